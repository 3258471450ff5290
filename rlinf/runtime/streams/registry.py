"""The queues that live on one host, by id, and how many handles elsewhere hold each.

Flows in: queues as streams and channels are made; word from other hosts that a handle came or went. Flows out: the
queue of an id. Nobody is woken.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from rlinf.runtime.base.calls import Key, current_scope
from rlinf.runtime.base.errors import QueueClosed

from .item_queue import ItemQueue

if TYPE_CHECKING:
    from rlinf.runtime.base.ports import Host


class QueueRegistry:
    """One per host, at `host.system.queues`. Holds no queue alive, but for those that others hold."""

    def __init__(self) -> None:
        self.queues: weakref.WeakValueDictionary[Key, ItemQueue] = weakref.WeakValueDictionary()
        self.held: dict[ItemQueue, int] = {}
        """Queues of streams that left as results, and how many handles elsewhere hold each."""

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

    def all(self) -> list[ItemQueue]:
        """All queues that exist at this moment."""
        return list(self.queues.values())


def queues_of(host: Host) -> QueueRegistry:
    """The registry of a host."""
    registry: QueueRegistry = host.system.queues
    return registry
