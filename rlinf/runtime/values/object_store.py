"""Values that hosts share: promised ones kept until they are fetched, and tensors in shared memory.

Flows in: results nobody has asked for yet, arguments lent to calls. Flows out: those values, when a peer fetches them;
word to their owners when they are no longer needed. Who wakes whom: the garbage collector's word that the last handle
or tensor is gone is noted on any thread and acted upon on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import SERVICE, Key, waiter
from rlinf.runtime.base.errors import ActorDied, UserError
from rlinf.runtime.base.tasks import mark_seen
from rlinf.runtime.transport.arena import Arena, ArenaReader
from rlinf.runtime.values.codec import Codec
from rlinf.runtime.values.p2p import Handles
from rlinf.runtime.values.pickler import Place, ValueRef
from rlinf.runtime.values.promise import KEPT, QUEUED, Promise
from rlinf.runtime.values.relay import Relay

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

_GONE = "a promised value is gone: its handle was dropped, or the host that had it died, before the value was fetched"


class Values:
    """Store of the values that one host keeps for others, and holds of theirs.

    Args:
        places: where every host lives.
        share_memory: send big CPU tensors through shared memory to hosts on this machine.
    """

    def __init__(self, host: Host, places: dict[int, Place], share_memory: bool):
        self._host = host
        self._rank = host.rank
        self.kept: dict[Key, asyncio.Future[Any]] = {}
        self.awaited: dict[object, tuple[str, str | Key, float]] = {}
        """Each wait for a value: the waiter, the call (its label, or who made it and its number there), since when."""
        self._lending: list[Any] | None = None
        self._borrower = ""  # the call whose arguments they are
        self._frees: deque[tuple[int, int]] = deque()
        use_arena = share_memory and Arena.available()
        self.arena = Arena(host.rank) if use_arena else None
        self.reader = ArenaReader(self._slot_free) if use_arena else None
        self.handles = Handles(host.rank, self._slot_free)
        self.codec = Codec(host, places, self)
        self.relay = Relay(host, self.codec)

    @contextlib.contextmanager
    def lending_to(self, promise: Promise[Any]) -> Iterator[None]:
        """Encode the arguments of this call within the context: promises among them are lent until its reply."""
        lends: list[Any] = []
        self._lending, self._borrower = lends, promise.name
        try:
            yield
        except BaseException:
            self.give_back(lends)
            raise
        finally:
            self._lending = None
        if lends:
            promise.lends = lends

    def hold(self, stream: Any) -> bool:
        """Keep a stream alive as long as the receiver may use it; True if its handle there does so."""
        if self._lending is not None:
            self._lending.append(stream)
            return False
        stream.handle.hold(1)  # it leaves as a result, or in a queue: its receiver keeps it as its maker did
        return True

    def lend(self, promise: Promise[Any]) -> ValueRef:
        """A call's argument is a promise: say where its value will be, and keep the promise until the reply."""
        if self._lending is None:
            raise UserError(f"{promise.name} is not awaited: await it before sending it in anything but a call")
        self._lending.append(promise)
        self._host.flows.passed(promise.name, self._borrower, promise.key)
        promise.lent = True
        promise.borrowers += 1
        if promise.state in (QUEUED, KEPT):
            return ValueRef(promise.target, promise.key)
        self.kept[promise.key] = promise
        return ValueRef(self._rank, promise.key)

    def give_back(self, lends: list[Any] | None) -> None:
        """A call has its reply: its consumer has fetched the promises that were lent to it."""
        for handle in lends or ():
            if isinstance(handle, Promise):
                handle.borrowers -= 1
                if not handle.borrowers:
                    self.kept.pop(handle.key, None)
                    self.relay.drop(handle.key)
                    if handle.done() and (handle.cancelled() or handle.exception() is not None):
                        handle.release()
        if lends:
            lends.clear()  # though somebody may still hold the call's promise

    def fetch(self, ref: ValueRef) -> Any:
        """Awaitable for a value that some host keeps."""
        if ref.owner == self._rank:
            return self.kept_value(ref.key)
        here, there = self._host.places[self._rank], self._host.places[ref.owner]
        if there.machine != here.machine or "cpu" != here.device != there.device:
            return self.relay.fetch(ref)
        return self._host.call(ref.owner, SERVICE, "fetch", "value", (ref.key,), {})

    def keep(self, value: Any) -> ValueRef:
        """Keep a value here until `drop`, for hosts that will fetch it."""
        future: asyncio.Future[Any] = self._host.loop.create_future()
        future.set_result(value)
        key = self._host.number()
        self.kept[key] = future
        return ValueRef(self._rank, key)

    def expect(self, key: Key) -> asyncio.Future[Any]:
        """The place for the value of a call that has arrived, or will: it is kept here."""
        future = self.kept.get(key)
        if future is None:
            future = self.kept[key] = self._host.loop.create_future()
            future.add_done_callback(mark_seen)  # an error also travels with the reply
        return future

    def drop(self, key: Key) -> None:
        """The last handle of a kept value is gone, or the host that had it."""
        future = self.kept.pop(key, None)
        self.relay.drop(key)
        if future is not None and not future.done():
            future.set_exception(ActorDied(_GONE))

    async def kept_value(self, key: Key) -> Any:
        """The value that is or will be kept under `key` on this host."""
        future = self.kept.get(key)
        if future is None and key[0] != self._rank and key[1] > self._host.arrived.get(key[0], 0):
            future = self.expect(key)  # the call is on its way from a third host; word of it came here first
        if future is None or key[0] in self._host.lost_hosts:
            raise ActorDied(_GONE)
        if future.done():
            return future.result()
        over = self.note_wait(key)
        try:
            return await asyncio.shield(future)
        finally:
            over()

    def note_wait(self, call: str | Key) -> Callable[[], object]:
        """The running code waits for the value of a call, until it calls what this returns."""
        wait = object()
        self.awaited[wait] = (waiter(), call, self._host.now())
        return lambda: self.awaited.pop(wait, None)

    def _slot_free(self, owner: int, slot: int) -> None:
        """The last tensor over a peer's arena slot or CUDA handle is gone; the garbage collector calls this on any
        thread."""
        self._frees.append((owner, slot))
        if len(self._frees) == 1:
            self._host.soon(self.send_frees)

    def send_frees(self) -> None:
        """Tell the owners of slots that are no longer used here; with what else there is to say to them, or soon."""
        slots: dict[int, list[int]] = {}
        while self._frees:
            owner, slot = self._frees.popleft()
            slots.setdefault(owner, []).append(slot)
        for owner, ids in slots.items():
            if owner == self._rank and self.arena is not None:
                self.arena.release(self._rank, ids)
            elif owner not in self._host.lost_hosts:
                self._host.link(owner).post_lazily((5, ids))

    def freed(self, holder: int, slots: list[int]) -> None:
        """A peer is done with these slots of this host's arena, and these handles of its CUDA memory."""
        if self.arena is not None:
            self.arena.release(holder, [slot for slot in slots if slot >= 0])
        self.handles.returned(holder, [number for number in slots if number < 0])

    def forget(self, host: int) -> None:
        """A peer is gone: drop what was kept for it, take back the memory it held."""
        for key in [key for key in self.kept if key[0] == host]:
            self.drop(key)
        self.relay.forget(host)
        if self.arena is not None:
            self.arena.forget(host)
        self.handles.forget(host)
        if self.reader is not None:
            self.reader.forget(host)

    def close(self) -> None:
        """Let go of everything."""
        self.kept.clear()
        self.relay.copies.clear()
        self.handles.close()
        if self.reader is not None:
            self.reader.close()
        if self.arena is not None:
            self.arena.close()
