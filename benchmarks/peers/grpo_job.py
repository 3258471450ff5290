"""Job of every contestant of `benchmarks.grpo`, how it takes turns, and what it answers.

In: a job as JSON. Out: one JSON line. Between steps a contestant waits for its turn. Imports the standard library
alone, so that a peer's environment, which has nothing of ours, can import it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

MARK = '{"grpo":'
"""How the one line of a contestant's output that counts begins."""
WORK = "work "
"""How the line begins in which a contestant with an agent says what a sample was, on average of the run."""
PLACE, NAME = "BENCH_TURNS", "BENCH_TURNS_NAME"
"""Environment: the socket at which turns are given out, and under which number."""
GO, DONE = b"g", b"d"


@dataclass(frozen=True, slots=True)
class Job:
    """One training run: the quickstart's, in numbers."""

    model: str
    """Hugging Face directory of the model to start from; its tokenizer lies beside it."""
    problems: list[list[tuple[str, str]]]
    """Per step, what is asked and its one right answer."""
    seed: int
    """Seed of the sampling."""
    group_size: int
    """Answers per problem."""
    epochs: int
    """Optimizer steps on each batch of answers."""
    max_new_tokens: int
    """An answer without end token is cut there."""
    temperature: float
    """Logits are divided by it before sampling."""
    lr: float
    """Learning rate of AdamW after warm-up."""
    warmup_steps: int
    """Optimizer step i, from 1, uses lr x i / warmup_steps until then."""
    betas: tuple[float, float]
    """Betas of AdamW."""
    weight_decay: float
    """Weight decay of AdamW."""
    grad_clip: float
    """Bound of the gradient's norm."""
    clip_low: float
    """The probability ratio is clipped below 1 - clip_low ..."""
    clip_high: float
    """... and above 1 + clip_high."""
    advantage_scale: str
    """"std" or "none"."""

    def write(self, path: Path) -> None:
        """Save it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str | Path) -> Job:
        """Load what `write` saved."""
        return Job(**json.loads(Path(path).read_text()))


@dataclass(slots=True)
class Result:
    """Result of a job, step by step.

    A step is measured from its beginning to the beginning of the next, waiting for one's turn left out: what happens
    between steps counts. So the last one, which nothing follows, is not.
    """

    version: str
    """Version of what ran it."""
    seconds: list[float] = field(default_factory=list)
    """How long each step took [steps - 1]."""
    cpu: list[float] = field(default_factory=list)
    """Processor seconds of the process in each [steps - 1]."""
    loop: list[float] = field(default_factory=list)
    """Processor seconds of the thread that takes the steps, in ours the event loop's [steps - 1]."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's answers [steps]."""
    peak: int = 0
    """Most resident memory of the process that trains, bytes."""
    outside: float | None = None
    """Share of the steps' time in which no stage computed; None where it is not known."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step [steps], where it is asked for."""

    def tell(self) -> None:
        """Print it."""
        self.peak = self.peak or peak_memory()
        print("\n" + MARK + json.dumps(asdict(self)) + "}", flush=True)

    @staticmethod
    def heard(output: str) -> Result:
        """The result in a contestant's output.

        Raises:
            ValueError: there is none.
        """
        for line in reversed(output.splitlines()):
            if line.startswith(MARK):
                return Result(**json.loads(line)["grpo"])
        raise ValueError(f"no line of the output begins with {MARK}")


class Stopwatch:
    """Takes the time of steps, and waits for one's turn between them.

    Without PLACE in the environment there is nobody to wait for.
    """

    def __init__(self, result: Result) -> None:
        self._result = result
        self._began: tuple[float, float, float] | None = None
        self._line: socket.socket | None = None

    def next_step(self) -> None:
        """The step under way is over: wait for the next turn, and begin another."""
        self.over()
        self.wait()
        self.begin()

    def over(self) -> None:
        """The step under way, if there is one, is over; from the thread that began it."""
        if self._began is not None:
            took = [now - then for now, then in zip(_clocks(), self._began, strict=True)]
            for series, value in zip((self._result.seconds, self._result.cpu, self._result.loop), took, strict=True):
                series.append(value)

    def wait(self) -> None:
        """Wait for one's turn."""
        if (place := os.environ.get(PLACE)) is None:
            return
        if self._line is None:
            self._line = socket.socket(socket.AF_UNIX)
            self._line.connect(place)
            self._line.send(os.environ[NAME].encode())
        else:
            self._line.send(DONE)
        if not self._line.recv(1):
            sys.exit("whoever gives out the turns is gone")

    def begin(self) -> None:
        """A step begins."""
        self._began = _clocks()


def _clocks() -> tuple[float, float, float]:
    """Seconds: of the wall, of this process, of this thread."""
    return time.perf_counter(), time.process_time(), time.thread_time()


def peak_memory() -> int:
    """Most resident memory of this process so far, bytes: VmHWM, since getrusage also counts what forked us."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    sys.exit("/proc/self/status has no VmHWM: peak memory is measured on Linux only")
