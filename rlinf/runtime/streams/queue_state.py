"""State of an item queue: its items, and those who wait for it, takers by key, kind of wish and token, putters by key.

Flows in: items; a taker or putter that has to wait. Flows out: the oldest that may be served. Nobody is woken here; see
`item_queue.py`. Each operation costs the same however many wait: it touches only the oldest of each kind of wish.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

Token = Hashable
"""Under which a consumer holds items."""
REMEMBERED = 1024
"""Ids that are remembered beside those that may be put again: many times what a map has on its way at a time."""
Pairs = list[tuple[Hashable, Any]]
"""(id, value) of items, in order; [] at the end of a queue."""


@dataclass(slots=True, eq=False)
class Item:
    """One queued or running item."""

    id: Hashable
    value: Any
    weight: float
    key: Hashable
    number: int
    """Order of putting; items that come back take their old place."""


class Items(deque[Item]):
    """The queued items of one key, oldest first."""

    _weighed = (0, 0.0)  # the first so many items, and what they weigh

    def next(self, count: int) -> list[Item]:
        """Take so many."""
        self._weighed = (0, 0.0)
        return [self.popleft()] if count == 1 else [self.popleft() for _ in range(count)]

    def put_back(self, items: list[Item]) -> None:
        """Items that were taken, to their old places."""
        items.sort(key=lambda item: item.number)
        if self and self[0].number < items[-1].number:
            items = sorted([*items, *self], key=lambda item: item.number)
            self.clear()
        self.extendleft(reversed(items))
        self._weighed = (0, 0.0)

    def reaching(self, weight: float) -> int:
        """How many it takes to reach a weight; 0 if all are too light. Asked again, only new items are weighed."""
        count, total = self._weighed
        if total >= weight:
            count, total = 0, 0.0
        while count < len(self):
            total += self[count].weight
            count += 1
            if total >= weight:
                return count
        self._weighed = (count, total)
        return 0


class Running:
    """The items that were taken and not yet acknowledged, by the token of whoever holds them."""

    def __init__(self) -> None:
        self.by_token: dict[Token, dict[Hashable, Item]] = {}
        """Of tokens that hold at least one item: the items by id."""
        self.holders: dict[Token, str] = {}
        """Holder of each, for the stall report."""
        self._counts: dict[Hashable, int] = {}

    def __contains__(self, token: Token) -> bool:
        return token in self.by_token

    def __len__(self) -> int:
        """How many tokens hold something."""
        return len(self.by_token)

    def has(self, key: Hashable) -> bool:
        """True if items of this key are held."""
        return key in self._counts

    def add(self, token: Token, key: Hashable, items: list[Item]) -> None:
        """The holder of a token took these items of one key, at least one."""
        own = self.by_token.setdefault(token, {})
        for item in items:
            own[item.id] = item
        self._counts[key] = self._counts.get(key, 0) + len(items)

    def remove(self, token: Token, ids: Iterable[Hashable] | None = None) -> list[Item]:
        """Which of these ids (default: all) the token held; it does not any more."""
        own = self.by_token[token]
        items = [item for id in (list(own) if ids is None else ids) if (item := own.pop(id, None)) is not None]
        for item in items:
            if self._counts[item.key] == 1:
                del self._counts[item.key]
            else:
                self._counts[item.key] -= 1
        if not own:
            del self.by_token[token]
            self.holders.pop(token, None)
        return items


class PutIds(set[Hashable]):
    """Ids that were put and may be put again, because what they were made of may come back and be done again."""

    def __init__(self) -> None:
        super().__init__()
        self._forgotten: deque[Hashable] = deque()

    def forget(self, ids: Iterable[Hashable]) -> None:
        """These will not be put again.

        The latest are remembered a little longer: what a host sent just before it lost its work to another, which has
        done it again by now, may still be on its way.
        """
        self._forgotten.extend(ids)
        while len(self._forgotten) > REMEMBERED:
            self.discard(self._forgotten.popleft())


class Wishes(TypedDict, total=False):
    """Wishes of a taker, beside how many items at most."""

    least: int
    """Fewer than these are only given at the end of the queue. Default 1."""
    key: Hashable
    """The queue within the queue. Default None."""
    weight: float | None
    """As many as reach this total weight instead; all that are left at the end of the queue."""
    spare: bool
    """Only what other consumers do not need."""
    more: bool
    """The consumer has some that are not begun: where the queue is closed, and none are left, it does not wait until
    it is sure that none come back, which it might hold up itself."""
    peek: bool
    """Nothing: [] says that `least` are there, or all that will ever be for whoever has this token."""


class _Waiter:
    """Somebody who waits for a queue; `name` says who, for the stall report."""

    __slots__ = ("future", "key", "name", "since")

    def __init__(self, key: Hashable, name: str):
        self.key, self.name = key, name
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self.future: asyncio.Future[Any] = loop.create_future()

    @property
    def served(self) -> bool:
        """True if it got what it waited for."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # seen: whoever was cancelled meanwhile must not make asyncio complain


