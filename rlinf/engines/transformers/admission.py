"""Who comes into the batch next: calls of `batches` with their requests, callers of `answer`, and when they are let in.

Flows in: requests, read from each call's source as they are granted or brought by callers one by one, and ended
answers. Flows out: requests for the batch, first come first served within a call, calls in turn. Who wakes whom: a
grant wakes the call's reader; every change wakes whoever waits on `changed`; of the callers of `answer` one at a time
does, and wakes the next when it leaves.

**When.** Newcomers are let in once a share of the rows (and of the token budget) is free, or all that is left fits, or
nothing is in flight: so a reading of prompts serves several of them. Reading costs about as much as a step, whoever is
read; rows that wait for it stand empty. With answers of L tokens, the sum of both is least at sqrt(2/L) of the rows.

**What is reproducible.** A source is read only when newcomers are due, and then it is waited for, so that it depends on
the requests alone who shares the batch with whom. A source that once let us wait longer than `PATIENCE` is slow; it is
not waited for again, and then arrival times decide. It is read no further than there is room: what is taken from a
stream here, no other rank can begin with.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from math import isqrt

from rlinf.engines.base import Completion, Request
from rlinf.runtime.streams.stream import each

PATIENCE = 0.25
"""Seconds for which a source is waited for, again and again, until it was slower once. More than a scheduling delay on
a busy machine, less than anybody minds once per call."""
_LEAST, _MOST = 1, 16
"""Newcomers are let in when between all and 1/16 of the room is free: answers of a few tokens are fastest in waves."""


class Call:
    """One `batches` in progress."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        """Read from the source, not yet in the batch."""
        self.finished: deque[Completion] = deque()
        """Not yet yielded."""
        self.running: set[Request] = set()
        """In the batch."""
        self.reader: asyncio.Task[None] | None = None
        """Reads the source."""
        self.error: BaseException | None = None
        self.reading = True
        """The source may have more."""
        self.slow = False
        """It once let us wait."""
        self.granted = 0
        """Requests that may be waiting."""
        self._grant = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None

    @property
    def wanting(self) -> bool:
        """The source was asked for more and has not answered."""
        return self.reading and len(self.waiting) < self.granted

    @property
    def over(self) -> bool:
        """Everything has been yielded."""
        return not (self.reading or self.waiting or self.running or self.finished)

    def ended(self, request: Request, completion: Completion) -> None:
        """One of its requests has got its answer."""
        self.finished.append(completion)

    def failed(self, request: Request, error: Exception) -> None:
        """One of its requests was lost."""
        self.error = error

    def grant(self, count: int) -> None:
        """Let the reader fill up to so many waiting requests."""
        self.granted = count
        if self.wanting:
            self._grant.set()

    async def granting(self) -> None:
        """Wait until one more request may be read."""
        while len(self.waiting) >= self.granted:
            self._grant.clear()
            await self._grant.wait()

    def watch(self, admission: Admission) -> None:
        """Lose patience unless the source answers in time."""
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._lose_patience, admission)

    def answered(self) -> None:
        """The source has done what it was asked for."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self, admission: Admission) -> None:
        self.slow = True
        admission.wake()


class Caller:
    """Waits for one answer, in `answer`."""

    def __init__(self, request: Request):
        self.request = request
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self._woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Its answer is there, or it is its turn to drive."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def woken(self) -> None:
        """Wait for `wake`."""
        self._woken = asyncio.get_running_loop().create_future()
        await self._woken


