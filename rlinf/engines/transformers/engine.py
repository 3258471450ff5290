"""The engine in this process: a Hugging Face causal language model, its rows joining and leaving between decode steps.

Consumes requests, of any number of `generate` calls at once. Produces completions as they end. Who wakes whom: of the
calls that wait for answers, one drives: it runs a stretch of steps in the thread that `compute` offers, hands out what
has finished, and wakes the others, of whom the next one drives on. Nothing runs when nobody waits for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Request
from rlinf.engines.transformers.admission import Admission, Call
from rlinf.engines.transformers.decode_batch import Batch
from rlinf.engines.transformers.llama_forward import fastest
from rlinf.engines.transformers.step_stats import Pace

Compute = Callable[..., Awaitable[Any]]
"""`await compute(fn, *args)` runs blocking work somewhere, one function at a time, and gives its result. Cancelled
while `fn` runs, it ends when `fn` has."""


class InThreads:
    """A `Compute` out of `asyncio.to_thread`: one function at a time, and cancelled, it waits for the thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(fn, *args))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                while not work.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([work])
                raise


class TransformersEngine:
    """An `Engine` around a model in this process.

    Args:
        model: the model, in place on its device; the engine owns its weights from now on.
        compute: where blocking work runs; an actor passes its own `compute`. Default: a thread of the event loop's.
        max_rows: answers decoded together.
        max_tokens: prompt and possible answer of all answers under way, in tokens, stay within this; None for no
            bound. A request that is larger than that is answered by itself.
        tokenizer: reads answers for stop texts; without it they are refused.
        reread: after `load`, read answers under way again with the new weights; otherwise they go on with keys and
            values that the old ones made, which costs nothing and is what most asynchronous training does.
        version: of the weights the model has now.

    Raises:
        ValueError: the model's attention is not of the plain kind that this engine decodes, or a setting is out of
            range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute: Compute | None = None,
        max_rows: int = 128,
        max_tokens: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reread: bool = False,
        version: int = 0,
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for no bound")
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._compute = compute or InThreads()
        self._reread = reread
        self._forward = fastest(model.eval(), version)
        self._decode: Any = None if tokenizer is None else tokenizer.decode
        self._batch = Batch(self._forward, max_rows, self._decode)
        self._admission = Admission(max_rows, max_tokens)
        self._driving = False
        self._working = 0  # computations under way: while there are none, the loop may touch the batch

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._forward.version

    @property
    def pace(self) -> Pace:
        """How long its steps took."""
        return self._batch.pace

    async def generate(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Completion, None]:
        """Answer requests, which may still be coming; yields each answer as soon as it is finished.

        Raises:
            ValueError: a request has an empty prompt, or stop texts and there is no tokenizer.
        """
        async with contextlib.aclosing(self.batches(requests)) as batches:
            async for completions in batches:
                for completion in completions:
                    yield completion

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncGenerator[list[Completion], None]:
        """As `generate`, but all answers that have finished since the last ones at once, for work cheaper in bulk."""
        call, admission = Call(), self._admission
        admission.calls.append(call)
        reader = call.reader = asyncio.create_task(admission.read(call, requests, self._decode is not None))
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
            admission.calls.remove(call)
            self._batch.left.append(call)
            self._settle()
            admission.wake()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests that have come; each is still yielded, with `finish="abort"` and its tokens so far.

        None ends all of them, and no more are read from where they come.
        """
        wanted = None if ids is None else set(ids)
        for call in self._admission.calls:
            if wanted is None and call.reader is not None:
                call.reader.cancel()
            ended = [ticket for ticket in call.waiting if wanted is None or ticket.request.id in wanted]
            for ticket in ended:
                call.waiting.remove(ticket)
                call.finished.append(ticket.request.ended("abort"))
        await self._work(self._batch.abort, wanted)

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        """Let go of requests that have come, for another engine to go on with: none of them is yielded here.

        Returns:
            Those that had not ended, each with what there is of its answer in `begun`.
        """
        wanted = set(ids)
        taken: list[Request] = []
        for call in self._admission.calls:
            here = [ticket for ticket in call.waiting if ticket.request.id in wanted]
            for ticket in here:
                call.waiting.remove(ticket)
            taken += [ticket.request for ticket in here]
        for ticket, request in await self._work(self._batch.take_out, wanted):
            ticket.owner.running -= 1
            taken.append(request)
        self._admission.wake()
        return taken

    async def pause(self) -> None:
        """Stop after the step under way; nothing is lost. Returns when the device is idle."""
        self._batch.paused = True
        await self._work(_nothing)

    async def resume(self) -> None:
        """Go on."""
        self._batch.paused = False
        self._admission.wake()

    async def load(self, weights: Weights) -> None:
        """Switch to other weights, between two steps of whatever is being decoded.

        Raises:
            ValueError: names or shapes differ from the model's; then nothing has changed.
        """
        await self.check(weights)
        await self._work(self._batch.load, weights, self._reread)

    async def check(self, weights: Weights) -> None:
        """Raise ValueError if `load` would; changes nothing."""
        await self._compute(self._forward.check, weights)

    async def sleep(self) -> None:
        """Drop keys and values and move the weights to the host's memory. Answers under way wait for `wake`, and so do
        weights that are loaded meanwhile."""
        await self._work(self._batch.park)

    async def wake(self) -> None:
        """Be ready again after `sleep`; answers under way are read again from their tokens. Nothing if not asleep."""
        await self._work(self._batch.unpark)

    async def _advance(self) -> bool:
        """Let in newcomers and run a stretch of steps. False if there is nothing to do before something changes."""
        batch, admission = self._batch, self._admission
        if self._driving or batch.paused:
            return False
        running = batch.live + len(batch.newcomers)
        tokens = batch.tokens + sum(ticket.need for ticket in batch.newcomers)
        free, (rows, most) = self.max_rows - running, admission.due()
        if not running or (free >= rows and tokens <= most):
            if not admission.fill(free):
                return False
            batch.newcomers.extend(admission.take(free, tokens, running))
        if not batch.live and not batch.newcomers:
            return False
        self._driving = True
        try:
            # Asleep or not: for an actor, to compute is to ask for its device, and then it is woken.
            await self._work(batch.advance, admission.due(), interrupt=False)
        except Exception as error:
            if not any(call.error is error for call in admission.calls):
                raise
        finally:
            self._driving = False
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
        """In the thread: what goes wrong is the end of all answers under way."""
        try:
            return fn(*args)
        except Exception as error:
            for ticket in self._batch.clear():
                ticket.owner.error = error
            raise

    def _settle(self) -> None:
        """Hand out what has finished, and forget those whose caller has left, unless the thread is about to."""
        batch = self._batch
        if not self._working:
            batch.drop()
        while batch.finished:
            ticket, completion = batch.finished.popleft()
            ticket.owner.running -= 1
            ticket.owner.finished.append(completion)


def _nothing() -> None:
    """What the thread does once it is idle."""
