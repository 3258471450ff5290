"""Replicas that join a trainer of several processes, each of which has a copy of the model that goes at its own pace.

Flows in: rounds of one call, of the same queue as the copies' own. Flows out: sums, which rank 0 adds to its gradient
before the optimizer step that all ranks take together. Who wakes whom: the queue, sums that come, a replica that joins
or is lost wake the one task that shares out, on rank 0.

What a lost replica had goes back to the queue, for whichever copy or replica asks first. So a step is what the copies
compute by themselves up to the order of additions: who computes what changes rounding, as it does without replicas.
Sums are added up in host memory as they come, so that what waits there is one gradient however many replicas there are.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlinf.actors.async_replicas import Round, WorkQueue
from rlinf.actors.base import BaseTrainer
from rlinf.actors.replicas.members import Replicas, Work
from rlinf.joining.peer import SILENCE
from rlinf.runtime.base.tasks import in_thread
from rlinf.training import schedule
from rlinf.training.fsdp import FsdpBackEnd, Learner
from rlinf.training.optimizer import Sums


class JoinedHelpers:
    """The `Helpers` of a trainer that replicas join; on its rank 0.

    Args:
        trainer: the actor.
        back: its model.
        made_of: arguments of the trainer's `setup`, by which a replica is made.
    """

    def __init__(self, trainer: BaseTrainer, back: FsdpBackEnd, made_of: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self.replicas = Replicas(trainer, back, made_of, self._tell, self._take_back)
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._queue: WorkQueue | None = None
        self._begin()

    def _begin(self) -> None:
        self._out: dict[Work, Round] = {}  # what replicas have
        self._sums: Sums | None = None  # what came since the last step
        self._tokens = self._steps = 0

    async def serve(self, queue: WorkQueue) -> None:
        """See `Helpers`."""
        self._begin()
        self._queue, queue.heard = queue, self._tell
        try:
            while True:
                changed = self._changed
                await self._take_in(queue)
                await self._share_out(queue)
                try:
                    # What only a silent replica still has, all others wait for.
                    async with asyncio.timeout(SILENCE if self._out and not queue.ready else None):
                        await changed.wait()
                except TimeoutError:
                    self._take_back(self.replicas.forget())
        finally:
            self._queue, queue.heard = None, None
            self.replicas.forget()

    def _tell(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def _share_out(self, queue: WorkQueue) -> None:
        for member in self.replicas.free():
            if (round := queue.claim(self._steps)) is None:
                return
            work = Work(next(self._numbers), await schedule.here(round.commands[0]))  # type: ignore[arg-type]  # no step
            if self.replicas.takes(member):
                self._out[work] = round
                member.give(work, self._trainer.version)
            else:  # it was lost meanwhile
                queue.give_back(round)

    async def _take_in(self, queue: WorkQueue) -> None:
        for work in [work for work in self._out if work.done]:
            assert work.sums is not None
            self._sums = await in_thread(partial(_added, self._sums, work.sums))
            self._tokens += sum(row.size for row in work.command.rows)
            queue.finished(self._out.pop(work), work.result)

    def _take_back(self, under_way: list[Work]) -> None:
        for work in under_way:
            if self._queue is not None and (round := self._out.pop(work, None)) is not None:
                self._queue.give_back(round)

    # Of rank 0, which holds its device --------------------------------------------------------------------------------

    async def renew(self) -> None:
        """See `Helpers`."""
        await self.replicas.send_weights()

    async def hand_in(self) -> None:
        """See `Helpers`."""
        learner: Learner = self._trainer._at_work  # type: ignore[attr-defined]  # of every text trainer
        sums, self._sums = self._sums, None
        if sums is not None:
            await self._trainer.computed(learner.add, sums)

    async def stepped(self, step: schedule.OptimizerStep) -> None:
        """See `Helpers`."""
        self._trainer.note("trainer/joined_tokens", bytes=self._tokens)
        self._tokens = 0
        self._steps += 1
        await self.replicas.stepped(step)
        self._tell()


def _added(before: Sums | None, more: Sums) -> Sums:
    """Sums of both, in the place of the first. Blocking."""
    if before is None:
        return Sums(dict(more.gradients), more.loss)
    gradients = dict(before.gradients)
    for name, gradient in more.gradients.items():
        gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
    losses = [loss for loss in (before.loss, more.loss) if loss is not None]
    return Sums(gradients, losses[0] + losses[1] if len(losses) == 2 else next(iter(losses), None))
