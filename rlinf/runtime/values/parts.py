"""What stands in a message for something that travels beside it, and where hosts live. Knows how nothing of it moves.

Flows in: what a codec finds in a value. Flows out: small picklable references. Nobody waits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlinf.runtime.base.calls import Key

Payload = tuple[Any, ...]
"""(value,) by reference; (value, None) short atoms; (blob, refs, parts) anything else."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a promised value is kept: `key` on host `owner`."""

    owner: int
    key: Key


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A tensor that the sender hands to a process group: who sends, under which tag, and what to expect."""

    source: int
    tag: int
    device: str
    """The type of device it comes from and goes to."""
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IpcRef:
    """A CUDA tensor of this GPU: what opens it. It must be opened or refused once, or its owner keeps the memory."""

    owner: int
    """Rank of the host whose memory it is."""
    number: int
    """Below 0; unique over the owner's life."""
    rebuild: Callable[..., torch.Tensor]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """A CUDA tensor that travels as a copy in CPU memory."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Unsent:
    """In place of a part that could not be copied at the sender: why."""

    why: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host lives, as far as payload routes care."""

    host: int
    process: str
    """Equal for hosts that share an address space."""
    machine: str
    """Equal for hosts that can map each other's memory."""
    device: str = "cpu"
    """The GPU's unique id, or "cpu"."""
    node: str = "localhost"
    pid: int = 0


class Bulk(Protocol):
    """Moves a tensor between two hosts through a process group (see `p2p.py`).

    Sends to a host happen in the order of the calls of `send`, receives from a host in the order of `receive`.
    """

    def announce(self, tensor: torch.Tensor) -> GroupRef: ...
    def send(self, tensor: torch.Tensor, ref: GroupRef, host: int, after: asyncio.Future[None] | None) -> None: ...
    def receive(self, ref: GroupRef) -> asyncio.Future[torch.Tensor]: ...
