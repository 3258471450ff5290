"""Kill drills: kill -9 of a part of a run at a random moment, again and again; afterwards nothing is lost or repeated.

    python -m tests.drills.driver --points 100 --flow grpo_async --staleness 2 --seed 0 [--save]       (make drills)

A run is started, something of it is killed, it is gone on with (`--resume auto`) and killed again, and at last let to
its end. After every death: the ledger balances, also against the newest checkpoint; the first cause was told in one
line; no process and no shared memory is left. At the end: every step is there once, prompts were drawn without a gap,
few tokens that the checkpoint held were made again; and a synchronous run has the weights of one that was never killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlinf.actors.base.in_flight import PartialGroup
from rlinf.cli.runs.ledger_command import account
from rlinf.data.in_flight.kept_files import read_kept
from rlinf.data.in_flight.ledger import of_ranges
from rlinf.job.roles.keeper import KINDS
from rlinf.metrics.files import read_lines
from rlinf.metrics.run_directory import find_checkpoint
from tests.drills.parts import TOKENS
from tests.launching import ROOT, Ranks, command, environment, equal, metrics_of, start, steps_noted
from tests.runtime.programs.jobs import descendants, shared_memory, until

VICTIMS = ("rank 0", "rank 1", "all", "reward", "engine", "torchrun")
"""Whom a drill kills: hosts, all of them at once, a child process of the judge, the engine's server, or torchrun."""
MOMENTS = ("start", "step", "step", "step", "writing", "named", "evaluation")
"""When: while it starts, some time after some step, while a checkpoint is written, just after it got its name, in or
near an evaluation. Random moments of steps are the most."""
EVERY = {"checkpoint": 4, "evaluation": 10}
"""Steps between two of them."""
PATIENCE = 90.0
"""Seconds for what takes one or two: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Drill:
    """What is run."""

    flow: str = "grpo_async"
    """Name of a flow: grpo, grpo_async, agentic, agentic_async, ppo, ppo_async."""
    staleness: int = 1
    """Its `staleness.max`."""
    mode: str = "mask"
    """Its `staleness.mode`."""
    steps: int = 60
    """Of a run."""
    more: tuple[str, ...] = ()
    """Further overrides."""

    def arguments(self, output: Path, *, engine: bool) -> tuple[str, ...]:
        """Of launch.py.

        Args:
            output: where the run goes.
            engine: by a server in a child process, instead of the engine that counts its tokens.
        """
        made = "imitation" if engine else "counting"
        ahead = (f"staleness.max={self.staleness}", f"staleness.mode={self.mode}") if "async" in self.flow else ()
        agent = "agentic" in self.flow
        path = "rlinf.flows.agentic" if agent else f"rlinf.flows.{self.flow.removesuffix('_async')}"
        flow = (f"flow={path}.{self.flow}" if agent else f"flow=rlinf.flows.{self.flow}",)
        return (
            "--config", "configs/quickstart.yaml", f"steps={self.steps}", "log_every=1", "sft.steps=2",
            "algorithm.prompts_per_step=8", "algorithm.group_size=4", "algorithm.epochs=1",
            "model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
            "rollout.max_new_tokens=24", f"rollout.engine=tests.drills.parts.{made}",
            "reward.function=tests.drills.rewards.reward", "reward.workers=1",
            "evaluation.problems=16", f"evaluation.every={EVERY['evaluation']}",
            f"checkpoint.every={EVERY['checkpoint']}", "checkpoint.keep=2", "placement.trainer=1",
            "trace=false", "metrics.live=never", f"output_dir={output}", *ahead, *flow,
            *(("agent.function=tests.drills.parts.agent",) if agent else ()), *self.more,
        )  # fmt: skip


@dataclass(slots=True)
class Point:
    """One kill."""

    victim: str
    """Whom."""
    moment: str
    """When."""
    step: int
    """Steps noted then."""
    cause: str = ""
    """What the run told of it: its lines with `error:`."""
    seconds: float = 0.0
    """Until all of it had ended; 0 where it went on."""
    wrong: list[str] = field(default_factory=list)
    """What should not be."""


@dataclass(slots=True)
class Found:
    """What came of drills."""

    points: list[Point] = field(default_factory=list)
    """The kills."""
    runs: int = 0
    """Runs that were let to their end."""
    torn: int = 0
    """How often a run ended because its engine was killed in the middle of taking new weights."""
    wrong: list[str] = field(default_factory=list)
    """What should not be, at the end of a run."""
    held: int = 0
    """Tokens in flight in checkpoints that were gone on from, where what was made afterwards is known."""
    again: int = 0
    """Tokens of those that were made again."""

    @property
    def well(self) -> bool:
        """Nothing was as it should not be."""
        return not self.wrong and not any(point.wrong for point in self.points)


class Torchrun:
    """A run by a real torchrun, with the surface of `Ranks` as far as drills need it."""

    def __init__(self, arguments: Sequence[str], **more: str) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the object
        self._process = subprocess.Popen(
            command(*arguments, processes=2), cwd=ROOT, env=environment(**more), start_new_session=True,
            stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.pids = [self._process.pid]

    def kill_all(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def codes(self, seconds: float) -> list[int]:
        return [self._process.wait(seconds)]

    def everything(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def end(self) -> None:
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


class Run:
    """One run directory, and the processes that work in it now.

    Args:
        drill: what.
        output: where.
        rng: of moments and victims.
        engine: by a server in a child process.
        torchrun: started by torchrun, which takes longer.
    """

    def __init__(self, drill: Drill, output: Path, rng: random.Random, *, engine: bool, torchrun: bool) -> None:
        self.drill, self.output, self.rng, self.engine, self.torchrun = drill, output, rng, engine, torchrun
        self.path = output / "quickstart"
        self.tokens = output / "tokens"
        self.arguments = drill.arguments(output, engine=engine)
        self.processes: Ranks | Torchrun | None = None
        self.went_on: int | None = None  # from the checkpoint of this step
        self.held = 0  # tokens in flight there

    def begin(self) -> Ranks | Torchrun:
        """Start it, or go on with it."""
        self.tokens.unlink(missing_ok=True)
        found = find_checkpoint(self.path) if self.path.exists() else None
        self.went_on = None if found is None else found.step
        self.held = 0 if found is None else tokens_held(found.path)
        more = {TOKENS: str(self.tokens)}
        arguments = (*self.arguments, "--resume", "auto")
        self.processes = Torchrun(arguments, **more) if self.torchrun else start(*arguments, processes=2, **more)
        return self.processes

    def again(self) -> Ranks | Torchrun:
        """Go on after a death."""
        self.end()
        return self.begin()

    def torn(self) -> bool:
        """It has ended because its engine died while it took new weights, which no replica may go on from."""
        here = self.processes
        return here is not None and here.ended() and "not every rank has switched" in here.everything()

    def choose(self) -> tuple[str, str]:
        """A victim and a moment."""
        victims = [
            name for name in VICTIMS if (name != "engine" or self.engine) and (name != "torchrun" or self.torchrun)
        ]
        weights = [3 if name in ("engine", "torchrun") else 1 for name in victims]
        return self.rng.choices(victims, weights)[0], self.rng.choice(MOMENTS)

    def until_moment(self, moment: str) -> bool:
        """Wait for it; False if the run has ended before."""
        path, rng, here = self.path, self.rng, self.processes
        assert here is not None
        begun, target = steps_noted(path), rng.randint(1, 15)
        named = set(_checkpoints(path))
        evaluated = _evaluations(path)
        came: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "step": lambda: steps_noted(path) >= begun + target or steps_noted(path) >= self.drill.steps,
            "writing": lambda: any((path / "checkpoints").glob(".step_*.partial")),
            "named": lambda: bool(set(_checkpoints(path)) - named),
            "evaluation": lambda: _evaluations(path) > evaluated or 0 < steps_noted(path) % EVERY["evaluation"] < 2,
        }
        until(lambda: here.ended() or came[moment](), lambda: f"{moment}\n{here.everything()}", PATIENCE)
        later = {"start": 3.0, "writing": 0.01, "named": 0.01}.get(moment, 0.15)
        end = time.monotonic() + rng.uniform(0.0, later)
        while time.monotonic() < end and not here.ended():
            time.sleep(0.001)
        return not here.ended()

    def kill(self, victim: str) -> tuple[list[int], list[tuple[int, str]]]:
        """Kill it.

        Returns:
            Who was killed, and every process that there was, with its time of birth.
        """
        here = self.processes
        assert here is not None
        everyone = [*here.pids, *(pid for each in here.pids for pid in descendants(each))]
        born = [(pid, birth) for pid in dict.fromkeys(everyone) if (birth := _birth(pid))]
        hosts = [pid for pid in everyone if pid not in here.pids and _is_host(pid)] if self.torchrun else here.pids
        children = {"reward": "keeper.py json", "engine": "sleep "}
        if victim in children:
            below = [pid for pid in everyone if pid not in here.pids and " keep " not in _command(pid)]
            chosen = [pid for pid in below if children[victim] in _command(pid)][-1:]
        elif victim == "torchrun":
            chosen = here.pids
        else:
            chosen = hosts if victim == "all" else hosts[int(victim[-1]) :][:1]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return chosen, born

    def end(self) -> None:
        """Whatever is left of it."""
        if self.processes is not None:
            self.processes.end()


def drilled(
    drill: Drill,
    points: int,
    seed: int,
    directory: Path,
    say: Callable[[str], None] = print,
    *,
    torchrun: bool = True,
) -> Found:
    """Kill `points` times.

    Args:
        drill: what is run.
        points: how often.
        seed: of victims and moments.
        directory: an empty one.
        say: is told of every kill.
        torchrun: some runs are started by it, which takes longer.
    """
    rng, found = random.Random(seed), Found()
    whole: dict[bool, Path] = {}
    number = 0
    while len(found.points) < points:
        number += 1
        kind = number % 4  # every fourth run is by torchrun, every other one by an engine with a child
        run = Run(drill, directory / str(number), rng, engine=number % 2 == 0, torchrun=torchrun and kind == 3)
        run.output.mkdir(parents=True)
        try:
            kills = min(rng.randint(3, 6), points - len(found.points))
            _with_kills(run, kills, found, say)
            if "async" not in drill.flow and not found.wrong:
                if run.engine not in whole:
                    whole[run.engine] = _uninterrupted(drill, directory / f"whole-{run.engine}", run.engine)
                with _noting(found.wrong, f"run {number}: weights differ from an uninterrupted run's"):
                    equal(whole[run.engine], run.path)
        finally:
            run.end()
    return found


def _uninterrupted(drill: Drill, output: Path, engine: bool) -> Path:
    run = Run(drill, output, random.Random(0), engine=engine, torchrun=False)
    output.mkdir()
    here = run.begin()
    try:
        assert set(here.codes(PATIENCE)) == {0}, here.everything()
    finally:
        run.end()
    return run.path


def _with_kills(run: Run, kills: int, found: Found, say: Callable[[str], None]) -> None:
    """A run from start to end, with so many kills on the way."""
    since, before = time.monotonic(), shared_memory()
    here = run.begin()
    while kills:
        victim, moment = run.choose()
        if not run.until_moment(moment):
            if run.torn():
                found.torn += 1
                here = run.again()
                continue
            break
        point = Point(victim, moment, steps_noted(run.path))
        killed, born = run.kill(victim)
        if not killed:
            continue  # there is no such process now, as before the first reward is asked for
        if victim not in ("reward", "engine"):  # those are started anew, and the run goes on
            began = time.monotonic()
            apart = not run.torchrun and "rollout on host" not in here.everything()
            if apart:  # they have not met yet, and nobody but torchrun, which is not there, watches over them
                here.kill_all(signal.SIGTERM)
            try:
                codes = here.codes(PATIENCE)
                point.seconds = time.monotonic() - began
            except (AssertionError, subprocess.TimeoutExpired) as error:
                codes = []
                point.wrong.append(f"it did not end: {error}"[:300])
            _examine(run, point, born, before, silent=apart or not any(codes))
            here = run.again()
        found.points.append(point)
        kills -= 1
        spent = time.monotonic() - since
        where = f"{point.victim:9} {point.moment:10} step {point.step:3d}"
        say(f"{spent:5.0f} s {len(found.points):4d}  {where}  {point.seconds:4.1f} s  {point.cause[:60]}")
        for each in point.wrong:
            say(f"      wrong: {each}")
    codes = here.codes(PATIENCE)
    if run.torn():
        found.torn += 1
        here = run.again()
        codes = here.codes(PATIENCE)
    said = here.everything()
    found.runs += 1
    if any(codes):
        found.wrong.append(f"{run.path} ended with {codes}: {said[-400:]}")
        return
    _finished(run, found)


def _examine(run: Run, point: Point, born: Sequence[tuple[int, str]], before: set[str], *, silent: bool) -> None:
    """What a death has left.

    Args:
        run, point: what died, and how.
        born: the processes that there were.
        before: what lay in shared memory before.
        silent: nothing needs to be told: it was over by then, or had hardly begun.
    """
    here = run.processes
    assert here is not None
    said = here.everything()
    told = [line for line in said.splitlines() if line.startswith(("error:", "rlinf:"))]
    point.cause = " | ".join(told)
    if point.victim.startswith("rank") and not silent and not _named(told, point):
        point.wrong.append(f"first cause not told in one line: {said[-300:]}")
    if "Traceback" in said and not run.torchrun and not run.engine:  # torchrun and the imitated server show their own
        point.wrong.append(f"a traceback: {said[-500:]}")
    try:
        until(lambda: not [pid for pid, birth in born if _birth(pid) == birth], "", 15)
    except AssertionError:
        left = [f"{pid} {_command(pid)[:80]}" for pid, birth in born if _birth(pid) == birth]
        point.wrong.append(f"processes are left: {left}")
    ours = [str(pid) for pid, _ in born]
    if left_in_memory := [name for name in shared_memory() - before if any(pid in name for pid in ours)]:
        point.wrong.append(f"/dev/shm has {left_in_memory}")
    point.wrong += _ledger(run)


def _named(told: Sequence[str], point: Point) -> bool:
    """One line, which names the host."""
    return len(told) == 1 and f"host {point.victim[-1]}" in told[0]


def _ledger(run: Run) -> list[str]:
    """Why the run's ledger does not balance; nothing where it does, or where no step is over."""
    if not (run.path / "ledger.jsonl").exists():
        return []
    found = account(run.path)
    wrong = [f"ledger: {problem}" for problem in found.problems]
    wrong += [f"ledger: {found.note}"] if found.note else []
    numbers = sorted(
        number
        for line in read_lines(run.path / "ledger.jsonl")
        for ids in line.get("drawn", {}).values()
        for number in of_ranges(ids)
    )
    if numbers != [*range(len(numbers))]:
        wrong.append(f"prompts drawn are not 0 to {len(numbers) - 1}, each once")
    return wrong


