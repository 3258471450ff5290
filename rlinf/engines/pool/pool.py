"""An engine and those of other processes that have joined it: together they are one engine.

Flows in: requests, as to any engine; connections of those who join. Flows out: completions, whoever made them. Who
wakes whom: every change wakes the task of each call that shares its requests out, and answers wake the reader of the
call.

Whoever has the smallest share of its rows taken gets the next request; nobody gets one for which it has no row. What a
lost engine had under way is answered anew by the others, with the same seeds, and so to the same tokens up to rounding.
One that leaves hands on its tokens too. Requests that name pictures or adapters, keep to a form or are listened to stay
with the job's own engine. Where it has none (`Absent`), everything waits until one joins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from rlinf.data.differences import Differences
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Compute, Engine, Hear, Request, StepStats, TextScores, closing
from rlinf.engines.pool.absent import Absent
from rlinf.engines.pool.member import Member
from rlinf.joining.connection import Connection
from rlinf.joining.listener import Elsewhere, Joiner, Listener
from rlinf.joining.peer import SILENCE
from rlinf.models.language.truth import Way
from rlinf.runtime.base.tasks import cancel_all, in_thread
from rlinf.runtime.streams.stream import each

_SAME = (
    *("max_rows", "max_tokens", "max_length", "vocabulary", "kv", "hands_over", "seeded", "forms", "scores", "rounds"),
    *("sleeps", "through_host", "keeps_conversations", "streams", "reads_text", "routes", "reads_images"),
)
"""Abilities of the own engine, and so of the whole."""
Check = Callable[[Request], None]
"""Raises RequestRefused of a request that cannot be answered."""
Waiting = Callable[[str], AbstractContextManager[Any]]
"""`with waiting(what):` says for what the code inside waits."""

logger = logging.getLogger(__name__)


class Call:
    """One call of `batches` in progress: its requests that nobody has yet, and its answers that nobody has read.

    Args:
        changed: called when there is more to share out.
    """

    def __init__(self, changed: Any) -> None:
        self.reading = True
        """Its source may have more."""
        self.held: deque[Request] = deque()
        """Came back from an engine that is gone."""
        self.fresh: deque[Request] = deque()
        """Have come from the source."""
        self.reader: asyncio.Task[None] | None = None
        """Reads the source."""
        self.one_more = asyncio.Event()
        """One more request is wanted of the source."""
        self.for_own: deque[Request] = deque()
        """The own engine has asked for them, and is about to read them."""
        self.own_wants = False
        """The own engine has asked for one more."""
        self.fed = asyncio.Event()
        self.own: set[int] = set()
        """Ids of the requests that the own engine has."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.error: Exception | None = None
        self.aborted = False
        self._changed_all = changed
        self._ready: list[Completion] = []
        self._news, self._read = asyncio.Event(), asyncio.Event()

    def took(self, completions: Sequence[Completion]) -> None:
        """Take answers."""
        self._ready.extend(completions)
        self.own.difference_update(one.id for one in completions)
        self.tell()

    def put_back(self, request: Request) -> None:
        """Take back a request that an engine had which is gone; an aborted call has what there is of it."""
        if self.aborted:
            self.took([request.ended("abort")])
        else:
            self.held.append(request)
            self.tell()

    def failed(self, error: Exception) -> None:
        """End with an error."""
        self.error = self.error or error
        self.tell()

    def tell(self) -> None:
        """Have its reader, and whoever shares out, look again."""
        self._news.set()
        self._changed_all()

    @property
    def unread(self) -> tuple[deque[Request], ...]:
        """Requests that no engine has read."""
        return self.held, self.fresh, self.for_own

    async def read(self) -> AsyncGenerator[list[Completion], None]:
        """Answers as they come, until there can be no more."""
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
                self._read.set()
            elif self.error is not None:
                raise self.error
            elif not (self.reading or self.tasks):
                return
            else:
                self._news.clear()
                await self._news.wait()

    async def by_own(self, batches: AsyncGenerator[list[Completion], None]) -> None:
        """Take what the own engine answers; it goes on when that has been read."""
        async with aclosing(batches):
            async for completions in batches:
                self._read.clear()
                self.took(completions)
                await self._read.wait()

    async def feed(self) -> AsyncIterator[Request]:
        """Requests for the own engine, as far as it asks for them."""
        while True:
            while not self.for_own:
                if not self.reading:
                    self.own_wants = False
                    return
                self.own_wants = True
                self.fed.clear()
                self._changed_all()
                await self.fed.wait()
            self.own_wants = False
            yield self.for_own.popleft()

    async def read_source(self, requests: Iterable[Request] | AsyncIterable[Request], check: Check) -> None:
        """Read a request whenever one is asked for."""
        try:
            await self.one_more.wait()
            async with closing(each(requests)) as source:
                async for request in source:
                    check(request)
                    self.one_more.clear()
                    self.fresh.append(request)
                    self.tell()
                    await self.one_more.wait()
        finally:
            self.reading = False
            self.fed.set()
            self.tell()


