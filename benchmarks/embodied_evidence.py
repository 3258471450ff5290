"""`python -m benchmarks.embodied_evidence`: what every shipped configuration that acts, and runs on a CPU, comes to.

Each is run as its user runs it, `launch.py --config`, on several seeds, one process after the other, and is judged by
the likeliest actions of the trained policy in trials whose starts nobody learned from; with `--seeds` and `--only` a
part of it is made. `--save` writes benchmarks/results, `--markdown` the table of docs/embodied.md.

Success and return are those of the last evaluation; steps are environment steps that were learned from; minutes are
wall time and processor time of the whole command, evaluations and imports included.
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
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.runtime import machine
from rlinf.algos.evaluation import wilson_interval

CONFIGS = ROOT / "configs" / "embodied"
EPISODES = 100
NEEDS = {
    "mt10": "hours: 20 million environment steps",
    "libero": "a checkpoint",
    "putonplate": "a GPU, ManiSkill's bridge assets and a checkpoint",
    "openvla": "a GPU and a checkpoint",
    "pi0": "a GPU and a checkpoint",
    "gr00t": "a GPU and a checkpoint",
    "_rlpd": "demonstrations that are recorded first: docs/off-policy.md has its rows",
}
"""Needs of a configuration that a CPU has not within minutes, by a part of its file's name: these are not run."""
HEADINGS = ("configuration", "seed", "solved once, %", "95 %", "at end, %", "return", "env steps", "minutes", "CPU min")
TABLE = ("configuration", "solved, % by seed", "95 % of all", "return by seed", "env steps", "CPU minutes of one")


@dataclass(frozen=True, slots=True)
class Trained:
    """One run of one configuration."""

    config: str
    """Its file's name."""
    seed: int
    episodes: int
    """Episodes of the last evaluation."""
    solved: float | None
    """Share of them that solved their task at some time; None where the simulator does not say."""
    solved_at_end: float | None
    """Share of them in which it was solved in the end."""
    total: float
    """Mean return of an episode."""
    before: float
    """Value of `solved` before the first step, or the return where nobody says what is solved."""
    env_steps: int
    minutes: float
    processor_minutes: float


def shipped() -> dict[str, str | None]:
    """Shipped configurations, and why each is not run here; None for those that are."""
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    return {name: next((why for part, why in NEEDS.items() if part in name), None) for name in names}


def trained(name: str, seed: int, directory: Path, overrides: Sequence[str] = ()) -> Trained:
    """Run a configuration to its end.

    Raises:
        RuntimeError: the run failed; the text has what it said last.
    """
    placement = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")).get("placement") or {}
    arguments = [
        "--config", str(CONFIGS / f"{name}.yaml"), f"seed={seed}", f"name={name}-{seed}", f"output_dir={directory}",
        f"trials.episodes={EPISODES}", "trials.videos=0", "trials.every=0", "metrics.live=never", "trace=false",
        *(f"placement.{role}=0" for role in placement), *overrides,
    ]  # fmt: skip
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True,
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    lines = (directory / f"{name}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    judged = [line for line in found if "evaluation/episodes" in line]
    first, last = judged[0], judged[-1]
    solved = "evaluation/success_once"
    return Trained(
        config=name,
        seed=seed,
        episodes=int(last["evaluation/episodes"]),
        solved=last.get(solved),
        solved_at_end=last.get("evaluation/success_at_end"),
        total=last["evaluation/reward/mean"],
        before=first.get(solved, first["evaluation/reward/mean"]),
        env_steps=int(max(line.get("env_steps/total", 0.0) for line in found)),
        minutes=(time.monotonic() - began) / 60,
        processor_minutes=(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / 60,
    )


def rows(runs: Iterable[Trained]) -> list[tuple[str, ...]]:
    """A row per run, under `HEADINGS`."""
    made = []
    for each in runs:
        once = at_end = between = "-"
        if each.solved is not None:
            low, high = wilson_interval(round(each.solved * each.episodes), each.episodes)
            once, between = f"{100 * each.solved:.0f}", f"{100 * low:.0f} to {100 * high:.0f}"
        if each.solved_at_end is not None:
            at_end = f"{100 * each.solved_at_end:.0f}"
        effort = (f"{each.env_steps:,}", f"{each.minutes:.1f}", f"{each.processor_minutes:.1f}")
        made.append((f"`{each.config}`", str(each.seed), once, between, at_end, f"{each.total:.2f}", *effort))
    return made


def markdown(runs: Sequence[Trained]) -> str:
    """The table of the page, a row per configuration with what its seeds came to, those that are not run included."""
    lines = ["| " + " | ".join(TABLE) + " |", "|" + "---|" * len(TABLE)]
    for name in sorted({each.config for each in runs}):
        mine = sorted((each for each in runs if each.config == name), key=lambda each: each.seed)
        shares = [each.solved for each in mine if each.solved is not None]
        solved = between = "-"
        if shares:
            episodes = sum(each.episodes for each in mine)
            low, high = wilson_interval(round(statistics.fmean(shares) * episodes), episodes)
            solved, between = _listed(100 * share for share in shares), f"{100 * low:.0f} to {100 * high:.0f}"
        steps, minutes = (
            max(each.env_steps for each in mine),
            statistics.median(each.processor_minutes for each in mine),
        )
        total = ", ".join(f"{each.total:.2f}" for each in mine)
        lines.append(f"| `{name}` | {solved} | {between} | {total} | {steps:,} | {minutes:.1f} |")
    for name, why in shipped().items():
        if why is not None:
            lines.append(f"| `{name}` | not run: needs {why} |" + " |" * (len(TABLE) - 2))
    return "\n".join(lines)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embodied_evidence", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="configurations, with commas between")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--save", type=Path, nargs="?", const=_file(), help="write a JSON file; runs that it has stay")
    parser.add_argument("--markdown", action="store_true", help="print the table of the page, of what was saved")
    parser.add_argument("overrides", nargs="*", help="of all configurations, such as steps=2")
    options = parser.parse_args()
    saved = options.save or _file()
    kept = [Trained(**each) for each in json.loads(saved.read_text())["runs"]] if saved.exists() else []
    if options.markdown:
        print(markdown(kept))
        return 0
    wanted = [name for name in options.only.split(",") if name] or [n for n, why in shipped().items() if why is None]
    if unknown := [name for name in wanted if name not in shipped()]:
        parser.error(f"no configuration is called {', '.join(unknown)}; there are {', '.join(shipped())}")
    runs, failed = list(kept) if options.save else [], False
    known = {(each.config, each.seed) for each in runs}
    with tempfile.TemporaryDirectory(prefix="rlinf-evidence-") as folder:
        for name in wanted:
            for seed in map(int, options.seeds.split(",")):
                if (name, seed) in known:
                    continue
                try:
                    runs.append(trained(name, seed, Path(folder), options.overrides))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    failed = True
                    continue
                print("  ".join(rows(runs[-1:])[0]), flush=True)
                if options.save:
                    _write(saved, runs)
    for name in dict.fromkeys(each.config for each in runs):
        shares = [each.solved for each in runs if each.config == name and each.solved is not None]
        if shares:
            print(
                f"{name}: {100 * statistics.fmean(shares):.1f} % of {len(shares)} seeds, least {100 * min(shares):.0f}"
            )
    return int(failed)


def _file() -> Path:
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-embodied-evidence.json"


def _write(path: Path, runs: Sequence[Trained]) -> None:
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "runs": [asdict(each) for each in sorted(runs, key=lambda each: (each.config, each.seed))],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
