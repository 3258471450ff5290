"""Runs many small programs in one sandbox, which takes a third of the time of a sandbox for each.

In: programs that define functions, and calls of those. Out: what each call returned. Who wakes whom: a caller that gets
one of the `at_once` places takes everything that waits into one sandbox, and wakes those whose programs were in it; so
batches are as large as the load makes them.

Programs in a sandbox cannot help or harm each other's results: each has a process of its own, one after the other,
which may not start further ones, has no descriptor but the file for its own results, and no copy of another program or
its results in its memory or its directory.
What the results should be is never told to it. A program that ends its sandbox has one of its own after that, and those
behind it another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlinf.sandbox.inside import caller
from rlinf.sandbox.limits import ChannelError, Limits, Program
from rlinf.sandbox.sandbox import Sandbox, shared

_HARNESS = Path(caller.__file__).read_text(encoding="utf-8")
_START = 2.0
"""Seconds of a sandbox beyond those of its programs."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Outcome of one call: its value or an error."""

    value: str | None
    """`repr` of what was returned, cut at 1,000 characters; None: it returned nothing."""
    error: str = ""
    """Why: the exception's last line, or what limit was exceeded."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One program that waits for its results."""

    code: str
    calls: tuple[str, ...]
    results: list[Returned] | None = None
    """Its results; None: there are none yet."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """It has its results, or is queued again."""
    queued: bool = True
    """It waits for a sandbox."""
    alone: bool = False
    """It is not run together with others."""


class Batched:
    """Runs many small programs in few sandboxes. Belongs to one event loop.

    Args:
        sandbox: in which they run; None takes the one that this event loop shares.
        most: programs of one sandbox.
        at_once: sandboxes at the same time.
        seconds: that a program may take, its calls included.
        memory_bytes: that a program may use.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        most: int = 128,
        at_once: int = 2,
        seconds: float = 1.0,
        memory_bytes: int = 256 << 20,
    ) -> None:
        self._sandbox, self._most, self._seconds = sandbox, most, seconds
        self._limits = Limits(memory_bytes=memory_bytes, output_bytes=most << 20, processes=4)
        self._places = asyncio.Semaphore(at_once)
        self._queue: deque[_Waiting] = deque()
        self.sandboxes = 0
        """How many were used."""

    async def returned(self, code: str, calls: Sequence[str]) -> list[Returned]:
        """Return the results of calls once a program has run.

        Args:
            code: of the program; it defines what is called.
            calls: expressions such as `f(3)`.

        Returns:
            One for each call. Nothing that the program does raises here.

        Raises:
            SandboxError: programs cannot be kept apart here, or the sandbox failed.
        """
        mine = _Waiting(code, tuple(calls))
        self._queue.append(mine)
        try:
            while mine.results is None:
                mine.news.clear()
                async with self._places:
                    if mine.queued:
                        await self._run(self._next_batch())
                if mine.results is None and not mine.queued:
                    await mine.news.wait()  # another caller has it
            return mine.results
        finally:
            if mine.queued:
                self._queue.remove(mine)

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < self._most and not (batch[0].alone or self._queue[0].alone):
            batch.append(self._queue.popleft())
        for each in batch:
            each.queued = False
        return batch

    def _again(self, batch: Sequence[_Waiting]) -> None:
        for each in reversed(batch):
            each.queued = True
            self._queue.appendleft(each)
            each.news.set()

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        """Run programs in one sandbox; those that it does not come to are queued again."""
        seconds = _START + self._seconds * len(batch)
        limits = replace(self._limits, wall_seconds=seconds, cpu_seconds=seconds)
        parts = [json.dumps([each.code, *each.calls]).encode() for each in batch]
        programs = b"".join(b"%08d%s" % (len(part), part) for part in parts)
        sandbox = shared() if self._sandbox is None else self._sandbox
        self.sandboxes += 1
        done = 0
        try:
            async with sandbox.place(), self._harness(sandbox, programs, limits) as harness:
                with contextlib.suppress(ChannelError):
                    for each in batch:
                        each.results = _read(await harness.channel.receive(), len(each.calls), self._seconds)
                        each.news.set()
                        done += 1
                ended = await harness.result() if done < len(batch) else None
        except BaseException:
            self._again(batch[done:])  # their callers are told the same, or go on where this one was cancelled
            raise
        if ended is None:
            return
        rest = batch[done:]
        if rest[0].alone:
            over = f"the program ended its sandbox ({ended.outcome})"
            rest[0].results = [Returned(None, over)] * len(rest[0].calls)
            rest[0].news.set()
            rest = rest[1:]
        elif rest:
            rest[0].alone = True
        self._again(rest)

    def _harness(
        self, sandbox: Sandbox, programs: bytes, limits: Limits
    ) -> contextlib.AbstractAsyncContextManager[Program]:
        return sandbox.program(_HARNESS, stdin=programs, args=[str(self._seconds)], limits=limits, channel=True)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batched] = weakref.WeakKeyDictionary()


async def returned(code: str, calls: Sequence[str]) -> list[Returned]:
    """Return the results of calls once a program has run, in sandboxes shared by this event loop; see `Batched`."""
    mine = _shared.setdefault(asyncio.get_running_loop(), Batched())
    return await mine.returned(code, calls)


def _read(message: bytes, count: int, seconds: float) -> list[Returned]:
    """The results of one program, which may have written anything."""
    try:
        pairs = json.loads(message)
        results = [Returned(None if value is None else str(value), str(error)) for value, error in pairs][:count]
    except (ValueError, TypeError, RecursionError):
        results = []
    over = f"it took longer than {seconds:g} s" if message == caller.LATE else "it ended before this call returned"
    return results + [Returned(None, over)] * (count - len(results))
