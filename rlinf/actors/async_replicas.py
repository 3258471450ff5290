"""Asynchronous data parallelism between optimizer steps: copies of a model take micro-batches at their own pace.

`AsyncReplicas` runs the commands of one call. On rank 0 a `WorkQueue` reads rounds of commands, as a single copy of the
model would carry them out one after the other, and gives each copy that asks the next one, so that none waits for
another; and all ranks every optimizer step, once each round before it is done. A round makes each copy ask for its own
devices; whoever gets them takes rounds until there are none. When all are done, all ranks take their devices together,
add up their gradients and take the step. A copy may be several ranks, which compute a round together. Whichever of them
asks first decides for all of them: they see one sequence of rounds, with None where their copy found nothing and left.

Nobody waits for one device while it holds another, or for others while it holds its own: a copy gives its devices back
when it finds no work, gives up asking for them when others took the work, and gives them back before it asks for those
of all ranks, which the lease manager grants at once or not at all. So whatever keeps a device for a while, such as a
rollout with long answers, delays its copy, and at worst the optimizer step, but cannot lock out anybody.

Why any order does: losses are un-normalised sums, which the optimizer step adds up over copies and divides once
(`algos/loss_sum.py`). So which copy computed what changes rounding, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf.actors.base import BaseTrainer
from rlinf.runtime.base.calls import DeviceLease, Gang, current_call, lease_here, start_apart
from rlinf.runtime.base.tasks import cancel_all
from rlinf.training.schedule import Command, CommandHandler, Forward, ForwardBackward, OptimizerStep, Recompute, here


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """An optimizer step that all ranks take together, or the end of the call."""

    step: OptimizerStep | None
    """The optimizer step; None: the call is over."""
    empty_batch: ForwardBackward | None = None
    """For ranks that computed nothing since the last one: a micro-batch without rows, which gives them sums of 0."""


@dataclass(slots=True, eq=False)
class Round:
    """Commands that the ranks of one copy carry out together."""

    commands: tuple[Command, ...]
    """For each rank of the copy."""
    results: dict[int, Any] = field(default_factory=dict)
    """By rank of the copy."""


class WorkQueue:
    """Gives out the rounds of one call.

    Args:
        commands: rounds, with an entry for each rank of a copy, and optimizer steps.
        copies: the ranks of each copy.
    """

    def __init__(self, commands: AsyncGenerator[tuple[Command, ...], None], copies: Sequence[Sequence[int]]):
        self.error: BaseException | None = None
        """Why the input ended, if it failed."""
        self.heard: Callable[[], None] | None = None
        """Called when there may be something new."""
        self._commands = commands
        self._place = {rank: (number, part) for number, ranks in enumerate(copies) for part, rank in enumerate(ranks)}
        self._taken: list[list[Round | None]] = [[] for _ in copies]
        self._ready: deque[Round] = deque()
        self._again: list[Round] = []  # computed once, to come once more
        self._out = 0  # results that are still to come
        self._sync_points: list[SyncPoint] = []
        self._empty_batch: ForwardBackward | None = None
        self._stopped = False
        self._changed = asyncio.Event()

    async def read(self) -> None:
        """Read the commands; returns when all rounds are done."""
        try:
            async with aclosing(self._commands) as commands:
                async for round in commands:
                    await self._put(round)
            await self._settled()
        except Exception as error:  # raised when all ranks have come to the end
            self.error = error
        finally:
            self.stop()

    def stop(self) -> None:
        """Give out no more rounds, and call all ranks to the end."""
        if not self._stopped:
            self._stopped = True
            self._ready.clear()
            self._call(SyncPoint(None))

    async def _put(self, commands: tuple[Command, ...]) -> None:
        first = commands[0]
        if isinstance(first, OptimizerStep):
            await self._settled()
            self._call(SyncPoint(first, self._empty_batch))
            self._empty_batch = None
            return
        if isinstance(first, Recompute):
            before = self._again[first.number]
            again = [one.once_more(before.results[part]) for part, one in enumerate(before.commands)]  # type: ignore[union-attr]
            commands, first = tuple(again), again[0]
        round = Round(commands)
        if isinstance(first, ForwardBackward):
            self._empty_batch = first.without_rows()
            if first.keep and not first.again:
                self._again.append(round)
        self._ready.append(round)
        self._wake()

    def _call(self, sync_point: SyncPoint) -> None:
        self._sync_points.append(sync_point)
        self._wake()

    async def _settled(self) -> None:
        """Wait until every round is done."""
        while self._ready or self._out:
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.heard is not None:
            self.heard()

    # For others than the ranks, where a copy is one rank ---------------------------------------------------------

    @property
    def ready(self) -> bool:
        """There are rounds that nobody has."""
        return bool(self._ready)

    def claim(self, points: int) -> Round | None:
        """Take the next round; None: there is none now.

        Args:
            points: sync points that rank 0 went to: what comes after the next one is for other weights.
        """
        if not self._ready or points < len(self._sync_points):
            return None
        round = self._ready.popleft()
        self._out += 1
        self._wake()
        return round

    def give_back(self, round: Round) -> None:
        """Leave a round that was taken to others."""
        self._out -= 1
        if not self._stopped:
            self._ready.appendleft(round)
        self._wake()

    def finished(self, round: Round, result: Any) -> None:
        """A round that was taken is computed, and what it adds to the gradient is there."""
        self._done(round, 0, result)

    # For the ranks -----------------------------------------------------------------------------------------------

    async def work(self, rank: int, points: int, number: int) -> tuple[SyncPoint | None, int]:
        """Wait until there is something to do.

        Args:
            rank: that asks.
            points: sync points that it went to.
            number: rounds of its copy, those that were None included, that it knows of.

        Returns:
            What all ranks do together now; or None: a round is available. And `number`, counted on over what its copy
            left without it.
        """
        while True:
            number = self._next(rank, number)
            if points < len(self._sync_points):
                return self._sync_points[points], number
            if self._available(rank, number):
                return None, number
            await self._changed.wait()

    async def drained(self, rank: int, points: int, number: int) -> None:
        """Wait until no round is available any more: others took them all."""
        while points == len(self._sync_points) and self._available(rank, self._next(rank, number)):
            await self._changed.wait()

    def take(self, rank: int, points: int, number: int, result: Any = None) -> Command | None:
        """The next round of this rank's copy; None: there is nothing to do, leave the device to others.

        Args:
            rank, points, number: see `work`.
            result: of the round before, if there was one.
        """
        copy, part = self._place[rank]
        rows_taken = self._taken[copy]
        if result is not None:
            self._done(rows_taken[number - 1], part, result)
        if number == len(rows_taken):
            free = self._ready and points == len(self._sync_points)
            round = self._ready.popleft() if free else None
            rows_taken.append(round)
            self._out += 0 if round is None else len(round.commands)
            self._wake()
        mine = rows_taken[number]
        return None if mine is None else mine.commands[part]

    def _done(self, round: Round | None, part: int, result: Any) -> None:
        assert round is not None
        self._out -= 1
        round.results[part] = result
        first = round.commands[0]
        if isinstance(first, Forward) and len(round.results) == len(round.commands):
            first.deliver([round.results[part] for part in range(len(round.commands))])
        self._wake()

    def _next(self, rank: int, number: int) -> int:
        rows_taken = self._taken[self._place[rank][0]]
        while number < len(rows_taken) and rows_taken[number] is None:
            number += 1
        return number

    def _available(self, rank: int, number: int) -> bool:
        return bool(self._ready) or number < len(self._taken[self._place[rank][0]])


class Helpers(Protocol):
    """Others that compute rounds, on rank 0 of a trainer whose copies are one rank each."""

    async def serve(self, queue: WorkQueue) -> None:
        """Have them compute rounds of a call until this is cancelled."""

    async def renew(self) -> None:
        """Send the weights to those that do not have them; rank 0 holds its device."""

    async def hand_in(self) -> None:
        """Add what they computed since the last step to the gradient of rank 0, which holds its device."""

    async def stepped(self, step: OptimizerStep) -> None:
        """All ranks have taken a step; rank 0 holds its device."""


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
        self.helpers: Helpers | None = None
        """On rank 0, those that joined."""

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
            apart = [] if queue is None else [start_apart(queue.read(), "reading")]
            if queue is not None and self.helpers is not None:
                apart.append(start_apart(_help(self.helpers, queue), "helpers"))
            try:
                with handler.turn():
                    await self._work(gang, handler)
            finally:
                if queue is not None:
                    await cancel_all(apart)
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
                trainer.system.leases.rank_over(team, trainer.group.names[trainer.rank])

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
            if self.helpers is not None:
                await self.helpers.renew()
            while (command := await lead.work_take(gang, trainer.rank, steps, rounds, result)) is not None:
                rounds += 1
                result = await compute(carry_out, handler, await here(command), trainer.device)
                added |= not isinstance(command, Forward)
        return rounds + 1, added

    async def _step(self, handler: CommandHandler, point: SyncPoint, idle: bool) -> None:
        """Take an optimizer step; ranks that computed nothing since the last bring gradients of 0."""
        assert point.step is not None
        if idle and point.empty_batch is not None:
            await self._trainer.computed(carry_out, handler, point.empty_batch, self._trainer.device)
        if self.helpers is not None:
            await self.helpers.hand_in()
        await handler.step(point.step)
        if self.helpers is not None:
            await self.helpers.stepped(point.step)

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


async def _help(helpers: Helpers, queue: WorkQueue) -> None:
    try:
        await helpers.serve(queue)
    except Exception as error:  # raised when all ranks have come to the end
        queue.error = error
        queue.stop()


def carry_out(handler: CommandHandler, command: Command, device: torch.device) -> Any:
    """Compute a command; what rank 0 is to know of it. Blocking."""
    if isinstance(command, Forward):
        return handler.score(command).float().cpu().numpy()
    assert isinstance(command, ForwardBackward)
    columns = {name: torch.as_tensor(each, device=device) for name, each in command.cached_columns.items()}
    mine = replace(command, cached_columns=columns)
    handler.learn(mine, again=command.again)
    return {name: column.cpu().numpy() for name, column in mine.cached_columns.items()} if command.keep else {}


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
