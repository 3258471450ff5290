"""Contestants of `benchmarks.grpo`: how a training run of each is started, and how what it left is read."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contestants import ROOT, TurnFailed
from benchmarks.grpo_ours import FLOW, WARM_UP, result_of
from benchmarks.grpo_turns import Command
from benchmarks.peers.grpo_job import Job, Result

TRL = ROOT / ".venv-trl" / "bin" / "python"
CONFIG = ROOT / "configs" / "quickstart.yaml"
OURS, THEIRS, BARE = "rlinf", "TRL", "bare loop"

Start = Callable[[Path, Path], Command]
"""The command that runs the job in a file, and leaves its results in a directory if it writes any."""
Read = Callable[[Path, str], Result]
"""The result, from that directory and what was printed."""


@dataclass
class Contestant:
    """One system in one setting.

    Attributes:
        system: OURS, THEIRS or BARE.
        setting: how it uses its cores, in words.
        cores: how many it may use.
        start: begins a run.
        read: ends it.
        missing: why it cannot take part; None if it can.
    """

    system: str
    setting: str
    cores: int
    start: Start
    read: Read = field(default=lambda directory, output: Result.heard(output))
    missing: str | None = None
    runs: list[Result] = field(default_factory=list)
    """One per round."""

    @property
    def name(self) -> str:
        """Name of system and setting."""
        return f"{self.system}, {self.setting}"

    @property
    def rates(self) -> list[float]:
        """Steps per second of each run: by the median step, since other work on the machine makes some steps long."""
        return [1.0 / median_step(each.seconds) for each in self.runs]

    @property
    def rates_of_cpu(self) -> list[float]:
        """Samples per second of processor time; of the process that reports alone, so right where there is one."""
        return [1.0 / median_step(each.cpu) for each in self.runs]


def median_step(values: Sequence[float]) -> float:
    """The median over the steps that count, or over all where there are no more."""
    return statistics.median(values[WARM_UP:] or values)


def contestants(cores: Sequence[int]) -> list[Contestant]:
    """Every system in every setting that fits so many cores; ours first."""
    absent = None if TRL.exists() else "its environment is absent; `make bench-peers` creates it"
    everyone = [
        Contestant(OURS, "one process", 1, ours(1), read_ours),
        Contestant(THEIRS, "one thread", 1, theirs(1), missing=absent),
        Contestant(BARE, "one thread", 1, bare),
        Contestant(OURS, "torchrun, two processes", 2, ours(2), read_ours),
        Contestant(THEIRS, "two threads", 2, theirs(2), missing=absent),
        Contestant(THEIRS, "two processes", 2, theirs(2, processes=2), missing=absent),
    ]
    return [one for one in everyone if one.cores in cores]


def ours(cores: int, *overrides: str) -> Start:
    """The quickstart, in as many processes as cores, by way of the command line."""

    def start(path: Path, directory: Path) -> Command:
        job = Job.read(path)
        settings = {
            "model.path": job.model,
            "sft.steps": 0,  # the model in the job is warm
            "seed": job.seed,
            "steps": len(job.problems),
            "flow": FLOW,
            "output_dir": directory,
        }
        keys = [f"{key}={value}" for key, value in settings.items()]
        words = [*pinned(cores), *interpreter(sys.executable, cores), "-m", "benchmarks.grpo_ours"]
        return Command([*words, "--config", str(CONFIG), *keys, *overrides], {})

    return start


def read_ours(directory: Path, output: str) -> Result:
    """Read what the quickstart left."""
    return result_of(directory / "quickstart", output)


def theirs(cores: int, processes: int = 1) -> Start:
    """TRL. 128 rows to a micro-batch: of 64 to 512 the fastest on one thread; twice that for two threads."""

    def start(path: Path, directory: Path) -> Command:
        threads = cores // processes
        words = [*pinned(cores), *interpreter(str(TRL), processes), "-m", "benchmarks.peers.trl_grpo", str(path)]
        return Command([*words, "--rows", str(128 * threads)], {"OMP_NUM_THREADS": str(threads)})

    return start


def bare(path: Path, directory: Path) -> Command:
    """The plain loop."""
    return Command([*pinned(1), sys.executable, "-m", "benchmarks.peers.bare_grpo", str(path)], {})


def interpreter(python: str, processes: int) -> list[str]:
    """An interpreter, or torchrun with it, to which a module is given."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [python, *(many if processes > 1 else [])]


def pinned(cores: int) -> list[str]:
    """Words to put before a command so that it and its children have so many cores and no more.

    Raises:
        TurnFailed: there are not so many.
    """
    free = sorted(os.sched_getaffinity(0))
    if len(free) < cores:
        raise TurnFailed(f"{cores} cores are wanted, this process may use {len(free)}")
    return ["taskset", "--cpu-list", ",".join(map(str, free[:cores]))]
