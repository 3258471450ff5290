"""Asynchronous data parallelism between optimizer steps: copies of a model take micro-batches at their own pace.

`AsyncReplicas` runs the commands of one call. Rank 0 reads them into a queue (`training/work_queue.py`); a round there
makes each copy ask for its own devices; whoever gets them takes rounds until there are none. When all are done, all
ranks take their devices together, add up their gradients and take the step.

Nobody waits for one device while it holds another, or for others while it holds its own: a copy gives its devices back
when it finds no work, gives up asking for them when others took the work, and gives them back before it asks for those
of all ranks, which the lease manager grants at once or not at all. So whatever keeps a device for a while, such as a
rollout with long answers, delays its copy, and at worst the optimizer step, but cannot lock out anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.base import BaseTrainer
from rlinf.runtime.base.calls import DeviceLease, Gang, current_call, lease_here, start_apart
from rlinf.runtime.base.tasks import cancel_all
from rlinf.training.micro_batches import Command, CommandHandler, Forward, ForwardBackward
from rlinf.training.work_queue import SyncPoint, WorkQueue


class AsyncReplicas:
    """A `CommandRunner` whose copies of the model need not go in step.

    Args:
        trainer: the actor; its endpoints `work_next`, `work_drained` and `work_take` ask the queue here on rank 0.
        copies: the ranks of each copy, as many in each.
    """

    def __init__(self, trainer: BaseTrainer, copies: Sequence[Sequence[int]]):
        self._trainer, self._copies = trainer, copies
        self._number, self._mine = next((number, ranks) for number, ranks in enumerate(copies) if trainer.rank in ranks)
        self.queues: dict[Gang, WorkQueue] = {}
        """On rank 0, by call."""

    @property
    def shares(self) -> int:
        """Micro-batches of a round: one for each rank of a copy."""
        return len(self._mine)

    @property
    def rounds_at_once(self) -> int:
        """Rounds that are computed at the same time: one by each copy."""
        return len(self._copies)

    def held(self) -> Iterator[Tensor]:
        """Nothing: columns of earlier epochs are in host memory on rank 0."""
        return iter(())

    async def run(self, commands: AsyncGenerator[tuple[Command, ...], None], handler: CommandHandler) -> None:
        """Work through commands, each copy for itself between two optimizer steps; to be called on every rank.

        Args:
            commands: rounds with an entry for each rank of a copy; read on rank 0 alone.
            handler: carries commands out on this rank. Its `step` raises on all ranks or on none.

        Raises:
            FloatingPointError: on all ranks: a loss or gradient is not finite.
            Exception: whatever `commands` raised, on rank 0.
        """
        trainer, call = self._trainer, current_call.get()
        gang = None if call is None else call.gang
        queue = WorkQueue(commands, self._copies) if trainer.rank == 0 and gang is not None else None
        if queue is not None and gang is not None:
            self.queues[gang] = queue

        async def body(_: None) -> None:
            assert gang is not None  # `run_spmd` has seen to it
            reading = None if queue is None else start_apart(queue.read(), "reading")
            try:
                with handler.turn():
                    await self._work(gang, handler)
            finally:
                if queue is not None and reading is not None:
                    await cancel_all([reading])
                    queue.stop()  # for the others, if this rank has failed

        try:
            await trainer.run_spmd(body, None, None if queue is None else queue.stop)
        finally:
            if gang is not None:
                self.queues.pop(gang, None)
        if queue is not None and queue.error is not None:
            raise queue.error

    async def _work(self, gang: Gang, handler: CommandHandler) -> None:
        """This rank's part: compute where there is work, and go to optimizer steps."""
        trainer, lease = self._trainer, lease_here()
        # of this call and this copy, and of no other: the numbers of calls are positive
        team = (gang[0], -gang[1] * len(self._copies) - self._number, self.shares) if self.shares > 1 else None
        steps = rounds = 0
        idle = True
        try:
            if lease is not None:
                lease.take_among(team)
            while True:
                point, rounds = await trainer.group[0].work_next(gang, trainer.rank, steps, rounds)
                if point is None:
                    rounds, added = await self._take_rounds(gang, steps, rounds, handler)
                    idle = idle and not added
                    continue
                if point.step is None:
                    return
                steps += 1
                if lease is not None:
                    lease.take_among(gang)
                await self._step(handler, point, idle)
                idle = True
                if lease is not None:
                    lease.take_among(team)
        finally:
            if lease is not None and team is not None:
                trainer.system.leases.gone(team, trainer.group.names[trainer.rank])

    async def _take_rounds(self, gang: Gang, steps: int, rounds: int, handler: CommandHandler) -> tuple[int, bool]:
        """Take this copy's devices and compute rounds while there are any.

        Returns:
            Rounds that this rank knows of now, and whether it added to the gradient.
        """
        trainer, lease, lead = self._trainer, lease_here(), self._trainer.group[0]
        added, result = False, None
        if lease is not None and not await _granted(lease, lead.work_drained(gang, trainer.rank, steps, rounds)):
            return rounds, False
        compute = trainer.computed if self.shares > 1 else trainer.on_model  # alone it leaves nobody waiting
        async with nullcontext() if lease is None else lease.computing():
            while (command := await lead.work_take(gang, trainer.rank, steps, rounds, result)) is not None:
                rounds += 1
                result = await compute(self._carry_out, handler, command)
                added |= not isinstance(command, Forward)
        return rounds + 1, added

    def _carry_out(self, handler: CommandHandler, command: Command) -> Any:
        """Compute a round for this rank; what rank 0 is to know of it. Blocking."""
        if isinstance(command, Forward):
            return handler.score(command).float().cpu().numpy()
        assert isinstance(command, ForwardBackward)
        device = self._trainer.device
        columns = {name: torch.as_tensor(each, device=device) for name, each in command.cached_columns.items()}
        mine = replace(command, cached_columns=columns)
        handler.learn(mine, again=command.again)
        return {name: column.cpu().numpy() for name, column in mine.cached_columns.items()} if command.keep else {}

    async def _step(self, handler: CommandHandler, point: SyncPoint, idle: bool) -> None:
        """Take an optimizer step; ranks that computed nothing since the last bring gradients of 0."""
        assert point.step is not None
        if idle and point.empty_batch is not None:
            await self._trainer.computed(self._carry_out, handler, point.empty_batch)
        await handler.step(point.step)

    # On rank 0, for all ranks --------------------------------------------------------------------------------------

    async def next(self, gang: Gang, rank: int, steps: int, rounds: int) -> tuple[SyncPoint | None, int]:
        """See `WorkQueue.work`."""
        queue = self.queues.get(gang)
        return (SyncPoint(None), rounds) if queue is None else await queue.work(rank, steps, rounds)

    async def drained(self, gang: Gang, rank: int, steps: int, rounds: int) -> None:
        """See `WorkQueue.drained`."""
        if (queue := self.queues.get(gang)) is not None:
            await queue.drained(rank, steps, rounds)

    def take(self, gang: Gang, rank: int, steps: int, rounds: int, result: Any) -> Command | None:
        """See `WorkQueue.take`."""
        queue = self.queues.get(gang)
        return None if queue is None else queue.take(rank, steps, rounds, result)


async def _granted(lease: DeviceLease, drained: Awaitable[None]) -> bool:
    """Take the devices, unless the work is gone before; says whether they are held."""

    async def until_drained() -> None:
        await drained

    asking = [asyncio.create_task(lease.ensure(), name="devices"), asyncio.create_task(until_drained(), name="work")]
    try:
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for each in asking:
            if each.done():
                each.result()
        return asking[0].done()
    finally:
        await cancel_all(asking)
