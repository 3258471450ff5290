"""`python -m benchmarks.embodied`: runs of a policy that acts, in figures: speed, overlap, overhead.

    speed      environment steps/s (simulation, inference and learning) of configs/embodied/maniskill_pullcube_ppo.yaml,
               in one process and its simulators, beside a plain loop in the structure of ManiSkill's own PPO baseline
               with as many workers; all take turns, one step each, and ratios are taken between neighbouring turns.
               Two processes that each do everything, with half of the environments, take turns with them
    cartpole   configs/embodied/cartpole_ppo.yaml: what it comes to on three seeds, and how long a step takes beside a
               plain loop with the hyperparameters of cleanrl's ppo.py
    equal      environment steps/s of CartPole and InvertedPendulum at equal batches (16 environments x 64, 4 epochs of
               8 minibatches), one process and one thread each, beside that loop and beside stable-baselines3 (which
               `make bench-peers` brings); and the processor time of a step
    overlap    of simulation and inference, modelled, under the virtual clock: how near to the bound
    overhead   of the runtime per environment step, around a simulator and a policy that do nothing

Shown are medians with quartiles. A figure that misses its bar says LOST and is published as it is.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ONE_THREAD, ROOT, TurnFailed
from benchmarks.embodied_cartpole import STEP
from benchmarks.embodied_evidence import trained
from benchmarks.embodied_modelled import RATIOS, SLICES, overlap
from benchmarks.embodied_ours import ASYNC_FLOW, FLOW
from benchmarks.embodied_overhead import overhead
from benchmarks.embodied_plain import Job
from benchmarks.grpo_judging import Line
from benchmarks.grpo_turns import Command, in_turn
from benchmarks.peers.grpo_job import Result
from benchmarks.runtime import machine
from rlinf.config.embodied import EmbodiedConfig
from rlinf.runs.rules import load_embodied

CONFIG = ROOT / "configs" / "embodied" / "maniskill_pullcube_ppo.yaml"
OVERLAP, OVERHEAD, TOGETHER, NO_SLOWER = 0.95, 0.3e-3, 1.1, 1.0
STATE, ACTION = 35, 4
"""Numbers in PullCube's state, and in an action of its configuration."""
OURS = {
    "rlinf, 1 slice": (FLOW, 1),
    "rlinf, 2 slices": (FLOW, 2),
    "rlinf, asynchronous (learning may lag by 1 version), 1 slice": (ASYNC_FLOW, 1),
}
"""Flow and slices. The asynchronous one is not the plain loop's algorithm, so it is a row of its own."""
PLAIN = {
    "plain loop, our adapter in its workers": ("ours", 1.0),
    "plain loop, ManiSkill's own wrapper": ("theirs", 1.5),
}
"""Simulating contestants, and how many times as fast ours is to be."""
ONE, TWO = "rlinf, 1 slice", "rlinf, two processes that each do everything"
CARTPOLE = ROOT / "configs" / "embodied" / "cartpole_ppo.yaml"
SEEDS, SOLVED, ENV_STEPS = (21, 22, 23), 475.0, 60_000
PLAIN_CARTPOLE = (sys.executable, "-m", "benchmarks.embodied_cartpole")
PARTS = ("speed", "cartpole", "equal", "overlap", "overhead")
TASKS = ("CartPole-v1", "InvertedPendulum-v5")
SB3 = ROOT / ".venv-sb3" / "bin" / "python"
WARM_UP = 1
"""Turns that are not counted: the first steps of an episode load meshes and code."""


