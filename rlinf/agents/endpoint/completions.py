"""OpenAI's first protocol, `/v1/completions`: texts and token ids that the model goes on from, as they stand.

In: a request's fields. Out: answers, whole or as a stream; and how likely the model finds the prompts themselves, where
that is asked for: `echo` tells a prompt before its answer, with `logprobs` those of its tokens, too, and
`prompt_logprobs` tells them as vLLM does. With `max_tokens: 0` there is no answer: nothing is generated and recorded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.call import Call, event
from rlinf.agents.endpoint.openai import (
    LEAST_LOGPROB,
    TokenForm,
    check_plain_sampling,
    logprob_count,
    prompt_ids,
    stream_end,
    token_pairs,
    usage,
    wants_usage,
)
from rlinf.agents.endpoint.requests import (
    LARGEST,
    ClientAnswer,
    Fields,
    ModelRequest,
    invalid,
    sampling_of,
    unsupported,
)
from rlinf.agents.endpoint.streaming import Piece
from rlinf.engines.base import TextScores
from rlinf.runtime.base.tasks import cancel_all

if TYPE_CHECKING:
    from aiohttp import web

_MOST_LIKELIEST = 128
"""Likeliest tokens that are told in place of each token of a prompt, at most."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Whatever a client wants to know beside the words of answers."""

    tokens: TokenForm
    """Form in which the tokens of answers are told."""
    echo: bool
    """Each prompt before its answer."""
    likeliest: int | None
    """So many of the likeliest tokens in place of each of the prompt's, by vLLM's field; None: nothing."""

    @property
    def prompts(self) -> bool:
        """Prompts are told, too."""
        return self.echo or self.likeliest is not None

    @property
    def top(self) -> int | None:
        """So many of the likeliest tokens are needed in place of each of the prompt's; None: the model need not read it
        for that."""
        if self.likeliest is None and not (self.echo and self.tokens.logprobs):
            return None
        return max(self.likeliest or 0, 1)


async def completion_reply(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body, model = call.body, call.model()
    check_plain_sampling(body)
    body.neutral("suffix", "", why="the model goes on from the prompt alone")
    count = body.whole("n", 1, 128) or 1
    body.neutral("best_of", 1, count, why="all answers are told")
    stop_shown = body.flag("include_stop_str_in_output")
    tokens = TokenForm(call, logprob_count(body, "logprobs") is not None, body.flag("return_token_ids"))
    form = _Form(tokens, body.flag("echo"), body.whole("prompt_logprobs", 0, _MOST_LIKELIEST))
    if form.prompts and call.streamed:
        raise unsupported("stream", "with echo or prompt_logprobs an answer comes whole")
    sampling = sampling_of(body, "max_tokens", "stop", least=0 if form.prompts else 1)
    request = ModelRequest(sampling=sampling, stop_shown=stop_shown, count=count)
    with_usage, prompts = wants_usage(body), _prompts(body)
    call.accept(model)
    head: dict[str, Any] = {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": call.created,
        "model": model,
    }
    if form.prompts:
        return await _with_prompts(call, request, prompts, head, form)

    def whole(results: list[ClientAnswer]) -> dict[str, Any]:
        choices = [_choice(form, number, each, _entries(form, each)) for number, each in enumerate(results)]
        return {**head, "choices": choices, "usage": _usage(results, count)}

    def end(results: list[ClientAnswer]) -> Iterable[bytes]:
        for number, each in enumerate(results):
            choice = _choice(form, number, each, _entries(form, each))
            yield event({**head, "choices": [{**choice, "text": ""}]})
        yield from stream_end(head, _usage(results, count) if with_usage else None)

    answering = partial(_answers, call, request, prompts, head["id"])
    return await call.reply(answering, whole, _CompletionEvents(head, end))


class _CompletionEvents:
    """The chunks of a completion's stream; see `Events`."""

    def __init__(self, head: dict[str, Any], end: Callable[[list[ClientAnswer]], Iterable[bytes]]) -> None:
        self._head, self.end = head, end

    def piece(self, piece: Piece) -> Iterable[bytes]:
        choice = {"index": piece.number, "text": piece.text, "finish_reason": None, "logprobs": None}
        yield event({**self._head, "choices": [choice]})


async def _answers(call: Call, request: ModelRequest, prompts: Prompts, response: str) -> list[ClientAnswer]:
    """Answers to several prompts, in their order."""
    session = call.session = call.session or call.endpoint.conversation([], None)
    requests = [replace(request, ids=each) for each in _token_ids(session.llm.trajectories.chat, prompts)]
    asking = [
        asyncio.ensure_future(call.answers(one, f"{response}-{n}", first=n * one.count))
        for n, one in enumerate(requests)
    ]
    try:
        results = [result for one in asking for result in await one]
    finally:
        await cancel_all(asking)
    call.endpoint.noted(session, response, results, [])
    return results


Entry = tuple[str, float | None, dict[str, float] | None]
"""A token's text, its log-prob, and those of the likeliest in its place; None where nothing stands before it."""


def _entries(form: _Form, result: ClientAnswer) -> list[Entry]:
    """The tokens of an answer, if they are wanted."""
    pairs = token_pairs(form.tokens.call, result) if form.tokens.logprobs else []
    return [(text, value, {text: value}) for text, value in pairs]


def _choice(form: _Form, number: int, result: ClientAnswer, entries: Sequence[Entry]) -> dict[str, Any]:
    finish, logprobs = "length" if result.cut else "stop", _logprobs(entries) if form.tokens.logprobs else None
    choice = {"index": number, "text": result.text, "finish_reason": finish, "logprobs": logprobs}
    if form.tokens.ids:
        choice |= {"token_ids": result.reply.ids.tolist(), "prompt_token_ids": prompt_ids(result)}
    return choice


def _logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """Tokens as the protocol has them."""
    texts, values, likeliest = ([*column] for column in zip(*entries, strict=True)) if entries else ([], [], [])
    offsets = [0, *itertools.accumulate(map(len, texts))][:-1]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}


