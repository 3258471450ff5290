"""The engine in the actor's own process: continuous batching of a Hugging Face causal language model.

Flows in: requests, of any number of `batches` and `answer` calls at once; their rows join and leave between decode
steps. Flows out: completions as they end. Who wakes whom: of the calls that wait for answers, one drives: it runs a
stretch of steps in the thread that `compute` offers, hands out what has finished, and wakes the others, of whom the
next one drives on. Nothing runs when nobody waits for an answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rlinf.data.weights import Weights
from rlinf.engines.base import (
    Completion,
    Compute,
    Engine,
    EngineSetup,
    Hear,
    Request,
    RequestRefused,
    Scheduler,
    StepStats,
    StopTexts,
    TextScores,
    named,
)
from rlinf.engines.grammars import Grammars
from rlinf.engines.transformers.batch import BandedRows, Batch, DecodeState
from rlinf.engines.transformers.drafts import IN_CACHE, LARGE, SMALL, Drafts
from rlinf.engines.transformers.float8 import Float8Weights
from rlinf.engines.transformers.graphs import Graphs, rows_for, unknown
from rlinf.engines.transformers.int8 import no_int8, round_layers
from rlinf.engines.transformers.model import ModelForward, fastest
from rlinf.engines.usual_lengths import UsualLengths
from rlinf.models.language.truth import Way
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tasks import InThreads, in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlinf.data.images import Pictures

logger = logging.getLogger(__name__)
_APART, _SILENCE = 0.005, 0.25
"""Seconds between two times at which listeners are told new tokens, for each of them, and at most: to tell one, and to
send it on, takes half a millisecond of the interpreter, for which steps wait, and so a tenth of their time at most.
"""


def lacking(args: Mapping[str, Any]) -> str | None:
    """Describe what these arguments ask for that there is not; see `rlinf.engines.base.lacking`."""
    return unknown(args.get("graphs", "auto"))


async def build(setup: EngineSetup, *, keep_tokens: int | None = None, graphs: Graphs = "auto") -> TransformersEngine:
    """Make the model in this process, and the engine around it; see `make`.

    Args:
        setup: what every engine is made from.
        keep_tokens, graphs: see `DecodeSettings`.
    """

    def made() -> TransformersEngine:
        with setup.build_model() as model:
            settings = DecodeSettings(
                max_rows=setup.max_rows,
                max_tokens=setup.max_tokens,
                max_length=setup.max_length,
                reread=setup.kv == "reread",
                keep_tokens=keep_tokens,
                graphs=graphs,
                routes=setup.routes,
                padding=setup.padding,
                weights=setup.weights,
                drafts=setup.drafts,
            )
            return TransformersEngine(
                model, settings, compute=setup.compute, tokenizer=setup.tokenizer, pictures=setup.pictures
            )

    engine: TransformersEngine = await setup.compute(made)
    logger.info("%s decodes %s", setup.name, engine.decoding)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How a `TransformersEngine` decodes.

    Raises:
        ValueError: a setting is out of range.
    """

    max_rows: int = 128
    """Answers decoded together."""
    max_tokens: int | None = None
    """Tokens within which prompts and possible answers of all answers in flight stay; None for no bound. A request that
    is larger than that is answered by itself."""
    max_length: int | None = None
    """Tokens of a prompt and its possible answer; a longer request is refused. None for no bound."""
    reread: bool = False
    """After `load`, read answers in flight again with the new weights; otherwise they go on with keys and values that
    the old ones made, which costs nothing and is what most asynchronous training does."""
    keep_tokens: int | None = None
    """Tokens of KV cache that are kept of conversations between their turns at most, those used longest ago going
    first; 0 for none. Default: what `max_tokens` leaves beside the answers in flight, or without that as much as
    `max_rows` of the longest answers may come to."""
    graphs: Graphs = "auto"
    """`auto` records decode steps as CUDA graphs where model and machine allow it; `off` does not; the dotted path of a
    `graphs.Recorder` has that record instead, on the CPU, to try that way out."""
    routes: bool = False
    """Tell to which experts of a mixture tokens go."""
    padding: tuple[int, ...] = ()
    """Ids of the model's head that its tokenizer has not; no answer has them."""
    weights: Literal["full", "int8", "float8"] = "full"
    """`int8` rounds those of linear layers to 8 bits, on a CPU; `float8` to float8, anywhere."""
    drafts: bool = False
    """Read drafts from history where they pay; see `rlinf.engines.transformers.drafts`."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows={self.max_rows} must be at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None for no bound")
        if self.keep_tokens is not None and self.keep_tokens < 0:
            raise ValueError(f"keep_tokens={self.keep_tokens} must be at least 0, or None for the rest of max_tokens")


class TransformersEngine(Engine):
    """An `Engine` around a model in this process.

    Args:
        model: the model, in place on its device; the engine owns its weights from now on.
        settings: how it decodes; or its fields one by one, as `TransformersEngine(model, max_rows=64)`.
        compute: where blocking work runs; an actor passes its own `compute`. Default: a thread of the event loop's.
        tokenizer: reads answers for stop texts; without it they are refused.
        version: of the weights the model has now.
        pictures: reads those of prompts; None if the model reads text alone.

    Raises:
        ValueError: the model's attention is not of the plain kind that this engine decodes, or a setting is out of
            range.
    """

    kv = ("keep", "reread")
    hands_over = sleeps = rounds = streams = forms = scores = unembeds = True

    def __init__(
        self,
        model: PreTrainedModel,
        settings: DecodeSettings | None = None,
        *,
        compute: Compute | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: int = 0,
        pictures: Pictures | None = None,
        **fields: Any,
    ):
        how = DecodeSettings(**fields) if settings is None else replace(settings, **fields)
        self.max_rows, self.max_tokens, self.max_length = how.max_rows, how.max_tokens, how.max_length
        self._compute = compute or InThreads()
        self._reread = how.reread
        if how.weights == "int8":
            if (problem := no_int8(model.device.type == "cpu")) is not None:
                raise WrongSetting(f"rollout.weights=int8: {problem}")
            round_layers(model)
        float8 = Float8Weights(model) if how.weights == "float8" else None
        self._forward = fastest(model.eval(), version, pictures)
        self._forward.float8 = float8
        self.vocabulary = self._forward.vocabulary
        if how.padding:
            self._forward.padding = torch.tensor(how.padding, device=self._forward.device)
        self.routes = how.routes and self._forward.watch()
        self.reads_images = self._forward.reads_images
        self.reads_text = tokenizer is not None
        reusable = how.keep_tokens if self._forward.continues else 0
        self.keeps_conversations = reusable != 0
        rows, self.decoding = rows_for(self._forward, how.max_rows, how.graphs, how.max_tokens)
        if how.drafts:
            self.decoding += _drafting(rows, self._forward)
        self.way = _way(self.decoding, self._forward, how.graphs)
        if not isinstance(rows, BandedRows):  # recorded steps have no place for them
            self._forward.adapters = None
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._forward.vocabulary)
        usual = UsualLengths()
        more = (StopTexts.of(tokenizer), how.max_tokens, reusable, self._grammars, usual)
        self._batch = Batch(self._forward, rows, how.max_rows, *more)
        reserving = None if how.max_tokens is None else usual
        self._scheduler = Scheduler(how.max_rows, how.max_tokens, self.check_request, reserving=reserving)
        self._listeners: dict[Request, Hear] = {}
        self._unheard: set[Request] = set()  # listeners to these have heard no token yet
        self._untold: dict[Request, list[int]] = {}
        self._silent_until = 0.0
        self._driving = False
        self._lost: deque[tuple[Request, Exception]] = deque()  # put there by the thread
        self._told: Exception | None = None  # the newest error that those who waited have been told
        self._working = 0  # computations in progress: while there are none, the loop may touch the batch

    @property
    def version(self) -> int:
        return self._forward.version

    @property
    def adapters(self) -> Mapping[str, int] | None:  # type: ignore[override]  # read here, never set
        return None if self._forward.adapters is None else self._forward.adapters.versions

    @property
    def rounding(self) -> Mapping[str, float]:  # type: ignore[override]  # read here, never set
        return {} if (rounded := self._forward.rounded) is None else rounded.metrics

    @property
    def stats(self) -> StepStats:  # type: ignore[override]  # read here, never set
        return self._batch.stats

    def batches(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[list[Completion], None]:
        return self._scheduler.batches(requests, self._advance, self._drop)

    def form_problem(self, form: str) -> str | None:
        return "the engine has no tokenizer" if self._grammars is None else self._grammars.problem(form)

    async def answer(self, request: Request, hear: Hear | None = None) -> Completion:
        if form := request.sampling.form:
            await in_thread(lambda: self.form_problem(form))  # for `check_request`
        caller = self._scheduler.enter(request, self.stats.steps)
        if self._driving and self._scheduler.ready(self.stats.steps):
            self._batch.interrupted = True
        if hear is None:
            return await self._scheduler.answer(caller, self._advance, self._drop)
        self._listeners[request] = hear
        self._unheard.add(request)
        self._batch.watched.add(request)
        try:
            return await self._scheduler.answer(caller, self._advance, self._drop)
        finally:
            self._batch.watched.discard(request)
            self._unheard.discard(request)
            self._untold.pop(request, None)
            del self._listeners[request]

    def _tell(self) -> None:
        """Tell listeners the tokens that have come: the first ones at once, and others where it is time."""
        while self._batch.new_tokens:
            request, token = self._batch.new_tokens.popleft()
            self._untold.setdefault(request, []).append(token)
        now = time.monotonic()
        if due := bool(self._untold) and now >= self._silent_until:
            self._silent_until = now + min(_SILENCE, _APART * len(self._listeners))
        for request in [one for one in self._untold if due or one in self._unheard]:
            tokens = self._untold.pop(request)
            self._unheard.discard(request)
            if (hear := self._listeners.get(request)) is not None:
                hear(tokens)

    async def score(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        for ids in texts:
            if self.max_length is not None and len(ids) > self.max_length:
                raise RequestRefused(
                    f"a text of {len(ids)} tokens is to be scored, and the model takes {self.max_length}"
                )
            self._check_ids("a text that is to be scored", ids)

        def compute() -> list[TextScores]:
            if self._batch.asleep:  # an actor's engine is not, since to compute is to ask for its device
                raise RuntimeError("the engine sleeps, and a text is to be scored: wake it")
            self._forward.check_current()
            return self._forward.scores(texts, top)

        self._batch.interrupted = self._driving  # answers wait for one another's steps, and this for none but the next
        return await self._compute(compute)

    async def _drop(self, requests: Sequence[Request]) -> None:
        self._batch.unwanted.extend(requests)
        self._settle()

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        self._scheduler.abort(wanted)
        await self._work(self._batch.abort, wanted)

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids) - self._scheduler.callers.ids
        waiting = self._scheduler.withdraw(wanted)
        requests, partial = await self._work(self._batch.take_out, wanted)
        for request in requests:
            self._scheduler.left(request)
        self._scheduler.wake()
        return [*waiting, *partial]

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        wanted = set(ids)
        waiting = self._scheduler.waiting(wanted)  # first: what waits now may join meanwhile
        return [*waiting, *(await self._work(self._batch.partial, wanted - {request.id for request in waiting}))]

    async def forget(self, conversations: Iterable[int] | None = None) -> None:
        self._batch.forgotten.append(None if conversations is None else set(conversations))
        self._settle()

    async def pause(self) -> None:
        self._batch.paused = True
        await self._work(self._batch.settle)

    async def resume(self) -> None:
        self._batch.paused = False
        self._scheduler.wake()

    async def load(self, weights: Weights) -> None:
        await self.check(weights)
        await self._work(self._batch.load, weights, self._reread)

    async def unload(self, adapter: str) -> None:
        waits = any(one.adapter == adapter for call in self._scheduler.calls for one in call.waiting)
        if waits or not await self._work(self._batch.unload, adapter):
            raise ValueError(f"adapters {adapter} are not here, or somebody is answered by them")

    async def check(self, weights: Weights) -> None:
        await self._compute(self._forward.check, weights)

    async def sleep(self) -> None:
        await self._work(self._batch.park)

    async def wake(self) -> None:
        await self._work(self._batch.unpark)

    async def _advance(self) -> bool:
        """Let in newcomers and run a stretch of steps. False if there is nothing to do before something changes."""
        batch, scheduler = self._batch, self._scheduler
        if self._driving or batch.paused:
            return False
        running = batch.live + len(batch.newcomers)
        tokens = batch.tokens + sum(map(scheduler.reserve, batch.newcomers))
        free, (rows, most) = self.max_rows - running, scheduler.due(batch.stats.steps)
        scheduler.offer(free, tokens, running)
        if not batch.put_back and (not running or (free >= rows and tokens <= most)):
            if not scheduler.fill(free):
                return False
            batch.newcomers.extend(scheduler.take(free, tokens, running))
        if not batch.live and not batch.newcomers and not batch.put_back:
            return False
        self._forward.check_current()
        self._driving = True
        try:
            # Asleep or not: for an actor, to compute is to ask for its device, and then it is woken.
            await self._work(batch.advance, scheduler.due(batch.stats.steps), interrupt=False)
        except Exception as error:
            if error is not self._told:
                raise
        finally:
            self._driving, self._told = False, None
            scheduler.wake()
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
            self._scheduler.wake()

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
        """Hand out new tokens and what has finished, and forget those whose caller has left, unless the thread is about
        to."""
        batch = self._batch
        if not self._working:
            batch.drop()
        self._tell()
        while batch.finished:
            request, completion = batch.finished.popleft()
            if (call := self._scheduler.left(request)) is not None:
                call.ended(request, completion)
        while self._lost:
            request, error = self._lost.popleft()
            if (call := self._scheduler.left(request)) is not None:
                call.failed(request, error)
                self._told = error


def _drafting(rows: DecodeState, forward: ModelForward) -> str:
    """Have rows read drafts where they can; returns what is to be said of it."""
    if not isinstance(rows, BandedRows):
        return ", without drafts, for which recorded steps have no place"
    if forward.device.type != "cpu":
        return f", without drafts, which were not tried on {forward.device.type}"
    if not forward.verifies:
        return f", without drafts, which the forward of transformers does not read ({forward.slower})"
    rows.drafts = Drafts(SMALL if forward.weights <= IN_CACHE else LARGE)
    return ", with drafts from history where they pay"


def _way(decoding: str, forward: ModelForward, graphs: Graphs) -> Way:
    """How an engine decodes, and what keeps a GPU from recorded steps where its user wants them."""
    slower, on_cpu = forward.slower, forward.device.type == "cpu"
    by = "by the lean forward" if slower is None else f"by the forward of transformers ({slower})"
    if (rounded := forward.rounded) is not None:
        by += f", with {rounded.words}, of which rounding has changed {rounded.error:.2%}"
    slow = decoding if not on_cpu and graphs == "auto" and decoding.startswith("step by step") else ""
    return Way(f"decodes {decoding}, {by}", on_cpu and slower is None and rounded is None, slow)


ENGINE = TransformersEngine
