"""A role's state in host memory, between the ranks that had it and those that go on with it on other hosts.

In: a `StateCopy` of each old rank, kept on its host by a `StateKeeper`. Out: to each new rank, however many there are,
the pieces that it needs. Who wakes whom: nobody; a new rank's compute thread waits for the pieces that it reads.

Pieces go straight from an old rank's host to the new rank: by reference in one process, through shared memory on one
machine, by process group or RPC between machines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import start_apart
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.weights.train_state import StateCopy, planner_of

READ_BYTES = 256 << 20
"""What a new rank fetches at a time: beside what it already has, its host needs memory for no more than that."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where in its whole tensor a kept shard lies."""

    offset: tuple[int, ...]
    """Of its first element."""
    shape: tuple[int, ...]
    """Its own."""
    dtype: torch.dtype
    """Its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a kept shard."""

    key: str
    """Name of the tensor."""
    offset: tuple[int, ...]
    """Of its first element in the shard."""
    shape: tuple[int, ...]
    """Its own."""


class StateKeeper(Actor):
    """Keeps what one rank of a role knew, in the memory of its host, after that rank has ended."""

    @endpoint
    async def keep(self, state: StateCopy) -> tuple[str | None, dict[str, Shard]]:
        """Keep a copy; returns its `about` and what is in it."""
        self._shards = state.shards
        inside = {
            key: Shard(state.offsets[key], tuple(shard.shape), shard.dtype) for key, shard in state.shards.items()
        }
        return state.about, inside

    @endpoint
    async def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Parts of what is kept; nobody may write to them."""
        found = []
        for piece in pieces:
            ends = (start + size for start, size in zip(piece.offset, piece.shape, strict=True))
            found.append(self._shards[piece.key][tuple(map(slice, piece.offset, ends))])
        return found


@dataclass(frozen=True, slots=True)
class ParkedState:
    """Where the state of a role is while the role is nowhere; its new ranks are sent this, and `open` it."""

    role: str
    """Whose it is."""
    keepers: ActorGroup
    """One for each old rank, on its host."""
    about: Mapping[str, Any]
    """What is not a tensor."""
    shards: tuple[Mapping[str, Shard], ...]
    """Of each old rank, by key."""

    def open(self) -> OpenState:
        """The state as a `train_state.Source`; to be called on the loop of the host that will read it."""
        return OpenState(self, asyncio.get_running_loop())


async def park(system: ActorSystem, role: str, group: ActorGroup) -> ParkedState:
    """Have the ranks of a role copy what they know to host memory, where it stays until `parked.keepers` are ended.

    Args:
        system: where.
        role: its name.
        group: its ranks, at rest; they have the endpoint `export_state`, and may end as soon as this returns.

    Raises:
        Exception: what `export_state` raised; nothing is kept then.
    """
    keepers = await system.spawn(StateKeeper, name=f"{role}.parked", hosts=group.hosts)
    try:
        copies = group.export_state()
        kept = await keepers.keep.each([copies[rank] for rank in range(len(group))])
    except BaseException:
        await system.kill(keepers)
        raise
    abouts, shards = zip(*kept, strict=True)
    return ParkedState(role, keepers, json.loads(abouts[0]), shards)


class OpenState:
    """A parked state, as a rank of the role's successor reads it; a `train_state.Source`.

    Args:
        parked: where it is.
        loop: of this host.
    """

    def __init__(self, parked: ParkedState, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.about = f"the state of {parked.role}", parked.about
        self._keepers, self._loop = parked.keepers, loop
        self.stored = _metadata(parked.shards)
        self._owners = {(key, s.offset): rank for rank, shards in enumerate(parked.shards) for key, s in shards.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fetch what these tensors need. Blocking, in a compute thread: its loop goes on meanwhile.

        Raises:
            ActorDied: a host that has a part of it is lost.
        """
        planner = planner_of(self.stored, targets)
        for items in self._batches(planner.create_local_plan().items):
            for item, piece in zip(items, self._fetched(items), strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, without that, in host memory. Blocking, as `fill`."""
        found = {
            key: torch.empty(kind.size, dtype=kind.properties.dtype)
            for key, kind in self.stored.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
        }
        self.fill(found)
        return {key.removeprefix(prefix): tensor for key, tensor in found.items()}

    def _batches(self, items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
        """Of at most `READ_BYTES` each, unless a single one is larger."""
        batch: list[ReadItem] = []
        size = 0
        for item in items:
            assert item.type == LoadItemType.TENSOR
            kind = self.stored.state_dict_metadata[item.storage_index.fqn]
            nbytes = prod(item.lengths) * kind.properties.dtype.itemsize  # type: ignore[union-attr]
            if batch and size + nbytes > READ_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += nbytes
        if batch:
            yield batch

    def _fetched(self, items: Sequence[ReadItem]) -> list[Tensor]:
        # apart: whoever reads holds its devices, in the middle of a computation, and must not lend them while it waits
        async def fetch() -> list[Tensor]:
            return await start_apart(self._fetch(items), f"reading {self.name}")

        return asyncio.run_coroutine_threadsafe(fetch(), self._loop).result()

    async def _fetch(self, items: Sequence[ReadItem]) -> list[Tensor]:
        wanted: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            index: MetadataIndex = item.storage_index
            assert index.offset is not None
            wanted.setdefault(self._owners[index.fqn, tuple(index.offset)], []).append(place)
        calls = []
        for rank, places in wanted.items():
            pieces = [
                Piece(items[at].storage_index.fqn, tuple(items[at].storage_offsets), tuple(items[at].lengths))
                for at in places
            ]
            calls.append(self._keepers[rank].read(pieces))
        found: dict[int, Tensor] = {}
        for places, tensors in zip(wanted.values(), await asyncio.gather(*calls), strict=True):
            found.update(zip(places, tensors, strict=True))
        return [found[place] for place in range(len(items))]


def _metadata(shards: Iterable[Mapping[str, Shard]]) -> Metadata:
    """What torch's planner wants to know of kept shards."""
    found: dict[str, TensorStorageMetadata] = {}
    for key, shard in (item for each in shards for item in each.items()):
        chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.shape))
        end = [start + size for start, size in zip(shard.offset, shard.shape, strict=True)]
        if (kind := found.get(key)) is None:
            found[key] = TensorStorageMetadata(TensorProperties(shard.dtype), torch.Size(end), [chunk])
        else:
            kind.chunks.append(chunk)
            kind.size = torch.Size(map(max, kind.size, end))
    return Metadata(dict(found))
