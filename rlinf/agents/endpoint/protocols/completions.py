"""OpenAI's `/v1/completions`: texts and token ids that the model goes on from, as they stand.

In: a request's fields. Out: what the official clients read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.agents.endpoint.asking import Asked, Said, sampling_of
from rlinf.agents.endpoint.errors import invalid, unsupported
from rlinf.agents.endpoint.fields import LARGEST, Fields
from rlinf.agents.endpoint.protocols.chat import IGNORED, pieces, prompt_ids, usage

if TYPE_CHECKING:
    from aiohttp import web

    from rlinf.agents.endpoint.app import Call


async def answered(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body = call.body
    model = body.wanted("model", body.text("model"))
    for name in ("frequency_penalty", "presence_penalty"):
        body.neutral(name, 0, 0.0, why="log-probs that are learned from know no penalties")
    body.neutral("logit_bias", {}, why="log-probs that are learned from know no bias")
    body.neutral("echo", False, why="the prompt is what was sent")
    body.neutral("suffix", "", why="the model goes on from the prompt alone")
    count = body.whole("n", 1, 128) or 1
    body.neutral("best_of", 1, count, why="all answers are told")
    body.ignored(*IGNORED)
    sampling = sampling_of(body, "max_tokens", "stop")
    if (seed := body.whole("seed", -(2**63), 2**63 - 1)) is not None:
        sampling["seed"] = seed
    if (wanted := body.whole("logprobs", 0, 20)) is not None and wanted > 1:
        raise unsupported("logprobs", "the record has the log-prob of the token that was drawn alone; take 1")
    ids, streamed = body.flag("return_token_ids"), body.flag("stream")
    options = body.object("stream_options")
    with_usage = options is not None and options.flag("include_usage")
    prompts, stop_shown = _prompts(body), body.flag("include_stop_str_in_output")
    body.done()
    call.endpoint.check_model(model)
    response = f"cmpl-{call.id}"
    head = {"id": response, "object": "text_completion", "created": call.created, "model": model}

    async def answers() -> list[Said]:
        session = call.session or call.endpoint.conversation([], None)
        call.session = session
        chat, asked = session.llm.trajectories.chat, []
        for prompt in prompts:
            given = chat.ids(prompt, first=True) if isinstance(prompt, str) else np.asarray(prompt, np.int64)
            if not len(given):
                raise invalid("prompt", "prompt has no token; give at least one")
            asked.append(Asked(ids=given, sampling=sampling, stop_shown=stop_shown, count=count))
        each = [asyncio.ensure_future(call.answers(one, f"{response}-{n}")) for n, one in enumerate(asked)]
        try:
            found = [said for one in each for said in await one]
        finally:
            for one in each:
                one.cancel()
            await asyncio.gather(*each, return_exceptions=True)
        call.endpoint.noted(session, response, found, [])
        return found

    def told(number: int, said: Said) -> dict[str, Any]:
        choice = {
            "index": number, "text": said.text, "finish_reason": "length" if said.cut else "stop",
            "logprobs": None if wanted is None else _logprobs(call, said),
        }  # fmt: skip
        return {**choice, "token_ids": said.reply.ids.tolist(), "prompt_token_ids": prompt_ids(said)} if ids else choice

    def chunks(said: list[Said]) -> Iterable[bytes]:
        from rlinf.agents.endpoint.app import event

        for number, each in enumerate(said):
            choice = told(number, each)
            for piece in pieces(each.text):
                yield event({**head, "choices": [{**choice, "text": piece, "finish_reason": None, "logprobs": None}]})
            yield event({**head, "choices": [{**choice, "text": ""}]})
        if with_usage:
            yield event({**head, "choices": [], "usage": _usage(said, count)})
        yield b"data: [DONE]\n\n"

    if streamed:
        return await call.stream(answers(), chunks)
    said = await answers()
    choices = [told(number, each) for number, each in enumerate(said)]
    return call.json({**head, "choices": choices, "usage": _usage(said, count)})


def _usage(said: list[Said], count: int) -> dict[str, Any]:
    """Tokens of a response; a prompt that was answered several times counts once."""
    read = sum(each.read for each in said[::count])
    told = usage(said)
    return {**told, "prompt_tokens": read, "total_tokens": read + told["completion_tokens"]}


def _prompts(body: Fields) -> list[str | list[int]]:
    """The prompts: a text, texts, token ids, or lists of token ids.

    Raises:
        ApiError: something else.
    """
    given = body.wanted("prompt", body.any("prompt"))
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(map(_is_id, given)):
            return [given]
        if len(given) <= 128 and all(isinstance(each, str) for each in given):
            return given
        if len(given) <= 128 and all(isinstance(each, list) and each and all(map(_is_id, each)) for each in given):
            return given
    raise invalid("prompt", "prompt must be a string, up to 128 strings, an array of token ids, or up to 128 of those")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _logprobs(call: Call, said: Said) -> dict[str, Any]:
    assert call.session is not None
    tokenizer, at = call.session.llm.trajectories.chat.tokenizer, 0
    tokens = [str(tokenizer.decode([int(token)])) for token in said.reply.ids]
    offsets = []
    for token in tokens:
        offsets.append(at)
        at += len(token)
    values = [max(float(value), -9999.0) for value in said.reply.logprobs]
    top = [{token: value} for token, value in zip(tokens, values, strict=True)]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
