"""`python -m benchmarks.weights`: publishing a gigabyte of weights, beside a pickled state dict.

Two processes under torchrun: a trainer's model in one, receivers in both. All ways take turns within each round, so
that a ratio compares neighbours in time; shown are medians over the rounds. Times are wall-clock, of whole phases.

`--cast` is about a trainer with float32 masters and engines in bfloat16 instead, on four processes: published as the
masters are, or cast before; to one engine, or to three.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import rlinf
from rlinf import Actor, endpoint
from rlinf.data.weights import Weights
from rlinf.metrics.timing import parts
from rlinf.runtime.system.observer import Watch
from rlinf.training.weight_sync import Receiver, exported, pack, publish

ROOT = Path(__file__).parents[1]
LAYER = {"q": (896, 896), "k": (128, 896), "v": (128, 896), "o": (896, 896), "up": (2, 4864, 896), "down": (896, 4864)}
"""Shapes of Qwen2.5-0.5B, 24 layers of which are 0.7 GB of bfloat16; with the embedding it is 1 GB."""
WAYS = {
    "pack": "pack into buckets, with checksums",
    "verify": "verify the checksums",
    "copy": "copy into the engine's model",
    "by reference": "`load(trainer.weights())`, receiver in the same process",
    "arena": "`load(trainer.weights())`, receiver in another process",
    "both": "`load(trainer.weights())`, a receiver in each of the two",
    "pickled": "state dict by pickle, in the same process",
    "pickled, sent": "state dict by pickle, sent to another process",
}


CASTS = {"float32": None, "bfloat16": torch.bfloat16}
"""Weights that are published of float32 masters: before this could be said, and since."""


def model(layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Parameters of the shapes of a small language model."""
    shapes = {f"layers_{i}_{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    shapes["embed"] = (151936, 896)
    holder = nn.Module()
    for name, shape in shapes.items():
        holder.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype).normal_(std=0.02)))
    return holder


