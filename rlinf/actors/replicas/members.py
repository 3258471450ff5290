"""The replicas that have joined a trainer: who is there, what each computes, and which weights it has.

Flows in: connections of those who join, and what they send. Flows out: micro-batches, weights that learn after every
optimizer step, all of them to those that are new. Who wakes whom: sums that come, a replica that joins or is lost wake
whoever shares work out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.actors.base import BaseTrainer
from rlinf.algos.loss_sum import LossSum
from rlinf.data.weights import Weights
from rlinf.joining.connection import Connection
from rlinf.joining.listener import Joiner, Listener
from rlinf.joining.peer import Peer
from rlinf.training import schedule
from rlinf.training.fsdp import FsdpBackEnd
from rlinf.training.optimizer import Sums

AHEAD = 2
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
        return self.peer.current and self._computes is None and len(self._under_way) < AHEAD

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


class Replicas:
    """The replicas that have joined a trainer.

    Args:
        trainer: the actor.
        back: its model.
        made_of: arguments of the trainer's `setup`, by which a replica is made.
        tell: called when one may take more, or sums have come.
        take_back: called with what a lost one had under way.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        back: FsdpBackEnd,
        made_of: Mapping[str, Any],
        tell: Callable[[], None],
        take_back: Callable[[list[Work]], None],
    ) -> None:
        self.there: set[Replica] = set()
        """Those that have joined."""
        self._trainer, self._back, self._tell, self._take_back = trainer, back, tell, take_back
        self._listener = Listener(self, "trainer", trainer.group.names[0].partition("[")[0], made_of)
        self._stamp = self._whole_from = 0  # how often the weights have changed, and when otherwise than by a step
        self._closing = False

    async def listen(self, place: str, directory: str | None) -> str:
        """Let replicas join; see `Listener.open`."""
        where = await self._listener.open(place, directory)
        logger.warning("trainer: replicas may join at %s: %s", where, self._listener.how)
        return where

    async def close(self) -> None:
        """End with those who joined."""
        self._closing = True
        self._listener.shut()
        await asyncio.gather(*(each.peer.connection.close("end") for each in self.there), return_exceptions=True)
        await self._listener.close()

    def changed(self) -> None:
        """The weights have changed otherwise than by a step, those that never learn too."""
        self._stamp += 1
        self._whole_from = self._stamp

    async def stepped(self, step: schedule.OptimizerStep) -> None:
        """The optimizer has taken a step: note what it had of the replicas, and send them the weights."""
        self._stamp += not step.empty
        self._trainer.note("trainer/joined_count", bytes=len(self.there))
        for member in self.there:
            self._trainer.note("trainer/joined_bytes", bytes=member.received)
            member.received = 0
        await self.send_weights()

    def takes(self, member: Replica) -> bool:
        """It is there, has the newest weights, and may be given a micro-batch."""
        return member in self.there and member.free and member.stamp == self._stamp

    def free(self) -> Iterator[Replica]:
        """Those that may be given a micro-batch."""
        return (member for member in [*self.there] if self.takes(member))

    def forget(self, only: Work | None = None) -> list[Work]:
        """Take back what all have under way, or only this: it is no longer wanted of them."""
        return [work for member in self.there for work in member.forget(only)]

    async def send_weights(self) -> None:
        """Send the newest weights to those that have not been: whole to those that are new."""
        for whole in (False, True):
            old = [one for one in self.there if one.stamp != self._stamp]
            behind = [one for one in old if (one.stamp is None or one.stamp < self._whole_from) == whole]
            if behind:
                stamp = self._stamp
                weights = await self._trainer.computed(self._packed, whole)
                for member in self.there.intersection(behind):
                    member.stamp = stamp
                    member.peer.publish(weights)
                self._trainer.note("trainer/joined_bytes", bytes=weights.nbytes * len(behind))

    def _packed(self, whole: bool) -> Weights:
        named = ((name, tensor.cpu()) for name, tensor in self._back.trained(whole=whole))
        return Weights.pack(named, self._trainer.version)

    def came(self, connection: Connection, about: dict[str, Any]) -> Replica:
        """See `Joinable`."""
        member = Replica(connection, about, self._tell)
        self.there.add(member)
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
        self.there.discard(member)
        self._take_back(under_way := member.forget())
        logger.warning(
            "trainer: replica %s is gone: %s; %d micro-batches that it had under way are computed by others; %s",
            *(member.peer.name, reason, len(under_way), self._count()),
        )
        self._tell()

    def _count(self) -> str:
        count = len(self.there)
        return f"{count} {'replica is' if count == 1 else 'replicas are'} there beside the trainer"
