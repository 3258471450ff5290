"""The interface of engines, which generate text with one model; the scheduler that they share; and how one is made.

Token ids in, token ids out; text is never encoded again. Every token carries the version of the weights that made it.
`tests/engines/test_engine_contract.py` holds what every engine must do.

Who wakes whom: every change wakes whoever waits on `Scheduler.changed`, and a grant of room wakes the reader of a
call's requests. Of the callers of `answer` one at a time waits for changes, and wakes the next when it leaves.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isqrt
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from rlinf.config.importing import resolve
from rlinf.data.sample import ImageRef, PrefixKey, Prompt, prefix_key
from rlinf.data.weights import Weights
from rlinf.engines import ENGINES
from rlinf.engines.grammars import missing
from rlinf.models.language.truth import Way
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tasks import InThreads
from rlinf.runtime.streams.stream import each

if TYPE_CHECKING:
    import transformers  # which takes two seconds
    from transformers import PreTrainedTokenizerBase

    from rlinf.data.images import Pictures

Finish = Literal["stop", "text", "length", "abort"]
"""Why an answer ended: a stop token (its last token), a stop text, the length limit, or `abort`."""


Kv = Literal["keep", "reread"]
"""Treatment of the keys and values of answers in flight when weights change: those of the old weights stay, or all is
read again by the new ones before the next token."""


class StopTexts:
    """Reads answers for the texts that end them.

    The text of a special token counts as a whole: a stop text is found in it where it has all of it, such as
    `<|im_end|>`, and never in a part, so `a` does not end an answer at `<pad>`.

    Args:
        tokenizer: is asked for nothing before the first stop text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def of(tokenizer: Any) -> StopTexts | None:
        """For a tokenizer; None without one."""
        return None if tokenizer is None else StopTexts(tokenizer)

    @cached_property
    def specials(self) -> Mapping[int, str]:
        """The special tokens, with their texts."""
        ids = [*getattr(self._tokenizer, "all_special_ids", ())]
        return {id: str(self._tokenizer.convert_ids_to_tokens(id)) for id in ids}

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(ids)
        return text

    def complete(self, tokens: list[int], stops: Iterable[str]) -> bool:
        """True if the newest token completed a stop text.

        Args:
            tokens: of the answer, or as many of its last ones as a stop text may have.
            stops: the texts.
        """
        specials = {*tokens} & self.specials.keys()
        for stop in stops:
            hidden = {special for special in specials if self.specials[special] not in stop}
            texts = [token for token in tokens if token not in hidden] if hidden else tokens
            if not texts or tokens[-1] in hidden or stop not in (now := self.decode(texts)):
                continue
            if now.count(stop) > self.decode(texts[:-1]).count(stop):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when an answer ends."""

    max_new_tokens: int
    """An answer without an end token is cut after this many tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from; 1 for all."""
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the likeliest, are drawn from; 0 for all."""
    min_new_tokens: int = 0
    """No stop token or text ends an answer before it has so many tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer; the one that did is its last token."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer once its decoded tokens contain one; they stay in the answer."""
    form: str = ""
    """JSON that the answer keeps to while it is decoded, the `text` of a `rlinf.engines.grammars.Form`; "" for none."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 takes the likeliest token)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 draws from all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1 draws from all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1 (0 draws from all tokens)")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} must be at least 0")
        if isinstance(self.stop_texts, str) or not all(self.stop_texts):
            raise ValueError(f"stop_texts={self.stop_texts!r} must be a tuple of texts, none of them empty")
        if self.form and self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must be 0 for an answer of a form, which ends with it"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PartialAnswer:
    """The beginning of an answer; see `Completion` for the fields."""

    response_ids: np.ndarray
    """int64 [begun], at least one token, none of which ended the answer."""
    logprobs: np.ndarray
    """float32 [begun]"""
    versions: np.ndarray
    """int32 [begun]"""
    routes: np.ndarray | None = None
    """[prompt + begun - 1, layers, experts per token]"""
    log_mass: np.ndarray | None = None
    """float32 [begun], of an answer of a form"""

    @property
    def masses(self) -> list[float]:
        """`log_mass`, also where the engine that began it does not know it."""
        count = len(self.response_ids)
        return [inf] * count if self.log_mass is None else self.log_mass.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One answer wanted."""

    id: int
    """Given back with the answer; unique among the requests in flight."""
    prompt_ids: np.ndarray
    """int64 [prompt], at least one token."""
    sampling: Sampling
    """How to answer."""
    seed: int = 0
    """Seed of the random choices: the same seed gives the same answer, whatever shares the batch, up to rounding. Token
    k is drawn with random number k of the seed, so another engine continues an answer as this one would have."""
    partial: PartialAnswer | None = None
    """Answer so far of another engine; it is read, not made again, and is part of the completion."""
    images: tuple[ImageRef, ...] = ()
    """Pictures of the prompt, in the order of their placeholders in `prompt_ids`."""
    conversation: int | None = None
    """Names the conversation of which this is a turn: an engine with `keeps_conversations` may keep what it has read
    when the answer ends, so that the next request of that name, whose prompt begins with this prompt and answer, has
    only its new tokens read. None: nothing is kept. It changes no answer, up to rounding."""
    adapter: str | None = None
    """Name of the adapters that answer, see `Engine.adapters`; None: the model itself."""

    @property
    def cache_tokens(self) -> int:
        """Tokens of KV cache that it may come to; the last token is never read."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens - 1

    @property
    def answered(self) -> int:
        """Tokens that another engine has answered."""
        return 0 if self.partial is None else len(self.partial.response_ids)

    def prefix_key(self, ids: np.ndarray | None = None) -> PrefixKey:
        """Equal for requests of which a model reads the same: the prompt's tokens (or `ids`, which begin with them) and
        the digests of its images."""
        return prefix_key(self.prompt_ids if ids is None else ids, self.images)

    def ended(self, finish: Finish) -> Completion:
        """Its completion as it came, without a further token."""
        partial = self.partial or PartialAnswer(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32))
        arrays = partial.response_ids, partial.logprobs, partial.versions
        return Completion(self.id, *arrays, finish, partial.routes, partial.log_mass)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished answer."""

    id: int
    """The request's."""
    response_ids: np.ndarray
    """int64 [response], the end token included if one was reached."""
    logprobs: np.ndarray
    """Log-prob of each token, nats, float32 [response]: under softmax(logits / temperature), or softmax(logits) if that
    is 0.

    Under the whole softmax, also where top_k, top_p or min_p left tokens out: it is what a trainer computes again, and
    it stays finite for every token when the two differ a little. With those limits a token was drawn with a higher
    probability than this says, so importance ratios are off by the left-out mass: train with plain temperature.

    Of an answer of a form (`Sampling.form`), under the softmax over the tokens that it allowed; see `log_mass`."""
    versions: np.ndarray
    """Version of the weights that made each token, int32 [response]."""
    finish: Finish
    """Why it ended."""
    routes: np.ndarray | None = None
    """Experts to which each token went, see `Sample.routes`; None unless the engine has `routes`."""
    log_mass: np.ndarray | None = None
    """Of an answer of a form: log of the probability that the form left of the whole softmax at each token, nats,
    float32 [response]; added to `logprobs` it gives the log-prob under the whole softmax, which a trainer computes
    again. Infinite where the engine does not know it. None: the answer had no form."""

    @property
    def truncated(self) -> bool:
        """The length limit cut it."""
        return self.finish == "length"


