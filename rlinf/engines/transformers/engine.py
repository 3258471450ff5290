"""The engine in this process: a Hugging Face causal language model, its rows joining and leaving between decode steps.

Flows in: requests, of any number of `batches` and `answer` calls at once. Flows out: completions as they end. Who wakes
whom: of the calls that wait for answers, one drives: it runs a stretch of steps in the thread that `compute` offers,
hands out what has finished, and wakes the others, of whom the next one drives on. Nothing runs when nobody waits for an
answer.

Who comes into the batch next: calls of `batches` with their requests, callers of `answer`, and when they are let in.

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
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from math import isqrt
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.data.images import Pictures
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Compute, Engine, EngineSetup, Request, StepStats, StopTexts, named
from rlinf.engines.transformers.batch import Batch
from rlinf.engines.transformers.graphs import Graphs, rows_for, unknown
from rlinf.engines.transformers.model import fastest
from rlinf.runtime.base.tasks import InThreads
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


logger = logging.getLogger(__name__)


def lacking(args: Mapping[str, Any]) -> str | None:
    """What these arguments ask for that there is not; see `rlinf.engines.base.lacking`."""
    return unknown(args.get("graphs", "auto"))


async def build(setup: EngineSetup, *, keep_tokens: int | None = None, graphs: Graphs = "auto") -> TransformersEngine:
    """Make the model in this process, and the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        keep_tokens, graphs: see `TransformersEngine`.
    """

    def made() -> TransformersEngine:
        with setup.build_model() as model:
            return TransformersEngine(
                model,
                compute=setup.compute,
                max_rows=setup.max_rows,
                max_tokens=setup.max_tokens,
                max_length=setup.max_length,
                tokenizer=setup.tokenizer,
                reread=setup.kv == "reread",
                keep_tokens=keep_tokens,
                graphs=graphs,
                pictures=setup.pictures,
                routes=setup.routes,
                padding=setup.padding,
            )

    engine: TransformersEngine = await setup.compute(made)
    logger.info("%s decodes %s", setup.name, engine.decoding)
    return engine


class TransformersEngine(Engine):
    """An `Engine` around a model in this process.

    Args:
        model: the model, in place on its device; the engine owns its weights from now on.
        compute: where blocking work runs; an actor passes its own `compute`. Default: a thread of the event loop's.
        max_rows: answers decoded together.
        max_tokens: prompt and possible answer of all answers in flight, in tokens, stay within this; None for no
            bound. A request that is larger than that is answered by itself.
        max_length: of a prompt and its possible answer, in tokens; a longer request is refused. None for no bound.
        tokenizer: reads answers for stop texts; without it they are refused.
        reread: after `load`, read answers in flight again with the new weights; otherwise they go on with keys and
            values that the old ones made, which costs nothing and is what most asynchronous training does.
        keep_tokens: of KV cache that are kept of conversations between their turns at most, those used longest ago
            going first; 0 for none. Default: what `max_tokens` leaves beside the answers in flight, or without that
            as much as `max_rows` of the longest answers may come to.
        graphs: `auto` records decode steps as CUDA graphs where model and machine allow it; `off` does not; the dotted
            path of a `graphs.Recorder` has that record instead, on the CPU, to try that way out.
        routes: tell to which experts of a mixture tokens go.
        version: of the weights the model has now.
        pictures: reads those of prompts; None if the model reads text alone.
        padding: ids of the model's head that its tokenizer has not; no answer has them.

    Raises:
        ValueError: the model's attention is not of the plain kind that this engine decodes, or a setting is out of
            range.
    """

    kv = ("keep", "reread")
    hands_over = sleeps = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute: Compute | None = None,
        max_rows: int = 128,
        max_tokens: int | None = None,
        max_length: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reread: bool = False,
        keep_tokens: int | None = None,
        graphs: Graphs = "auto",
        routes: bool = False,
        version: int = 0,
        pictures: Pictures | None = None,
        padding: tuple[int, ...] = (),
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for no bound")
        if keep_tokens is not None and keep_tokens < 0:
            raise ValueError(f"keep_tokens={keep_tokens} must be at least 0, or None for what is left of max_tokens")
        self.max_rows, self.max_tokens, self.max_length = max_rows, max_tokens, max_length
        self._compute = compute or InThreads()
        self._reread = reread
        self._forward = fastest(model.eval(), version, pictures)
        self.vocabulary = self._forward.vocabulary
        if padding:
            self._forward.padding = torch.tensor(padding, device=self._forward.device)
        self.routes = routes and self._forward.watch()
        self.reads_images = self._forward.reads_images
        self.reads_text = tokenizer is not None
        self.keeps_conversations = self._forward.continues and keep_tokens != 0
        rows, self.decoding = rows_for(self._forward, max_rows, graphs, max_tokens)
        kept = keep_tokens if self._forward.continues else 0
        self._batch = Batch(self._forward, rows, max_rows, StopTexts.of(tokenizer), max_tokens, kept)
        self._admission = Admission(max_rows, max_tokens, self.check_request)
        self._driving = False
        self._lost: deque[tuple[Request, Exception]] = deque()  # put there by the thread
        self._told: Exception | None = None  # the newest error that those who waited have been told
        self._working = 0  # computations in progress: while there are none, the loop may touch the batch

    @property
    def version(self) -> int:
        return self._forward.version

    @property
    def stats(self) -> StepStats:  # type: ignore[override]  # read here, never set
        return self._batch.stats

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncGenerator[list[Completion], None]:
        call, admission = Call(), self._admission
        admission.calls.append(call)
        call.reader = asyncio.create_task(admission.read(call, requests))
        try:
            while True:
                changed = admission.changed
                if call.finished:
                    completions = list(call.finished)
                    call.finished.clear()
                    yield completions
                elif call.error is not None:
                    raise call.error
                elif call.over:
                    return
                elif not await self._advance():
                    await changed.wait()
        finally:
            self._batch.unwanted.extend(admission.end(call))
            self._settle()
            call.reader.cancel()
            await asyncio.gather(call.reader, return_exceptions=True)
            call.reader = None  # what cancelled it has a traceback, which holds the source and this

    async def answer(self, request: Request) -> Completion:
        self.check_request(request)
        admission, callers = self._admission, self._admission.callers
        caller = admission.enter(request, self.stats.steps)
        if self._driving and admission.ready(self.stats.steps):
            self._batch.interrupted = True
        try:
            while caller.completion is None:
                changed = admission.changed
                if caller.error is not None:
                    raise caller.error
                if not callers.drives(caller):
                    await caller.woken()
                elif not await self._advance():
                    await changed.wait()
            return caller.completion
        finally:
            if admission.leave(caller):  # cancelled
                self._batch.unwanted.append(request)
                self._settle()

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        for call in self._admission.calls:
            if wanted is None and call.reader is not None:
                call.reader.cancel()
            for request in [request for request in call.waiting if wanted is None or request.id in wanted]:
                call.waiting.remove(request)
                call.ended(request, request.ended("abort"))
        await self._work(self._batch.abort, wanted)

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids) - self._admission.callers.ids
        waiting = self._waiting(wanted)
        for call in self._admission.calls:
            call.waiting = deque(request for request in call.waiting if request.id not in wanted)
        taken, partial = await self._work(self._batch.take_out, wanted)
        for request in taken:
            self._admission.left(request)
        self._admission.wake()
        return [*waiting, *partial]

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids)
        waiting = self._waiting(wanted)  # first: what waits now may join meanwhile
        return [*waiting, *(await self._work(self._batch.partial, wanted - {request.id for request in waiting}))]

    async def forget(self, conversations: Iterable[int] | None = None) -> None:
        self._batch.forgotten.append(None if conversations is None else set(conversations))
        self._settle()

    def _waiting(self, ids: set[int]) -> list[Request]:
        return [request for call in self._admission.calls for request in call.waiting if request.id in ids]

    async def pause(self) -> None:
        self._batch.paused = True
        await self._work(self._batch.settle)

    async def resume(self) -> None:
        self._batch.paused = False
        self._admission.wake()

    async def load(self, weights: Weights) -> None:
        await self.check(weights)
        await self._work(self._batch.load, weights, self._reread)

    async def check(self, weights: Weights) -> None:
        await self._compute(self._forward.check, weights)

    async def sleep(self) -> None:
        await self._work(self._batch.park)

    async def wake(self) -> None:
        await self._work(self._batch.unpark)

    async def _advance(self) -> bool:
        """Let in newcomers and run a stretch of steps. False if there is nothing to do before something changes."""
        batch, admission = self._batch, self._admission
        if self._driving or batch.paused:
            return False
        running = batch.live + len(batch.newcomers)
        tokens = batch.tokens + sum(request.cache_tokens for request in batch.newcomers)
        free, (rows, most) = self.max_rows - running, admission.due(batch.stats.steps)
        admission.offer(free, tokens, running)
        if not running or (free >= rows and tokens <= most):
            if not admission.fill(free):
                return False
            batch.newcomers.extend(admission.take(free, tokens, running))
        if not batch.live and not batch.newcomers:
            return False
        self._driving = True
        try:
            # Asleep or not: for an actor, to compute is to ask for its device, and then it is woken.
            await self._work(batch.advance, admission.due(batch.stats.steps), interrupt=False)
        except Exception as error:
            if error is not self._told:
                raise
        finally:
            self._driving, self._told = False, None
            admission.wake()
        return not batch.asleep

    async def _work(self, fn: Callable[..., Any], *args: Any, interrupt: bool = True) -> Any:
        """Have the thread work on the batch, and hand out what has finished; returns what `fn` does."""
        self._batch.interrupted = interrupt and self._driving
        self._working += 1
        try:
            return await self._compute(self._guarded, fn, *args)
        finally:
            self._working -= 1
            self._settle()
            self._admission.wake()

    def _guarded(self, fn: Callable[..., Any], *args: Any) -> Any:
        """In the thread: what goes wrong is the end of all answers in flight."""
        try:
            return fn(*args)
        except Exception as error:
            lost = self._batch.clear()
            if lost:
                error.add_note(f"the engine was answering {named(lost)}")
            self._lost.extend((request, error) for request in lost)
            raise

    def _settle(self) -> None:
        """Hand out what has finished, and forget those whose caller has left, unless the thread is about to."""
        batch = self._batch
        if not self._working:
            batch.drop()
        while batch.finished:
            request, completion = batch.finished.popleft()
            if (call := self._admission.left(request)) is not None:
                call.ended(request, completion)
        while self._lost:
            request, error = self._lost.popleft()
            if (call := self._admission.left(request)) is not None:
                call.failed(request, error)
                self._told = error


ENGINE = TransformersEngine
