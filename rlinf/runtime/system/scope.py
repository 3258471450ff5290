"""Scopes: who ends what.

Flows in: groups, channels, streams, meshes and further scopes, each noted by the scope in which it was made. Flows
out: their end, the youngest first, however the scope is left. Who wakes whom: leaving wakes everything that still runs
in it, with a cancellation.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from rlinf.runtime.base import ports
from rlinf.runtime.base.calls import current_scope
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.streams.channel import Channel
from rlinf.runtime.streams.item_queue import ItemQueue

from .handles import ActorGroup

if TYPE_CHECKING:
    from .system import ActorSystem


class Closable(Protocol):
    """What ends itself: a scope, a device mesh."""

    async def close(self) -> None: ...


Owned = ActorGroup | Channel | Closable


class Scope:
    """Owns what is made in it: leaving it ends its actors, channels and streams, whatever happened.

    Example:
        >>> async with system.scope():                                    # doctest: +SKIP
        ...     judge = await system.spawn(Judge, name="judge")
        >>> await system.spawn(Judge, name="judge")                       # doctest: +SKIP
    """

    def __init__(self, system: ActorSystem):
        self._system = system
        self._owned: list[Owned] = []
        self._owner: ports.Scope | None = None
        self._token: Any = None
        self.queues: weakref.WeakSet[ItemQueue] = weakref.WeakSet()
        """Of the streams made in it."""

    def adopt(self, queue: ItemQueue) -> None:
        """Abandon a stream's queue with this scope."""
        self.queues.add(queue)

    def add(self, what: Owned) -> None:
        """End `what` with this scope."""
        self._owned.append(what)

    def forget(self, what: Owned) -> None:
        """It has ended already."""
        if what in self._owned:
            self._owned.remove(what)

    def groups(self) -> list[ActorGroup]:
        """All groups in it and in its scopes, the oldest first."""
        found: list[ActorGroup] = []
        for what in self._owned:
            found += what.groups() if isinstance(what, Scope) else [what] if isinstance(what, ActorGroup) else []
        return found

    async def __aenter__(self) -> Scope:
        self._owner = current_scope.get() or self._system.root
        self._owner.add(self)
        self._token = current_scope.set(self)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with contextlib.suppress(ValueError):  # left in another context than entered
            current_scope.reset(self._token)
        closing = self._system._host.own(self.close())
        try:
            await finish(closing)
        finally:
            if self._owner is not None:
                self._owner.forget(self)
        failure = None if closing.cancelled() else closing.exception()
        if failure is not None and error is None:
            raise failure
        if failure is not None:  # what went wrong first is what the user gets to see
            self._system._host.complain("while a scope was left", failure)

    async def close(self) -> None:
        """End everything in it, the youngest first.

        Raises:
            Exception: the first that an actor's `close` raised; all the others have been closed all the same.
        """
        for queue in list(self.queues):
            queue.abandon()
        await self._system.stop_calls(self.groups())  # all at once, so that waiting for the slow ones is not a sum
        first: Exception | None = None
        while self._owned:
            youngest = self._owned.pop()
            try:
                if isinstance(youngest, ActorGroup):
                    await self._system.kill(youngest)
                elif isinstance(youngest, Channel):
                    self._system.withdraw(youngest)
                else:
                    await youngest.close()
            except Exception as error:  # the others must be closed, too
                first = first or error
        if first is not None:
            raise first
