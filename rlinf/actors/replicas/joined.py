"""Replicas of the trainer that join it, and leave it or are lost, in the middle of a step too.

Flows in: commands, as for a trainer of one process. Flows out: gradients of the
commands, added up here. Who wakes whom: a new command, sums that come, a replica that joins or is lost wake the call.

A replica has a copy of the model. It is given a micro-batch when it has the newest weights and computes nothing, and
hands back sums of that micro-batch alone. Sums are added in the order of the commands, whoever computed them, and the
trainer itself computes whatever a lost replica had: so a step is bit for bit what the trainer computes by itself, where
the replica's processor adds up as its own does. What comes early waits in host memory; so that it is not much, no
command is read that is further ahead than two for each who computes.

The optimizer is here alone. After each of its steps the replicas are sent the weights that learn, in the precision in
which they are kept.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, nullcontext
from typing import Any

from torch import Tensor

from rlinf.actors.async_replicas import carry_out
from rlinf.actors.base import BaseTrainer
from rlinf.actors.replicas.members import AHEAD, Replicas, Work
from rlinf.joining.peer import SILENCE
from rlinf.metrics.explain import MICRO_BATCH
from rlinf.runtime.base.calls import lease_here, start_apart
from rlinf.runtime.base.tasks import cancel_all
from rlinf.training import schedule
from rlinf.training.fsdp import FsdpBackEnd, Learner


class JoinedReplicas:
    """A `CommandRunner` of a trainer of one process, which others help.

    Args:
        trainer: the actor.
        back: its model.
        made_of: arguments of the trainer's `setup`, by which a replica is made.
    """

    shares = 1
    rounds_at_once = 1

    def __init__(self, trainer: BaseTrainer, back: FsdpBackEnd, made_of: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self.replicas = Replicas(trainer, back, made_of, self._tell, self._take_back)
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        self._order: deque[Work | schedule.OptimizerStep] = deque()  # what is to be added, and steps, in order
        self._ready: deque[Work] = deque()  # of those, what nobody has
        self._kept: list[Work] = []  # comes once more
        self._ended = self._stopped = self._waits = False
        self._error: Exception | None = None

    def held(self) -> Iterator[Tensor]:
        """Nothing: columns of earlier epochs are in host memory."""
        return iter(())

    # Commands ---------------------------------------------------------------------------------------------------------

    async def run(
        self, commands: AsyncGenerator[tuple[schedule.Command, ...], None], handler: schedule.CommandHandler
    ) -> None:
        """See `CommandRunner`."""

        async def body(_: None) -> None:
            self._begin()
            reading = start_apart(self._read(commands), "reading")
            try:
                with handler.turn():
                    await self._work(handler)
            finally:
                await cancel_all([reading])
                self.replicas.forget()
            if self._error is not None:
                raise self._error

        await self._trainer.run_spmd(body, None, self._stop)

    def _stop(self) -> None:
        self._stopped = True
        self._tell()

    async def _read(self, commands: AsyncGenerator[tuple[schedule.Command, ...], None]) -> None:
        try:
            async with aclosing(commands):
                async for (command,) in commands:
                    await self._put(command)
        except Exception as error:  # raised when what came before is done
            self._error = error
        finally:
            self._ended = True
            self._tell()

    async def _put(self, command: schedule.Command) -> None:
        order, last = self._order, schedule.OptimizerStep
        while order and (isinstance(order[-1], last) or len(order) >= AHEAD * (len(self.replicas.there) + 1)):
            await self._changed.wait()
        if isinstance(command, schedule.OptimizerStep):
            self._order.append(command)
        else:
            if isinstance(command, schedule.Recompute):
                before = self._kept[command.number]
                assert isinstance(before.command, schedule.ForwardBackward)
                command = before.command.once_more(before.result)
            work = Work(next(self._numbers), await schedule.here(command))
            if isinstance(command, schedule.ForwardBackward) and command.keep:
                self._kept.append(work)
            self._order.append(work)
            self._ready.append(work)
        self._tell()

    def _tell(self) -> None:
        """Share out what nobody has, of which the trainer takes the first if it waits; and have all look again."""
        for member in self.replicas.free():
            if len(self._ready) <= self._waits or self._stopped:
                break
            place = int(self._waits)
            member.give(self._ready[place], self._trainer.version)
            del self._ready[place]
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    # One after the other ----------------------------------------------------------------------------------------------

    async def _work(self, handler: schedule.CommandHandler) -> None:
        learner: Learner = self._trainer._at_work  # type: ignore[attr-defined]  # of every text trainer
        while not self._stopped:
            changed = self._changed
            await self.replicas.send_weights()
            first = self._order[0] if self._order else None
            if isinstance(first, schedule.OptimizerStep):
                await self._step(first, handler)
            elif first is not None and first.done:
                if first.sums is not None:
                    await self._trainer.computed(learner.add, first.sums)
                if first.away:
                    self._trainer.note("trainer/joined_tokens", bytes=sum(row.size for row in first.command.rows))
                self._over(first)
            elif self._ready:
                await self._compute(self._ready.popleft(), handler, learner)
            elif first is None and self._ended:
                return
            else:
                await self._wait(changed, first)

    async def _wait(self, changed: asyncio.Event, first: Work | None) -> None:
        """Wait for news; of a replica that has the first micro-batch, no longer than a silent one may take."""
        lease, self._waits = lease_here(), True
        async with nullcontext() if lease is None else lease.waiting():
            try:
                async with asyncio.timeout(None if first is None else SILENCE):
                    await changed.wait()
            except TimeoutError:
                self._take_back(self.replicas.forget(first))
        self._waits = False

    def _take_back(self, under_way: list[Work]) -> None:
        self._ready = deque(sorted([*self._ready, *under_way], key=lambda work: work.number))

    async def _step(self, step: schedule.OptimizerStep, handler: schedule.CommandHandler) -> None:
        await handler.step(step)
        self._order.popleft()
        await self.replicas.stepped(step)
        self._tell()

    async def _compute(self, work: Work, handler: schedule.CommandHandler, learner: Learner) -> None:
        """Compute a micro-batch here; apart, if what comes before it has not been added."""
        first, start = work is self._order[0], time.perf_counter()

        def compute() -> None:
            before = None if first else learner.hand_over()
            work.result = carry_out(handler, work.command, self._trainer.device)
            if before is not None:
                work.sums = learner.hand_over()
                learner.add(before)

        await self._trainer.computed(compute)
        if isinstance(work.command, schedule.ForwardBackward):
            size = sum(row.size for row in work.command.rows)
            self._trainer.note(MICRO_BATCH, time.perf_counter() - start, size)
        work.done = True
        if first:
            self._over(work)
        else:
            self._tell()

    def _over(self, work: Work) -> None:
        self._order.popleft()
        work.sums = None
        if isinstance(work.command, schedule.Forward):
            work.command.deliver([work.result])
        self._tell()
