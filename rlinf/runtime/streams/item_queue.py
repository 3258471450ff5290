"""The queue behind channels and streams: items with ids and states, competing consumers, bounded space.

Flows in: `put`. Flows out: `take`, then `ack`. Who wakes whom: a put wakes the oldest taker whose wish can be met; an
ack, or a taker that waits for more than there is, wakes the oldest putter; a consumer's leaving wakes takers.

An item is queued → running (taken, not yet acknowledged) → done and gone. Whoever takes items holds them under a
token; if that consumer leaves or dies, what it holds is queued again, in its old place. So nothing is lost; and because
an item put twice under one id counts once, nothing is repeated either when a stage dies between emitting a result and
acknowledging its input. Hosts and messages are the business of `channel.py` and `stream.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Unpack

from rlinf.runtime.base.calls import waiter
from rlinf.runtime.base.errors import QueueClosed, again
from rlinf.runtime.observe.dataflow import Counter
from rlinf.runtime.streams.queue_state import Item, Items, Pairs, PutIds, Putter, Running, Taker, Token, Waiting, Wishes

__all__ = ["ItemQueue", "Pairs", "Token"]


class ItemQueue:
    """A queue with item states.

    Args:
        name: for errors and reports.
        capacity: how many items may be queued or running before `put` waits; None for no bound. While a taker waits
            for more than there is, its items are let in beyond that: a small queue must still fill a large batch.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, name: str, capacity: int | None = None):
        if capacity is not None and capacity < 1:
            raise ValueError(f"{name}: a capacity must be at least 1, or None for no bound; got {capacity}")
        self.name = name
        self.capacity = capacity
        self.producers: dict[str, Callable[[], object]] = {}
        """Those that fill it, by call label, and how to stop each when all consumers are gone."""
        self.closing = False
        """Nothing more may be put, but some is still on its way from other hosts."""
        self.closed = False
        self.error: BaseException | None = None
        self.on_end: list[Callable[[], None]] = []
        """Told once, when the queue is closed and empty, or failed: nothing more will come out of it."""
        self._queued: dict[Hashable, Items] = {}
        self._running = Running()
        self._waiting = Waiting()
        self._reserved = 0
        self._seen = PutIds()
        self._ids = itertools.count()
        self._size = 0
        self._ended = False
        self.unbounded = False
        """Set while the producer holds a device that others wait for: it must be able to finish."""
        self.handles = 0
        """How many handles, here and elsewhere, keep it; the last to go abandons it."""
        self.put_count = 0
        self.done_count = 0
        self.counter: Counter | None = None
        """Told of every item that is put."""

    # Producing ---------------------------------------------------------------------------------------------------

    def put_nowait(
        self, value: Any, *, id: Hashable = None, key: Hashable = None, weight: float = 1.0, force: bool = False
    ) -> bool:
        """Queue an item; False when there is no space (`force` queues it all the same).

        Args:
            id: an item whose id was already put counts as put and is dropped.

        Raises:
            QueueClosed: the queue is closed; or its error, when it failed.
        """
        self._check_open()
        if id in self._seen:
            return True
        if not force and not self._space_for(key):
            return False
        self._append(value, id, key, weight)
        return True

    def put_late(self, value: Any, key: Hashable, weight: float) -> None:
        """Queue an item that was put before the queue began to close; dropped if the queue has failed."""
        if not self.closed:
            self._append(value, None, key, weight)

    def _append(self, value: Any, id: Hashable, key: Hashable, weight: float) -> None:
        if id is None:
            id = next(self._ids)
        else:
            self._seen.add(id)
        queued = self._queued.get(key)
        if queued is None:
            queued = self._queued[key] = Items()
        queued.append(Item(id, value, weight, key, self.put_count))
        self._size += 1
        self.put_count += 1
        if self.counter is not None:
            self.counter.add()
        if self._waiting.takers:
            self._serve(key)
            self._wake_putters()  # a taker that needs more lets one more in

    def forget(self, ids: Iterable[Hashable]) -> None:
        """These ids will not be put again: what they were made of is done, and cannot come back."""
        self._seen.forget(ids)

    async def put(
        self, value: Any, *, id: Hashable = None, key: Hashable = None, weight: float = 1.0, name: str | None = None
    ) -> None:
        """Queue an item, waiting for space, after those who wait already. Cancelled, it has not been queued.

        Args:
            id, key, weight: see `put_nowait`.
            name: who waits, if not the running code.
        """
        if self._waiting.putters or not self.put_nowait(value, id=id, key=key, weight=weight):
            await self._reserve(key, name)
            self._reserved -= 1
            self.put_nowait(value, id=id, key=key, weight=weight, force=True)
            self._wake_putters()

    @property
    def has_space(self) -> bool:
        """True if `put` would not wait."""
        return not self._waiting.putters and self._space_for(None)

    async def space(self, name: str | None = None) -> None:
        """Wait until an item may be queued."""
        self._check_open()
        if not self.has_space:
            await self._reserve(None, name)
            self._unreserve()

    def _space_for(self, key: Hashable) -> bool:
        return self._has_room or (not self._reserved and self._waiting.is_needed(key))

    @property
    def _has_room(self) -> bool:
        return self.capacity is None or self.unbounded or self._size + self._reserved < self.capacity

    async def _reserve(self, key: Hashable, name: str | None) -> None:
        """Wait for a place; it counts as taken until `_reserved` is lowered again."""
        putter = Putter(key, name or waiter())
        self._waiting.add_putter(putter)
        self._wake_putters()
        try:
            await putter.future
        except asyncio.CancelledError:
            if not self._waiting.remove_putter(putter) and putter.served:
                self._unreserve()
            raise
        finally:
            del putter  # it leads to the error, and the error's traceback here

    def _unreserve(self) -> None:
        self._reserved -= 1
        self._wake_putters()

    def release_bound(self) -> None:
        """Let producers go on without a bound from now on."""
        self.unbounded = True
        self._wake_putters()

    def close(self) -> None:
        """No more items will be put. What is queued can still be taken."""
        if not self.closed:
            self.closed = True
            for putter in list(self._waiting.putters):
                putter.fail(QueueClosed(f"{self.name} was closed while {putter.name} waited to put"))
                self._waiting.remove_putter(putter)
            self._serve(*self._waiting.wanted())
            self._check_end()

    def fail(self, error: BaseException) -> None:
        """End the queue with an error, which every consumer and producer gets from now on."""
        if self.error is not None or self._ended:
            return
        self.error = error
        self.closed = True
        for waiting in (*self._waiting.all_takers(), *self._waiting.putters):
            waiting.fail(again(error))
        self._waiting = Waiting()
        self._end()

    def abandon(self) -> None:
        """All consumers are gone for good: drop what is left and stop the producers."""
        self.fail(QueueClosed(f"{self.name} was closed by its consumer, or its scope ended"))

    def hold(self, change: int) -> None:
        """One more handle keeps the queue, or one fewer."""
        self.handles += change
        if self.handles <= 0:
            self.abandon()

    # Consuming ---------------------------------------------------------------------------------------------------

    def take_nowait(
        self,
        token: Token,
        most: int = 1,
        *,
        least: int = 1,
        key: Hashable = None,
        weight: float | None = None,
        spare: bool = False,
        more: bool = False,
        peek: bool = False,
    ) -> Pairs | None:
        """Take up to `most` items of `key` now; [] at the end of the queue; None if it would wait.

        Args:
            token: holds what is taken until `ack` or `leave`.
            least, key, weight, spare, more, peek: see `Wishes`.
        """
        if self.error is not None:
            raise again(self.error)
        if peek:
            return [] if self._at_hand(token, least, key) else None
        queued = self._queued.get(key)
        if queued:
            if not spare and weight is None and len(queued) >= least:  # as nearly always
                return self._hand_out(token, queued, most, key)
            if count := self._grant(token, queued, most, least, weight, spare):
                return self._hand_out(token, queued, count, key)
        elif self._at_end(key) or (more and self.closed):
            return []
        return None

    def _grant(self, token: Token, queued: Items, most: int, least: int, weight: float | None, spare: bool) -> int:
        """How many of `queued` a taker with these wishes gets."""
        if weight is not None:
            return queued.reaching(weight) or (len(queued) if self.closed else 0)
        there = len(queued)
        if spare:
            there -= len(self._running) - (token in self._running)
        if there >= least or (self.closed and there > 0):
            return min(most, there)
        return 0

    def _at_hand(self, token: Token, least: int, key: Hashable) -> bool:
        there = len(self._queued.get(key, ()))
        return there >= least or (self.closed and (there > 0 or token in self._running or self._at_end(key)))

    def _hand_out(self, token: Token, queued: Items, count: int, key: Hashable) -> Pairs:
        items = queued.next(min(count, len(queued)))
        self._running.add(token, key, items)
        if not queued:
            del self._queued[key]
        if self.closed:  # whoever peeks for this token has got what there will ever be
            for taker in list(self._waiting.takers.get(token, ())):
                if taker.peeks:
                    self._offer(taker)
        return [(item.id, item.value) for item in items]

    async def take(self, token: Token, most: int = 1, *, name: str | None = None, **wishes: Unpack[Wishes]) -> Pairs:
        """Like `take_nowait`, waiting. Cancelled, it has taken nothing.

        Args:
            token, most, wishes: see `take_nowait`.
            name: who takes, if not the running code.
        """
        pairs, name = self.take_nowait(token, most, **wishes), name or waiter()
        if pairs is None:  # nobody waits for what is there
            pairs = await self._taken(Taker(token, most, wishes, name))
        if pairs:
            self._running.holders[token] = name
        return pairs

    async def _taken(self, taker: Taker) -> Pairs:
        self._waiting.add_taker(taker)
        self._wake_putters()  # for a taker that needs more than may be queued
        try:
            pairs: Pairs = await taker.future
            return pairs
        except asyncio.CancelledError:
            if not self._waiting.remove_taker(taker) and taker.served:
                self.requeue(taker.token, [id for id, _ in taker.future.result()])
            raise
        finally:
            del taker  # it leads to the error, and the error's traceback here

    def ack(self, token: Token, ids: Iterable[Hashable] | None = None) -> None:
        """The consumer is done with these items (default: all that it holds): they are gone."""
        if token in self._running:
            done = self._running.remove(token, ids)
            self._size -= len(done)
            self.done_count += len(done)
            if self._waiting.takers:  # who may wait to hear that a key ends with these items
                self._serve_after(token, [key for key in {item.key: None for item in done} if self._at_end(key)])
            if self._waiting.putters:
                self._wake_putters()
            if self.closed:
                self._check_end()

    def requeue(self, token: Token, ids: Iterable[Hashable] | None = None) -> None:
        """The consumer gives these items back (default: all that it holds): they take their old places."""
        if token in self._running:
            back: dict[Hashable, list[Item]] = {}
            for item in self._running.remove(token, ids):
                back.setdefault(item.key, []).append(item)
            for key, items in back.items():
                self._queued.setdefault(key, Items()).put_back(items)
            self._serve_after(token, back)

    def _serve_after(self, token: Token, keys: Iterable[Hashable]) -> None:
        """A consumer holds fewer items, and those who wait for these keys may have something to take."""
        if self._waiting.takers:
            self._serve(*keys)
            if token not in self._running:
                self._serve(*self._waiting.wanted_if_spare())  # one consumer fewer is busy

    def leave(self, tokens: Callable[[Token], bool]) -> None:
        """Consumers are gone: give back what the tokens that match hold, forget their wishes."""
        for token in [token for token in self._waiting.takers if tokens(token)]:
            for taker in list(self._waiting.takers[token]):
                self._waiting.remove_taker(taker)
                taker.future.cancel()
        for token in [token for token in self._running.by_token if tokens(token)]:
            self.requeue(token)

    def insist(self, token: Token, more: bool = False) -> None:
        """A consumer that asked for spare items is idle now and needs them as much as any other; see `Wishes.more`."""
        for taker in self._waiting.insist(token, more):
            self._serve(taker.key)
        self._wake_putters()

    # Inside ------------------------------------------------------------------------------------------------------

    def _serve(self, *keys: Hashable) -> None:
        """Give those who wait for these keys what they can have, oldest first; wishes for spare items come last."""
        for key in keys:
            for spare in (False, True):
                while key in self._queued or self.closed:
                    if not any(self._offer(taker) for taker in self._waiting.first_takers(key, spare)):
                        break

    def _offer(self, taker: Taker) -> bool:
        """Serve a waiting taker if possible; True if it waits no more."""
        if taker.future.done():  # cancelled, and not yet told
            return self._waiting.remove_taker(taker)
        pairs = self.take_nowait(taker.token, taker.most, **taker.wishes)
        if pairs is None:
            return False
        self._waiting.remove_taker(taker)
        taker.future.set_result(pairs)
        return True

    def _wake_putters(self) -> None:
        """Reserve places for putters, oldest first, as long as there is space."""
        while self._waiting.putters:
            if self._has_room:
                putter = self._waiting.first_putter()
            elif self._reserved or (needed := self._waiting.needed_putter()) is None:
                return
            else:
                putter = needed
            self._waiting.remove_putter(putter)
            if not putter.future.done():
                self._reserved += 1
                putter.future.set_result(None)

    def _at_end(self, key: Hashable) -> bool:
        """Closed, and nothing of this key is held that could come back."""
        return self.closed and not self._running.has(key)

    def _check_end(self) -> None:
        if self.closed and not self._running and not self._queued:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queued.clear()
            for notify in self.on_end:
                notify()
            self.on_end.clear()
            if self.error is not None:
                for stop in list(self.producers.values()):
                    stop()

    def _check_open(self) -> None:
        if self.error is not None:
            raise again(self.error)
        if self.closed or self.closing:
            raise QueueClosed(f"{self.name} is closed: nothing can be put into it any more")

    def statistics(self) -> dict[str, Any]:
        """Counts of items by state and of who waits, for people and for the stall report."""
        return {
            "name": self.name,
            "capacity": self.capacity,
            "queued": sum(map(len, self._queued.values())),
            "running": sum(map(len, self._running.by_token.values())),
            "put": self.put_count,
            "done": self.done_count,
            "keys": len(self._queued),
            "waiting_to_take": [(taker.name, taker.since) for taker in self._waiting.all_takers()],
            "waiting_to_put": [(putter.name, putter.since) for putter in self._waiting.putters],
            "held_by": sorted({self._running.holders.get(token, "?") for token in self._running.by_token}),
            "closed": self.closed or self.closing,
        }
