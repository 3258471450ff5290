"""The runs of `benchmarks.learning`: launch.py as a user would start it, a few at a time, and what they left behind.

In: recipes and seeds. Out: an `Outcome` for each, in the order asked for, whatever the order in which they ended. A
recipe that distils waits for its teacher, a run of grpo, without holding a place among those that run. An outcome is
kept beside its run, so that what was interrupted goes on with the runs that are missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import dropwhile
from pathlib import Path

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.learning_recipes import CHANGES, EVERYWHERE
from rlinf.runtime.processes import keeper

CONFIG = "configs/quickstart.yaml"
TEACHER = ("grpo", 0)
"""The recipe and seed whose final model teaches."""
RUN_SECONDS = 1800.0
"""A run takes less than one minute on an idle core; one that takes thirty hangs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    recipe: str
    """Name of the algorithm."""
    seed: int
    """Seed of the model, the problems and the sampling."""
    before: float = float("nan")
    """Share of held-out problems answered right, greedily, before the first step."""
    after: float = float("nan")
    """That share after the last step."""
    minutes: float = float("nan")
    """From starting the process to its end, warm-up and evaluations included."""
    processor_minutes: float = float("nan")
    """Processor time of its computing: that hardly depends on what else the machine does."""
    load: float = float("nan")
    """The machine's load average over the five minutes before its end."""
    rewards: tuple[float, ...] = ()
    """Mean reward of every step's sampled answers."""
    failure: str = ""
    """Message of the run when it failed; empty if it came to its end."""

    @property
    def error_left(self) -> float:
        """Share of the errors at the start that is left at the end; NaN if the run failed."""
        return (1 - self.after) / (1 - self.before) if self.before < 1 else float("nan")

    @property
    def learned(self) -> bool:
        """True if the error was at least halved."""
        return self.error_left <= 0.5


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    code: int
    """Its exit code."""
    seconds: float
    """From its start to its end."""
    processor_seconds: float
    """Processor time of it and its children."""
    output: str
    """Text that it printed."""
    load: float = float("nan")
    """The machine's load average over the five minutes before."""
    peak_gib: float = float("nan")
    """Memory of the largest of its processes, at most."""


def arguments(recipe: str, seed: int, steps: int, output: Path, teacher: Path | None = None) -> list[str]:
    """The command line of launch.py for one run; `steps=0` only warms up and evaluates."""
    keys = [key for change in (*EVERYWHERE, *CHANGES.get(recipe, ())) for key in change.keys]
    settings = [
        f"name={recipe}-{seed}", f"output_dir={output}", f"seed={seed}", f"steps={steps}", f"algorithm.name={recipe}",
        *(key.format(teacher=teacher) for key in keys),
    ]  # fmt: skip
    return ["--config", CONFIG, *settings]