@dataclass(slots=True, eq=False)
class PartialGroup:
    """The answers to one prompt, until all have ended; `generate` continues it in place of a prompt."""

    prompt: Prompt
    """The prompt that is answered."""
    done: dict[int, Completion] = field(default_factory=dict)
    """The finished answers, by index."""
    left: dict[int, Request] = field(default_factory=dict)
    """The others, by index; on its way, each with its tokens so far. Empty: all have ended, and `generate` puts the
    group out at once."""
    temperature: float = 1.0
    """At which they are sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class TextScores:
    """Log-probs of a text's tokens, each behind those before it, under softmax(logits)."""

    logprobs: np.ndarray
    """Of every token but the first, nats, float32 [tokens - 1]."""
    ranks: np.ndarray
    """Their places in the vocabulary by likelihood, from 1, int64 [tokens - 1]; 0 where an engine does not know it: it
    comes after the likeliest that were asked for."""
    likeliest: np.ndarray
    """The likeliest tokens in place of each, the likeliest first, int64 [tokens - 1, top]."""
    likeliest_logprobs: np.ndarray
    """float32 [tokens - 1, top]"""


class StepStats(NamedTuple):
    """How fast an engine decodes and reads, as sums from its beginning."""

    steps: float = 0.0
    """Decode steps: a row that was there in all of them has got so many tokens, or more where drafts were right."""
    rows: float = 0.0
    """Rows of all steps."""
    seconds: float = 0.0
    """Seconds of all steps."""
    read_tokens: float = 0.0
    """Tokens read, padding included."""
    read_seconds: float = 0.0
    """Seconds it took to read them."""
    draft_tokens: float = 0.0
    """Drafts that steps read."""
    right_tokens: float = 0.0
    """Those of them that were drawn: rows got so many tokens more than they were in steps."""

    def stepped(self, rows: float, seconds: float, steps: float = 1.0) -> StepStats:
        """The sums after further decode steps, each of so many rows and seconds."""
        steps, rows, seconds = self.steps + steps, self.rows + steps * rows, self.seconds + steps * seconds
        return self._replace(steps=steps, rows=rows, seconds=seconds)

    def read(self, tokens: float, seconds: float) -> StepStats:
        """The sums after further tokens were read."""
        return self._replace(read_tokens=self.read_tokens + tokens, read_seconds=self.read_seconds + seconds)


