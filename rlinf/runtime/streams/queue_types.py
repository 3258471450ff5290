"""What is in an item queue: items, and those who wait to take or to put.

Flows in: wishes. Flows out: futures that the queue fulfils. Who wakes whom: see `item_queue.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypedDict

Token = Hashable
"""Under which a consumer holds items."""
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
    peek: bool
    """Nothing: [] says that `least` are there, or all that will ever be for whoever has this token."""


class Taker:
    """Somebody who waits for items; `name` says who, for the stall report."""

    __slots__ = ("future", "key", "most", "name", "since", "token", "wishes")

    def __init__(self, token: Token, most: int, wishes: Wishes, name: str):
        self.token, self.most, self.wishes, self.name = token, most, wishes, name
        self.key = wishes.get("key")
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self.future: asyncio.Future[Taken] = loop.create_future()

    @property
    def spare(self) -> bool:
        return self.wishes.get("spare", False)

    def fail(self, error: BaseException) -> None:
        _fail(self.future, error)


class Putter:
    """Somebody who waits for space; once woken, a place is reserved for it."""

    __slots__ = ("future", "key", "name", "since")

    def __init__(self, key: Hashable, name: str):
        self.key, self.name = key, name
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self.future: asyncio.Future[None] = loop.create_future()

    def fail(self, error: BaseException) -> None:
        _fail(self.future, error)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: whoever was cancelled meanwhile must not make asyncio complain
