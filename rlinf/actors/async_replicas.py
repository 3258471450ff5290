"""Copies of a model that learn at their own pace: each takes micro-batches as its device becomes free, and all meet at
the optimizer step alone.

In: the commands of one call, as for a single copy. Out: optimizer steps, the same on every rank. Who wakes whom: rank 0
reads the commands into a queue (`training/work_queue.py`); a round there makes each copy ask for its own devices;
whoever gets them takes rounds until there are none. When all are done, all ranks take their devices together, add up
what they have and take the step.

Nobody waits for one device while it holds another, or for others while it holds its own: a copy gives its devices back
when it finds no work, gives up asking for them when others took the work, and gives them back before it asks for those
of all ranks, which the lease manager grants at once or not at all. So whatever keeps a device for a while, such as a
rollout with long answers, delays its copy, and at worst the optimizer step, but cannot lock out anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlinf.actors.base import BaseTrainer
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import DeviceLease, Gang, current_call, lease_here, start_apart
from rlinf.runtime.base.tasks import cancel_all
from rlinf.training.micro_batches import Command, Forward
from rlinf.training.work_queue import Meeting, WorkQueue

Compute = Callable[[Command], Any]
"""Carries a command out; blocking. It returns what rank 0 is to know: scores, or the columns of a gradient."""


class OwnPace(BaseTrainer):
    """A trainer whose copies of the model need not go in step."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[Gang, WorkQueue] = {}
        """On rank 0, by call."""

    async def at_own_pace(
        self,
        commands: AsyncGenerator[tuple[Command, ...], None],
        copies: Sequence[Sequence[int]],
        carry_out: Compute,
        meet: Callable[[Meeting], Any],
        turn: AbstractContextManager[None],
    ) -> None:
        """Work through commands, each copy for itself between two optimizer steps; to be called on every rank.

        Args:
            commands: rounds with an entry for each rank of a copy; read on rank 0 alone.
            copies: the ranks of each copy.
            carry_out: computes a round's command for this rank: together with the other ranks of its copy, but with no
                other copy.
            meet: an async function that takes an optimizer step, on all ranks together; what it raises ends the work,
                and it raises on all of them or on none.
            turn: entered when it is this call's turn, and left before the next call's.

        Raises:
            Exception: whatever `commands` raised, on rank 0.
        """
        call = current_call.get()
        gang = None if call is None else call.gang
        queue = WorkQueue(commands, copies) if self.rank == 0 and gang is not None else None
        if queue is not None and gang is not None:
            self._queues[gang] = queue

        async def body(_: None) -> None:
            assert gang is not None  # `jointly` has seen to it
            reading = None if queue is None else start_apart(queue.read(), "reading")
            try:
                with turn:
                    await self._visits(gang, copies, carry_out, meet)
            finally:
                if queue is not None and reading is not None:
                    await cancel_all([reading])
                    queue.stop()  # for the others, if this rank has failed

        try:
            await self.jointly(body, None, None if queue is None else queue.stop)
        finally:
            if gang is not None:
                self._queues.pop(gang, None)
        if queue is not None and queue.error is not None:
            raise queue.error

    async def _visits(
        self, gang: Gang, copies: Sequence[Sequence[int]], carry_out: Compute, meet: Callable[[Meeting], Any]
    ) -> None:
        """This rank's part: work where there is some, and go to meetings."""
        lead, lease = self.group[0], lease_here()
        number, mine = next((number, ranks) for number, ranks in enumerate(copies) if self.rank in ranks)
        # of this call and this copy, and of no other: the numbers of calls are positive
        team = (gang[0], -gang[1] * len(copies) - number, len(mine)) if len(mine) > 1 else None
        met = seen = 0
        idle = True
        try:
            if lease is not None:
                lease.take_among(team)
            while True:
                meeting, seen = await lead.work_next(gang, self.rank, met, seen)
                if meeting is None:
                    seen, worked = await self._visit(gang, met, seen, lease, carry_out, len(mine) > 1)
                    idle = idle and not worked
                    continue
                if meeting.step is None:
                    return
                met += 1
                if lease is not None:
                    lease.take_among(gang)
                await meet(meeting if idle else Meeting(meeting.step))
                idle = True
                if lease is not None:
                    lease.take_among(team)
        finally:
            if lease is not None and team is not None:
                self.system.leases.gone(team, self.group.names[self.rank])

    async def _visit(
        self, gang: Gang, met: int, seen: int, lease: DeviceLease | None, carry_out: Compute, several: bool
    ) -> tuple[int, bool]:
        """Take this copy's devices and compute rounds while there are any.

        Returns:
            Rounds that this rank knows of now, and whether it added to the gradient.
        """
        lead, worked, result = self.group[0], False, None
        if lease is not None and not await _granted(lease, lead.work_gone(gang, self.rank, met, seen)):
            return seen, False
        compute = self.computed if several else self.on_model  # alone it leaves nobody waiting when it fails
        async with nullcontext() if lease is None else lease.computing():
            while (command := await lead.work_take(gang, self.rank, met, seen, result)) is not None:
                seen += 1
                result = await compute(carry_out, command)
                worked |= not isinstance(command, Forward)
        return seen + 1, worked

    @endpoint
    async def work_next(self, gang: Gang, rank: int, met: int, seen: int) -> tuple[Meeting | None, int]:
        """On rank 0: see `WorkQueue.work`."""
        queue = self._queues.get(gang)
        return (Meeting(None), seen) if queue is None else await queue.work(rank, met, seen)

    @endpoint
    async def work_gone(self, gang: Gang, rank: int, met: int, seen: int) -> None:
        """On rank 0: see `WorkQueue.gone`."""
        if (queue := self._queues.get(gang)) is not None:
            await queue.gone(rank, met, seen)

    @endpoint
    async def work_take(self, gang: Gang, rank: int, met: int, seen: int, result: Any) -> Command | None:
        """On rank 0: see `WorkQueue.take`."""
        queue = self._queues.get(gang)
        return None if queue is None else queue.take(rank, met, seen, result)


async def _granted(lease: DeviceLease, gone: Any) -> bool:
    """Take the devices, unless the work is gone before; says whether they are held."""

    async def until_gone() -> None:
        await gone

    asking = [asyncio.create_task(lease.ensure(), name="devices"), asyncio.create_task(until_gone(), name="work")]
    try:
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for each in asking:
            if each.done():
                each.result()
        return asking[0].done()
    finally:
        await cancel_all(asking)