class One:
    """One call of `answer` that an engine which joined has."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Completion | Request] = asyncio.get_running_loop().create_future()
        """The answer; or the request, which somebody else is to answer."""
        self.aborted = False
        self.waits: Request | None = None
        """While nobody has it: the request, with its tokens so far."""

    def took(self, completions: Sequence[Completion]) -> None:
        """Take the answer."""
        self._ends(completions[0])

    def put_back(self, request: Request) -> None:
        """Take the request back of an engine that is gone."""
        self.waits = request
        self._ends(request.ended("abort") if self.aborted else request)

    def _ends(self, outcome: Completion | Request) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _portable(request: Request) -> bool:
    return request.adapter is None and not request.images


class Pool(Engine):
    """See above; made by `open_pool`.

    Args:
        own: the job's own engine.
        compute: runs blocking work on its device.
        made_of: what a joiner's engine is made from; it is told besides whether `weights_come` before any request.
        name: whose engine it is, for messages.
        silence: see `Member`.
        waiting: opened while answers wait for the first engine.
        elsewhere: asked of each one that wants to join; None: it joins here.
    """

    def __init__(
        self,
        own: Engine,
        compute: Compute,
        made_of: Mapping[str, Any],
        name: str,
        silence: float = SILENCE,
        waiting: Waiting = nullcontext,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        for what in _SAME:
            setattr(self, what, getattr(own, what))
        self.own = own
        """The job's own engine."""
        self.members: set[Member] = set()
        """Those that have joined."""
        self._compute, self._silence, self._name, self._waiting = compute, silence, name, waiting
        self._listener = Listener(self, "rollout", name, {**made_of, "weights_come": False}, elsewhere)
        self.differences: Differences | None = None
        """Makes what those who joined are sent of new weights; None: the whole."""
        self._sending: asyncio.Task[None] | None = None
        self.where: str | None = None
        """Where engines may join."""
        self._own_answers = not isinstance(own, Absent)
        self._turn = asyncio.Lock()  # of callers of `answer` who wait for an engine, first come, first served
        self._calls: list[Call] = []
        self._ones: dict[One, int] = {}  # with the ids of their requests
        self._alone = 0  # calls of `answer` that the own engine has
        self._talks: dict[int, Member | None] = {}  # who has read conversations; None: the own engine
        self._newest: Weights | None = None
        self._gone = StepStats()  # of members that are gone
        self._paused = self._closing = False
        self._changed = asyncio.Event()

    # As the own engine ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.own.version

    @property
    def rounding(self) -> Mapping[str, float]:  # type: ignore[override]  # read here, never set
        return self.own.rounding

    @property
    def adapters(self) -> Mapping[str, int] | None:  # type: ignore[override]  # read here, never set
        return self.own.adapters

    @property
    def way(self) -> Way:  # type: ignore[override]  # read here, never set
        return self.own.way

    @property
    def stats(self) -> StepStats:  # type: ignore[override]  # read here, never set
        return _sum([self.own.stats, self._gone, *(member.stats for member in self.members)])

    def check_request(self, request: Request) -> None:
        self.own.check_request(request)

    def form_problem(self, form: str) -> str | None:
        return self.own.form_problem(form)

    async def score(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        return await self.own.score(texts, top)

    async def unload(self, adapter: str) -> None:
        await self.own.unload(adapter)

    async def check(self, weights: Weights) -> None:
        await self.own.check(weights)

    async def sleep(self) -> None:
        await self.own.sleep()

    async def wake(self) -> None:
        await self.own.wake()

    # Sharing out ------------------------------------------------------------------------------------------------------

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncGenerator[list[Completion], None]:
        call = Call(self._tell)
        self._calls.append(call)
        call.reader = self._own(call, call.read_source(requests, self.own.check_request))
        self._own(call, self._share_out(call))
        self._own(call, call.by_own(self.own.batches(call.feed())))
        try:
            async with aclosing(call.read()) as answers:
                async for completions in answers:
                    yield completions
        finally:
            self._calls.remove(call)
            for member in self.members:
                member.forget(call)
            await cancel_all([*call.tasks])

    def _own(self, call: Call, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        call.tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            call.tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                call.failed(error)
            call.tell()

        task.add_done_callback(ended)
        return task

    async def _share_out(self, call: Call) -> None:
        """Give each request of a call to somebody with room for it, until none can come any more."""
        while call.reading or call.held or call.fresh or any(member.has(call) for member in self.members):
            queue = call.held or call.fresh
            if queue and self._give(call, queue[0]):
                queue.popleft()
                continue
            if not queue and (call.own_wants or any(map(self._takes, self.members))):
                call.one_more.set()
            await self._change()

    async def _change(self) -> None:
        """Wait for the next change; without any engine, for the next one that joins, and say so."""
        if self._own_answers or self.members:
            await self._changed.wait()
            return
        with self._waiting(f"an engine that joins: {self._listener.how}"):
            await self._changed.wait()

    def _takes(self, member: Member) -> bool:
        return member.current and not self._paused and member.load < 1

    def _give(self, call: Call, request: Request) -> bool:
        """Give a request to the one with the smallest share of its rows taken; False: nobody has room now."""
        members = [member for member in self.members if self._takes(member)] if _portable(request) else []
        least = min(members, key=lambda member: member.load, default=None)
        if least is not None and not (call.own_wants and self._own_load <= least.load):
            least.give(request, call)
            return True
        if call.own_wants:
            call.own_wants = False
            call.for_own.append(request)
            call.fed.set()
        elif call.reading or not self._own_answers:
            return False
        else:  # the own engine has read all that there was: this is one more call to it
            self._own(call, call.by_own(self.own.batches([request])))
        call.own.add(request.id)
        return True

    # One by one -------------------------------------------------------------------------------------------------------

    async def answer(self, request: Request, hear: Hear | None = None) -> Completion:
        one, member = One(), None
        self._ones[one] = request.id
        try:
            while (member := await self._given(request, one, hear)) is not None:
                outcome = await one.outcome
                if isinstance(outcome, Completion):
                    return outcome
                request, one.outcome = outcome, asyncio.get_running_loop().create_future()
            if one.aborted:
                return request.ended("abort")
        finally:
            del self._ones[one]
            if member is not None:
                member.forget(one)  # where it was cancelled
        self._alone += 1
        try:
            return await self.own.answer(request, hear)
        finally:
            self._alone -= 1
            self._tell()

    async def _given(self, request: Request, one: One, hear: Hear | None) -> Member | None:
        """Give a request to an engine that joined, and say to which; None: the own one is to answer it, or nobody."""
        if (member := self._for_one(request, hear)) is None and not self._own_answers:
            self.own.check_request(request)
            one.waits = request
            try:
                async with self._turn:
                    while not one.aborted and (member := self._for_one(request, hear)) is None:
                        await self._change()
            finally:
                one.waits = None
        if member is not None:
            member.give(request, one)
        return member

    def _for_one(self, request: Request, hear: Hear | None) -> Member | None:
        """The engine for a request by itself; None: the own one, which alone is heard while it answers, and knows
        forms. A conversation stays with whoever has read it, unless that has no room."""
        if hear is not None or request.sampling.form or not _portable(request):
            return None
        self.own.check_request(request)
        members = [member for member in self.members if self._takes(member)]
        known = request.conversation is not None and request.conversation in self._talks
        if known and ((talks := self._talks[request.conversation]) is None or talks in members):  # type: ignore[index]
            return talks
        least = min(members, key=lambda member: member.load, default=None)
        if least is not None and least.load >= self._own_load:
            least = None
        if request.conversation is not None and (least is not None or self._own_answers):
            self._talks[request.conversation] = least
        return least

    @property
    def _own_load(self) -> float:
        """Share of the own engine's rows that are taken."""
        if not self._own_answers:
            return inf
        return (sum(len(each.own) for each in self._calls) + self._alone) / self.max_rows

    async def forget(self, conversations: Iterable[int] | None = None) -> None:
        over = {*self._talks} if conversations is None else {*conversations}
        for conversation in over:
            self._talks.pop(conversation, None)
        for member in self.members:
            member.forget_conversations(None if conversations is None else over)
        await self.own.forget(None if conversations is None else over)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # Requests under way -----------------------------------------------------------------------------------------------

    def _withdrawn(self, ids: Collection[int]) -> list[Request]:
        """Take out requests that nobody has read yet."""
        out: list[Request] = []
        for call in self._calls:
            for queue in call.unread:
                its = [request for request in queue if request.id in ids]
                for request in its:
                    queue.remove(request)
                    call.own.discard(request.id)
                out += its
        return out

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        for call in self._calls:
            if wanted is None:
                call.aborted = True
                if call.reader is not None:
                    call.reader.cancel()
            for request in [one for queue in call.unread for one in queue if wanted is None or one.id in wanted]:
                self._withdrawn([request.id])
                call.took([request.ended("abort")])
        for one, id in self._ones.items():
            one.aborted |= wanted is None or id in wanted
        self._tell()
        theirs = [(each, each.ids if wanted is None else each.ids & wanted) for each in self.members]
        questions = (member.ask("abort", ids) for member, ids in theirs if ids)
        await asyncio.gather(self.own.abort(wanted), *questions, return_exceptions=True)

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids) - {*self._ones.values()}  # which have callers here
        out = self._withdrawn(wanted)
        parts = await asyncio.gather(self.own.take_out(wanted), *(each.take_out(wanted) for each in self.members))
        out = [*out, *(one for part in parts for one in part)]
        for call in self._calls:
            call.own.difference_update(one.id for one in out)
            call.tell()
        return out

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids)
        waiting = [one for call in self._calls for queue in call.unread for one in queue if one.id in wanted]
        waiting += [one.waits for one, id in self._ones.items() if id in wanted and one.waits is not None]
        wanted -= {one.id for one in waiting}
        parts = await asyncio.gather(self.own.partial(wanted), *(each.partial(wanted) for each in self.members))
        return [*waiting, *(one for part in parts for one in part)]

    async def pause(self) -> None:
        self._paused = True
        await asyncio.gather(self.own.pause(), self._ask_all("pause"))

    async def resume(self) -> None:
        self._paused = False
        await asyncio.gather(self.own.resume(), self._ask_all("resume"))
        self._tell()

    async def _ask_all(self, what: str) -> None:
        await asyncio.gather(*(each.ask(what) for each in self.members), return_exceptions=True)  # some may be lost

    async def load(self, weights: Weights) -> None:
        await self.own.load(weights)
        if weights.adapter is None:
            here = all(bucket.device.type == "cpu" for bucket in weights.buckets) and weights.version_now is None
            newest = weights if here else await self._compute(_copied, weights)
            self._newest = replace(newest, lineage=None, adapters=())  # which those who joined do not take
            self._listener.made_of["weights_come"] = True
            await self._publish(self._newest)

    async def _publish(self, newest: Weights) -> None:
        """Send the newest weights to those who joined, or begin to, where they are compared with older ones first."""
        if self._sending is not None and self._sending.done():
            await self._sending
            self._sending = None
        if self.differences is not None and self.members:
            for member in self.members:
                member.outdate()
            self._sending = self._sending or asyncio.create_task(self._send_newest(self.differences))
            return
        if self.differences is not None:
            self.differences.base = None  # nobody is there who has it
        for member in self.members:
            member.publish(newest)

    async def _send_newest(self, differences: Differences) -> None:
        """Send the newest weights as they differ from what those who joined were sent before, until there are no newer
        ones. Nobody waits for it: comparing takes as long as to read all twice."""
        compared: Weights | None = None
        while (newest := self._newest) is not None and newest is not compared:
            compared = await in_thread(partial(differences.placed, newest))
            if newest is self._newest:
                self._newest = compared
                for member in self.members:
                    member.publish(compared)

    # Joining and leaving ----------------------------------------------------------------------------------------------

    def coming(self, *, one_more: bool = False) -> int:
        """How many have joined, or are about to; see `Listener.coming`."""
        return self._listener.coming(one_more=one_more)

    async def listen(self, place: str, directory: str | None, token: str | None = None) -> str:
        """Let engines join; see `Listener.open`."""
        where = self.where = await self._listener.open(place, directory, token)
        if token is None:  # else whoever has it knows where this is
            may = "other processes may join" if self._own_answers else "it generates by engines that join alone,"
            logger.warning("%s: %s at %s: %s", self._name, may, where, self._listener.how)
        return where

    def came(self, connection: Connection, about: dict[str, Any]) -> Member:
        """See `Joinable`."""
        member = Member(connection, about, self._silence, self._tell)
        self.members.add(member)
        if self._newest is not None:
            member.publish(self._newest)
        logger.warning("%s: %s has joined; %s", self._name, member.name, self._count())
        self._tell()
        return member

    def left(self, member: Joiner | None, peer: str, reason: str) -> None:
        """See `Joinable`."""
        if self._closing:
            return
        if not isinstance(member, Member):
            logger.warning("%s: %s wanted to join and is gone: %s", self._name, peer, reason)
            return
        self.members.discard(member)
        self._talks = {conversation: who for conversation, who in self._talks.items() if who is not member}
        self._gone = _sum([self._gone, member.stats])
        count = member.lost()
        logger.warning(
            "%s: %s is gone: %s; %d answers that it had under way go to others; %s",
            *(self._name, member.name, reason, count, self._count()),
        )
        self._tell()

    def _count(self) -> str:
        count = len(self.members)
        if count == 0 and not self._own_answers:
            return f"none is there: answers wait until one joins: {self._listener.how}"
        there = f"{count} {'engine is' if count == 1 else 'engines are'} there"
        return f"{there} beside the job's own" if self._own_answers else there

    async def close(self) -> None:
        self._closing = True
        self._listener.shut()
        await cancel_all([self._sending] if self._sending is not None else [])
        await asyncio.gather(*(member.close() for member in self.members), return_exceptions=True)
        await self._listener.close()
        await self.own.close()


def _sum(parts: Iterable[StepStats]) -> StepStats:
    return StepStats(*map(sum, zip(*parts, strict=True)))


def _copied(weights: Weights) -> Weights:
    """Weights in host memory, which nobody changes. Blocking."""
    if weights.version_now is None:
        return weights.in_host_memory()
    # A trainer's own tensors. Its thread changes them, and waits for the step that loads them to end.
    return Weights.pack(((name, tensor.cpu()) for name, tensor in weights.named()), weights.version_now())
