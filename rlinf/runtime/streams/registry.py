"""The queues that live on one host, by id, and how many handles elsewhere hold each.

Flows in: queues as streams and channels are made; word from other hosts that a handle came or went. Flows out: the
queue of an id. Nobody is woken.

A host that has put into a queue without bound may feed it from then on: its items are on their way when `put` returns,
without an answer, but for every `UNANSWERED`-th. To close such a queue, its host tells all feeders so, and closes it
when each has said that it knows: by then all that they had put has arrived, for messages between two hosts keep their
order. So nothing is lost, whoever learns by whatever way that somebody has put, and closes the queue.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlinf.runtime.base.calls import SERVICE, Key, current_scope
from rlinf.runtime.base.errors import QueueClosed

from .item_queue import ItemQueue

if TYPE_CHECKING:
    from rlinf.runtime.base.ports import Host

UNANSWERED = 256
"""Items that a feeder sends without an answer at most: more would gather in memory, and hold up its loop."""


class QueueRegistry:
    """One per host, at `host.system.queues`. Holds no queue alive, but for those that others hold."""

    def __init__(self) -> None:
        self.queues: weakref.WeakValueDictionary[Key, ItemQueue] = weakref.WeakValueDictionary()
        self.held: dict[ItemQueue, int] = {}
        """Queues of streams that left as results, and how many handles elsewhere hold each."""
        self.feeders: dict[Key, set[int]] = {}
        """Hosts that feed the queues of this one."""
        self.feeding: dict[Key, int] = {}
        """Queues of other hosts that this one feeds, and how many items without an answer are left to each."""

    def add(self, id: Key, queue: ItemQueue, *, scoped: bool = False) -> None:
        """Register a queue; `scoped`: the scope in which it is made abandons it at its end."""
        self.queues[id] = queue
        if scoped and (scope := current_scope.get()) is not None:
            scope.adopt(queue)

    def get(self, id: Key) -> ItemQueue | None:
        """The queue of this id, if it still exists."""
        return self.queues.get(id)

    def find(self, id: Key, name: str = "the channel or stream") -> ItemQueue:
        """The queue of this id.

        Raises:
            QueueClosed: it is gone; `name` is what the text calls it.
        """
        queue = self.queues.get(id)
        if queue is None:
            raise QueueClosed(f"{name} is gone: its owner dropped it")
        return queue

    def hold(self, id: Key, change: int) -> None:
        """One more handle on another host holds the queue, or one fewer."""
        queue = self.queues.get(id)
        if queue is not None:
            self.held[queue] = count = self.held.get(queue, 0) + change
            if not count:
                del self.held[queue]
            queue.hold(change)

    def lost(self, host: int, reason: str) -> None:
        """A host is gone: what its consumers held goes back."""
        for queue in self.all():
            queue.leave(lambda token: isinstance(token, tuple) and token[0] == host)
        for id in list(self.feeders):
            self.drained(id, host)
        for id in [id for id in self.feeding if id[0] == host]:
            del self.feeding[id]

    # Feeding -----------------------------------------------------------------------------------------------------

    def let_feed(self, host: Host, id: Key, feeder: int) -> None:
        """Another host has put into a queue of this one that has no bound."""
        feeders = self.feeders.get(id)
        if feeders is None:
            feeders = self.feeders[id] = set()
            self.queues[id].on_end.append(lambda: self._tell_closing(host, id, self.feeders.pop(id, ())))
        if feeder not in feeders:
            feeders.add(feeder)
            host.cast(feeder, SERVICE, "queue_opened", id)

    def opened(self, id: Key) -> None:
        """This host may feed a queue of another."""
        self.feeding[id] = UNANSWERED

    def may_feed(self, id: Key) -> bool:
        """Whether an item may be put without waiting for an answer."""
        left = self.feeding.get(id)
        if left is None:
            return False
        self.feeding[id] = left - 1 if left else UNANSWERED
        return left > 0

    def close(self, host: Host, id: Key) -> None:
        """Close a queue of this host, once all that was put has arrived."""
        queue = self.queues.get(id)
        if queue is None or queue.closing:
            return
        if feeders := self.feeders.get(id):
            queue.closing = True
            self._tell_closing(host, id, feeders)
        else:
            queue.close()

    def _tell_closing(self, host: Host, id: Key, feeders: Iterable[int]) -> None:
        for feeder in feeders:
            host.cast(feeder, SERVICE, "queue_closing", id)

    def closing(self, id: Key) -> None:
        """A queue that this host may feed begins to close, or has ended."""
        self.feeding.pop(id, None)

    def drained(self, id: Key, feeder: int) -> None:
        """All that another host has put into a queue is here, and it will put no more."""
        feeders = self.feeders.get(id)
        if feeders is None or feeder not in feeders:
            return
        feeders.remove(feeder)
        if not feeders:
            del self.feeders[id]
            queue = self.queues.get(id)
            if queue is not None and queue.closing:
                queue.close()

    def all(self) -> list[ItemQueue]:
        """All queues that exist at this moment."""
        return list(self.queues.values())


def queues_of(host: Host) -> QueueRegistry:
    """The registry of a host."""
    registry: QueueRegistry = host.system.queues
    return registry
