"""What neighbouring stages of a pipeline send each other: hidden states one way, their gradients the other.

In: what Megatron's schedules want sent and received. Out: the tensors of the neighbours. Each way has a group of its
own: of two stages that are both neighbours of one another twice over, as interleaved ones are, Megatron's own way of
sending mistakes one for the other over gloo. The shape of a tensor goes before it, since micro-batches are unequal.

Imported by `schedule.py` alone, when a pipeline is run, since Megatron-core takes seconds to import.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from rlinf.training.megatron.layout import Groups

_DIMENSIONS = 3
"""Tokens, 1, width."""


class Exchange(P2PCommunicator):  # type: ignore[misc]
    """Between this rank's stage and its neighbours.

    Args:
        groups: this rank's.
        config: Megatron's.
        device: where tensors are made.
    """

    def __init__(self, groups: Groups, config: Any, device: torch.device):
        super().__init__(groups.group("pipeline"), config)
        self._ways = groups.group("pipeline"), groups.group("way back")
        self._device = device

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        onward, back = self._ways
        asked = (
            (tensor_send_next, self.next_rank, recv_prev, self.prev_rank, onward),
            (tensor_send_prev, self.prev_rank, recv_next, self.next_rank, back),
        )
        shapes: list[Tensor | None] = [
            torch.empty(_DIMENSIONS, dtype=torch.int64, device=self._device) if receives else None
            for _, _, receives, _, _ in asked
        ]
        sizes = [
            None if sent is None else torch.tensor(sent.shape, dtype=torch.int64, device=self._device)
            for sent, *_ in asked
        ]
        self._sent(asked, sizes, shapes)
        found = [
            None
            if shape is None
            else torch.empty(shape.tolist(), dtype=self.config.pipeline_dtype, device=self._device, requires_grad=True)
            for shape in shapes
        ]
        self._sent(asked, [None if sent is None else sent.detach().contiguous() for sent, *_ in asked], found)
        return found[0], found[1], None

    def _sent(self, asked: Any, out: list[Tensor | None], into: list[Tensor | None]) -> None:
        """Send and receive both ways at once."""
        waiting = []
        for (_, to, _, source, group), sent, received in zip(asked, out, into, strict=True):
            operations = [] if sent is None else [dist.P2POp(dist.isend, sent, to, group)]
            if received is not None:
                operations.append(dist.P2POp(dist.irecv, received.detach(), source, group))
            if operations:
                waiting += dist.batch_isend_irecv(operations)
        for each in waiting:
            each.wait()
