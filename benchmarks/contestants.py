"""Contestants of `benchmarks.runtime`, and how one turn of each is run: a command in, a row of numbers out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.common import GROUPS

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",  # on shared cores a second OpenMP thread costs up to 40 times
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TURN_SECONDS = 300.0


class TurnFailed(Exception):
    """A contestant's process failed or hung; the text ends with what it wrote last."""


@dataclass
class Contestant:
    """One system that is measured.

    Attributes:
        turn: runs one group of rows and returns (version, numbers by row).
        groups: the groups of rows that it can do.
        missing: why it cannot take part; None if it can.
    """

    name: str
    turn: Callable[[str], tuple[str, dict[str, float]]]
    groups: tuple[str, ...]
    missing: str | None = None
    version: str = ""
    rows: dict[str, list[float]] = field(default_factory=dict)
    """One number per round."""
    latest: dict[str, float] = field(default_factory=dict)
    """Numbers of the last turn."""

    def measure(self, group: str) -> None:
        self.version, self.latest = self.turn(group)
        for row, value in self.latest.items():
            self.rows.setdefault(row, []).append(value)


def contestants() -> list[Contestant]:
    """Ours first."""
    absent = None if PEERS.exists() else "its environment is absent; `make bench-peers` creates it"
    peers = "benchmarks.peers"
    bare = f"{peers}.bare_rpc"
    return [
        Contestant("rlinf", _ours, (*GROUPS, "leases", "startup")),
        Contestant("bare rpc_async", _script(sys.executable, bare), ("calls", "cold", "tensors")),
        Contestant("bare rpc_async, sockets", _script(sys.executable, bare, BENCH_RPC_TRANSPORT="uv"), ("calls",)),
        Contestant("ray", _script(str(PEERS), f"{peers}.ray_peer"), ("calls", "tensors", "queues"), absent),
        Contestant("xoscar", _script(str(PEERS), f"{peers}.xoscar_peer"), ("calls", "tensors", "queues"), absent),
        Contestant("import torch", lambda _: _startup("benchmarks.startup.bare"), ("startup",)),
    ]


def _ours(group: str) -> tuple[str, dict[str, float]]:
    if group == "startup":
        return _startup("benchmarks.startup.first_call")
    if group == "leases":
        return _result(run([*_torchrun(3), "-m", "benchmarks.runtime_handover"]))
    return _result(run([*_torchrun(), "-m", "benchmarks.runtime_rlinf", "--groups", group]))


def _script(python: str, module: str, **environment: str) -> Callable[[str], tuple[str, dict[str, float]]]:
    return lambda group: _result(run([python, "-m", module, "--groups", group], environment))


def _result(output: str) -> tuple[str, dict[str, float]]:
    line = next(line for line in reversed(output.splitlines()) if line.startswith('{"name"'))
    result = json.loads(line)
    return result["version"], result["rows"]


def _startup(module: str) -> tuple[str, dict[str, float]]:
    """Seconds from starting torchrun until the last process that says so is ready."""
    start = time.time()
    lines = [line.split() for line in run([*_torchrun(), "-m", module]).splitlines() if line.startswith("ready ")]
    return lines[0][3], {"startup": max(float(words[1]) for words in lines) - start}


def _torchrun(processes: int = 2) -> list[str]:
    with socket.socket() as probe:  # a port of its own: other jobs on this machine may hold torchrun's default
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-port",
        str(port),
    ]


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """The standard output of a command, which is stopped with all its children if it takes too long."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ONE_THREAD | (environment or {}), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=TURN_SECONDS)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TurnFailed(f"{' '.join(command)} hung for {TURN_SECONDS:.0f} s:\n{errors[-2000:]}") from None
        raise
    if process.returncode != 0:
        raise TurnFailed(f"{' '.join(command)} exited with {process.returncode}:\n{errors[-4000:]}")
    return output
