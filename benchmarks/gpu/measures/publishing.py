"""Publishing: from a trainer's weights to an engine that uses them, and the bytes that cross the host's memory for it.

Trainer and engine in one process, and in two processes on one card; for engines of either dtype. Before each time the
trainer learns a little, so that the weights are new.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rlinf
from benchmarks.gpu.measures.training import TOKENIZER
from benchmarks.gpu.measuring.clock import Figures, Parts, freed, peak_gb, settled, told
from benchmarks.gpu.measuring.limits import limits_of
from benchmarks.gpu.measuring.profiled import counts, events_of, watched
from benchmarks.gpu.measuring.work import groups
from benchmarks.gpu.scale import Outcome, Scale
from rlinf import ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.metrics.timing import parts as parts_of
from rlinf.models.language.cost import ModelCost
from rlinf.runtime.system.observer import Watch

ROOT = Path(__file__).parents[3]
DTYPES = ("bfloat16", "float32")
"""Types of the engines' weights."""
LEAST = 1 << 16
"""Bytes below which copies to the host are no weights: checksums, norms, losses."""


def publishing(scale: Scale) -> Outcome:
    """Measure the 1.5B model."""
    parts = Parts("publishing", scale)
    for way, processes in (("direct", 1), ("ipc", 2)):
        found = in_processes(parts, scale, way, processes)
        for dtype in DTYPES:
            parts.make(f"{way}_{dtype}", lambda d=dtype, f=found: f[d])
    return parts.outcome()


def in_processes(parts: Parts, scale: Scale, way: str, processes: int) -> dict[str, Figures]:
    """Figures of both dtypes, measured in new processes, which leave no memory to the next."""
    path = scale.work / f"publishing-{way}.json"
    found: dict[str, Figures] = {dtype: {} for dtype in DTYPES}
    path.unlink(missing_ok=True)
    scale.model_dir("1.5B")
    limits_of(scale)  # while nobody else is on the card
    freed(scale.device)
    hosts = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [
        sys.executable, *(hosts if processes > 1 else []), "-m", "benchmarks.gpu.measures.publishing",
        str(path), str(scale.work), *(["--rehearse"] if scale.rehearse else []),
    ]  # fmt: skip

    def run() -> Figures:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode or not path.exists():
            print(done.stdout)
            raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-300:]}")
        found.update(json.loads(path.read_text()))
        return {}

    parts.make(way, run, expected=20.0)
    return found


async def measured(system: ActorSystem, scale: Scale) -> dict[str, Figures]:
    """For each dtype a trainer and an engine, which is on the trainer's host or, where there is one, on another."""
    made = {"model": str(scale.model_dir("1.5B")), "tokenizer": TOKENIZER}
    computes = str(scale.dtype).removeprefix("torch.")
    found = {}
    for dtype in DTYPES:
        freed(scale.device)
        trainer = await system.spawn(
            Trainer, hosts=[0], name=f"trainer_{dtype}", lr=1e-6, dtype=computes, publishes=dtype, compile=False, **made
        )
        rollout = await system.spawn(Rollout, hosts=[system.hosts - 1], name=f"rollout_{dtype}", dtype=dtype, **made)
        found[dtype] = await published(system, trainer, rollout, scale, dtype)
        await system.kill(rollout)
        await system.kill(trainer)
    return found


async def published(system: ActorSystem, trainer: Any, rollout: Any, scale: Scale, dtype: str) -> Figures:
    """Seconds of publishing and loading, and what crossed the host's memory meanwhile: by what the runtime tells of it,
    or by the copies to the host that the trainer's process made, whichever is more.

    Args:
        system: its hosts are asked what their actors did.
        trainer, rollout: actors.
        scale: where they compute.
        dtype: of the engine.
    """
    config, watch = scale.config("1.5B"), await Watch.start(system)

    async def new(number: int) -> None:
        await trainer.train(Stream.of(groups(1, 2, 8, 24, config.vocab_size, seed=number)))
        settled(scale.device)
        watch.begins()

    async def once(number: int) -> float:
        await new(number)
        began = time.perf_counter()
        await rollout.load(trainer.weights())
        settled(scale.device)
        return time.perf_counter() - began

    first = await once(0)
    seconds = [await once(number) for number in range(1, scale.of(6, 3))]
    told_of = parts_of(await watch.ends("publish"))
    await new(99)
    with watched(scale.device) as seen:
        await rollout.load(trainer.weights())
    crossed = counts(events_of(seen), scale.device)
    weights = ModelCost.of(config).weights
    size = weights * (2 if dtype == "bfloat16" else 4)
    found = told("s", seconds)
    copied = crossed["to_host_bytes"] if crossed["to_host_bytes"] >= LEAST else 0
    return {
        **found,
        "first_s": first,
        "limit_s": (4 * weights + size) / limits_of(scale).memory_bytes_per_s,  # masters read once, and written as sent
        "gb": size / 1e9,
        "gb_per_s": size / 1e9 / float(found["s"]),
        "host_bytes": max(copied, int(told_of.get("weights/host_bytes", 0))),
        "syncs": crossed["syncs"],
        **{name.removeprefix("weights/").replace("_seconds", "_s"): value for name, value in told_of.items()
           if name != "weights/host_bytes"},
        "peak_gb": peak_gb(scale.device),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """The process, or each of the two, that `in_processes` starts."""
    path, work, *rest = arguments

    async def work_on(system: Any) -> None:
        figures = await measured(system, Scale("--rehearse" in rest, Path(work)))
        with open(path, "w") as file:  # noqa: ASYNC230  # nothing else goes on any more
            json.dump(figures, file)

    rlinf.run(work_on)


if __name__ == "__main__":
    main(sys.argv[1:])
