"""OpenAI's `/v1/chat/completions`, whole or as a stream.

In: a request's fields. Out: what the official clients read. A stream begins when the answer is complete: the engine
gives whole answers, with the tokens and log-probs that are learned from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rlinf.agents.endpoint.asking import (
    Asked,
    JsonForm,
    Said,
    call_message,
    custom_schema,
    function_schema,
    json_form,
    json_wish,
    messages_checked,
    sampling_of,
    template_arguments,
    tool_choice,
)
from rlinf.agents.endpoint.errors import ApiError, invalid, unsupported
from rlinf.agents.endpoint.fields import Fields, words
from rlinf.agents.tools.calls import ToolCall

if TYPE_CHECKING:
    from aiohttp import web

    from rlinf.agents.endpoint.app import Call

IGNORED = (
    "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "verbosity", "prediction", "prompt_cache_options", "client_metadata",
)  # fmt: skip
"""Fields that say nothing about what the answer means."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PIECE = 256
"""Characters of a streamed piece of text."""


async def answered(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body = call.body
    model = body.wanted("model", body.text("model"))
    asked = _asked(body)
    logprobs, ids = _logprobs(body), body.flag("return_token_ids")
    options, streamed = body.object("stream_options"), body.flag("stream")
    with_usage = options is not None and options.flag("include_usage")
    body.done()
    call.endpoint.check_model(model)
    response = f"chatcmpl-{call.id}"
    head = {"id": response, "created": call.created, "model": model}
    answers = call.answers(asked, response)
    if streamed:
        return await call.stream(answers, lambda said: _chunks(call, head, said, logprobs, with_usage))
    said = await answers
    choices = [_choice(call, number, each, logprobs, ids) for number, each in enumerate(said)]
    whole = {**head, "object": "chat.completion", "choices": choices, "usage": usage(said)}
    if ids:
        whole["prompt_token_ids"] = prompt_ids(said[0])
    return call.json(whole)


# What is asked --------------------------------------------------------------------------------------------------------


def _asked(body: Fields) -> Asked:
    for name in ("frequency_penalty", "presence_penalty"):
        body.neutral(name, 0, 0.0, why="log-probs that are learned from know no penalties")
    body.neutral("repetition_penalty", 1, 1.0, why="log-probs that are learned from know no penalties")
    body.neutral("logit_bias", {}, why="log-probs that are learned from know no bias")
    body.neutral("modalities", ["text"], why="the model writes text alone")
    for name in ("audio", "functions", "function_call"):
        body.neutral(name, why="take messages and tools of the type function")
    body.ignored(*IGNORED)
    body.wanted("messages", body.any("messages"))
    messages = [_message(each) for each in body.objects("messages")]
    tools = [tool for each in body.objects("tools") if (tool := _tool(each)) is not None]
    choice = tool_choice(body, tools, single=not body.flag("parallel_tool_calls", True))
    sampling = sampling_of(body, "max_tokens", "stop")
    if (longest := body.whole("max_completion_tokens", 1)) is not None:
        sampling["max_new_tokens"] = longest
    for theirs, ours in (("min_tokens", "min_new_tokens"), ("seed", "seed")):
        low, high = (-(2**63), 2**63 - 1) if ours == "seed" else (0, 2**31)
        if (value := body.whole(theirs, low, high)) is not None:
            sampling[ours] = value
    if (min_p := body.number("min_p", 0, 1)) is not None:
        sampling["min_p"] = min_p
    return Asked(
        messages_checked(messages, "messages"),
        tools=tools or None,
        choice=choice,
        template=template_arguments(body),
        stop_shown=body.flag("include_stop_str_in_output"),
        sampling=sampling,
        form=_form(body.object("response_format")) or json_wish(body),
        count=body.whole("n", 1, 128) or 1,
    )


def _message(given: Fields) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = given.wanted("role", given.text("role"))
    if role not in _ROLES:
        raise invalid(given.path("role"), f"{given.path('role')}: there is no role {role!r:.50}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    content = given.any("content")
    if content is None and role != "assistant":
        given.wanted("content", None)
    message: dict[str, Any] = {"role": _ROLES[role], "content": words(content, given.path("content"), kinds)}
    calls = given.objects("tool_calls")
    if calls and role != "assistant":
        raise invalid(given.path("tool_calls"), f"{given.path('tool_calls')}: only the assistant calls tools")
    if given.any("function_call") is not None:
        raise unsupported(given.path("function_call"), "take tool_calls")
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    if role == "assistant" and (thought := given.any("reasoning_content") or given.any("reasoning")):
        message["reasoning_content"] = words(thought, given.path("reasoning_content"))
    if role == "tool":
        message["tool_call_id"] = given.text("tool_call_id", "")
    if (name := given.text("name")) is not None:
        message["name"] = name
    return message


def _call(given: Fields) -> dict[str, Any]:
    if given.text("type", "function") == "custom":
        custom = given.wanted("custom", given.object("custom"))
        written = {"input": custom.text("input", "")}
        return call_message(custom.any("name"), written, given.any("id"), given.path("custom"))
    function = given.wanted("function", given.object("function"))
    return call_message(function.any("name"), function.any("arguments"), given.any("id"), given.path("function"))


def _tool(given: Fields) -> dict[str, Any] | None:
    """A tool as chat templates read it; None for one that the client does not run."""
    kind = given.text("type", "function")
    if kind == "custom":
        custom = given.wanted("custom", given.object("custom"))
        return custom_schema(custom.any("name"), custom.any("description"), given.path("custom"))
    if kind != "function":
        given.note("type", kind)
        return None
    function = given.wanted("function", given.object("function"))
    path = given.path("function")
    return function_schema(function.any("name"), function.any("description"), function.any("parameters"), path)


def customs(body: Fields) -> set[str]:
    """Names of the tools that take a text of any form."""
    return {each.given["custom"]["name"] for each in body.objects("tools") if each.given.get("type") == "custom"}


def _form(given: Fields | None) -> JsonForm | None:
    if given is None:
        return None
    shape = given.object("json_schema")
    return json_form(given.any("type"), None if shape is None else shape.any("schema"), "response_format")


def _logprobs(body: Fields) -> bool:
    """Whether log-probs are wanted; at most that of the token itself can be told."""
    wanted = body.flag("logprobs")
    if (body.whole("top_logprobs", 0, 20) or 0) > 1:
        raise unsupported("top_logprobs", "the record has the log-prob of the token that was drawn alone; take 1")
    if body.any("top_logprobs") and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    return wanted


# What is told ---------------------------------------------------------------------------------------------------------


def usage(said: list[Said]) -> dict[str, Any]:
    """Tokens of a response."""
    written = sum(len(each.reply.ids) for each in said)
    return {
        "prompt_tokens": said[0].read,
        "completion_tokens": written,
        "total_tokens": said[0].read + written,
        "prompt_tokens_details": {"cached_tokens": said[0].cached},
    }


def prompt_ids(said: Said) -> list[int]:
    """All tokens that the model had before an answer."""
    return [int(token) for token in said.turn.ids()[: said.read]]


def call_text(call: ToolCall) -> str:
    """Arguments of a call, as clients read them."""
    return json.dumps(call.arguments, ensure_ascii=False)


def custom_text(call: ToolCall) -> str:
    """The text that a custom tool is given."""
    given = call.arguments.get("input")
    return given if isinstance(given, str) else call_text(call)


def token_logprobs(call: Call, said: Said) -> list[dict[str, Any]]:
    """Every token of an answer with its log-prob."""
    assert call.session is not None
    tokenizer, listed = call.session.llm.trajectories.chat.tokenizer, []
    for token, logprob in zip(said.reply.ids, said.reply.logprobs, strict=True):
        text = str(tokenizer.decode([int(token)]))
        entry = {"token": text, "logprob": max(float(logprob), -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
        listed.append({**entry, "top_logprobs": [entry]})
    return listed


def _finish(said: Said) -> str:
    return "tool_calls" if said.calls else "length" if said.cut else "stop"


def _call_shown(each: ToolCall, custom: bool) -> dict[str, Any]:
    """A call, as clients read it."""
    if custom:
        return {"id": each.id, "type": "custom", "custom": {"name": each.name, "input": custom_text(each)}}
    return {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": call_text(each)}}


def _choice(call: Call, number: int, said: Said, logprobs: bool, ids: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": said.refusal}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [_call_shown(each, each.name in customs(call.body)) for each in said.calls]
    told = {"content": token_logprobs(call, said), "refusal": None} if logprobs else None
    choice = {"index": number, "message": message, "logprobs": told, "finish_reason": _finish(said)}
    if ids:
        choice["token_ids"] = said.reply.ids.tolist()
    return choice


def pieces(text: str) -> Iterator[str]:
    """A text in pieces for a stream."""
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _chunks(call: Call, head: dict[str, Any], answers: list[Said], logprobs: bool, with_usage: bool) -> Iterable[bytes]:
    from rlinf.agents.endpoint.app import event

    head = {**head, "object": "chat.completion.chunk"}

    def chunk(number: int, delta: dict[str, Any], finish: str | None = None, told: Any = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": told, "finish_reason": finish}
        return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    for number, said in enumerate(answers):
        told = {"content": token_logprobs(call, said), "refusal": None} if logprobs else None
        yield chunk(number, {"role": "assistant", "content": "", "refusal": None}, told=told)
        for piece in pieces(said.reasoning or ""):
            yield chunk(number, {"reasoning_content": piece})
        for piece in pieces(said.text):
            yield chunk(number, {"content": piece})
        for place, each in enumerate(said.calls):
            whole = _call_shown(each, each.name in customs(call.body))
            kind, key = whole["type"], "input" if whole["type"] == "custom" else "arguments"
            begun = {**whole, "index": place, kind: {**whole[kind], key: ""}}
            yield chunk(number, {"tool_calls": [begun]})
            for piece in pieces(whole[kind][key]):
                yield chunk(number, {"tool_calls": [{"index": place, kind: {key: piece}}]})
        if said.refusal is not None:
            yield chunk(number, {"refusal": said.refusal})
        yield chunk(number, {}, _finish(said))
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(answers)})
    yield b"data: [DONE]\n\n"