class Trainer(Actor):
    """Owns the model."""

    async def setup(self, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = await self.compute(model, layers, dtype)

    @endpoint(joint=True)
    async def weights(self, dtype: torch.dtype | None = None) -> Weights | None:
        return await publish(self, partial(exported, self.model), 1, dtype=dtype)

    @endpoint
    async def pickled(self) -> bytes:
        return await self.compute(lambda: pickle.dumps(self.model.state_dict(), 5))

    @endpoint
    async def phases(self) -> dict[str, float]:
        """Seconds of what publishing and receiving are made of."""
        return await self.compute(self._phases)

    def _phases(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        weights = timed(
            seconds, "pack", lambda: pack(partial(exported, self.model), 1, lead=True, empty=self.empty_shared)
        )
        timed(seconds, "verify", weights.verify)
        target = dict(self.model.named_parameters())
        timed(seconds, "copy", lambda: fill(target, dict(weights.named())))
        return seconds


class Engine(Receiver):
    """Copies what it receives into its own model."""

    async def setup(self, layers: int) -> None:
        self.model = await self.compute(model, layers)
        self.target = dict(self.model.named_parameters())

    async def check_weights(self, weights: Weights) -> None:
        wrong = [slot.name for slot in weights.layout if self.target[slot.name].shape != slot.shape]
        if wrong:
            raise ValueError(f"shapes differ: {wrong}")

    async def switch_weights(self, weights: Weights) -> None:
        await self.compute(lambda: fill(self.target, dict(weights.named())))

    @endpoint
    async def unpickle(self, state: bytes) -> None:
        await self.compute(lambda: fill(self.target, pickle.loads(state)))


@torch.no_grad()
def fill(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copy tensors by name."""
    for name, tensor in source.items():
        target[name].copy_(tensor)


def timed(seconds: dict[str, float], what: str, work: Callable[[], Any]) -> Any:
    """Run `work`, and note how long it took."""
    begun = time.perf_counter()
    result = work()
    seconds[what] = time.perf_counter() - begun
    return result


async def measure(system: Any) -> None:
    """All ways, in turns; prints one line of JSON."""
    layers, rounds = int(sys.argv[1]), int(sys.argv[2])
    trainer = await system.spawn(Trainer, hosts=[0], name="trainer", layers=layers)
    engines = await system.spawn(Engine, hosts=[0, 1], name="engines", layers=layers)
    beside = await system.spawn(Engine, hosts=[0], name="beside", layers=layers)
    across = await system.spawn(Engine, hosts=[1], name="across", layers=layers)
    size = (await trainer.weights()).nbytes
    found: dict[str, list[float]] = {}

    async def clocked(what: str, call: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        await call()
        found.setdefault(what, []).append(time.perf_counter() - begun)

    for number in range(rounds + 1):
        if number == 1:
            found.clear()  # the first round maps and touches memory
        for what, seconds in (await trainer[0].phases()).items():
            found.setdefault(what, []).append(seconds)
        await clocked("by reference", lambda: beside.load(trainer.weights()))
        await clocked("pickled", lambda: beside.unpickle(trainer[0].pickled()))
        await clocked("arena", lambda: across.load(trainer.weights()))
        await clocked("pickled, sent", lambda: across.unpickle(trainer[0].pickled()))
        await clocked("both", lambda: engines.load(trainer.weights()))
    print("RESULT " + json.dumps({"bytes": size, "seconds": found}))


async def measure_casts(system: Any) -> None:
    """Float32 masters to engines in bfloat16, in turns; prints one line of JSON."""
    layers, rounds = int(sys.argv[1]), int(sys.argv[2])
    trainer = await system.spawn(Trainer, hosts=[0], name="trainer", layers=layers, dtype=torch.float32)
    groups = {
        1: await system.spawn(Engine, hosts=[1], name="one", layers=layers),
        3: await system.spawn(Engine, hosts=[1, 2, 3], name="three", layers=layers),
    }
    watch = await Watch.start(system)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds + 1):
        for receivers, engines in groups.items():
            for name, dtype in CASTS.items():
                watch.begins()
                begun = time.perf_counter()
                await engines.load(trainer.weights(dtype))
                seconds = time.perf_counter() - begun
                told = {"seconds": seconds, **parts(await watch.ends(name))}
                if number:  # the first round maps and touches memory
                    found.setdefault(f"{name} to {receivers}", []).append(told)
    print("RESULT " + json.dumps({key: _medians(rows) for key, rows in found.items()}))


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show_casts(result: dict[str, dict[str, float]]) -> None:
    """A table of what `measure_casts` found."""
    phases = ("copy", "checksum", "send", "verify", "load")
    table = Table("published as, to so many engines", "s", "GB through host", *(f"{phase} s" for phase in phases))
    for key, told in result.items():
        seconds = (f"{told[f'weights/{phase}_seconds']:.2f}" for phase in phases)
        table.add_row(key, f"{told['seconds']:.2f}", f"{told['weights/host_bytes'] / 1e9:.2f}", *seconds)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of the model; 24 make it 1 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-weights.json")
    parser.add_argument("--cast", action="store_true", help="float32 masters to engines in bfloat16")
    given = parser.parse_args()
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node", 4 if given.cast else 2, __file__, given.layers, given.rounds]
    command += ["--cast"] if given.cast else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    load = os.getloadavg()[0]
    done = subprocess.run(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    if given.cast:
        show_casts(result)
        save(given, "weights-cast", {"rows": result, "layers": given.layers, "load": load})
        return
    table = Table(
        "what", "s", "GB/s", "beside pickle", title=f"{result['bytes'] / 1e9:.2f} GB, load {load:.1f} at start"
    )
    peers = {"by reference": "pickled", "arena": "pickled, sent"}
    for key, what in WAYS.items():
        times = result["seconds"][key]
        middle = statistics.median(times)
        ratio = ""
        if key in peers:
            pairs = zip(result["seconds"][peers[key]], times, strict=True)
            ratio = f"{statistics.median(theirs / ours for theirs, ours in pairs):.1f} x faster"
        table.add_row(what, f"{middle:.2f}", f"{result['bytes'] / middle / 1e9:.2f}", ratio)
    Console().print(table)
    save(given, "weights", result | {"load": load})


def save(given: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    """Write a result down, if that was asked for."""
    if given.save:
        path = ROOT / "benchmarks" / "results" / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}.json"
        path.write_text(json.dumps(result | {"torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        from benchmarks import weights  # under its own name, so that what it defines can be sent

        rlinf.run(weights.measure_casts if "--cast" in sys.argv else weights.measure)
    else:
        main()