def _usage(results: list[ClientAnswer], count: int) -> dict[str, Any]:
    """Tokens of a response; a prompt that was answered several times counts once."""
    prompt_tokens = sum(each.prompt_tokens for each in results[::count])
    counts = usage(results)
    return {**counts, "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + counts["completion_tokens"]}


# Prompts -------------------------------------------------------------------------------------------------------------

Prompts = Sequence[str | list[int]]
"""Texts, or token ids."""


def _prompts(body: Fields) -> Prompts:
    """The prompts: a text, texts, token ids, or lists of token ids.

    Raises:
        ApiError: something else.
    """
    value = body.wanted("prompt", body.any("prompt"))
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_id, value)):
            return [value]
        if len(value) <= 128 and all(isinstance(each, str) for each in value):
            return value
        if len(value) <= 128 and all(isinstance(each, list) and each and all(map(_is_id, each)) for each in value):
            return value
    raise invalid("prompt", "prompt must be a string, up to 128 strings, an array of token ids, or up to 128 of those")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _token_ids(chat: ChatFormat, prompts: Prompts) -> list[np.ndarray]:
    ids = [chat.ids(each, first=True) if isinstance(each, str) else np.asarray(each, np.int64) for each in prompts]
    if not all(map(len, ids)):
        raise invalid("prompt", "prompt has no token; give at least one")
    return ids


