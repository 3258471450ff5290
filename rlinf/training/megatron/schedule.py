"""Micro-batches through the stages of a pipeline, by Megatron-core's schedules.

In: micro-batches, the same on all ranks of a copy, and what becomes of the last stage's outputs. Out: gradients in
`Parameter.grad`, or outputs. Where there is no pipeline, each micro-batch goes forward and back before the next.
With p stages and m micro-batches at once a stage is idle for (p - 1) / (m + p - 1) of the time (GPipe,
arXiv:1811.06965, section 2.3; the same for 1F1B), interleaved over v parts for (p - 1) / (v m + p - 1)
(arXiv:2104.04473, section 2.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf.data.packing import Packed
from rlinf.training.megatron.layers.attention import Reading, read
from rlinf.training.megatron.layers.stage import Stage
from rlinf.training.megatron.layout import Groups
from rlinf.training.megatron.precision import Precision

Ended = Callable[[int, Tensor], Tensor | None]
"""Of the number of a micro-batch and what the last stage gave for it: what is differentiated, None for nothing."""


class Pipeline:
    """The stages of one rank, and how micro-batches go through them.

    Args:
        stages: this rank's parts, in order.
        groups: this rank's.
    """

    def __init__(self, stages: Sequence[Stage], groups: Groups):
        self.stages, self._groups = stages, groups
        self.depth = groups.grid.parallel.pipeline
        self.interleaved = len(stages) > 1
        self.precision = Precision(stages)

    @property
    def last(self) -> bool:
        """This rank has the outputs."""
        return self.stages[-1].last

    def reading(self, batch: Packed) -> Reading:
        """What this rank reads of a micro-batch."""
        parallel, dtype = self._groups.grid.parallel, self.stages[0].config.pipeline_dtype
        here = batch.to(next(self.stages[0].parameters()).device)
        return read(here, dtype, parallel.tensor, parallel.context, self._groups.place.context)

    def run(self, batches: Sequence[Packed], ended: Ended, *, learns: bool, entropy_slope: bool = False) -> None:
        """Have micro-batches computed, all or none of their stages on this rank.

        Args:
            batches: the same on all ranks of a copy; where stages are interleaved, a multiple of their number.
            ended: called where the outputs are, in the order of the micro-batches.
            learns: go back, too.
            entropy_slope: entropies are differentiable.
        """
        with self.precision.rounded():
            self._run([self.reading(batch) for batch in batches], ended, learns, entropy_slope)

    def _run(self, readings: Sequence[Reading], ended: Ended, learns: bool, entropy_slope: bool) -> None:
        if self.depth == 1:
            for number, reading in enumerate(readings):
                with torch.set_grad_enabled(learns):
                    total = ended(number, self.stages[0](reading, entropy_slope))
                    if learns and total is not None:
                        total.backward()  # type: ignore[no-untyped-call]
            return
        from megatron.core.pipeline_parallel import schedules

        from rlinf.training.megatron.exchange import Exchange

        def forward(numbered: Any, stage: Stage) -> tuple[Tensor, Any]:
            number, reading = next(numbered)

            def finish(found: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                total = ended(number, found)
                total = found.sum() * 0.0 if total is None else total
                return total, torch.zeros((), dtype=torch.int, device=found.device), {}

            return stage(reading, entropy_slope), finish

        config = self.stages[0].config
        schedule = (
            schedules.forward_backward_pipelining_with_interleaving
            if self.interleaved
            else schedules.forward_backward_pipelining_without_interleaving
        )
        with torch.set_grad_enabled(learns):
            schedule(
                forward_step_func=forward,
                data_iterator=[iter(enumerate(readings)) for _ in self.stages],
                model=list(self.stages),
                num_microbatches=len(readings),
                seq_length=1,  # of which the shapes that stages tell each other make nothing
                micro_batch_size=1,
                forward_only=not learns,
                p2p_communicator=Exchange(self._groups, config, next(self.stages[0].parameters()).device),
                pg_collection=self._groups.collection(),
            )
