"""Anthropic's `/v1/messages`, whole or as a stream, and its count of tokens.

In: a request's fields. Out: what the official clients read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf.agents.endpoint.call import Call, event
from rlinf.agents.endpoint.openai import pieces
from rlinf.agents.endpoint.requests import (
    Asked,
    Fields,
    JsonForm,
    Said,
    call_message,
    fields_of,
    function_schema,
    invalid,
    json_form,
    messages_checked,
    sampling_of,
    template_arguments,
    template_of,
    tool_choice,
    words,
)

if TYPE_CHECKING:
    from aiohttp import web

_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo", "thinking")
"""Fields that say nothing about what the answer means; whether the model thinks, its chat template says."""
_THOUGHT = {"type": "thinking", "signature": "unsigned"}
"""A block of thinking without its text; clients send signatures back, and nobody checks ours."""

_SERVERS = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "mcp_tool_use", "mcp_tool_result", "container_upload",
)  # fmt: skip
"""Blocks of tools that Anthropic's own servers run; a conversation that was begun there may hold them."""


async def answered(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body = call.body
    model = body.wanted("model", body.text("model"))
    sampling = sampling_of(body, "max_tokens", "stop_sequences")
    asked = replace(_asked(body), sampling=sampling, form=_form(body))
    body.wanted("max_tokens", body.any("max_tokens"))
    streamed = body.flag("stream")
    body.done()
    call.endpoint.check_model(model)
    thinking = body.object("thinking")
    thinks = thinking is not None and thinking.any("type") != "disabled"
    response = f"msg_{call.id}"
    answers = call.answers(asked, response)
    head = {"id": response, "type": "message", "role": "assistant", "model": model}
    if streamed:
        return await call.stream(answers, lambda said: _events(head, said[0], thinks), _event({"type": "ping"}))
    (said,) = await answers
    return call.json({**head, "content": _blocks(said, thinks), **_stop(said), "usage": _usage(said)})


async def counted(call: Call) -> web.StreamResponse:
    """Say how many tokens the model would read."""
    body = call.body
    call.endpoint.check_model(body.wanted("model", body.text("model")))
    asked = _asked(body)
    body.done()
    session = call.session or next(iter(call.endpoint.sessions.values()), None)
    if session is None:
        session = call.endpoint.conversation([], None)
    parent, read = session.llm.trajectories.of_messages(asked.messages, template_of(session.llm, asked))
    return call.json({"input_tokens": len(read) + (0 if parent is None else parent.length)})


# What is asked --------------------------------------------------------------------------------------------------------


def _asked(body: Fields) -> Asked:
    """Messages as chat templates take them, tools, and how they may be called."""
    messages: list[dict[str, Any]] = []
    if (system := body.any("system")) is not None:
        messages.append({"role": "system", "content": words(system, "system")})
    body.wanted("messages", body.any("messages"))
    said = [message for given in body.objects("messages") for message in _messages(given)]
    messages += messages_checked(said, "messages")
    tools = [tool for each in body.objects("tools") if (tool := _tool(each)) is not None]
    choice = body.object("tool_choice")
    single = choice is not None and choice.flag("disable_parallel_tool_use")
    body.ignored(*_IGNORED)
    return Asked(
        messages, tools=tools or None, choice=tool_choice(body, tools, single=single), template=template_arguments(body)
    )


def _messages(given: Fields) -> list[dict[str, Any]]:
    """A message with its blocks, as one or several: results of tools are messages of their own."""
    role, path = given.wanted("role", given.text("role")), given.path("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(given.path("role"), f"{given.path('role')}: there is no role {role!r:.50}")
    content = given.wanted("content", given.any("content"))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string or an array of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in fields_of(content, path, given.unheeded):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.wanted("text", block.text("text")))
        elif kind == "tool_use" and role == "assistant":
            calls.append(call_message(block.any("name"), block.any("input"), block.any("id"), block.path("tool_use")))
        elif kind == "tool_result" and role == "user":
            told = words(block.any("content"), block.path("content"))
            result = {"role": "tool", "content": told, "tool_call_id": block.text("tool_use_id", "")}
            results.append({**result, "is_error": True} if block.flag("is_error") else result)
        elif kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind in _SERVERS:
            block.note("type", kind)
        elif kind != "redacted_thinking":
            raise invalid(
                block.path("type"), f"{block.path('type')}: {kind!r:.50} is not supported in a {role} message"
            )
    if role == "assistant":
        message: dict[str, Any] = {"role": role, "content": "".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        return [message]
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]


def _tool(given: Fields) -> dict[str, Any] | None:
    """A tool as chat templates read it; None for one of Anthropic's own, which the model was not trained on."""
    kind = given.text("type", "custom")
    if kind != "custom":
        given.note("type", kind)
        return None
    return function_schema(given.any("name"), given.any("description"), given.any("input_schema"), given.path("name"))


def _form(body: Fields) -> JsonForm | None:
    given = body.object("output_format")
    config = body.object("output_config")
    if given is None and config is not None:
        given = config.object("format")
    if given is None:
        return None
    return json_form(given.any("type"), given.any("schema"), "output_config.format")


# What is told ---------------------------------------------------------------------------------------------------------


def _blocks(said: Said, thinks: bool) -> list[dict[str, Any]]:
    thought = [{**_THOUGHT, "thinking": said.reasoning}] if thinks and said.reasoning is not None else []
    text = [{"type": "text", "text": said.text, "citations": None}] if said.text or not said.calls else []
    return [
        *thought,
        *text,
        *({"type": "tool_use", "id": f"toolu_{c.id}", "name": c.name, "input": c.arguments} for c in said.calls),
    ]


def _stop(said: Said) -> dict[str, Any]:
    if said.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if said.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": said.stop}
    return {"stop_reason": "max_tokens" if said.cut else "end_turn", "stop_sequence": None}


def _usage(said: Said) -> dict[str, int]:
    return {
        "input_tokens": said.read - said.cached,
        "cache_read_input_tokens": said.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(said.reply.ids),
    }


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def _events(head: dict[str, Any], said: Said, thinks: bool) -> Iterable[bytes]:
    usage = _usage(said)
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield _event({"type": "message_start", "message": begun})
    for number, block in enumerate(_blocks(said, thinks)):
        if block["type"] == "thinking":
            start: dict[str, Any] = {**block, "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "text":
            start = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            start = {**block, "input": {}}
            written = json.dumps(block["input"], ensure_ascii=False)
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(written)]
        yield _event({"type": "content_block_start", "index": number, "content_block": start})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": number, "delta": delta})
        yield _event({"type": "content_block_stop", "index": number})
    yield _event({"type": "message_delta", "delta": _stop(said), "usage": usage})
    yield _event({"type": "message_stop"})