class RequestRefused(ValueError):
    """An engine cannot answer a request: what was asked is wrong, and no code of ours."""


Hear = Callable[[Sequence[int]], None]
"""Is called with tokens that are new."""


class Engine(ABC):
    """Generates text with one model.

    The attributes say what an engine can do; those who use it do without what it cannot.
    """

    max_rows: int
    """Answers decoded together."""
    max_tokens: int | None = None
    """Tokens of KV cache that the answers in flight may come to, together; None for no bound."""
    max_length: int | None = None
    """Most tokens of a prompt and its answer; a longer request is refused. None for no bound."""
    vocabulary: int | None = None
    """The model has token ids below it; a request with others is refused. None: not known."""
    kv: tuple[Kv, ...] = ("reread",)
    """Ways to treat keys and values when `load` brings weights in the middle of answers; its own choice first."""
    hands_over: bool = False
    """It has `take_out`, and continues a `Request.partial`."""
    seeded: bool = True
    """`Request.seed` decides the answer. Without that, answers are fair draws which nobody can repeat."""
    forms: bool = False
    """It keeps answers to their `Sampling.form`."""
    scores: bool = False
    """It has `score`."""
    rounds: bool = False
    """It has weights of 8 bits, whole or float, where its user wants them."""
    rounding: Mapping[str, float] = MappingProxyType({})
    """Metrics of how far its weights are from those that came; empty where none was rounded."""
    sleeps: bool = False
    """It has `sleep` and `wake`, so that it can share its devices."""
    through_host: bool = False
    """It hands new weights on through host memory, as to a server, wherever they come from."""
    keeps_conversations: bool = False
    """It keeps what it has read of a `Request.conversation` for the next turn; others read everything again."""
    streams: bool = False
    """Its `answer` tells tokens as they come."""
    reads_text: bool = False
    """It can decode answers, to find stop texts in them."""
    routes: bool = False
    """It tells to which experts of its model tokens went."""
    reads_images: bool = False
    """Its model reads the pictures of a prompt."""
    adapters: Mapping[str, int] | None = None
    """Versions of the adapters that it holds beside its model, by name; None: it takes none."""
    unembeds: bool = False
    """Adapters that it takes may be of the output embedding, too."""
    way: Way = Way()
    """How it decodes."""
    _ranged: tuple[np.ndarray, int, int] | None = None  # see `_range_of`
    stats: StepStats = StepStats()
    """How fast it is, as far as it measures that; may be read at any moment."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights in use."""

    @abstractmethod
    def batches(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[list[Completion], None]:
        """Answer requests, which may still be coming; yields all answers that have finished since the last yield.

        Calls may overlap: their requests share the batch. Closing the generator, or cancelling it, aborts what it has
        not yielded.

        Raises:
            ValueError: of a request that the engine cannot answer, by its id; see `check_request`.
            Exception: what failed while it computed; a note says which requests were in flight. The engine can be used
                again.
        """

    async def generate(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Completion, None]:
        """Answer requests as `batches` does, one completion at a time."""
        async with aclosing(self.batches(requests)) as batches:
            async for completions in batches:
                for completion in completions:
                    yield completion

    async def answer(self, request: Request, hear: Hear | None = None) -> Completion:
        """Answer one request for a caller who waits for nothing else: thousands at once share the batch.

        Cancelled, it ends the request. `take_out` leaves it where it is: it has a caller here.

        Args:
            request: what to answer.
            hear: called on the event loop with new tokens, as they come, of an engine that `streams`; only with tokens
                behind which the answer goes on, so never with the one that ended it.

        Raises:
            ValueError, Exception: as `batches`.
        """
        async with aclosing(self.generate([request])) as completions:
            async for completion in completions:
                return completion
        return request.ended("abort")  # before it was read

    async def score(self, texts: Sequence[np.ndarray], top: int = 0) -> list[TextScores]:
        """Score the tokens of texts by the weights in use; nothing is generated.

        Args:
            texts: token ids, int64 [tokens], at least one each.
            top: so many of the likeliest tokens are told in place of each.

        Raises:
            RequestRefused: a text has ids that the model has not, or is longer than it takes.
        """
        raise NotImplementedError(f"{type(self).__name__} tells no log-probs of what it reads")

    @abstractmethod
    async def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests in flight; each is still yielded, with `finish="abort"` and its tokens so far.

        None ends all of them, and no more are read from where they come.
        """

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        """Drop requests in flight, for another engine to continue: none of them is yielded here.

        Returns:
            Those that had not ended, each with its tokens so far in `partial`; any engine with the same weights
            continues them as this one would have, up to rounding. (An engine around a server aborts them and keeps
            their tokens; to continue, it sends prompt and tokens as one prompt and asks for so many fewer. It may offer
            this only if the server's random numbers are counted by token as well.)
        """
        raise NotImplementedError(f"{type(self).__name__} does not hand over partial answers")

    async def forget(self, conversations: Iterable[int] | None = None) -> None:
        """Keep nothing more of these conversations, None: of all, which go on by being read again.

        An engine also does so by itself: of those used longest ago when answers need the room, and of all when it
        sleeps or gets other weights.
        """
        return

    @abstractmethod
    async def partial(self, ids: Iterable[int]) -> list[Request]:
        """Requests in flight, each with its tokens so far in `partial`; they go on here."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop after the step in progress; nothing is lost. Returns when the device is idle."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    async def check(self, weights: Weights) -> None:
        """Raise ValueError if `load` would; changes nothing."""

    @abstractmethod
    async def load(self, weights: Weights) -> None:
        """Switch to other weights, all tensors or, with a ValueError, none. Answers in flight go on with the new.

        An engine that sleeps keeps them until it wakes.
        """

    async def unload(self, adapter: str) -> None:
        """Hold adapters no more, or raise ValueError if they are not here or somebody is answered by them."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    async def sleep(self) -> None:
        """Give the device's memory back: KV caches are dropped, weights move to the host."""
        raise NotImplementedError(f"{type(self).__name__} does not sleep")

    async def wake(self) -> None:
        """Be ready again after `sleep`; answers in flight are read again from their tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not sleep")

    async def close(self) -> None:
        """End what it started, such as child processes. It is not used again."""
        return

    def _range_of(self, ids: np.ndarray) -> tuple[int, int]:
        """The least and the largest of a prompt's ids; looked for once where several answers to it are asked for in a
        row."""
        if self._ranged is None or self._ranged[0] is not ids:
            self._ranged = (ids, int(np.min(ids)), int(np.max(ids)))
        return self._ranged[1:]

    def form_problem(self, form: str) -> str | None:
        """Why no answer is kept to a `Sampling.form`; None: answers are."""
        return None if self.forms else f"{type(self).__name__} keeps answers to no form: see Engine.forms"

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        least, largest = self._range_of(ids)
        if least < 0 or (self.vocabulary is not None and largest >= self.vocabulary):
            raise RequestRefused(
                f"{name} has the token id {least if least < 0 else largest}, and the model of {type(self).__name__} "
                f"has ids from 0 to {'its last' if self.vocabulary is None else self.vocabulary - 1}: do tokenizer and "
                "model belong together?"
            )

    def check_request(self, request: Request) -> None:
        """See whether this engine can answer a request.

        Raises:
            RequestRefused: it cannot; the text names the request and what to do.
        """
        name, sampling, partial = f"request {request.id}", request.sampling, request.partial
        engine = type(self).__name__
        if len(request.prompt_ids) == 0:
            raise RequestRefused(f"{name} has an empty prompt: there is nothing to continue")
        self._check_ids(name, request.prompt_ids)
        if request.adapter is not None and request.adapter not in (self.adapters or ()):
            raise RequestRefused(
                f"{name} wants the adapters {request.adapter!r}, which {engine} has not: load them first"
            )
        if self.max_length is not None and (length := request.cache_tokens + 1) > self.max_length:
            raise RequestRefused(
                f"{name} may come to {length} tokens, a prompt of {len(request.prompt_ids)} and an answer of up to "
                f"{sampling.max_new_tokens}, and {engine} takes {self.max_length}: lower rollout.max_new_tokens, or "
                "leave out longer prompts by data.max_prompt_tokens"
            )
        if sampling.stop_texts and not self.reads_text:
            raise RequestRefused(
                f"{name} has stop texts {sampling.stop_texts}, but {engine} has no tokenizer to read its answer with"
            )
        if sampling.form and (problem := self.form_problem(sampling.form)) is not None:
            raise RequestRefused(f"{name}: {problem}")
        if sampling.form and not sampling.stop_ids:
            raise RequestRefused(f"{name} has a form to keep to, and no end token that could come behind it")
        if request.images and not self.reads_images:
            raise RequestRefused(f"{name} has {len(request.images)} images, and the model of {engine} reads text alone")
        if partial is None:
            return
        lengths = {len(partial.response_ids), len(partial.logprobs), len(partial.versions)}
        if len(lengths) > 1 or not 0 < max(lengths) < sampling.max_new_tokens:
            raise RequestRefused(
                f"{name} has begun with {len(partial.response_ids)} tokens, {len(partial.logprobs)} log-probs and "
                f"{len(partial.versions)} versions: as many of each are wanted, at least one and fewer than "
                f"max_new_tokens={sampling.max_new_tokens}"
            )
        if not self.hands_over:
            raise RequestRefused(f"{name} has a partial answer, which {engine} cannot continue")


def named(requests: Iterable[Request]) -> str:
    """Requests by their ids, for messages: `requests 3, 5, 8`, and how many more there are."""
    ids = sorted(request.id for request in requests)
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f"request{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:8]))}{more}"


Advance = Callable[[], Awaitable[bool]]
Drop = Callable[[Sequence[Request]], Awaitable[None]]

PATIENCE = 0.25
"""Seconds for which a source is waited for, again and again, until it was slower once. More than a scheduling delay on
a busy machine, less than anybody minds once per call."""
_LEAST, _MOST = 1, 16
"""Newcomers are let in when between all and 1/16 of the room is free: answers of a few tokens are fastest in waves."""


class Call:
    """One call of `batches` in progress.

    Args:
        slow: its source is not waited for.
    """

    def __init__(self, *, slow: bool = False) -> None:
        self.context = contextvars.copy_context()
        """Context of the call, and with it of its lease."""
        self.waiting: deque[Request] = deque()
        """Read from the source, and not yet in flight."""
        self.finished: deque[Completion] = deque()
        """Not yet yielded."""
        self.running: set[Request] = set()
        """In flight."""
        self.reader: asyncio.Task[None] | None = None
        """Reads the source."""
        self.error: BaseException | None = None
        self.reading = True
        """The source may have more."""
        self.slow = slow
        """Its source is not waited for, or once took too long."""
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
        """Take the answer to one of its requests."""
        self.finished.append(completion)

    def failed(self, request: Request, error: Exception) -> None:
        """Note that one of its requests was lost."""
        self.error = error

    def context_of(self, request: Request) -> contextvars.Context:
        """The context in which to work on one of its requests."""
        return self.context

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

    def watch(self, scheduler: Scheduler) -> None:
        """Lose patience unless the source answers in time."""
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._lose_patience, scheduler)

    def answered(self) -> None:
        """Note that the source has done what it was asked for."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self, scheduler: Scheduler) -> None:
        self.slow = True
        scheduler.wake()


class Caller:
    """One call of `answer` in progress."""

    def __init__(self, request: Request):
        self.request = request
        self.context = contextvars.copy_context()
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self._woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Tell it that its answer is there, or that it is its turn to drive."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def woken(self) -> None:
        """Wait for `wake`."""
        self._woken = asyncio.get_running_loop().create_future()
        await self._woken


class Callers(Call):
    """All calls of `answer` in progress: together they are one call, so that thousands cost no more than one."""

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
        """Ids of the requests whose callers wait."""
        return {request.id for request in self._callers}

    def enter(self, request: Request, steps: float) -> Caller:
        """Add a caller, after so many decode steps."""
        if not self.waiting:
            self.since = steps
        self.waiting.append(request)
        caller = self._callers[request] = Caller(request)
        return caller

    def context_of(self, request: Request) -> contextvars.Context:
        return self._callers[request].context

    def drives(self, caller: Caller) -> bool:
        """It is this caller's turn to drive the engine; the others wait to be woken."""
        self._driver = self._driver or caller
        return self._driver is caller

    def leave(self, caller: Caller) -> None:
        """Remove a caller; if it drove, another does."""
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


class Reserving(Protocol):
    """Tells how many tokens of KV cache to reserve for requests."""

    def reserve(self, request: Request) -> int:
        """Tokens of a request."""
        ...

    def clear(self) -> None:
        """Forget what was learned from answers: who comes next must not depend on who came before."""
        ...


class Scheduler:
    """Decides which requests an engine has in flight, of those of all calls of `batches` and `answer`.

    Calls take turns, and within a call who comes first is served first. A source is read no further than there is room:
    what is taken from a stream here, no other rank can begin with.

    An engine that reads prompts in between decode steps (without `admit`) asks when newcomers are `due`: once a share
    of the rows, and of the token budget, is free, or all that is left fits, or nothing is in flight; so one reading
    serves several of them. Reading costs about as much as a step, whoever is read; rows that wait for it stand empty.
    With answers of L tokens, the sum of both is least at sqrt(2/L) of the rows. Its sources are read only when
    newcomers are due, and then waited for, so that it depends on the requests alone who shares the batch with whom. A
    source that once took longer than `PATIENCE` is slow: it is waited for no more, and then arrival times decide.

    Args:
        max_rows: answers in flight at a time.
        max_tokens: of KV cache that they may come to, together; None for no bound.
        check: raises ValueError of a request that cannot be answered.
        admit: called at every change by an engine that takes each request as soon as there is room, by `take_next`.
        reserving: tells how many tokens of KV cache to reserve for a request; None: as many as it may come to.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int | None,
        check: Callable[[Request], None],
        admit: Callable[[], None] | None = None,
        reserving: Reserving | None = None,
    ):
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self.reserve: Callable[[Request], int] = attrgetter("cache_tokens") if reserving is None else reserving.reserve
        self._reserving = reserving
        self.callers = Callers()
        """Callers of `answer`."""
        self.calls: deque[Call] = deque()
        """The one whose turn it is first."""
        self.owners: dict[Request, Call] = {}
        """Calls that get the answers, by the requests in flight."""
        self.changed = asyncio.Event()
        """Set, and replaced, whenever something may have become possible."""
        self._share = _LEAST
        self._usual = 1.0  # tokens that an answer may come to, as far as any have been seen
        self._reserved: dict[Request, int] = {}  # tokens of KV cache, for each request in flight
        self._tokens = 0  # their sum
        self._check, self._admit = check, admit

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request], advance: Advance, drop: Drop
    ) -> AsyncGenerator[list[Completion], None]:
        """Answer the requests of one call; see `Engine.batches`.

        Args:
            requests: of the call.
            advance: does some work of the engine; False if there is none before something changes.
            drop: ends requests in flight that nobody wants any more.
        """
        call = Call(slow=self._admit is not None)
        self._add(call)
        call.reader = asyncio.create_task(self._read(call, requests))
        try:
            if self._admit is not None:
                self._admit()
            while True:
                changed = self.changed
                if call.finished:
                    completions = list(call.finished)
                    call.finished.clear()
                    yield completions
                elif call.error is not None:
                    raise call.error
                elif call.over:
                    return
                elif not await advance():
                    await changed.wait()
        finally:
            call.reader.cancel()
            await drop(self._end(call))
            await asyncio.gather(call.reader, return_exceptions=True)
            call.reader = None  # what cancelled it has a traceback, which holds the source and this

    def enter(self, request: Request, steps: float = 0.0) -> Caller:
        """Begin to answer one request by itself, after so many decode steps; `answer` waits for it."""
        self._check(request)
        if self.callers not in self.calls:
            self._add(self.callers)
        caller = self.callers.enter(request, steps)
        self.wake()
        return caller

    async def answer(self, caller: Caller, advance: Advance, drop: Drop) -> Completion:
        """Wait for an answer; `advance` and `drop` as for `batches`."""
        try:
            while caller.completion is None:
                changed = self.changed
                if caller.error is not None:
                    raise caller.error
                if not self.callers.drives(caller):
                    await caller.woken()
                elif not await advance():
                    await changed.wait()
            return caller.completion
        finally:
            if self._leave(caller):  # cancelled
                await drop([caller.request])

    def wake(self) -> None:
        """Have everybody look again."""
        if self._admit is not None:
            self._admit()
        self.changed.set()
        self.changed = asyncio.Event()

    # Requests that wait ------------------------------------------------------------------------------------------

    def waiting(self, ids: Container[int]) -> list[Request]:
        """Requests that wait, of those with these ids."""
        return [request for call in self.calls for request in call.waiting if request.id in ids]

    def withdraw(self, ids: Container[int]) -> list[Request]:
        """Take out requests that wait; their calls get no answer to them."""
        withdrawn = self.waiting(ids)
        for call in self.calls:
            call.waiting = deque(request for request in call.waiting if request.id not in ids)
        return withdrawn

    def abort(self, ids: Container[int] | None) -> None:
        """End requests that wait; None: all of them, and read no more."""
        for call in self.calls:
            if ids is None and call.reader is not None:
                call.reader.cancel()
            for request in [request for request in call.waiting if ids is None or request.id in ids]:
                call.waiting.remove(request)
                call.ended(request, request.ended("abort"))

    async def _read(self, call: Call, requests: Iterable[Request] | AsyncIterable[Request]) -> None:
        """Read a call's source as far as it is granted; its failure is the call's."""
        try:
            await call.granting()
            async with closing(each(requests)) as source:
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
        """The free rows and the tokens taken at which newcomers are let in.

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
        head = next((self.reserve(call.waiting[0]) for call in self.calls if call.waiting), 0)
        need = self.max_tokens // self._share
        if not more:
            need = min(need, sum(map(self.reserve, waiting)))
        return rows, self.max_tokens - max(head, need)

    def _leave(self, caller: Caller) -> bool:
        """End a call of `answer`; True if its request is still in flight."""
        self.callers.leave(caller)
        running = self.left(caller.request) is not None
        if self.callers.nobody and self.callers in self.calls:
            self.calls.remove(self.callers)
        return running

    def ready(self, steps: float) -> bool:
        """See if callers of `answer` are to be let in now, and there is a row for them."""
        return len(self.owners) < self.max_rows and not self._missing(steps)

    def _missing(self, steps: float) -> int:
        """Callers of `answer` that should still come before those who wait are let in."""
        waiting = len(self.callers.waiting)
        if steps - self.callers.since >= 2 * self._share:
            return 0
        return max(0, (len(self.owners) + waiting) // self._share - waiting)

    def left(self, request: Request) -> Call | None:
        """Note that a request is in flight no more; returns its call, unless that has ended before."""
        call = self.owners.pop(request, None)
        if call is not None:
            call.running.discard(request)
            self._tokens -= self._reserved.pop(request)
        return call

    def _end(self, call: Call) -> list[Request]:
        """End a call of `batches`; returns those of its requests that are in flight."""
        self.calls.remove(call)
        for request in call.running:
            del self.owners[request]
            self._tokens -= self._reserved.pop(request)
        self.wake()
        return list(call.running)

    def _add(self, call: Call) -> None:
        if self._reserving is not None and not self.calls:
            self._reserving.clear()
        self.calls.append(call)

    def fill(self, free: int) -> bool:
        """Ask the sources that are waited for, each for `free` requests; True once all have answered."""
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

    def take_next(self) -> list[Request]:
        """Let in all for whom there is room."""
        live = len(self.owners)
        return self.take(self.max_rows - live, self._tokens, live)

    def take(self, free: int, tokens: int, live: int) -> list[Request]:
        """Let requests in, calls in turn; a request that does not fit holds up all behind it.

        Args:
            free: rows.
            tokens: of cache taken.
            live: answers in flight; if there are none, even a request above the budget comes in, by itself.
        """
        requests: list[Request] = []
        blocked = False
        while len(requests) < free:
            call = next((call for call in self.calls if call.waiting), None)
            if call is None:
                break
            request = call.waiting[0]
            needed = self.reserve(request)
            if self.max_tokens is not None and tokens + needed > self.max_tokens and (live or requests):
                blocked = True
                break
            tokens += needed
            requests.append(call.waiting.popleft())
            call.running.add(request)
            self.owners[request] = call
            self._reserved[request] = needed
            self._tokens += needed
            if len(self.calls) > 1:
                self.calls.remove(call)
                self.calls.append(call)
        for call in self.calls:
            if not call.slow:
                call.grant(0)
        self.offer(0 if blocked else free - len(requests), tokens, live + len(requests))
        if requests:
            longest = max(request.sampling.max_new_tokens for request in requests)
            self._share = min(max(_LEAST, isqrt(longest // 2)), _MOST)
        return requests


def closing(source: AsyncIterator[Request]) -> AbstractAsyncContextManager[AsyncIterator[Request]]:
    """Have a generator end its work when it is left half way; a stream ends when it is let go of."""
    return aclosing(source) if isinstance(source, AsyncGenerator) else nullcontext(source)


Compute = Callable[..., Awaitable[Any]]
"""`await compute(fn, *args)` runs blocking work somewhere, one function at a time, and returns its result. Cancelled
while `fn` runs, it ends when `fn` has."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSetup:
    """Everything that an engine is made from: the model, its tokenizer, limits and the run's directory."""

    name: str
    """Whose engine it is, for messages and the names of processes, such as `rollout[0]`."""
    model: str | Mapping[str, Any]
    """A Hugging Face directory (or hub name), or the configuration of a new model."""
    build_model: Callable[[], AbstractContextManager[transformers.PreTrainedModel]]
    """Makes that model in this process, on its device, for engines that want it here. Blocking. While its context is
    open, no other model is made in this process: try the model out inside of it."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Decodes answers, for stop texts."""
    pictures: Pictures | None = None
    """Reads those of prompts; None if the model reads text alone."""
    seed: int = 0
    """Seed of a new model's weights."""
    dtype: torch.dtype = torch.float32
    """In which answers are computed; weights of another type are cast."""
    weights: Literal["full", "int8", "float8"] = "full"
    """`int8`, `float8`: rounded to 8 bits, by an engine that `rounds`."""
    drafts: bool = False
    """Read drafts from history, by an engine that `drafts`."""
    max_rows: int = 128
    """Answers decoded together, at least 1."""
    max_tokens: int | None = None
    """Tokens of KV cache that answers in flight may come to, together; None for no bound."""
    max_length: int | None = None
    """Tokens, prompt and answer together, for which the model has positions; None for no bound."""
    padding: tuple[int, ...] = ()
    """Ids of the model's head that its tokenizer has not, as vocabularies are padded to round numbers; no answer has
    them."""
    kv: Kv | None = None
    """Treatment of keys and values when weights change in the middle of answers; None: the engine's own choice."""
    routes: bool = False
    """Tell to which experts of a mixture tokens go, where the engine can."""
    directory: str | None = None
    """Directory of the run, where an engine may keep the output of its server; None keeps it in memory."""
    compute: Compute = field(default_factory=InThreads)
    """Runs blocking work; an actor's own `compute` holds its devices meanwhile, and wakes an engine that sleeps."""
    on_device: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    """`async with on_device():` holds the actor's devices for work that `compute` does not run, such as a request to a
    child process, and has its time counted as the rollout's."""


def lacking(engine: str, args: Mapping[str, Any] | None = None) -> str | None:
    """Describe what an engine of `ENGINES` with these arguments would lack on this machine, and how to get it; None:
    nothing.

    Engines say so by a function `lacking(args)` beside their `build`; who has none lacks nothing.
    """
    if engine not in ENGINES or (engine == "transformers" and not args):  # which takes a second to import
        return None
    check = getattr(importlib.import_module(ENGINES[engine].rpartition(".")[0]), "lacking", None)
    problem: str | None = None if check is None else check(dict(args or {}))
    return problem


def unable(engine: str, kv: Kv | None) -> str | None:
    """Why an engine of `ENGINES` cannot treat keys and values so when weights change; None: it can, or is another's."""
    if kv is None or engine not in ENGINES:
        return None
    engine_class: type[Engine] = importlib.import_module(ENGINES[engine].rpartition(".")[0]).ENGINE
    return None if kv in engine_class.kv else _other_kv(engine, engine_class.kv)


def no_forms(engine: str, args: Mapping[str, Any]) -> str | None:
    """Why an engine of `ENGINES` with these arguments keeps no answer to a JSON schema; None: it does."""
    if engine in ("sglang", "vllm") and not args.get("schemas"):
        return f"{engine} keeps answers to schemas where rollout.engine_args.schemas is set: its server then reads text"
    return missing() if engine in ENGINES else f"{engine} is no engine that is known to keep answers to schemas"


def no_rounding(engine: str, weights: str, on_cpu: bool) -> str | None:
    """Why an engine of `ENGINES` cannot have such weights of 8 bits on such devices; None: it can, or is another's."""
    if engine not in ENGINES:
        return None
    module = importlib.import_module(ENGINES[engine].rpartition(".")[0])
    if not module.ENGINE.rounds:
        return _unrounded(engine)
    problem: str | None = module.no_int8(on_cpu) if weights == "int8" else None
    return problem


def no_drafts(engine: str) -> str | None:
    """Why an engine of `ENGINES` reads no drafts from history; None: it does where it can, or is another's."""
    if engine == "sglang":
        return "sglang drafts by rollout.engine_args.args, where rollout.engine_args.seeded is false"
    return "vllm has none where answers are drawn from their seeds, as here" if engine == "vllm" else None


def _unrounded(engine: str) -> str:
    return f"{engine} has weights as they come; leave it at full, or take rollout.engine=transformers"


def _other_kv(engine: str, kinds: Sequence[Kv]) -> str:
    return (
        f"{engine} can only {' or '.join(kinds)} the keys and values of answers in flight; leave the key out for that"
    )


async def make(engine: str, setup: EngineSetup, args: Mapping[str, Any] | None = None) -> Engine:
    """Make an engine.

    Args:
        engine: one of `ENGINES`, or the dotted path of a function `build(setup, **args) -> Engine`, plain or async; a
            class whose constructor takes these is as good.
        setup: what every engine is made from.
        args: further arguments of that function.

    Raises:
        ValueError: the function does not take `args`, or the engine cannot do `setup.kv`, `setup.weights` or
            `setup.drafts`.
        TypeError: what it returns is no `Engine`.
    """
    if setup.drafts and (why := no_drafts(engine)) is not None:
        raise WrongSetting(f"rollout.drafts=true: {why}")
    path = ENGINES.get(engine, engine)
    build = resolve(path)
    try:
        inspect.signature(build).bind(setup, **(args or {}))
    except TypeError as error:
        raise WrongSetting(
            f"rollout.engine_args: {path} does not take {dict(args or {})}: {error}; it is called as "
            f"{path.rpartition('.')[2]}(setup, **rollout.engine_args)"
        ) from None
    instance = build(setup, **(args or {}))
    if inspect.isawaitable(instance):
        instance = await instance
    if not isinstance(instance, Engine):
        raise TypeError(
            f"rollout.engine={engine} gave {type(instance).__name__}, which is no rlinf.engines.base.Engine"
        )
    if setup.kv is not None and setup.kv not in instance.kv:
        await instance.close()
        raise ValueError(f"staleness.kv={setup.kv}: {_other_kv(engine, instance.kv)}")
    if setup.weights != "full" and not instance.rounds:
        await instance.close()
        raise WrongSetting(f"rollout.weights={setup.weights}: {_unrounded(engine)}")
    return instance