def _finished(run: Run, found: Found) -> None:
    """A run has come to its end."""
    found.wrong += [f"{run.path}: {each}" for each in _ledger(run)]
    steps = [line["step"] for line in metrics_of(run.path)]
    if steps != [*range(1, run.drill.steps + 1)]:
        found.wrong.append(f"{run.path}: steps are {steps}")
    stale = max((line.get("staleness/max", 0.0) for line in metrics_of(run.path)), default=0.0)
    if stale > (run.drill.staleness if "async" in run.drill.flow else 0):
        found.wrong.append(f"{run.path}: staleness/max {stale}")
    if run.went_on is None or run.engine:
        return
    lines = [line for line in read_lines(run.path / "ledger.jsonl") if line["step"] > run.went_on]
    used = sum(sum(line.get("tokens", {}).values()) for line in lines)
    made = sum(map(int, run.tokens.read_text().split())) if run.tokens.exists() else 0
    at_the_end = tokens_held(run.path / "checkpoints" / "latest")
    found.held += run.held
    found.again += max(0, made + run.held - used - at_the_end)


def tokens_held(checkpoint: Path) -> int:
    """Generated tokens of the samples in flight in a checkpoint, of half answers too."""
    kept = read_kept(checkpoint, KINDS)
    total = 0
    for entry in () if kept is None else kept.entries:
        if entry.result is not None:
            total += sum(sample.learned_tokens for group in entry.result for sample in group.samples)
            continue
        for part in entry.partial:
            if not isinstance(part, PartialGroup):  # a task of an agent's
                total += part.tokens
                continue
            total += sum(len(one.response_ids) for one in part.done.values())
            total += sum(one.answered for one in part.left.values())
    return total