class Callers(Call):
    """All who wait for one answer each: together they are one call, so that thousands cost no more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = False
        self.since = 0.0
        """Decode steps made when the one who waits longest for a row came."""
        self._callers: dict[Request, Caller] = {}
        self._driver: Caller | None = None

    @property
    def nobody(self) -> bool:
        """No caller waits."""
        return not self._callers

    @property
    def ids(self) -> set[int]:
        """Of the requests whose callers wait."""
        return {request.id for request in self._callers}

    def enter(self, request: Request, steps: float) -> Caller:
        """A caller has come, after so many decode steps."""
        if not self.waiting:
            self.since = steps
        self.waiting.append(request)
        caller = self._callers[request] = Caller(request)
        return caller

    def drives(self, caller: Caller) -> bool:
        """Whether it is this one that drives; the others wait to be woken."""
        self._driver = self._driver or caller
        return self._driver is caller

    def leave(self, caller: Caller) -> None:
        """A caller has its answer, or wants it no more; if it drove, another does."""
        if self._callers.pop(caller.request, None) is not None and caller.request not in self.running:
            self.waiting.remove(caller.request)
        if self._driver is caller:
            self._driver = next(iter(self._callers.values()), None)
            if self._driver is not None:
                self._driver.wake()

    def ended(self, request: Request, completion: Completion) -> None:
        caller = self._callers.pop(request)
        caller.completion = completion
        caller.wake()

    def failed(self, request: Request, error: Exception) -> None:
        caller = self._callers.pop(request)
        caller.error = error
        caller.wake()


class Admission:
    """All calls in progress, and their turn.

    Args:
        max_rows: answers in flight at a time.
        max_tokens: of KV cache that they may come to, together; None for no bound.
        check: raises ValueError of a request that cannot be answered.
    """

    def __init__(self, max_rows: int, max_tokens: int | None, check: Callable[[Request], None]):
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.callers = Callers()
        """Of `answer`."""
        self.calls: deque[Call] = deque()
        """The one whose turn it is first."""
        self.owners: dict[Request, Call] = {}
        """Who gets the answers to the requests that are in the batch."""
        self.changed = asyncio.Event()
        """Set, and replaced, whenever something may have become possible."""
        self._share = _LEAST
        self._usual = 1.0  # tokens that an answer may come to, as far as any have been seen
        self._check = check

    def wake(self) -> None:
        """Have everybody look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def read(self, call: Call, requests: Iterable[Request] | AsyncIterable[Request]) -> None:
        """Read a call's source as far as it is granted; its failure is the call's."""
        try:
            await call.granting()
            async with _closing(each(requests)) as source:
                async for request in source:
                    self._check(request)
                    call.waiting.append(request)
                    if len(call.waiting) >= call.granted:
                        call.answered()
                        self.wake()
                        await call.granting()
                    elif call.slow:
                        self.wake()
        except Exception as error:
            call.error = error
        finally:
            call.reading = False
            call.answered()
            self.wake()

    def due(self, steps: float) -> tuple[int, int]:
        """When newcomers are to be let in: so many rows are free, and no more than so many tokens taken.

        Args:
            steps: decode steps made so far.
        """
        waiting = [request for call in self.calls for request in call.waiting]
        more = any(call.reading and not call.slow for call in self.calls)
        if not waiting and not more:  # of a slow source, word comes by `changed`
            return self.max_rows + 1, 0
        share = max(1, self.max_rows // self._share)
        rows = share if more else min(share, len(waiting))
        if not more and len(waiting) == len(self.callers.waiting) and (missing := self._missing(steps)):
            rows = self.max_rows - len(self.owners) + missing  # which are free when so many have ended
        if self.max_tokens is None:
            return rows, 1 << 62
        head = next((call.waiting[0].cache_tokens for call in self.calls if call.waiting), 0)
        need = self.max_tokens // self._share
        if not more:
            need = min(need, sum(request.cache_tokens for request in waiting))
        return rows, self.max_tokens - max(head, need)

    def enter(self, request: Request, steps: float) -> Caller:
        """Somebody waits for one answer, since so many decode steps."""
        if self.callers not in self.calls:
            self.calls.append(self.callers)
        caller = self.callers.enter(request, steps)
        self.wake()
        return caller

    def leave(self, caller: Caller) -> bool:
        """A caller has its answer or wants it no more; whether its request is still in the batch."""
        self.callers.leave(caller)
        running = self.left(caller.request) is not None
        if self.callers.nobody and self.callers in self.calls:
            self.calls.remove(self.callers)
        return running

    def ready(self, steps: float) -> bool:
        """There is a row for the callers of `answer` who wait, and they are to be let in now."""
        return len(self.owners) < self.max_rows and not self._missing(steps)

    def _missing(self, steps: float) -> int:
        """How many more callers of `answer` should come before those who wait are let in."""
        waiting = len(self.callers.waiting)
        if steps - self.callers.since >= 2 * self._share:
            return 0
        return max(0, (len(self.owners) + waiting) // self._share - waiting)

    def left(self, request: Request) -> Call | None:
        """A request is no longer in the batch; whose it was, unless its call has ended before."""
        call = self.owners.pop(request, None)
        if call is not None:
            call.running.discard(request)
        return call

    def end(self, call: Call) -> list[Request]:
        """A call is over; returns those of its requests that are in the batch."""
        self.calls.remove(call)
        for request in call.running:
            del self.owners[request]
        self.wake()
        return list(call.running)

    def fill(self, free: int) -> bool:
        """Have the sources that are waited for asked for `free` requests each; whether all have answered."""
        settled = True
        for call in self.calls:
            if call.slow:
                continue
            call.grant(free)
            if call.wanting:
                call.watch(self)
                settled = False
        return settled

    def offer(self, free: int, tokens: int, live: int) -> None:
        """Let slow sources, which nobody waits for, be read as far as there is room now.

        Args:
            free, tokens, live: see `take`.
        """
        if self.max_tokens is not None:
            self._usual = tokens / live if live else self._usual
            room = int((self.max_tokens - tokens) // self._usual)
            free = min(free, room if live else max(1, room))
        for call in self.calls:
            if call.slow:
                call.grant(max(0, free))

    def take(self, free: int, tokens: int, live: int) -> list[Request]:
        """Those who come in now, calls in turn; a request that does not fit holds up all behind it.

        Args:
            free: rows.
            tokens: of cache taken.
            live: answers in flight; if there are none, even a request above the budget comes in, by itself.
        """
        taken: list[Request] = []
        while len(taken) < free:
            call = next((call for call in self.calls if call.waiting), None)
            if call is None:
                break
            request = call.waiting[0]
            if self.max_tokens is not None and tokens + request.cache_tokens > self.max_tokens and (live or taken):
                break
            tokens += request.cache_tokens
            taken.append(call.waiting.popleft())
            call.running.add(request)
            self.owners[request] = call
            if len(self.calls) > 1:
                self.calls.remove(call)
                self.calls.append(call)
        for call in self.calls:
            if not call.slow:
                call.grant(0)
        self.offer(free - len(taken), tokens, live + len(taken))
        if taken:
            longest = max(request.sampling.max_new_tokens for request in taken)
            self._share = min(max(_LEAST, isqrt(longest // 2)), _MOST)
        return taken


def _closing(source: AsyncIterator[Request]) -> AbstractAsyncContextManager[AsyncIterator[Request]]:
    """Have a generator end its work when it is left half way; a stream ends when it is let go of."""
    return aclosing(source) if isinstance(source, AsyncGenerator) else nullcontext(source)
