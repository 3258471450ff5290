"""Learning where a model is split: whose gradients are added up over which ranks, and who counts them.

In: micro-batches. Out: optimizer steps, by the same optimizer, schedule and bound on the norm as on a whole model
(`training/learner.py`). Micro-batches wait until there are as many as fill the pipeline, or until the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.packing import Packed, pack
from rlinf.models.language.fsdp import Layout
from rlinf.training.backend import Loss
from rlinf.training.learner import Learner
from rlinf.training.megatron.layers.stage import outputs_of
from rlinf.training.megatron.layout import Groups
from rlinf.training.megatron.pieces import Sharing
from rlinf.training.megatron.schedule import Pipeline
from rlinf.training.optimizer import optimizer_step, sum_over_copies

FILLS = 4
"""Micro-batches that wait for each other, per stage: with them a pipeline of p stages is idle for less than a fifth of
the time, and the first gradient comes while others are still being generated."""

NOTHING = LossSum(torch.zeros(()), torch.zeros((), dtype=torch.float64))


class SplitLearner(Learner):
    """Trains a model of which this rank has a part.

    Args:
        module: the part.
        pipeline: runs it.
        shared: who has each of its parameters, by name.
        groups: this rank's.
        head: see `ModelSettings.head`.
        named: gives what this rank has of every tensor of the model, for messages.
        settings: see `Learner`.
    """

    def __init__(
        self,
        module: nn.Module,
        pipeline: Pipeline,
        shared: dict[str, Sharing],
        groups: Groups,
        head: str,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        **settings: Any,
    ):
        super().__init__(module, layout=Layout(groups.meshes["data"]), **settings)
        self._pipeline, self._groups, self._head, self._named = pipeline, groups, head, named
        self._waiting: list[tuple[Packed, Loss, bool]] = []
        self._kinds = [(parameter, shared[name]) for name, parameter in module.named_parameters()]
        self._shared = {id(parameter): who for parameter, who in self._kinds}

    def begin(self) -> None:
        super().begin()
        self._waiting = []
        self._pipeline.precision.forget()

    def accumulate(self, batches: Sequence[Packed], loss: Loss, *, entropy_slope: bool = False) -> None:
        """Add the gradients of some micro-batches, at the latest with `step`.

        Args:
            batches: the same on all ranks of a copy; as many on all ranks.
            loss: called where the outputs are.
            entropy_slope: it differentiates entropies too.
        """
        self._waiting += [(batch, loss, entropy_slope) for batch in batches]
        most = 1 if self._pipeline.depth == 1 else FILLS * self._pipeline.depth
        while len(self._waiting) >= most:
            now, self._waiting = self._waiting[:most], self._waiting[most:]
            self._run(now)

    def step(self) -> tuple[LossSum, dict[str, float]]:
        if self._waiting:
            now, self._waiting = self._waiting, []
            self._run(now)
        return super().step()

    def _run(self, now: Sequence[tuple[Packed, Loss, bool]]) -> None:
        pipeline, device = self._pipeline, next(self.module.parameters()).device
        blank = -len(now) % pipeline.depth if pipeline.interleaved else 0
        batches = [batch.to(device) for batch, _, _ in now] + [pack([])] * blank

        def ended(number: int, found: Tensor) -> Tensor | None:
            if number >= len(now):
                return None
            sums = now[number][1](batches[number], outputs_of(found, self._head))
            part = sums.detach()
            self._sum = part if self._sum is None else self._sum + part
            return sums.total

        pipeline.run(batches, ended, learns=True, entropy_slope=any(slope for _, _, slope in now))
        if not pipeline.last:
            self._sum = NOTHING  # until the last stage says

    def _taken(self, mine: LossSum) -> tuple[LossSum, float]:
        self._gather()
        meshes = self._groups.meshes
        return optimizer_step(
            self._told(mine),
            self._parameters,
            self.optimizer,
            ranks=meshes["data"],
            parts=meshes["copy"],
            leads=lambda parameter: self._shared[id(parameter)].counts,
            grad_clip=self._grad_clip,
            named=self._named(),
        )

    def _gather(self) -> None:
        """Add up gradients over the ranks that computed parts of them."""
        kinds: dict[str, list[Tensor]] = {}
        for parameter, who in self._kinds:
            kinds.setdefault(who.summed, []).append(parameter)
        for kind, parameters in kinds.items():
            mesh = self._groups.meshes[kind]
            if mesh is not None:
                sum_over_copies(parameters, mesh)
        both = [parameter for parameter, who in self._kinds if who.both_ends]
        ends = self._groups.meshes["ends"]
        if both and ends is not None:
            sum_over_copies(both, ends)

    def _told(self, mine: LossSum) -> LossSum:
        """What gathered on the last stage, on all stages."""
        line = self._groups.meshes["pipeline"]
        if line is None:
            return mine
        group = line.get_group()
        said: list[Any] = [mine if self._pipeline.last else None]
        last = dist.get_global_rank(group, group.size() - 1)
        dist.broadcast_object_list(said, last, group=group, device=next(self.module.parameters()).device)
        told: LossSum = said[0]
        return told
