"""Starting runs in processes of their own: as a user does, or quicker, with their imports done beforehand."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlinf.metrics.verdict import FAMILIES
from tests.runtime.programs.jobs import Ranks, Zygote, until

ROOT = Path(__file__).parent.parent
QUICKSTART = "configs/quickstart.yaml"
TINY = (
    "steps=3", "log_every=1", "sft.steps=2", "sft.batch_size=8", "evaluation.problems=20", "evaluation.every=2",
    "checkpoint.every=2", "algorithm.prompts_per_step=4", "algorithm.group_size=4", "model.config.hidden_size=16",
    "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
)  # fmt: skip
"""A run of a second or two, after its imports."""


@functools.cache
def server() -> Zygote:
    """The fork server of all runs; its processes have imported what runs import."""
    directory = tempfile.TemporaryDirectory(prefix="rlinf-runs-")
    zygote = Zygote(directory.name, "tests.preloaded")
    atexit.register(lambda: (zygote.close(), directory.cleanup()))
    return zygote


def start(*arguments: str, processes: int = 0, program: Path = ROOT / "launch.py", **more: Any) -> Ranks:
    """Begin launch.py, or another program, in one process or as that many ranks, all of them forked off `server`.

    They share the server's seed of hashes, and are no children of torchrun: what is about either is to use `command`.
    """
    return server().run(program, processes, *arguments, **{"PYTHONPATH": "", **more})


class Forked:
    """A Python program in a process forked off `server`, with the part of `subprocess.Popen` that runs of it need."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: Any) -> None:
        """As Popen's, of `python -m module arguments`; what the process said is in `stdout` once it has ended."""
        self.args, self._output = command, Path(stdout.name)
        _, _, module, *arguments = command
        program = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        self._ranks = server().run(program, 0, *arguments, **env)
        (self.pid,) = self._ranks.pids
        self.returncode: int | None = None

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code."""
        if self.returncode is None:
            try:
                until(self._ranks.ended, "its end", timeout)
            except AssertionError:
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            (self.returncode,) = self._ranks.codes()
            self._output.write_text(self._ranks.printed(0) + self._ranks.complained(0))
        return self.returncode

    def kill(self) -> None:
        """End it at once, and what is left of its children."""
        self._ranks.end()


def launch(*arguments: str, expect: int = 0, timeout: float = 110, **more: Any) -> subprocess.CompletedProcess[str]:
    """`start` and wait for its end: what all ranks said, and the first exit code that is not 0."""
    ranks = start(*arguments, **more)
    try:
        codes = ranks.codes(timeout)
    finally:
        ranks.end()
    said, complained = ("".join(map(text, range(len(codes)))) for text in (ranks.printed, ranks.complained))
    code = next(filter(None, codes), 0)
    assert code == expect, said + complained
    return subprocess.CompletedProcess(arguments, code, said, complained)


def killed(when: Callable[[], bool], *arguments: str, processes: int = 0, later: float = 0.0) -> None:
    """Start a run, and kill all of it `later` seconds after `when` has come true."""
    ranks = start(*arguments, processes=processes)
    try:
        until(lambda: ranks.ended() or when(), "the moment to kill it", 100)
        assert not ranks.ended(), ranks.everything()
        time.sleep(later)
    finally:
        ranks.end()
    ranks.codes()


def steps_noted(run: Path) -> int:
    """How many lines a run has written of its steps."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def command(*arguments: str, processes: int = 0) -> list[str]:
    """The command line of launch.py as a user types it, by torchrun if `processes` are given."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"] if processes else []
    return [sys.executable, *torchrun, str(ROOT / "launch.py"), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Ours, with one thread per process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **more}


def typed(
    *arguments: str, processes: int = 0, expect: int = 0, timeout: float = 110, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end, imports and all."""
    done = subprocess.run(
        command(*arguments, processes=processes),
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """What a run noted of its steps, from 1 on."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > 0]


def learned(run: Path) -> list[dict[str, Any]]:
    """The same without what depends on the clock, or on who has joined."""
    timed = (*FAMILIES, "weights/", "tokens_per_s", "rollout/joined_count", "trainer/joined_", "reward/joined_")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in metrics_of(run)]


def weights_of(run: Path) -> dict[str, Any]:
    """The newest checkpoint's weights."""
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / "latest" / "hf" / "model.safetensors")


def equal(one: Path, other: Path) -> None:
    """Two runs answered, were rewarded and learned the same, bit for bit."""
    assert learned(one) == learned(other)
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
