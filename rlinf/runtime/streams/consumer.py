"""One consumer of a stream: what it has in hand, what it asks for ahead, and what becomes of both when it stops.

Flows in: items of a stream's queue, wherever that lives. Flows out: the same, each once; word of those that are done.
Who wakes whom: an item wakes its consumer; where that is a device call which gave its devices away, enough items do.

Why ahead, and not only several at a time: a round trip between batches, however many a queue grants in one, adds to the
time of items of 1 to 10 ms several times what asking beside the work does, and big items travel beside the work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from rlinf.runtime.actor.actor import show_wait
from rlinf.runtime.base.calls import SERVICE, Call, DeviceLease, current_call, here
from rlinf.runtime.observe.dataflow import Counter, amount
from rlinf.runtime.streams.channel import QueueHandle
from rlinf.runtime.streams.item_queue import Taken, Token
from rlinf.runtime.transport.link import CAST, Message

if TYPE_CHECKING:
    from rlinf.runtime.streams.stream import Stream

T = TypeVar("T")

WINDOW = 64
"""The most items that a consumer on another host asks for ahead, so that small items do not cost a round trip each."""
AHEAD_SECONDS = 2e-3
"""A consumer asks ahead for what it works off in this time (about ten round trips): what it has, others cannot take."""
NOT_AHEAD_SECONDS = 0.1
"""Beside items that take longer than this a round trip does not count, but an item in the wrong hands does."""
LAZY_FROM = 4 * WINDOW
"""Capacity from which on word of done items may wait for company: in a smaller stream producers wait for it."""


class Consumer(AsyncIterator[T]):
    """One consumer of a stream: takes items, and acknowledges each when it asks for the next.

    Args:
        prefetch: ask for items ahead while there are more than other consumers need.
        most: items to take at a time (`take`); fewer only at the end of the stream.
        weak: do not keep the stream alive.
        unread: where the stream lives on this host, do not open its items.
        passing: the items go on to somebody else.
    """

    def __init__(
        self,
        stream: Stream[T],
        *,
        prefetch: bool,
        most: int = 1,
        weak: bool = False,
        unread: bool = False,
        passing: bool = False,
    ):
        self._stream = None if weak else stream
        self._handle = stream.handle
        self._token = stream.handle.host.number()
        self._call = current_call.get()
        origin = stream.handle.origin
        self._counter: Counter | None = None
        if origin is not None and not passing:
            self._counter = stream.handle.host.flows.counter(origin, here(self._call))
            self._depth = origin[2]
        self._ready: deque[tuple[Hashable, T]] = deque()
        self._last: list[Hashable] = []
        self._prefetch = prefetch
        self._unread = unread
        self.most = most
        self._ahead: asyncio.Task[Taken] | None = None
        self._acks = Acks(stream.handle, self._token)
        self._in_hand = 0  # items handed out and not acknowledged
        self._made: list[Hashable] = []
        self._forgotten: list[Hashable] = []
        self._given: float | None = None  # when the last items were handed out
        self._busy: float | None = None  # seconds that they took to work off
        self._ended = False

    def __aiter__(self) -> Consumer[T]:
        return self

    async def __anext__(self) -> T:
        taken = await self.take()
        if not taken:
            raise StopAsyncIteration
        return taken[0][1]

    @property
    def at_hand(self) -> bool:
        """Whether the next `take` would not wait."""
        return len(self._ready) >= self.most

    async def take(self, *, acknowledge: bool = True) -> list[tuple[Hashable, T]]:
        """The next (id, item) pairs, as many as `most`; [] at the end of the stream.

        Args:
            acknowledge: what was taken before is done. Otherwise the caller acknowledges each by `ack`.
        """
        if self._given is not None:
            self._busy = self._handle.host.now() - self._given
        done = len(self._last)
        if acknowledge and self._last:
            self.ack(self._last)
            self._last = []
        call = current_call.get()
        lease = call.lease if call is not None else None
        works = call is not None and (lease is not None or call.within is not None)  # for a call that may have devices
        if works:
            await self._offer(call, done)
        if len(self._ready) < self.most and not self._ended:
            await self._fetch(lease, works)
        elif lease is not None and lease.away and not lease.stage:
            async with lease.waiting():
                await lease.enough(0, self.look)
        taken = [self._ready.popleft() for _ in range(min(self.most, len(self._ready)))]
        if acknowledge:
            self._last = [id for id, _ in taken]
        self._in_hand += len(taken)
        if self._counter is not None and taken:
            depth = self._depth
            self._counter.add(amount((value for _, value in taken), depth) if depth else len(taken))
        self._given = self._handle.host.now()
        self._look_ahead()
        return taken

    async def _offer(self, call: Call | None, done: int) -> None:
        """So many items are done, and the next are not begun: a moment to give devices to others."""
        if done and (lease := self._lease_over(call)) is not None and not lease.puts:
            lease.done(done)
        if call is not None and call.lease is not None and not call.lease.stage:
            await call.lease.offer()

    def _lease_over(self, call: Call | None) -> DeviceLease | None:
        """The lease of the call for which the running code takes items that others made: its own, or that of the call
        whose stage it is."""
        while call is not None and call.lease is None:
            call = call.within
        if call is None or call.lease is None or call.lease.stage:  # a stage counts the items of its own source
            return None
        origin = self._handle.origin
        return None if origin is not None and origin[0] == call.lease.role else call.lease

    async def look(self, missing: int) -> None:
        """Wait until so many items are at hand beside those that were taken, or all that will ever be."""
        missing -= len(self._ready)
        if missing > 0 and (ahead := self._ahead) is not None:
            self._insist(bool(self._ready))
            await asyncio.wait([ahead])  # which leaves it alone if this wait is given up
            missing -= len(ahead.result())
        if missing > 0:
            await self._handle.at_hand(self._token, missing)

    async def _fetch(self, lease: DeviceLease | None, works: bool) -> None:
        handle = self._handle
        start = handle.host.now()
        try:
            async with lease.waiting() if lease is not None else contextlib.nullcontext():
                opened = await self._next()
                if works and opened and (over := self._lease_over(current_call.get())) is not None:
                    await over.enough(len(opened), self.look)
        except BaseException:  # cancelled, or an item cannot be opened here: perhaps another consumer can
            self._ready.clear()
            handle.requeue(self._token)
            raise
        self._ended = not opened and not self._ready
        self._ready.extend(opened)
        show_wait(handle.host, handle.name, start)

    async def _next(self) -> Taken:
        handle, ahead, more = self._handle, self._ahead, bool(self._ready)
        if ahead is None:
            made, self._made = self._made, []
            taken = await handle.take(self._token, self.most, unread=self._unread, least=self.most, more=more)
            self._forgotten += made
            return taken
        self._ahead = None
        if not ahead.done():
            self._insist(more)
        return await ahead

    def _insist(self, more: bool) -> None:
        """What was asked for ahead is needed now. Told behind the question, which its task may not have sent yet."""
        self._handle.host.loop.call_soon(self._handle.insist, self._token, more)

    def _look_ahead(self) -> None:
        """Ask for more while working on what there is, if the stream lives elsewhere and has items to spare."""
        handle = self._handle
        if not self._prefetch or self._ended or self._ahead is not None or handle.owner == handle.host.rank:
            return
        if self._busy is None or self._busy > NOT_AHEAD_SECONDS:
            return
        times = min(int(AHEAD_SECONDS / max(self._busy, 1e-6)), WINDOW // self.most)
        window = max(times, 1) * self.most
        if len(self._ready) <= window // 2:
            made, self._made = self._made, []
            self._ahead = handle.host.own(_take_ahead(handle, self._token, window, self.most, made, self._forgotten))

    def ack(self, ids: list[Hashable], made: Iterable[Hashable] = ()) -> None:
        """These items are done.

        Args:
            made: ids of what was made of them, for `forgotten`.
        """
        self._in_hand -= len(ids)
        capacity = self._handle.capacity
        busy = self._in_hand > 0 or bool(self._ready)  # so nobody waits for the end of the stream yet
        self._acks.add(ids, lazily=busy and (capacity is None or capacity >= LAZY_FROM))
        self._made += made

    def forgotten(self) -> list[Hashable]:
        """Ids, each told once, that nobody will put any more: of what was made of items that are gone for good.

        The stream's owner has answered a question that was sent after their acknowledgement. So it knows that they are
        done, and gives them to nobody else even if this host dies now.
        """
        ids = list(self._forgotten)
        self._forgotten.clear()
        return ids

    def leave(self) -> None:
        """Stop consuming: what is in hand counts as done, what was taken ahead goes back to the stream.

        If the actor was killed over it, what is in hand goes back as well.
        """
        killed = self._call is not None and self._call.killed
        _leave(self._handle, self._token, [] if killed else self._last, self._ahead)
        self._last, self._ahead = [], None
        self._ready.clear()

    def give_back(self) -> None:
        """Stop consuming: everything not acknowledged goes back to the stream."""
        self._last = []
        self.leave()

    def close(self) -> None:
        """Stop consuming and let go of the stream: frames of a traceback may live on, and this object with them."""
        self.leave()
        self._stream = None

    def abandon(self) -> None:
        """Nobody is to consume the stream any more."""
        self._handle.abandon()

    def __del__(self) -> None:
        if self._last or self._ready or self._ahead is not None:
            handle, token, last, ahead = self._handle, self._token, self._last, self._ahead
            if self._call is not None and self._call.killed:
                last = []
            handle.host.on_loop(lambda: _leave(handle, token, last, ahead))


class Acks:
    """Word of what one consumer is done with. To another host, one message takes along all that is done until it
    leaves.
    """

    __slots__ = ("_handle", "_ids", "_token")

    def __init__(self, handle: QueueHandle, token: Token):
        self._handle, self._token = handle, token
        self._ids: list[Hashable] = []

    def add(self, ids: list[Hashable], *, lazily: bool) -> None:
        """These are done; `lazily`: it need not be told at once."""
        handle = self._handle
        if handle.owner == handle.host.rank:
            handle.ack(self._token, ids)
            return
        waiting = bool(self._ids)
        self._ids += ids
        link = handle.host.link(handle.owner)
        if not lazily:
            link.post(self)
        elif not waiting:
            link.post_lazily(self)

    def message(self) -> Message:
        ids, self._ids = self._ids, []
        return (CAST, SERVICE, "queue_cast", (self._handle.id, "ack", (self._token, ids)))


async def _take_ahead(
    handle: QueueHandle, token: Token, most: int, least: int, made: list[Hashable], forgotten: list[Hashable]
) -> Taken:
    try:
        asked = await handle.ask(token, most, least=least, spare=True)
        forgotten += made
        return await handle.open(asked)
    except asyncio.CancelledError:
        handle.requeue(token)  # said once more after the wish was withdrawn: it may just have been met
        raise


def _leave(handle: QueueHandle, token: Token, done: list[Hashable], ahead: asyncio.Task[Taken] | None) -> None:
    """Word of a consumer that stops: items that are done, a wish to be forgotten, and all else to be given back."""
    if ahead is not None and not ahead.cancel() and not ahead.cancelled():
        ahead.exception()  # seen: nobody will ask any more
    if done:
        handle.ack(token, done)
    handle.requeue(token)
