"""Promises of a service: what was asked for, by id, and its result once it is there.

A model's requests run one after the other, in the order in which its client sent them and whatever order they arrive
in: `InOrder`. What those of several models compute is computed in common turns: `FairTurns`. Answers by the same
weights run together, and those by others wait until the engine has switched: `Switching`. Sessions of which nothing is
heard any more end: `Lives`. Who wakes whom: a request that arrives wakes its model's line; its result wakes whoever
fetches it; a timer, whatever ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.service.checkpoints import Refused
from rlinf.service.journal import Result

Work = Callable[[], Awaitable[Result]]
T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)
_KEPT = 4096
"""Results that are kept for clients who fetch them late, or again."""


def failure(error: Exception) -> dict[str, Any]:
    """Describe a failed request as clients read it; what is no mistake of theirs goes into the log, whole."""
    if isinstance(error, UserError | ValueError | FloatingPointError):
        return {"error": str(error), "category": "user"}
    logger.error("a request failed", exc_info=error)
    return {"error": f"the service failed ({type(error).__name__}); its log says why", "category": "server"}


class Promises:
    """All requests that were promised a result.

    Args:
        note: is given every result before anybody else, and whether the request had it before a restart.
    """

    def __init__(self, note: Callable[[str, Result, bool], None] = lambda id, result, again: None) -> None:
        self._results: OrderedDict[str, asyncio.Future[Result]] = OrderedDict()
        self._note = note
        self._before: dict[str, Result] = {}
        self._fetched: set[str] = set()

    def __contains__(self, id: str) -> bool:
        return id in self._results

    def over(self, id: str) -> bool:
        """The request of that id has its result."""
        return id in self._results and self._results[id].done()

    def restore(self, results: Mapping[str, Result], again: Container[str]) -> None:
        """Take results over that were there before a restart.

        Args:
            results: by request.
            again: requests of these that are run once more, for what they do; their clients keep the old results.
        """
        for id, result in results.items():
            if id in again:
                self._before[id] = result
            else:
                self._results[id] = asyncio.get_running_loop().create_future()
                self._results[id].set_result(result)

    def before(self, id: str) -> Result | None:
        """The result that a request had before a restart, if it is one that runs again."""
        return self._before.get(id)

    def unfetched(self, part: str) -> dict[str, Result]:
        """Results that were never fetched, of requests whose ids have this in them; of those that run again, all."""
        there = ((id, task) for id, task in self._results.items() if part in id and id not in self._fetched)
        before = {id: result for id, result in self._before.items() if part in id}
        return before | {id: task.result() for id, task in there if task.done() and not task.cancelled()}

    def make(self, id: str, work: Work) -> None:
        """Begin with a request, unless it has begun: the same request again has the same result.

        Args:
            id: of the request, from what the client calls it.
            work: gives its result.
        """
        if id in self._results:
            return

        async def result() -> Result:
            try:
                outcome = await work()
            except Exception as error:  # whatever it is: clients read it as the result, and bugs are in the log
                outcome = failure(error)
            again = id in self._before
            outcome = self._before.pop(id, outcome)
            self._note(id, outcome, again)
            return outcome

        self._results[id] = asyncio.create_task(result(), name=f"request {id}")
        while len(self._results) > _KEPT and next(iter(self._results.values())).done():
            self._fetched.discard(self._results.popitem(last=False)[0])

    async def result(self, id: str, seconds: float | None) -> Result | None:
        """The result of a request; None: it is not there yet.

        Args:
            id: of the request.
            seconds: to wait for it; None: until it is there.

        Raises:
            Refused: there is no such request.
        """
        if (task := self._results.get(id)) is None:
            raise Refused(f"there is no request {id[:200]!r}, or its result was fetched long ago", 404)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        self._fetched.add(id)
        return task.result()

    async def close(self) -> None:
        """Give up what is under way."""
        await cancel_all([each for each in self._results.values() if isinstance(each, asyncio.Task)])


class InOrder:
    """Runs the requests of one model, one at a time, by their numbers: 0, which makes it, 1, 2, 3, …

    Args:
        first: number of the first one; those before it are over.
    """

    def __init__(self, first: int = 0) -> None:
        self._next, self._last = first, first - 1
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._busy = False

    @property
    def over(self) -> int:
        """Number of the last request that is over; all before it are, too."""
        return self._next - 1

    @property
    def last(self) -> int:
        """Number of the last request that is known."""
        return max(self._next - 1, self._last)

    @property
    def missing(self) -> int | None:
        """Number of the request for which all others wait, since it did not come."""
        return None if self._busy or not self._waiting else self._next

    def promise(self, number: int) -> None:
        """Know of a request before it is run: one without a number, at the same moment, has another."""
        self._last = max(self._last, number)

    async def run(self, number: int, work: Work) -> Result:
        """Run a request when all before it are over.

        Args:
            number: of the request.
            work: gives its result.

        Raises:
            Refused: that number was used.
        """
        if number < self._next or number in self._waiting:
            raise Refused(f"seq_id={number} was used, and the next one of this model is {self.last + 1}")
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await turn
            return await work()
        finally:
            del self._waiting[number]
            if number == self._next:
                self._next += 1
                self._busy = False
                self._wake()

    def _wake(self) -> None:
        turn = self._waiting.get(self._next)
        if not self._busy and turn is not None and not turn.done():
            self._busy = True
            turn.set_result(None)


class Switching:
    """Lets those use a thing together who want it in the same state, and changes the state between them.

    Args:
        switch: brings it into a state.
    """

    def __init__(self, switch: Callable[[str], Awaitable[None]]) -> None:
        self._switch = switch
        self.state: str | None = None
        """That it is in; None: in none that is known."""
        self._users = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._changing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def at(self, state: str) -> AsyncIterator[None]:
        """The thing is in this state; who came before for another one goes first."""
        if self._waiting or self._changing is not None or (self._users and state != self.state) or not self._users:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((state, turn))
            self._advance()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave()
                raise
        else:
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if self._users or self._changing is not None or not self._waiting:
            return
        self._changing = asyncio.create_task(self._change(self._waiting[0][0]), name="switch")

    async def _change(self, state: str) -> None:
        """Bring it into a state, and let all in who wait for that."""
        error: Exception | None = None
        try:
            if state != self.state:
                self.state = None
                await self._switch(state)
                self.state = state
        except Exception as failed:  # whatever it is, those that wait are given it
            error = failed
        self._changing = None
        together = [turn for wanted, turn in self._waiting if wanted == state and not turn.done()]
        self._waiting = deque(each for each in self._waiting if each[0] != state)
        for turn in together:
            if error is None:
                self._users += 1
                turn.set_result(None)
            else:
                turn.set_exception(error)
        self._advance()

    async def close(self) -> None:
        """Give up a change that is under way."""
        if self._changing is not None:
            await cancel_all([self._changing])


class Residents(Generic[T]):
    """Things that are fetched when they are wanted, and given up when others are wanted more.

    Args:
        fetch: gets one.
        give_up: is told of one that nobody uses.
        most: that stay without being used.
    """

    def __init__(
        self, fetch: Callable[[str], Awaitable[T]], give_up: Callable[[T], Awaitable[object]], most: int
    ) -> None:
        self._fetch, self._give_up, self._most = fetch, give_up, most
        self._there: OrderedDict[str, asyncio.Future[T]] = OrderedDict()  # the one wanted last at the end
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def at(self, key: str) -> AsyncIterator[T]:
        """One of them, which stays as long as it is used."""
        coming = self._there.get(key)
        if coming is None or (coming.done() and (coming.cancelled() or coming.exception() is not None)):
            coming = self._there[key] = asyncio.ensure_future(self._fetch(key))
        self._there.move_to_end(key)
        self._users[key] += 1
        try:
            yield await asyncio.shield(coming)
        finally:
            self._users[key] -= 1
            idle = [name for name, one in self._there.items() if one.done() and not self._users[name]]
            for name in idle[: max(0, len(idle) - self._most)]:
                idle_one = self._there.pop(name)
                if not idle_one.cancelled() and idle_one.exception() is None:
                    await self._give_up(idle_one.result())

    async def close(self) -> None:
        """Give up what is being fetched."""
        await cancel_all([each for each in self._there.values() if isinstance(each, asyncio.Task)])


class Lives:
    """Ends what gives no sign of life for so long.

    Args:
        end: is told of each that is over.
        seconds: without a sign; None: they go on for ever.
    """

    def __init__(self, end: Callable[[str], object], seconds: float | None) -> None:
        self._end, self._seconds = end, seconds
        self._ends: OrderedDict[str, float] = OrderedDict()  # when each is over, the first one first
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, key: str) -> None:
        """Wait for signs of this one."""
        if self._seconds is not None:
            self._ends[key] = asyncio.get_running_loop().time() + self._seconds
            self._ends.move_to_end(key)
            self._wake()

    def sign(self, key: str) -> None:
        """It lives, unless it is over already."""
        if key in self._ends:
            self.begin(key)

    def _wake(self) -> None:
        """Look again when the first one may be over; those that gave a sign meanwhile are later then."""
        if self._timer is None and self._ends:
            nobody = contextvars.Context()  # whoever's call set the timer has nothing to do with who is over
            when = next(iter(self._ends.values()))
            self._timer = asyncio.get_running_loop().call_at(when, self._look, context=nobody)

    def _look(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        try:
            while self._ends and next(iter(self._ends.values())) <= now:
                self._end(self._ends.popitem(last=False)[0])
        finally:
            self._wake()

    def close(self) -> None:
        """End nobody any more."""
        self._ends.clear()
        if self._timer is not None:
            self._timer.cancel()


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T, R]):
    """Something that is waited for."""

    item: T
    size: int
    result: asyncio.Future[R]
    credit: int = 0


class FairTurns(Generic[T, R]):
    """Does what several wait for in common turns, fairly by size: deficit round robin (Shreedhar and Varghese, 1995).

    In each turn everybody who waits is credited so much, and those go along whose size is within their credit; as long
    as nobody's is, all are credited again. So what is small waits for one turn, whatever others ask for.

    Args:
        work: does what is asked for in one turn; a result for each.
        quantum: that everybody is credited in a turn.
    """

    def __init__(self, work: Callable[[list[T]], Awaitable[Sequence[R]]], quantum: int) -> None:
        self._work, self._quantum = work, quantum
        self._waiting: list[_Waiting[T, R]] = []
        self._turns: asyncio.Task[None] | None = None

    async def run(self, item: T, size: int) -> R:
        """Have something done; its result.

        Args:
            item: that is asked for.
            size: by which it counts.
        """
        mine = _Waiting[T, R](item, size, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._take_turns(), name="turns")
        return await mine.result

    async def _take_turns(self) -> None:
        while going := self._next():
            try:
                results = await self._work([each.item for each in going])
            except Exception as error:  # whatever it is, those that wait are given it
                for each in going:
                    if not each.result.done():
                        each.result.set_exception(error)
                continue
            for each, result in zip(going, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)

    def _next(self) -> list[_Waiting[T, R]]:
        """Those of the next turn, who wait no more; none if nobody waits."""
        self._waiting = [each for each in self._waiting if not each.result.done()]  # others were cancelled
        going: list[_Waiting[T, R]] = []
        while self._waiting and not going:
            for each in self._waiting:
                each.credit += self._quantum
            going = [each for each in self._waiting if each.size <= each.credit]
        self._waiting = [each for each in self._waiting if each not in going]
        return going

    async def close(self) -> None:
        """Give up what is under way."""
        if self._turns is not None:
            await cancel_all([self._turns])
