"""What is in an item queue, and what may be asked of it. Flows in: nothing; out: types. Nobody is woken."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

Token = Hashable
"""Under which a consumer holds items."""
REMEMBERED = 1024
"""Ids that are remembered beside those that may be put again: many times what a map has on its way at a time."""
Taken = list[tuple[Hashable, Any]]
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
        return [self.popleft() for _ in range(count)]

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
        """Who holds them, for the stall report."""
        self._counts: dict[Hashable, int] = {}

    def __contains__(self, token: Token) -> bool:
        return token in self.by_token

    def __len__(self) -> int:
        """How many tokens hold something."""
        return len(self.by_token)

    def has(self, key: Hashable) -> bool:
        """Whether items of this key are held."""
        return key in self._counts

    def add(self, token: Token, key: Hashable, items: list[Item]) -> None:
        """The holder of a token took these items of one key, at least one."""
        self.by_token.setdefault(token, {}).update((item.id, item) for item in items)
        self._counts[key] = self._counts.get(key, 0) + len(items)

    def remove(self, token: Token, ids: Iterable[Hashable] | None = None) -> list[Item]:
        """Which of these ids (default: all) the token held; it does not any more."""
        held = self.by_token[token]
        items = [item for id in (list(held) if ids is None else ids) if (item := held.pop(id, None)) is not None]
        for item in items:
            self._counts[item.key] -= 1
            if not self._counts[item.key]:
                del self._counts[item.key]
        if not held:
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
    """What a taker wants, beside how many items at most."""

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
