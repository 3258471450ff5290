"""Big tensors between devices or machines: by a process group, beside the messages that announce them.

Flows in: tensors found while a payload is encoded, and their `GroupRef`s where it is decoded. Flows out: the tensors,
at the other end. Who wakes whom: the sending task runs until the receiver has posted its receive; the received tensor
wakes the decoding call.

Each direction of a pair of hosts has a group of its own, so that two hosts that send to each other never wait for each
other; within it both ends follow the order of the messages, which NCCL, having no tags, needs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from rlinf.runtime.transport.group_registry import Collectives, backend_for
from rlinf.runtime.transport.process_group import Group

from .codec import GroupRef

if TYPE_CHECKING:
    from rlinf.runtime.base.ports import Host


class GroupBulk:
    """The process-group route of one host.

    Args:
        host: owns the sending tasks; its loss or close ends them.
        collectives: makes the groups, one per direction and device type, at first use.
    """

    def __init__(self, host: Host, collectives: Collectives):
        self._host = host
        self._collectives = collectives
        self._tags = itertools.count()

    def send(self, tensor: torch.Tensor, host: int) -> GroupRef:
        """Start sending; the reference is what the receiver needs."""
        kind = tensor.device.type
        ref = GroupRef(self._host.rank, next(self._tags), kind, tensor.dtype, tuple(tensor.shape))
        self._host.own(self._send(tensor, host, ref.tag, kind))
        return ref

    async def _send(self, tensor: torch.Tensor, host: int, tag: int, kind: str) -> None:
        group = await self._group(self._host.rank, host, kind)
        await group.send(tensor, host, tag)

    async def receive(self, ref: GroupRef) -> torch.Tensor:
        """The tensor that a reference announces, on this host's device of the same type."""
        group = await self._group(ref.source, self._host.rank, ref.device)
        tensor = torch.empty(ref.shape, dtype=ref.dtype, device=ref.device)
        return await group.recv(tensor, ref.source, ref.tag)

    async def _group(self, source: int, target: int, kind: str) -> Group:
        return await self._collectives.group(f"bulk {kind} {source} to {target}", [source, target], backend_for(kind))