class Runs:
    """Runs, a few at a time.

    Args:
        output: the directory in which run directories are made.
        steps: of each run.
        at_once: how many processes run side by side.
        extra: further `key=value`, for every run.
        said: is told of every run that ended.
    """

    def __init__(
        self,
        output: Path,
        steps: int,
        at_once: int,
        extra: Sequence[str] = (),
        said: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.output, self.steps, self.extra, self.said = output, steps, extra, said
        self._places = asyncio.Semaphore(at_once)
        self._begun: dict[tuple[str, int], asyncio.Task[Outcome]] = {}

    async def all(self, wanted: Sequence[tuple[str, int]]) -> list[Outcome]:
        """The outcomes of these recipes and seeds, in this order. If it is cancelled, so is every run."""
        async with asyncio.TaskGroup() as group:
            if any(_needs_teacher(recipe) for recipe, _ in wanted):
                self._begin(group, TEACHER)  # first: others wait for it
            for each in wanted:
                self._begin(group, each)
        return [self._begun[each].result() for each in wanted]

    def _begin(self, group: asyncio.TaskGroup, each: tuple[str, int]) -> None:
        if each not in self._begun:
            self._begun[each] = group.create_task(self._run(*each))

    async def _run(self, recipe: str, seed: int) -> Outcome:
        teacher = None
        if _needs_teacher(recipe):
            taught = await self._begun[TEACHER]
            if taught.failure:
                return Outcome(recipe, seed, failure=f"its teacher failed: {taught.failure}")
            teacher = self.output / "-".join(map(str, TEACHER)) / "checkpoints" / "latest" / "hf"
        keys = [*arguments(recipe, seed, self.steps, self.output, teacher), *self.extra]
        kept = self.output / f"{recipe}-{seed}.json"
        if (outcome := _kept(kept, keys)) is None:
            async with self._places:
                ended = await run_process([sys.executable, str(ROOT / "launch.py"), *keys], kept.with_suffix(".log"))
            outcome = outcome_of(self.output / f"{recipe}-{seed}", recipe, seed, ended)
            kept.write_text(json.dumps({"command": keys, "outcome": asdict(outcome)}))
        self.said(outcome)
        return outcome


def outcome_of(directory: Path, recipe: str, seed: int, ended: Ended) -> Outcome:
    """Read what a run left in its directory, or why it did not come to its end."""
    outcome = Outcome(
        recipe, seed, minutes=ended.seconds / 60, processor_minutes=ended.processor_seconds / 60, load=ended.load
    )
    if ended.code != 0:
        return replace(outcome, failure=reason(ended.output) or f"exit code {ended.code}")
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    accuracies = [step["evaluation/accuracy"] for step in steps if "evaluation/accuracy" in step]
    rewards = tuple(step["reward/mean"] for step in steps if "reward/mean" in step)
    return replace(outcome, before=accuracies[0], after=accuracies[-1], rewards=rewards)


def _kept(path: Path, command: list[str]) -> Outcome | None:
    """The outcome of an earlier run of the same command; None if there is none, or it failed."""
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    outcome = Outcome(**kept["outcome"] | {"rewards": tuple(kept["outcome"]["rewards"])})
    return outcome if kept["command"] == command and not outcome.failure else None


def _needs_teacher(recipe: str) -> bool:
    return any("{teacher}" in key for change in CHANGES.get(recipe, ()) for key in change.keys)


def reason(output: str) -> str:
    """Find what launch.py says from `error:` on; of a traceback, what follows its frames; else the last line."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("error:")]
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if errors:
        told = lines[errors[0] :]
    else:
        told = lines[frames[-1] + 1 :] if frames else lines[-1:]
        told = list(dropwhile(lambda line: line.startswith("    "), told))  # the line of code that the frame shows
    return " ".join(line.strip() for line in told)[:500]


async def run_process(command: Sequence[str], log: Path, patience: float = RUN_SECONDS) -> Ended:
    """A command from its start to its end; it is stopped with all its descendants if we are, by whatever signal, or if
    it hangs: takes more seconds than we have patience for."""
    start = time.perf_counter()
    process, control = _started(command, log)
    ending = asyncio.create_task(asyncio.to_thread(os.wait4, process.pid, 0))  # tells what it used, unlike Popen.wait
    with control:
        try:
            done, _ = await asyncio.wait([ending], timeout=patience)
        finally:
            control.shutdown(socket.SHUT_WR)  # the keeper kills what is left
            _, status, used = await ending
            process.returncode = os.waitstatus_to_exitcode(status)  # for Popen, which would wait for it again
        report = control.makefile().read().split()  # pid N exit N, but for a keeper that was killed
    said = _text(log) if done else f"not done after {patience:.0f} s"
    seconds = time.perf_counter() - start
    computed, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    code = int(report[-1]) if "exit" in report else -signal.SIGKILL
    return Ended(code, seconds, computed, said, os.getloadavg()[1], peak)


def _started(command: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A keeper of the command, which ends with us and ends all that the command started; and the socket of its
    report."""
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, its = socket.socketpair()
    with log.open("w") as output, its:
        keeping = [sys.executable, "-I", "-S", keeper.__file__, "keep", str(os.getpid()), str(its.fileno()), "-1"]
        process = subprocess.Popen(
            [*keeping, *command], cwd=ROOT, env=os.environ | ONE_THREAD, start_new_session=True, stdout=output,
            stderr=subprocess.STDOUT, pass_fds=[its.fileno()],
        )  # fmt: skip
    return process, ours


def _text(log: Path) -> str:
    return log.read_text(errors="replace")
