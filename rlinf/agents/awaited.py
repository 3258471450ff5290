"""Calls that have to be awaited, and say so when they are not.

In: a coroutine. Out: what it comes to, for whoever awaits it: on the event loop that it belongs to, on that of another
thread, or in a thread without one, by `.result()`. Who wakes whom: the coroutine's end, on its own loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from rlinf.config.loading import InputError, RunFailure
from rlinf.runtime.base.errors import UserError

T = TypeVar("T")


class NotAwaited(UserError, AttributeError):
    """What an answer has was asked for before it was awaited."""


class plainly:
    """Mistakes of the program that are raised inside lose their way through ours: the message is what helps."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (UserError, InputError, RunFailure)):
            raise error.with_traceback(None) from error.__cause__


class Awaited(Coroutine[Any, Any, T]):
    """A coroutine whose attributes, before it is awaited, name the `await` that is missing.

    Args:
        coroutine: what to await.
        call: what made it, such as `c.generate(…)`, for errors.
        home: the event loop that it runs on, whichever thread awaits it; None: on the one that awaits it.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], call: str, home: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._coroutine, self._call, self._home = coroutine, call, home

    def result(self, timeout: float | None = None) -> T:
        """Wait for it where nothing can be awaited: in a thread, such as that of a plain `def agent(task, llm)`.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            UserError: this thread has an event loop, which would stand still.
            TimeoutError: it takes longer.
        """
        if running_loop() is not None or self._home is None:
            self._coroutine.close()
            raise UserError(
                f"{self._call}.result(): it would keep the event loop from giving the answer; write "
                f"`await {self._call}`"
            )
        with plainly():
            return asyncio.run_coroutine_threadsafe(self, self._home).result(timeout)

    def _placed(self) -> Coroutine[Any, Any, T]:
        """The coroutine, or from another loop one that waits for it."""
        home = self._home
        if home is not None and running_loop() not in (home, None):
            self._coroutine, self._home = _elsewhere(self._coroutine, home), None
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        with plainly():
            return (yield from self._placed().__await__())

    def send(self, value: Any) -> Any:
        with plainly():
            return self._placed().send(value)

    def throw(self, *error: Any) -> Any:
        with plainly():
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # asyncio and debuggers look at a coroutine's state
            return getattr(self._coroutine, name)
        raise self._not_awaited(name)

    def __iter__(self) -> Any:
        raise self._not_awaited("items")

    def __getitem__(self, key: Any) -> Any:
        raise self._not_awaited("items")

    def _not_awaited(self, name: str) -> NotAwaited:
        how = f"`await {self._call}`"
        if self._home is not None and running_loop() is None:
            how = f"`{self._call}.result()` in a plain function, {how} in an `async def`"
        weakref.finalize(self, self._coroutine.close)  # or else Python warns of it once more, at a line of ours
        return NotAwaited(f"{self._call} was not awaited, so it has no {name} yet: write {how}")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread, if one runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _elsewhere(coroutine: Coroutine[Any, Any, T], home: asyncio.AbstractEventLoop) -> T:
    """What a coroutine comes to on another thread's event loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, home))
