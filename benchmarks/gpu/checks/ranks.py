"""Several processes that share the device: a function in each of them, as ranks of one job.

In: `module:function`, how many. Out: how each ended, and what rank 0 told. Nobody ends the others when one dies, as
torchrun would: that is for the checks to see.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import ROOT
from benchmarks.gpu.scale import Scale

TOLD = "TOLD "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job of some ranks ended."""

    codes: list[int | None]
    """Exit status of each rank; None of one that had to be killed for taking too long."""
    told: dict[str, Any]
    """Figures that rank 0 told."""
    output: str
    """The end of what all ranks wrote."""
    seconds: float
    """From the start to the end of the last."""


def run(scale: Scale, target: str, world: int, seconds: float) -> Ended:
    """Have `world` processes call `target(scale)`, with what torchrun would set in their environments.

    Args:
        scale: of the check.
        target: `module:function`, the module below this package.
        world: how many.
        seconds: after which those that are left are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlinf-ranks-") as folder:
        logs = [Path(folder) / str(rank) for rank in range(world)]
        processes = []
        for rank, log in enumerate(logs):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            command = [sys.executable, "-m", __name__, target, str(scale.work), str(scale.limit), str(scale.rehearse)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, seconds - (time.monotonic() - begun))))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        texts = [log.read_text(errors="replace") for log in logs]
    told: dict[str, Any] = {}
    for line in texts[0].splitlines():
        told |= json.loads(line.removeprefix(TOLD)) if line.startswith(TOLD) else {}
    output = "".join(f"--- rank {rank}\n{text[-1500:]}\n" for rank, text in enumerate(texts))
    return Ended(codes, told, output, time.monotonic() - begun)


def tell(figures: Mapping[str, Any]) -> None:
    """Say, on rank 0, what `run` returns; may be called again with more."""
    print(TOLD + json.dumps(figures), flush=True)


def spans(trace: Path, kind: str) -> list[dict[str, Any]]:
    """The spans of one kind in a trace: what happened, as `rlinf.runtime.observe.spans` lists the kinds."""
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == kind]


def routes(trace: Path) -> dict[str, int]:
    """Bytes that went from process to process, by route."""
    found: dict[str, int] = {}
    for event in spans(trace, "payload"):
        found[event["name"]] = found.get(event["name"], 0) + int(event.get("args", {}).get("bytes", 0))
    return found


def parts(trace: Path) -> dict[str, float]:
    """Bytes and seconds that actors told of parts of what they did, such as `weights/host_bytes`, added up."""
    found: dict[str, float] = {}
    for event in spans(trace, "part"):
        more = event["args"]["bytes"] if event["name"].endswith("_bytes") else event["dur"] / 1e6
        found[event["name"]] = found.get(event["name"], 0.0) + more
    return found


def _rank() -> None:
    target, work, limit, rehearse = sys.argv[1:]
    module, function = target.split(":")
    scale = Scale(rehearse == "True", Path(work), float(limit))
    getattr(importlib.import_module(f"benchmarks.gpu.checks.{module}"), function)(scale)


if __name__ == "__main__":
    _rank()