def job_of(config: EmbodiedConfig, steps: int) -> Job:
    """The plain loop's job, so that it does what our flow does."""
    env, chosen = config.env, config.algorithm
    policy = {"type": config.policy.type, "seed": config.seed, "state_size": STATE, "action_size": ACTION}
    return Job(
        options=env.options, policy={**policy, **config.policy.settings}, seed=config.seed, steps=steps,
        num_envs=env.num_envs, workers=env.workers, horizon=config.policy.horizon, epochs=chosen.epochs,
        minibatch=chosen.minibatch, kl_stop=chosen.kl_stop, gamma=chosen.advantage["gamma"],
        lam=chosen.advantage["lam"], lr=config.optimizer.lr, grad_clip=config.optimizer.grad_clip,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Race:
    """Runs that took turns, by their names."""

    found: Mapping[str, Result]
    """Results of each."""
    spent: Mapping[str, Sequence[float]]
    """Processor seconds of each one's turns, all its processes together."""
    env_steps: int
    """Environment steps of a turn."""

    def compared(self, mine: str, other: str, bar: float) -> Iterator[Line]:
        """Two of them, by the clock and by the processor time of all their processes."""
        walls = [(name, self.found[name].seconds[WARM_UP:]) for name in (mine, other)]
        yield _compared("env steps/s, PullCube", *walls, self.env_steps, bar)
        cpus = [(name, self.spent[name][WARM_UP : len(self.found[name].seconds)]) for name in (mine, other)]
        yield _compared("env steps per processor second, PullCube", *cpus, self.env_steps, bar)


def runs(steps: int) -> Race:
    """Everybody's run, a step each in turn.

    Raises:
        TurnFailed: one failed.
    """
    config = load_embodied(CONFIG)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        job_of(config, steps).write(place / "job.json")
        commands = [_ours(place / str(number), *how, steps) for number, how in enumerate(OURS.values())]
        commands.append(_both(place / "both", config, steps))
        commands += [_plain(place / "job.json", simulator) for simulator, _ in PLAIN.values()]
        outcomes = in_turn(commands, spent := [])
    names = (*OURS, TWO, *PLAIN)
    spent_by = dict(zip(names, spent, strict=True))
    return Race(_heard(names, outcomes), spent_by, config.env.num_envs * config.policy.horizon)


def speed(race: Race) -> Iterator[Line]:
    """Ours beside the plain loops, and two processes that each do everything beside one that does, with the same
    environments in as many workers."""
    for ours in OURS:
        for other, (_, bar) in PLAIN.items():
            yield from race.compared(ours, other, bar)
    yield from race.compared(TWO, ONE, TOGETHER)


def cartpole(seeds: Sequence[int], turns: int) -> Iterator[Line]:
    """CartPole: what the configuration learns on each seed, beside the plain loop; and how long a step takes.

    Raises:
        TurnFailed: a run failed.
    """
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            done = trained("cartpole_ppo", seed, Path(directory))
        plain = subprocess.run(
            [*PLAIN_CARTPOLE, "--seed", str(seed), "--judge", str(done.episodes)],
            cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=True,
        ).stdout.splitlines()[-1]  # fmt: skip
        yield Line(
            f"CartPole, mean return of {done.episodes} episodes, seed {seed}", f"{done.total:.0f}",
            f"plain loop, cleanrl's hyperparameters: {plain.rpartition(' ')[2]}", f"after {done.env_steps:,} env steps",
            f">= {SOLVED:g} within {ENV_STEPS:,}", _verdict(done.total >= SOLVED and done.env_steps <= ENV_STEPS),
        )  # fmt: skip
    config = load_embodied(CARTPOLE)
    env_steps = config.env.num_envs * config.policy.horizon
    names = ("rlinf", "plain loop, cleanrl's hyperparameters")
    with tempfile.TemporaryDirectory() as directory:
        ours = _ours(Path(directory), FLOW, 1, turns, config=CARTPOLE)
        outcomes = in_turn([ours, Command([*PLAIN_CARTPOLE, "--turns", str(turns)], {})])
    mine, theirs = (run.seconds[WARM_UP:] for run in _heard(names, outcomes).values())
    alike = [env_steps / STEP * seconds for seconds in theirs]  # for as many environment steps as our step has
    yield _compared("env steps/s, CartPole", (names[0], mine), (names[1], alike), env_steps, NO_SLOWER)


def equal(turns: int) -> Iterator[Line]:
    """Environment steps per second at equal batches, beside the plain loop and stable-baselines3.

    Raises:
        TurnFailed: a run failed.
    """
    config = load_embodied(CARTPOLE)
    env_steps = config.env.num_envs * config.policy.horizon
    for task in TASKS:
        how = ["--task", task, "--turns", str(turns)]
        others = {"plain loop in cleanrl's structure": Command([*PLAIN_CARTPOLE, "--equal", "--steps", "58", *how], {})}
        if SB3.exists():
            others["stable-baselines3"] = Command([str(SB3), "-m", "benchmarks.peers.sb3_ppo", *how], {})
        else:
            yield Line(f"env steps/s, {task}", "", "stable-baselines3 is not here: make bench-peers", "", "", "skipped")
        with tempfile.TemporaryDirectory() as directory:
            ours = _ours(Path(directory), FLOW, 1, turns, config=CARTPOLE, **{"env.options": f"{{id: {task}}}"})
            found = _heard(("rlinf", *others), in_turn([ours, *others.values()]))
        mine = found.pop("rlinf")
        for name, run in found.items():
            sides = (("rlinf", mine), (name, run))
            for what, of in (("env steps/s", "seconds"), ("env steps per processor second", "cpu")):
                timed = [(who, getattr(each, of)[WARM_UP:]) for who, each in sides]
                yield _compared(f"{what}, {task}", *timed, env_steps, NO_SLOWER)


def agreement(found: Mapping[str, Result]) -> Line:
    """Tell whether everybody did the same work: mean returns of the first step, from equal starts and equal noise."""
    first = {name: run.rewards[0] for name, run in found.items() if name != TWO}  # whose second half starts otherwise
    apart = max(first.values()) - min(first.values())
    shown = ", ".join(f"{value:.3f}" for value in first.values())
    same = apart <= 0.02 * abs(statistics.mean(first.values()))
    return Line("same work: mean return of step 1", shown, "", f"{apart:.4f} apart", "<= 2 %", _verdict(same))


def overlaps(horizon: int) -> Iterator[Line]:
    """Bound over time, by slices."""
    for slices in SLICES:
        shares = {ratio: overlap(ratio, slices, horizon) for ratio in RATIOS}
        least = min(shares.values())
        shown = ", ".join(f"{ratio:g}: {share:.3f}" for ratio, share in shares.items())
        yield Line(
            f"overlap, modelled, slices={slices}", shown, "inference / simulation: bound / time",
            f"{least:.3f} at least", f">= {OVERLAP:g}", _verdict(least >= OVERLAP),
        )  # fmt: skip


def overheads(rounds: int, steps: int) -> Iterator[Line]:
    """Seconds per environment step, cases in turn."""
    cases = [(num_envs, slices) for num_envs in (16, 32) for slices in (1, 2)]
    found = [{case: overhead(*case, steps=steps) for case in cases} for _ in range(rounds)]
    for num_envs, slices in cases:
        walls = [each[num_envs, slices].wall for each in found]
        cpu = statistics.median(each[num_envs, slices].cpu for each in found)
        middle = statistics.median(walls)
        yield Line(
            f"overhead per env step, {num_envs} envs, slices={slices}",
            f"{1e3 * middle:.3f} ms ({1e3 * min(walls):.3f} to {1e3 * max(walls):.3f})",
            f"of it {1e3 * cpu:.3f} ms of processor time", f"{1e3 * middle:.3f} ms", f"<= {1e3 * OVERHEAD:g} ms",
            _verdict(middle <= OVERHEAD),
        )  # fmt: skip


def table(found: Sequence[Line]) -> Table:
    """The figures for people."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "rlinf", "beside", "compared", "bar", ""):
        shown.add_column(column, overflow="fold")
    for line in found:
        style = {"LOST": "bold red", "pass": "green"}.get(line.verdict, "")
        verdict = f"[{style}]{line.verdict}[/]" if style else line.verdict
        shown.add_row(line.what, line.ours, line.other, line.compared, line.bar, verdict)
    return shown


def save(found: Sequence[Line], raced: Mapping[str, Result], load: tuple[float, float]) -> Path:
    """Write everything that was measured, by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-embodied.json"
    report = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": {"before": load[0], "after": load[1]},
        "lines": [asdict(line) for line in found],
        "runs": {
            name: {
                "seconds": [round(each, 4) for each in run.seconds],
                "cpu": [round(each, 4) for each in run.cpu],
                "mean_return": [round(each, 4) for each in run.rewards],
            }
            for name, run in raced.items()
        },
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def _ours(
    directory: Path, flow: str, slices: int, steps: int, *, config: Path = CONFIG, processes: int = 1, **more: object
) -> Command:
    settings = {
        "flow": flow, "steps": steps, "env.slices": slices, "trials.episodes": 0, "trials.videos": 0,
        "output_dir": directory, **more,
    }  # fmt: skip
    keys = [f"{key}={value}" for key, value in settings.items()]
    many = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    return Command([sys.executable, "-m", *many, "benchmarks.embodied_ours", "--config", str(config), *keys], {})


def _both(directory: Path, config: EmbodiedConfig, steps: int) -> Command:
    """Every role on two processes, each with half of the environments and of the workers."""
    halves = {f"env.{name}": getattr(config.env, name) // 2 for name in ("num_envs", "workers")}
    places = {f"placement.{role}": "0-1" for role in ("env", "policy", "trainer")}
    return _ours(directory, FLOW, 1, steps, processes=2, **halves, **places)


def _plain(job: Path, simulator: str) -> Command:
    return Command([sys.executable, "-m", "benchmarks.embodied_plain", str(job), "--simulator", simulator], {})


def _heard(names: Sequence[str], outcomes: Sequence[str | TurnFailed]) -> dict[str, Result]:
    found = {}
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, TurnFailed):
            raise outcome
        found[name] = Result.heard(outcome)
    return found


def _compared(
    what: str, ours: tuple[str, Sequence[float]], other: tuple[str, Sequence[float]], env_steps: int, bar: float
) -> Line:
    """Names and seconds of two who took turns, as a row."""
    (name, mine), (beside, theirs) = ours, other
    ratios = [each / own for own, each in zip(mine, theirs, strict=True)]
    middle = statistics.median(ratios)
    return Line(
        what, f"{name}: {_rate(mine, env_steps)}", f"{beside}: {_rate(theirs, env_steps)}",
        f"{middle:.2f} x ({_range(ratios)})", f">= {bar:g} x", _verdict(middle >= bar),
    )  # fmt: skip


def _rate(seconds: Sequence[float], env_steps: int) -> str:
    return f"{env_steps / statistics.median(seconds):,.0f}/s"


def _range(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "one turn"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def _verdict(met: bool) -> str:
    return "pass" if met else "LOST"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="turns of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the overhead (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="four turns, one round, one seed: says little")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-embodied.json")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    steps, rounds = (4, 1) if options.quick else (options.steps, options.rounds)
    before = os.getloadavg()[0]
    lines: list[Line] = []
    raced: dict[str, Result] = {}

    def told(part: str, found: Iterable[Line]) -> None:
        """Measure a part if it is wanted, and show it at once: the next one may fail."""
        if part in wanted:
            lines.extend(measured := list(found))
            Console(width=None if sys.stdout.isatty() else 200).print(table(measured))

    def race() -> Iterator[Line]:
        if importlib.util.find_spec("mani_skill") is None:
            reason = "ManiSkill is not installed: pip install 'rlinf[maniskill]'"
            yield Line("env steps/s, PullCube", "", reason, "", "", "skipped")
            return
        raced.update((race := runs(steps)).found)
        yield from (*speed(race), agreement(raced))

    told("speed", race())
    told("cartpole", cartpole(SEEDS[:1] if options.quick else SEEDS, 2 * steps))
    told("equal", equal(3 * steps))
    told("overlap", overlaps(50))
    told("overhead", overheads(rounds, 5))
    after = os.getloadavg()[0]
    print(f"\n{machine()}; {steps} turns, {rounds} rounds; load average {before:.1f} before, {after:.1f} after")
    if options.save:
        print(f"saved {save(lines, raced, (before, after)).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
