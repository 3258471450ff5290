"""Tasks and threads that somebody owns: run together, cancelled and waited for, never forgotten.

Flows in: coroutines, tasks, blocking functions. Flows out: their results; the first failure. Who wakes whom: the end
of the last task wakes who waits for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rlinf.runtime.gpu.own_device import device_of_threads, work_on

from .shutdown import start_thread

S = TypeVar("S")
T = TypeVar("T")


async def finish(future: asyncio.Future[Any]) -> None:
    """Wait until a task or future has ended, come what may; a cancellation meanwhile is raised after that.

    Its outcome is the caller's to read. One that is left unread was overtaken by a cancellation, whose cause is the
    first; asyncio would report it as lost.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if not future.cancelled():
        future.exception()
    if cancelled is not None:
        raise cancelled


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], seconds: float | None = None) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait until each has ended; their outcomes are dropped.

    Args:
        seconds: to wait at most.

    Returns:
        Those that have not ended.
    """
    current = asyncio.current_task()
    waiting = [task for task in tasks if task is not current and not task.done()]
    for task in waiting:
        task.cancel()
    if not waiting:
        return []
    done, pending = await asyncio.wait(waiting, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()
    return list(pending)


async def together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """What all of these come to; the first failure cancels the others, without waiting for their ends."""
    if len(awaitables) < 2:
        return [await each for each in awaitables]
    futures = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen: the first one is raised
        raise
    finally:
        del futures  # they lead to the error, and its traceback here


async def all_or_none(work: Sequence[Awaitable[Any]]) -> None:
    """Run coroutines together; the first failure cancels the others, and is raised as it is once they have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


async def few_at_once(count: int, function: Callable[[S], Awaitable[T]], items: Iterable[S]) -> list[T]:
    """What `function` comes to for every item, in their order, with at most `count` of them running; the first failure
    cancels the others."""
    results: dict[int, T] = {}
    left = iter(list(enumerate(items)))

    async def work() -> None:
        for index, item in left:
            results[index] = await function(item)

    await all_or_none([work() for _ in range(count)])
    return [results[index] for index in sorted(results)]


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a daemon thread of its own: however long it blocks, it keeps nobody else waiting.

    Not the loop's executor: that has few threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result: Any = function()
            error = None
        except BaseException as caught:  # SystemExit, too, would end the thread and leave who waits waiting
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, future, result, error)

    start_thread(run)
    return future


class InThreads:
    """`await InThreads()(fn, *args)` runs blocking work in a thread of the event loop's, one function at a time, on
    this process's GPU if it has one.

    Cancelled while a function runs, it waits for the thread.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, fn: Callable[..., T], *args: Any) -> T:
        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(_on, device_of_threads(), fn, *args))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(asyncio.CancelledError):
                    await finish(work)
                raise


def _on(device: torch.device | None, fn: Callable[..., T], *args: Any) -> T:
    work_on(device)
    return fn(*args)


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its outcome, unless it has one; nobody need look at an error."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # marks it as seen: the one who waited may have been cancelled