@contextlib.contextmanager
def _noting(wrong: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        wrong.append(f"{what}: {str(error)[:200]}")


def _checkpoints(path: Path) -> list[str]:
    there = path / "checkpoints"
    return [entry.name for entry in there.iterdir() if entry.name.startswith("step_")] if there.is_dir() else []


def _evaluations(path: Path) -> int:
    return sum("evaluation/accuracy" in line for line in read_lines(path / "metrics.jsonl"))


def _birth(pid: int) -> str:
    """When a living process began; "" if there is none of that number, or a dead one that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _is_host(pid: int) -> bool:
    return "launch.py" in _command(pid) and "torch.distributed.run" not in _command(pid)


def summary(found: Found) -> dict[str, Any]:
    """What came of drills, as JSON."""
    by = Counter(point.victim for point in found.points)
    bad = Counter(point.victim for point in found.points if point.wrong)
    return {
        "points": len(found.points),
        "runs": found.runs,
        "ended by an engine killed in the middle of a load": found.torn,
        "well": len(found.points) - sum(bad.values()),
        "victims": {name: f"{by[name] - bad[name]} of {by[name]}" for name in VICTIMS if by[name]},
        "moments": dict(Counter(point.moment for point in found.points)),
        "seconds until it had ended": round(max((point.seconds for point in found.points), default=0.0), 1),
        "tokens held by checkpoints": found.held,
        "of those made again": found.again,
        "wrong": [
            *found.wrong,
            *(f"{p.victim}, {p.moment}, step {p.step}: {w}" for p in found.points for w in p.wrong),
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run drills; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.driver", description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--flow", default="grpo_async")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--mode", default="mask", choices=("drop", "mask", "resample"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="add it to benchmarks/results/drills.jsonl")
    parser.add_argument("--keep", help="a directory for the runs, which stay there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    drill = Drill(options.flow, options.staleness, options.mode, options.steps, tuple(options.overrides))
    with contextlib.ExitStack() as stack:
        place = options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="rlinf-drills-"))
        found = drilled(drill, options.points, options.seed, Path(place), lambda line: print(line, flush=True))
    told = {"drill": asdict(drill), "seed": options.seed, **summary(found)}
    print(json.dumps(told, indent=1))
    if options.save:
        with (ROOT / "benchmarks" / "results" / "drills.jsonl").open("a") as file:
            file.write(json.dumps({"date": time.strftime("%Y-%m-%d"), **told}) + "\n")
    return 0 if found.well else 1


if __name__ == "__main__":
    sys.exit(main())