async def _with_prompts(
    call: Call, request: ModelRequest, prompts: Prompts, head: dict[str, Any], form: _Form
) -> web.StreamResponse:
    """A response that tells of the prompts, with answers behind them or without."""
    own = call.session is None
    session = call.session = call.session or call.endpoint.conversation([], None)
    chat, top = session.llm.trajectories.chat, form.top
    ids = _token_ids(chat, prompts)
    scores = [None] * len(ids) if top is None else await session.llm.scores(ids, top)
    rows = [_Prompt.of(*each, chat.tokenizer, form) for each in zip(prompts, ids, scores, strict=True)]
    if request.sampling.get("max_new_tokens") == 0:
        call.endpoint.unheeded(session, call.body.unheeded)
        call.endpoint.metrics.prompt_tokens += (count := sum(map(len, ids)))
        if own:  # nobody goes on with it
            session.llm.end()
        counts = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        return await call.long_json(
            lambda: {**head, "choices": [each.alone(form, n) for n, each in enumerate(rows)], "usage": counts}
        )
    results = await _answers(call, request, prompts, head["id"])
    pairs = [(rows[n // request.count], each, _entries(form, each)) for n, each in enumerate(results)]

    def whole() -> dict[str, Any]:
        choices = [prompt.before(form, n, each, entries) for n, (prompt, each, entries) in enumerate(pairs)]
        return {**head, "choices": choices, "usage": _usage(results, request.count)}

    return await call.long_json(whole)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, as a client is told of it."""

    text: str
    """As it was sent; of token ids, their text."""
    ids: np.ndarray
    """int64 [tokens]"""
    scores: TextScores | None
    """Log-probs; None: they are not wanted."""
    texts: Mapping[int, str]
    """Texts of the tokens that are told, by id."""

    @staticmethod
    def of(prompt: str | list[int], ids: np.ndarray, scores: TextScores | None, tokenizer: Any, form: _Form) -> _Prompt:
        """Take the texts of all that is told."""
        wanted = {*ids.tolist(), *(scores.likeliest[:, 0].tolist() if scores is not None else ())}
        texts = {token: str(tokenizer.decode([token])) for token in (wanted if form.tokens.logprobs else ())}
        text = prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt)) if form.echo else ""
        return _Prompt(text, ids, scores, texts)

    def before(self, form: _Form, number: int, result: ClientAnswer, entries: Sequence[Entry]) -> dict[str, Any]:
        """A choice with the prompt before its answer."""
        choice = _choice(form, number, result, entries)
        return self._added(form, choice, entries)

    def alone(self, form: _Form, number: int) -> dict[str, Any]:
        """A choice without an answer."""
        choice: dict[str, Any] = {"index": number, "text": "", "finish_reason": "length", "logprobs": None}
        if form.tokens.ids:
            choice |= {"token_ids": [], "prompt_token_ids": self.ids.tolist()}
        return self._added(form, choice, ())

    def _added(self, form: _Form, choice: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
        if form.echo:
            choice["text"] = self.text + choice["text"]
            if form.tokens.logprobs:
                choice["logprobs"] = _logprobs([*self._entries(), *entries])
        if form.likeliest is not None:
            choice["prompt_logprobs"] = self._as_vllm(form.likeliest)
        return choice

    def _entries(self) -> list[Entry]:
        """The tokens, each with the likeliest one in its place."""
        assert self.scores is not None
        first, *texts = (self.texts[token] for token in self.ids.tolist())
        columns = (self.scores.logprobs, self.scores.likeliest[:, 0], self.scores.likeliest_logprobs[:, 0])
        rows = zip(texts, *(_numbers(column) for column in columns), strict=True)
        # the likeliest last: two tokens of bytes may have one text
        return [
            (first, None, None),
            *((text, own, {text: own, self.texts[top]: most}) for text, own, top, most in rows),
        ]

    def _as_vllm(self, top: int) -> list[dict[str, dict[str, float | None]] | None]:
        """Each token's log-prob and rank, and those of so many likeliest ones in its place, by their ids."""
        assert self.scores is not None
        places: list[dict[str, dict[str, float | None]] | None] = [None]
        columns = (self.scores.logprobs, self.scores.ranks, self.scores.likeliest, self.scores.likeliest_logprobs)
        rows = (self.ids[1:].tolist(), *(_numbers(column) for column in columns))
        for token, own, rank, likeliest, values in zip(*rows, strict=True):
            place = {str(token): {"logprob": own, "rank": rank or None}}
            for number, (each, value) in enumerate(zip(likeliest[:top], values, strict=False), 1):
                place.setdefault(str(each), {"logprob": value, "rank": number})
            places.append(place)
        return places


def _numbers(column: np.ndarray) -> list[Any]:
    """A column's numbers, each of which JSON has."""
    return np.maximum(column, column.dtype.type(LEAST_LOGPROB)).tolist()