class Taker(_Waiter):
    """Somebody who waits for items."""

    __slots__ = ("most", "number", "token", "wishes")

    def __init__(self, token: Token, most: int, wishes: Wishes, name: str):
        super().__init__(wishes.get("key"), name)
        self.token, self.most, self.wishes = token, most, wishes
        self.number = 0
        """Order of waiting."""

    @property
    def kind(self) -> Hashable:
        """Class of wishes: of takers of one kind and key, none can be served while the oldest cannot."""
        wishes = self.wishes
        return (wishes.get("least", 1), wishes.get("weight"), wishes.get("more", False), self.peeks)

    @property
    def spare(self) -> bool:
        return self.wishes.get("spare", False)

    @property
    def peeks(self) -> bool:
        return self.wishes.get("peek", False)


class Putter(_Waiter):
    """Somebody who waits for space; once woken, a place is reserved for it."""

    __slots__ = ()


_ByKey = dict[Hashable, dict[Hashable, "OrderedDict[Taker, None]"]]
"""Takers by key and kind of wish, oldest first."""


class Waiting:
    """Takers and putters that wait at a queue. First come, first served, by `OrderedDict`: its first
    entry is found at once however many were removed before it."""

    def __init__(self) -> None:
        self.takers: dict[Token, dict[Taker, None]] = {}
        """By token."""
        self._wishes: tuple[_ByKey, _ByKey] = ({}, {})  # needed; only if there are items to spare
        self._numbers = itertools.count()
        self.putters: OrderedDict[Putter, None] = OrderedDict()
        """All of them, oldest first."""
        self._putters: dict[Hashable, OrderedDict[Putter, None]] = {}
        self._both: OrderedDict[Hashable, None] = OrderedDict()  # keys that are waited for on both sides

    # Takers ------------------------------------------------------------------------------------------------------

    def add_taker(self, taker: Taker) -> None:
        """Behind all others."""
        taker.number = next(self._numbers)
        self.takers.setdefault(taker.token, {})[taker] = None
        kinds = self._wishes[taker.spare].setdefault(taker.key, {})
        kind = taker.kind
        if kind not in kinds:
            kinds[kind] = OrderedDict()
        kinds[kind][taker] = None
        self._match(taker.key)

    def remove_taker(self, taker: Taker) -> bool:
        """False if it does not wait any more."""
        mine = self.takers.get(taker.token)
        if mine is None or taker not in mine:
            return False
        del mine[taker]
        if not mine:
            del self.takers[taker.token]
        by_key = self._wishes[taker.spare]
        kinds, kind = by_key[taker.key], taker.kind
        del kinds[kind][taker]
        if not kinds[kind]:
            del kinds[kind]
            if not kinds:
                del by_key[taker.key]
        self._match(taker.key)
        return True

    def insist(self, token: Token, more: bool) -> list[Taker]:
        """The wishes of this token are needed from now on; those that were not."""
        promoted = [taker for taker in self.takers.get(token, ()) if taker.spare]
        for taker in promoted:
            self.remove_taker(taker)
            taker.wishes["spare"], taker.wishes["more"] = False, more
            self.add_taker(taker)
        return promoted

    def first_takers(self, key: Hashable, spare: bool) -> list[Taker]:
        """The oldest of each kind of wish for a key, oldest first."""
        firsts = [next(iter(takers)) for takers in self._wishes[spare].get(key, {}).values()]
        if len(firsts) > 1:
            firsts.sort(key=lambda taker: taker.number)
        return firsts

    def all_takers(self) -> list[Taker]:
        """Oldest first."""
        return sorted((taker for mine in self.takers.values() for taker in mine), key=lambda taker: taker.number)

    def wanted(self) -> list[Hashable]:
        """The keys that are waited for."""
        return list(self._wishes[False].keys() | self._wishes[True].keys())

    def wanted_if_spare(self) -> list[Hashable]:
        """The keys that are waited for if there are items to spare."""
        return list(self._wishes[True])

    def is_needed(self, key: Hashable) -> bool:
        """True if somebody waits for this key, not only for items to spare."""
        return key in self._wishes[False]

    # Putters -----------------------------------------------------------------------------------------------------

    def add_putter(self, putter: Putter) -> None:
        """Behind all others."""
        self.putters[putter] = None
        if putter.key not in self._putters:
            self._putters[putter.key] = OrderedDict()
        self._putters[putter.key][putter] = None
        self._match(putter.key)

    def remove_putter(self, putter: Putter) -> bool:
        """False if it does not wait any more."""
        if putter not in self.putters:
            return False
        del self.putters[putter]
        mine = self._putters[putter.key]
        del mine[putter]
        if not mine:
            del self._putters[putter.key]
        self._match(putter.key)
        return True

    def first_putter(self) -> Putter:
        """The oldest."""
        return next(iter(self.putters))

    def needed_putter(self) -> Putter | None:
        """The oldest of a key that takers need; keys take turns."""
        if not self._both:
            return None
        key = next(iter(self._both))
        self._both.move_to_end(key)
        return next(iter(self._putters[key]))

    def _match(self, key: Hashable) -> None:
        if key in self._putters and key in self._wishes[False]:
            self._both.setdefault(key)
        else:
            self._both.pop(key, None)
