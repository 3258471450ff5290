"""`python -m benchmarks.embodied_six`: PPO on six tasks of gymnasium at equal steps, beside others' PPO.

Ours is `launch.py --config configs/embodied/cartpole_ppo.yaml` with another task (and, for actions of real numbers,
other sizes); beside it stand stable-baselines3 (`make bench-peers`) and the plain loop in cleanrl's structure
(`benchmarks.embodied_cartpole`). All have the same environment steps, batches, epochs, learning rates and discounts,
and networks of two layers of 64, in one process with one thread; each scales observations and values in its own way.
Judged are the likeliest actions at the end, over episodes whose starts nobody learned from.

`--save` writes benchmarks/results, where runs that the file has stay as they are; `--markdown` prints the page's table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.runtime import machine

EPISODES = 20
"""Judged; ours plays as many before it learns, too."""
OURS, SB3, PLAIN = "rlinf", "stable-baselines3", "plain loop"
SB3_PYTHON = ROOT / ".venv-sb3" / "bin" / "python"
PREFIX = "mean return of"
"""Beginning of the line in which a peer says how it was judged."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task of gymnasium."""

    name: str
    continuous: bool
    """Actions are real numbers."""
    turns: int
    """Rollouts of 16 environments, of 128 steps each where actions are real numbers, else of 64."""

    @property
    def horizon(self) -> int:
        """Steps of an environment in a rollout."""
        return 128 if self.continuous else 64


TASKS = (
    Task("CartPole-v1", False, 58),
    Task("Acrobot-v1", False, 97),
    Task("InvertedPendulum-v5", True, 48),
    Task("InvertedDoublePendulum-v5", True, 73),
    Task("Hopper-v5", True, 97),
    Task("HalfCheetah-v5", True, 97),
)
CONTINUOUS = (
    "policy.horizon=128",
    "policy.settings={hidden: [64, 64], normalise_values: true, log_std: 0.0}",
    "algorithm.epochs=5",
)
"""What differs from cartpole_ppo.yaml for actions of real numbers: the sizes of `embodied_cartpole.CONTINUOUS`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant on one task from one seed."""

    who: str
    task: str
    seed: int
    env_steps: int
    total: float
    """Mean return of the likeliest actions at the end."""
    processor_seconds: float
    """Of the whole command, imports and the judging included."""


def run(who: str, task: Task, seed: int, directory: Path) -> Run:
    """Let a contestant learn a task.

    Raises:
        RuntimeError: it failed; the text has what it said last.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        _command(who, task, seed, directory), cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{who} on {task.name}, seed {seed}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    if who == OURS:
        lines = (directory / f"{task.name}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        total = [found for line in lines if "evaluation/episodes" in (found := json.loads(line))][-1][
            "evaluation/reward/mean"
        ]
    else:
        total = float(next(line for line in done.stdout.splitlines() if line.startswith(PREFIX)).rpartition(" ")[2])
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return Run(who, task.name, seed, 16 * task.horizon * task.turns, total, seconds)


def _command(who: str, task: Task, seed: int, directory: Path) -> list[str]:
    if who == OURS:
        return [
            sys.executable, str(ROOT / "launch.py"), "--config", str(ROOT / "configs/embodied/cartpole_ppo.yaml"),
            f"env.options={{id: {task.name}}}", f"steps={task.turns}", f"seed={seed}", f"name={task.name}-{seed}",
            f"output_dir={directory}", f"trials.episodes={EPISODES}", "trials.every=0", "trials.videos=0",
            "metrics.live=never", "trace=false", *(CONTINUOUS if task.continuous else ()),
        ]  # fmt: skip
    how = ["--seed", str(seed), "--task", task.name, "--judge", str(EPISODES)]
    if who == SB3:
        sizes = ["--continuous"] if task.continuous else []
        return [str(SB3_PYTHON), "-m", "benchmarks.peers.sb3_ppo", "--turns", str(task.turns), *sizes, *how]
    sizes = ["--continuous" if task.continuous else "--equal"]
    return [sys.executable, "-m", "benchmarks.embodied_cartpole", "--steps", str(task.turns), *sizes, *how]


def markdown(runs: Sequence[Run]) -> str:
    """A row per task: returns by seed, and the processor time of a run, of each contestant."""
    whose = [who for who in (OURS, SB3, PLAIN) if any(each.who == who for each in runs)]
    lines = ["| task | env steps | " + " | ".join(whose) + " |", "|" + "---|" * (len(whose) + 2)]
    for task in (each for each in TASKS if any(run.task == each.name for run in runs)):
        cells = []
        for who in whose:
            mine = sorted((r for r in runs if (r.who, r.task) == (who, task.name)), key=lambda each: each.seed)
            if not mine:
                cells.append("")
                continue
            returns = ", ".join(f"{each.total:,.0f}" for each in mine)
            mean, seconds = (statistics.fmean(getattr(r, key) for r in mine) for key in ("total", "processor_seconds"))
            cells.append(f"{returns}: **{mean:,.0f}** in {seconds:.0f} s")
        lines.append(f"| {task.name} | {16 * task.horizon * task.turns:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embodied_six", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", default=",".join(task.name for task in TASKS), help="with commas between")
    parser.add_argument("--seeds", default="1,2,3", help="with commas between")
    parser.add_argument("--save", type=Path, nargs="?", const=_file(), help="write a JSON file; runs that it has stay")
    parser.add_argument("--markdown", action="store_true", help="print the table of what was saved")
    options = parser.parse_args()
    saved = options.save or _file()
    runs = [Run(**each) for each in json.loads(saved.read_text())["runs"]] if saved.exists() else []
    if options.markdown:
        print(markdown(runs))
        return 0
    runs = runs if options.save else []
    names = options.tasks.split(",")
    if unknown := set(names) - {task.name for task in TASKS}:
        parser.error(f"--tasks has {', '.join(sorted(unknown))}; there are {', '.join(task.name for task in TASKS)}")
    contestants = (OURS, SB3, PLAIN) if SB3_PYTHON.exists() else (OURS, PLAIN)
    if SB3 not in contestants:
        print("stable-baselines3 is not here: make bench-peers")
    known = {(each.who, each.task, each.seed) for each in runs}
    with tempfile.TemporaryDirectory(prefix="rlinf-six-") as folder:
        for task in (each for each in TASKS if each.name in names):
            for seed in map(int, options.seeds.split(",")):
                for who in (each for each in contestants if (each, task.name, seed) not in known):
                    runs.append(run(who, task, seed, Path(folder)))
                    last = runs[-1]
                    print(
                        f"{task.name}  seed {seed}  {who}: {last.total:.1f}  {last.processor_seconds:.0f} s", flush=True
                    )
                    if options.save:
                        _write(saved, runs)
    print(markdown(runs))
    return 0


def _file() -> Path:
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-embodied-six.json"


def _write(path: Path, runs: Sequence[Run]) -> None:
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "runs": [asdict(each) for each in runs],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
