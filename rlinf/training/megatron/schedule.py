"""Learning a split model with Megatron-core's pipeline schedules: from micro-batches to optimizer steps.

Micro-batches, the same on all ranks of a copy, go through the stages and leave gradients in `Parameter.grad`, or
outputs. Where there is no pipeline, each micro-batch goes forward and back before the next. With p stages and m
micro-batches at once a stage is idle for (p - 1) / (m + p - 1) of the time (GPipe, arXiv:1811.06965, section 2.3; the
same for 1F1B), interleaved over v parts for (p - 1) / (v m + p - 1) (arXiv:2104.04473, section 2.2.2).

A stage may compute in bfloat16 (`WorkingCopy`); weights, sums of gradients and the optimizer are float32.

Neighbouring stages send each other hidden states one way, their gradients the other, and each way has a group of its
own: of two stages that are both neighbours of one another twice over, as interleaved ones are, Megatron's own way of
sending mistakes one for the other over gloo. The shape of a tensor goes before it, since micro-batches are unequal.

`SplitLearner` takes optimizer steps with the same optimizer, schedule and bound on the norm as on a whole model
(`training/fsdp.py`); it knows which gradients are added up over which ranks. Micro-batches wait until there are as many
as fill the pipeline, or until the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed, pack
from rlinf.models.language.kernels import HALF
from rlinf.models.language.working_copy import WorkingCopy
from rlinf.training.backend import Loss
from rlinf.training.megatron.layers import Reading, Stage, outputs_of, read
from rlinf.training.megatron.layout import Groups
from rlinf.training.megatron.state import Sharing
from rlinf.training.optimizer import Adam, ScheduledOptimizer, optimizer_step, sum_over_copies

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
        wanted = (
            (tensor_send_next, self.next_rank, recv_prev, self.prev_rank, onward),
            (tensor_send_prev, self.prev_rank, recv_next, self.next_rank, back),
        )
        shapes: list[Tensor | None] = [
            torch.empty(_DIMENSIONS, dtype=torch.int64, device=self._device) if receives else None
            for _, _, receives, _, _ in wanted
        ]
        sizes = [
            None if sent is None else torch.tensor(sent.shape, dtype=torch.int64, device=self._device)
            for sent, *_ in wanted
        ]
        self._sent(wanted, sizes, shapes)
        received = [
            None
            if shape is None
            else torch.empty(shape.tolist(), dtype=self.config.pipeline_dtype, device=self._device, requires_grad=True)
            for shape in shapes
        ]
        self._sent(wanted, [None if sent is None else sent.detach().contiguous() for sent, *_ in wanted], received)
        return received[0], received[1], None

    def _sent(self, wanted: Any, out: list[Tensor | None], into: list[Tensor | None]) -> None:
        """Send and receive both ways at once."""
        waiting = []
        for (_, to, _, source, group), sent, received in zip(wanted, out, into, strict=True):
            operations = [] if sent is None else [dist.P2POp(dist.isend, sent, to, group)]
            if received is not None:
                operations.append(dist.P2POp(dist.irecv, received.detach(), source, group))
            if operations:
                waiting += dist.batch_isend_irecv(operations)
        for each in waiting:
            each.wait()


Ended = Callable[[int, Tensor], Tensor | None]
"""Callback from the number of a micro-batch and the last stage's output for it to the tensor to differentiate, or
None."""


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
        dtype = stages[0].config.pipeline_dtype
        places = [place for stage in stages for place in stage.computed_with()] if dtype in HALF else []
        self.working = WorkingCopy(lambda: places, dtype)
        """The weights that stages compute with."""

    @property
    def last(self) -> bool:
        """True if this rank has the outputs."""
        return self.stages[-1].last

    def reading(self, batch: Packed) -> Reading:
        """This rank's part of a micro-batch."""
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
        with self.working.in_place():
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

        def forward(numbered: Any, stage: Stage) -> tuple[Tensor, Any]:
            number, reading = next(numbered)

            def finish(outputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                total = ended(number, outputs)
                total = outputs.sum() * 0.0 if total is None else total
                return total, torch.zeros((), dtype=torch.int, device=outputs.device), {}

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


FILLS = 4
"""Micro-batches that wait for each other, per stage: with them a pipeline of p stages is idle for less than a fifth of
the time, and the first gradient comes while others are still being generated."""

NOTHING = LossSum(torch.zeros(()), torch.zeros((), dtype=torch.float64))


class SplitLearner(ScheduledOptimizer):
    """Trains a model of which this rank has a part.

    Args:
        module: the part.
        settings: of the optimizer and its schedule.
        pipeline: runs it.
        shared: who has each of its parameters, by name.
        groups: this rank's.
        head: see `ModelSpec.head`.
        named: gives what this rank has of every tensor of the model, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: LearningSettings,
        pipeline: Pipeline,
        shared: dict[str, Sharing],
        groups: Groups,
        head: str,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
    ):
        super().__init__(module, settings)
        self._pipeline, self._groups, self._head, self._named = pipeline, groups, head, named
        self._waiting: list[tuple[Packed, Loss, bool]] = []
        self._kinds = [(parameter, shared[name]) for name, parameter in module.named_parameters()]
        self._shared = {id(parameter): who for parameter, who in self._kinds}

    def begin(self) -> None:
        super().begin()
        self._waiting = []
        self._pipeline.working.invalidate()

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

    def step(self, adam: Adam | None = None) -> tuple[LossSum, dict[str, float]]:
        if self._waiting:
            now, self._waiting = self._waiting, []
            self._run(now)
        return super().step(adam)

    def _run(self, now: Sequence[tuple[Packed, Loss, bool]]) -> None:
        pipeline, device = self._pipeline, next(self.module.parameters()).device
        blank = -len(now) % pipeline.depth if pipeline.interleaved else 0
        batches = [batch.to(device) for batch, _, _ in now] + [pack([])] * blank

        def ended(number: int, outputs: Tensor) -> Tensor | None:
            if number >= len(now):
                return None
            sums = now[number][1](batches[number], outputs_of(outputs, self._head))
            self._add(sums)
            return sums.total

        pipeline.run(batches, ended, learns=True, entropy_slope=any(slope for _, _, slope in now))
        if not pipeline.last:
            self._sum = NOTHING  # until the last stage says

    def _take_step(self, mine: LossSum) -> tuple[LossSum, float]:
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
        """Send the sums of the last stage to all stages."""
        line = self._groups.meshes["pipeline"]
        if line is None:
            return mine
        group = line.get_group()
        message: list[Any] = [mine if self._pipeline.last else None]
        last = dist.get_global_rank(group, group.size() - 1)
        dist.broadcast_object_list(message, last, group=group, device=next(self.module.parameters()).device)
        result: LossSum = message[0]
        return result
