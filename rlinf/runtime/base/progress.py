"""How far long work is: told by whoever does it, heard by whoever shows it in this process.

In: calls from any thread, next to the work itself. Out: the same calls, at the one listener of this process, if there
is one.

The listener belongs to the process and not to a context: files are read and downloaded by threads of libraries, which
inherit no context. In a job rank 0 alone has one, so ranks and child processes are silent by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    """Some work under way; any thread may call."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done; less, if it is negative."""

    def at(self, done: float, total: float | None = None) -> None:
        """So much is done, of so much in all; None leaves what was known of that."""

    def end(self, broken: bool = False) -> None:
        """It is over; `broken`: before it was done. Later calls of this work do nothing."""


class Listener(Protocol):
    """Whoever shows work; any thread may call, and none may be held up."""

    def begin(self, what: str, total: float | None, unit: str) -> Work:
        """Some work begins; see `begin_work`."""


class _Unheard:
    """Work that nobody is told of."""

    def advance(self, amount: float = 1) -> None:
        """Say nothing."""

    def at(self, done: float, total: float | None = None) -> None:
        """Say nothing."""

    def end(self, broken: bool = False) -> None:
        """Say nothing."""


class _Process:
    listener: Listener | None = None


_UNHEARD = _Unheard()


@contextmanager
def report_to(listener: Listener) -> Iterator[None]:
    """Work that begins meanwhile is told to `listener`, in this whole process."""
    before, _Process.listener = _Process.listener, listener
    try:
        yield
    finally:
        _Process.listener = before


def listener() -> Listener | None:
    """Return the listener that hears of work in this process; None: nobody."""
    return _Process.listener


def begin_work(what: str, total: float | None = None, unit: str = "") -> Work:
    """Tell that some work begins, and be told how to say more; the caller ends it.

    Args:
        what: is done, such as "loading outputs/x/hf"; begins a line.
        total: how much there is; None: nobody knows.
        unit: of it: a plural such as "files", or "bytes"; "": a share of the whole, or nothing that is counted.
    """
    hears = _Process.listener  # read once: another thread may end it meanwhile
    return _UNHEARD if hears is None else hears.begin(what, total, unit)


@contextmanager
def work(what: str, total: float | None = None, unit: str = "") -> Iterator[Work]:
    """Report a block of code as work, like `begin_work`; its end is the work's.

    Args:
        what, total, unit: see `begin_work`.
    """
    under_way = begin_work(what, total, unit)
    try:
        yield under_way
    except BaseException:
        under_way.end(broken=True)
        raise
    under_way.end()


def track(items: Iterable[T], what: str, total: float | None = None, unit: str = "") -> Iterator[T]:
    """Yield the same items and count them as work; each is done when the next one is asked for.

    Args:
        items: any; what is left of them when nobody goes on is told as broken off.
        what, total, unit: see `begin_work`; a `total` of None takes the number of items, if they know it.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with work(what, total, unit) as under_way:
        for item in items:
            yield item
            under_way.advance()
