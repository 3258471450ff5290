"""How weights get into an SGLang server: the routes, and which is taken.

Flows in: the buckets of `Weights`, in the trainer's order. Flows out: requests that tell the server where they are. Who
waits: the caller, for each bucket in turn; the deadline is the engine's. Names are those of the checkpoint; the server
fuses and shards for itself.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf.data.safetensors_io import write_tensors
from rlinf.data.weights import Weights
from rlinf.engines.served.http import Http, Refused
from rlinf.engines.served.shared_memory import SharedMemory
from rlinf.runtime.base.shutdown import OwnDirectory

_BUCKET = 600.0
"""Seconds for one bucket; the deadline of the whole is the engine's."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes weights."""

    http: Http
    """To it."""
    ranks: int
    """Processes over which its model is split; each reads everything and keeps its part."""
    device: str
    """"cuda" or "cpu"."""


class Route(Protocol):
    """One way in."""

    sessions: bool
    """It goes between /begin_weight_update and /end_weight_update, where a version has these."""

    async def send(self, target: Target, weights: Weights) -> None:
        """Have the server use these weights. Raises `Refused` or `Lost`."""

    def close(self) -> None:
        """Let go of what is held for the server."""


class SharedMemoryRoute:
    """Memory that both processes map: one copy here, while the server reads the bucket before; checksums verified
    there. For buckets in host memory."""

    sessions = True

    def __init__(self) -> None:
        self._memory = SharedMemory()

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        ready = asyncio.ensure_future(asyncio.to_thread(self._memory.copy, weights, 0))
        try:
            for number in range(len(weights.buckets)):
                manifest = torch.frombuffer(bytearray((await ready).encode()), dtype=torch.uint8)
                if number + 1 < len(weights.buckets):
                    ready = asyncio.ensure_future(asyncio.to_thread(self._memory.copy, weights, number + 1))
                await _update(target, _plain([("manifest", manifest)]), weights, "rlinf_weights.load")
                if (word := self._memory.word(number)) != "ok":
                    raise Refused(f"bucket {number} of the weights of version {weights.version}: {word or 'not read'}")
        finally:
            await asyncio.wait([ready])  # a thread cannot be stopped, and it writes where the next bucket goes

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class PickleRoute:
    """All bytes through HTTP, 4/3 of them by its encoding: works wherever there is a connection."""

    sessions = True

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        for number in range(len(weights.buckets)):
            payload = await asyncio.to_thread(_plain, _bucket(weights, number))
            await _update(target, payload, weights, None)

    def close(self) -> None:
        """Nothing is held."""


class CudaIpcRoute:
    """Handles of memory of the same GPU, which the server opens: no copy but its own. Not run yet."""

    sessions = True

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        from torch.multiprocessing.reductions import init_reductions

        init_reductions()
        for number in range(len(weights.buckets)):  # each lives until the reply
            await _update(target, _handles(_bucket(weights, number)), weights, None)

    def close(self) -> None:
        """Nothing is held."""


class DiskRoute:
    """Files that the server reads: the last resort, and the only one that undoes a failure by itself."""

    sessions = False

    def __init__(self) -> None:
        self._own = OwnDirectory("weights")
        self._directory = self._own.path

    async def send(self, target: Target, weights: Weights) -> None:
        """See `Route`."""
        said = await target.http.get("/server_info")
        config = Path(said["model_path"]) / "config.json"

        def write() -> None:
            shutil.copyfile(config, self._directory / "config.json")
            write_tensors(self._directory / "model.safetensors", {name: one.cpu() for name, one in weights.named()})

        await asyncio.to_thread(write)
        body = {"model_path": str(self._directory), "flush_cache": False, "weight_version": str(weights.version)}
        await target.http.post("/update_weights_from_disk", body, seconds=_BUCKET)

    def close(self) -> None:
        """Delete the files."""
        self._own.remove()


ROUTES: dict[str, Callable[[], Route]] = {
    "cuda_ipc": CudaIpcRoute,
    "shared_memory": SharedMemoryRoute,
    "http": PickleRoute,
    "disk": DiskRoute,
}
"""By the name that `rollout.engine_args.route` takes, the fastest first."""


def route_for(named: str | None, weights: Weights, device: str) -> Route:
    """The route that is named, or the fastest one for buckets where they lie.

    Raises:
        Refused: there is no such route.
    """
    if named is None:
        there = {bucket.device.type for bucket in weights.buckets}
        named = "cuda_ipc" if there == {"cuda"} == {device} else "shared_memory"
    if named not in ROUTES:
        raise Refused(f"rollout.engine_args.route={named!r} must be one of {', '.join(ROUTES)}")
    return ROUTES[named]()


def _bucket(weights: Weights, number: int) -> list[tuple[str, Tensor]]:
    """Names and tensors of one bucket, as views."""
    flat = weights.buckets[number]
    slots = [slot for slot in weights.layout if slot.bucket == number]
    return [(slot.name, flat[slot.offset : slot.offset + prod(slot.shape)].view(slot.shape)) for slot in slots]


def _plain(named: list[tuple[str, Tensor]]) -> str:
    """Names and tensors with their bytes, which any server reads. Views are copied, or each would bring its bucket."""
    return base64.b64encode(pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in named])).decode()


def _handles(named: list[tuple[str, Tensor]]) -> str:
    """Names and tensors as handles of their memory."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getbuffer()).decode()


async def _update(target: Target, payload: str, weights: Weights, load_format: str | None) -> None:
    body: dict[str, Any] = {
        "serialized_named_tensors": [payload] * target.ranks,
        "load_format": load_format,
        "flush_cache": False,  # it is empty, and a flush at the wrong moment ends the server
        "weight_version": str(weights.version),
    }
    said = await target.http.post("/update_weights_from_tensor", body, seconds=_BUCKET)
    if isinstance(said, dict) and not said.get("success", True):
        raise Refused(f"SGLang did not take weights of version {weights.version}: {said.get('message')}")
