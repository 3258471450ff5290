"""One way to walk over what comes as a list here and as a stream there."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")


def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """The items of a list, a generator or a stream, as they come, for `async for`.

    A stream is handed out as itself: whoever stops half way lets go of it at once.
    """
    return aiter(items) if isinstance(items, AsyncIterable) else _plain(items)


async def _plain(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
