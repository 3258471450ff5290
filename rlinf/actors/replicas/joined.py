"""Replicas of the trainer that join it, and leave it or are lost, in the middle of a step too.

Flows in: commands, as for a trainer of one process; connections of those who join. Flows out: gradients of the
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
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlinf.actors.async_replicas import carry_out
from rlinf.actors.base import BaseTrainer
from rlinf.algos.loss_sum import LossSum
from rlinf.data.weights import Weights
from rlinf.joining.connection import Connection
from rlinf.joining.listener import Joiner, Listener
from rlinf.joining.peer import SILENCE, Peer
from rlinf.metrics.explain import MICRO_BATCH
from rlinf.runtime.base.calls import lease_here, start_apart
from rlinf.runtime.base.tasks import cancel_all
from rlinf.training import schedule
from rlinf.training.fsdp import FsdpBackEnd, Learner
from rlinf.training.optimizer import Sums

_AHEAD = 2
"""Commands that each who computes may have: one that is computed, and one whose sums are on their way."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Work:
    """A micro-batch that is to be computed."""

    number: int
    """Its place among all of this process."""
    command: schedule.ForwardBackward | schedule.Forward
    sums: Sums | None = None
    """Sums to be added to the gradient, if they are not there already."""
    result: Any = None
    """Result of `carry_out`."""
    done: bool = False
    away: bool = False
    """A replica computed it."""


class Replica:
    """The trainer's end of a replica that joined.

    Args:
        connection: to it.
        about: what it says of itself: its `name`.
        changed: called when it may take more, or sums have come.
    """

    def __init__(self, connection: Connection, about: Mapping[str, Any], changed: Any) -> None:
        self.peer = Peer(connection, str(about["name"]))
        self.stamp: int | None = None
        """Number of the weights that it was sent last, see `JoinedReplicas`; None: none yet."""
        self.received = 0
        """Bytes of sums that came since the last step."""
        self._changed = changed
        self._computes: int | None = None
        self._under_way: dict[int, Work] = {}
        self._losses: dict[int, LossSum | None] = {}  # whose gradients are on their way

    @property
    def free(self) -> bool:
        """It may be given a micro-batch."""
        return self.peer.current and self._computes is None and len(self._under_way) < _AHEAD

    def give(self, work: Work, version: int) -> None:
        """Have it compute a micro-batch with the weights that it has, which are of this version."""
        self._computes, self._under_way[work.number] = work.number, work
        self.peer.connection.send("work", work.number, work.command, version)

    def take(self, kind: str, *rest: Any) -> str | None:
        """Take a message; returns why it leaves, if it says that."""
        self.peer.heard(kind, *rest)
        if kind == "computed":
            number, loss, result = rest
            self._computes = None
            if (work := self._under_way.get(number)) is not None:
                work.result, self._losses[number] = result, loss
        elif kind == "weights":
            self._sums_came(*rest)
        elif kind == "leaving":
            return "it leaves"
        elif kind == "failed":
            return f"it failed: {rest[0]}"
        if kind != "reply":  # which says no more than that it lives
            self._changed()
        return None

    def _sums_came(self, number: int, gradients: Weights) -> None:
        work, loss = self._under_way.pop(number, None), self._losses.pop(number, None)
        self.received += gradients.nbytes
        if work is not None:
            gradients.verify()
            work.sums = Sums(dict(gradients.named()), loss)
            work.done = work.away = True

    def forget(self, only: Work | None = None) -> list[Work]:
        """Micro-batches that it was given and whose sums have not come, all or only this one: they are no longer wanted
        of it."""
        numbers = [*self._under_way] if only is None else [only.number]
        for number in numbers:
            self._losses.pop(number, None)
        return [self._under_way.pop(number) for number in numbers if number in self._under_way]


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
        self.members: set[Replica] = set()
        """Those that have joined."""
        self._trainer, self._back = trainer, back
        self._listener = Listener(self, "trainer", trainer.group.names[0].partition("[")[0], made_of)
        self._numbers = itertools.count()
        self._stamp = self._whole_from = 0  # how often the weights have changed, and when otherwise than by a step
        self._closing = False
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

    async def listen(self, place: str, directory: str | None) -> str:
        """Let replicas join; see `Listener.open`."""
        where = await self._listener.open(place, directory)
        logger.warning("trainer: replicas may join at %s: %s", where, self._listener.how)
        return where

    def changed(self) -> None:
        """The weights have changed otherwise than by a step, those that never learn too."""
        self._stamp += 1
        self._whole_from = self._stamp

    async def close(self) -> None:
        """End with those who joined."""
        self._closing = True
        self._listener.shut()
        await asyncio.gather(*(each.peer.connection.close("end") for each in self.members), return_exceptions=True)
        await self._listener.close()

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
                for member in self.members:
                    member.forget()
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
        while self._order and (
            isinstance(self._order[-1], schedule.OptimizerStep) or len(self._order) >= _AHEAD * (len(self.members) + 1)
        ):
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
        for member in self.members:
            if len(self._ready) <= self._waits or self._stopped:
                break
            if member.free and member.stamp == self._stamp:
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
            await self._send_weights()
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
                self._take_back([work for member in self.members for work in member.forget(first)])
        self._waits = False

    def _take_back(self, under_way: list[Work]) -> None:
        self._ready = deque(sorted([*self._ready, *under_way], key=lambda work: work.number))

    async def _step(self, step: schedule.OptimizerStep, handler: schedule.CommandHandler) -> None:
        await handler.step(step)
        self._order.popleft()
        self._stamp += not step.empty
        self._trainer.note("trainer/joined_count", bytes=len(self.members))
        for member in self.members:
            self._trainer.note("trainer/joined_bytes", bytes=member.received)
            member.received = 0
        await self._send_weights()
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

    async def _send_weights(self) -> None:
        """Send the newest weights to those that have not been: whole to those that are new."""
        for whole in (False, True):
            old = [one for one in self.members if one.stamp != self._stamp]
            behind = [one for one in old if (one.stamp is None or one.stamp < self._whole_from) == whole]
            if behind:
                stamp = self._stamp
                weights = await self._trainer.computed(self._packed, whole)
                for member in self.members.intersection(behind):
                    member.stamp = stamp
                    member.peer.publish(weights)
                self._trainer.note("trainer/joined_bytes", bytes=weights.nbytes * len(behind))

    def _packed(self, whole: bool) -> Weights:
        named = ((name, tensor.cpu()) for name, tensor in self._back.trained(whole=whole))
        return Weights.pack(named, self._trainer.version)

    # Joining and leaving ----------------------------------------------------------------------------------------------

    def came(self, connection: Connection, about: dict[str, Any]) -> Replica:
        """See `Joinable`."""
        member = Replica(connection, about, self._tell)
        self.members.add(member)
        logger.warning("trainer: replica %s has joined; %s", member.peer.name, self._count())
        self._tell()
        return member

    def left(self, member: Joiner | None, peer: str, reason: str) -> None:
        """See `Joinable`."""
        if self._closing:
            return
        if not isinstance(member, Replica):
            logger.warning("trainer: %s wanted to join and is gone: %s", peer, reason)
            return
        member.peer.over()
        self.members.discard(member)
        self._take_back(under_way := member.forget())
        logger.warning(
            "trainer: replica %s is gone: %s; %d micro-batches that it had under way are computed by others; %s",
            *(member.peer.name, reason, len(under_way), self._count()),
        )
        self._tell()

    def _count(self) -> str:
        count = len(self.members)
        return f"{count} {'replica is' if count == 1 else 'replicas are'} there beside the trainer"
