"""Anthropic's `/v1/messages`, whole or as a stream, and its count of tokens.

In: a request's fields. Out: what the official clients read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf.agents.endpoint.call import Call, event
from rlinf.agents.endpoint.requests import (
    ClientAnswer,
    Fields,
    JsonForm,
    ModelRequest,
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
from rlinf.agents.endpoint.streaming import Piece

if TYPE_CHECKING:
    from aiohttp import web

_IGNORED = ("metadata", "service_tier", "cache_control", "inference_geo", "thinking")
"""Fields that say nothing about what the answer means; whether the model thinks, its chat template says."""
_THOUGHT = {"type": "thinking", "signature": "unsigned"}
"""A block of thinking without its text; clients send signatures back, and nobody checks ours."""

_SERVER_RESULTS = tuple(f"{tool}_tool_result" for tool in ("web_search", "web_fetch", "code_execution", "mcp"))
_SERVERS = ("server_tool_use", "mcp_tool_use", "container_upload", *_SERVER_RESULTS)
"""Blocks of tools that Anthropic's own servers run; a conversation that was begun there may hold them."""


async def messages_reply(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body, model = call.body, call.model()
    sampling = sampling_of(body, "max_tokens", "stop_sequences")
    request = replace(_request_of(body), sampling=sampling, form=_form(body))
    body.wanted("max_tokens", body.any("max_tokens"))
    call.accept(model)
    thinking = body.object("thinking")
    thinks = thinking is not None and thinking.any("type") != "disabled"
    head: dict[str, Any] = {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model}

    def whole(results: list[ClientAnswer]) -> dict[str, Any]:
        (result,) = results
        return {**head, "content": _blocks(result, thinks), **_stop(result), "usage": _usage(result)}

    events = _MessageEvents(call, head, thinks)
    return await call.reply(lambda: call.answers(request, head["id"]), whole, events, _event({"type": "ping"}))


async def count_reply(call: Call) -> web.StreamResponse:
    """Say how many tokens the model would read."""
    model, request = call.model(), _request_of(call.body)
    call.accept(model)
    session = call.session or next(iter(call.endpoint.sessions.values()), None)
    if session is None:
        session = call.endpoint.conversation([], None)
    parent, new_ids = session.llm.trajectories.of_messages(request.messages, template_of(session.llm, request))
    return call.json({"input_tokens": len(new_ids) + (0 if parent is None else parent.length)})


# What is asked --------------------------------------------------------------------------------------------------------


def _request_of(body: Fields) -> ModelRequest:
    """Messages as chat templates take them, tools, and how they may be called."""
    messages: list[dict[str, Any]] = []
    if (system := body.any("system")) is not None:
        messages.append({"role": "system", "content": words(system, "system")})
    body.wanted("messages", body.any("messages"))
    history = [message for fields in body.objects("messages") for message in _messages(fields)]
    messages += messages_checked(history, "messages")
    tools = [tool for each in body.objects("tools") if (tool := _tool(each)) is not None]
    choice = body.object("tool_choice")
    single = choice is not None and choice.flag("disable_parallel_tool_use")
    body.ignored(*_IGNORED)
    return ModelRequest(
        messages, tools=tools or None, choice=tool_choice(body, tools, single=single), template=template_arguments(body)
    )


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """A message with its blocks, as one or several: results of tools are messages of their own."""
    role, path = fields.wanted("role", fields.text("role")), fields.path("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(fields.path("role"), f"{fields.path('role')}: there is no role {role!r:.50}")
    content = fields.wanted("content", fields.any("content"))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string or an array of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in fields_of(content, path, fields.unheeded):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.wanted("text", block.text("text")))
        elif kind == "tool_use" and role == "assistant":
            calls.append(call_message(block.any("name"), block.any("input"), block.any("id"), block.path("tool_use")))
        elif kind == "tool_result" and role == "user":
            text = words(block.any("content"), block.path("content"))
            result = {"role": "tool", "content": text, "tool_call_id": block.text("tool_use_id", "")}
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


def _tool(fields: Fields) -> dict[str, Any] | None:
    """A tool as chat templates read it; None for one of Anthropic's own, which the model was not trained on."""
    kind = fields.text("type", "custom")
    if kind != "custom":
        fields.note("type", kind)
        return None
    return function_schema(
        fields.any("name"), fields.any("description"), fields.any("input_schema"), fields.path("name")
    )


def _form(body: Fields) -> JsonForm | None:
    fields = body.object("output_format")
    config = body.object("output_config")
    if fields is None and config is not None:
        fields = config.object("format")
    if fields is None:
        return None
    return json_form(fields.any("type"), fields.any("schema"), "output_config.format")


# What is told ---------------------------------------------------------------------------------------------------------


def _blocks(result: ClientAnswer, thinks: bool) -> list[dict[str, Any]]:
    thought = [{**_THOUGHT, "thinking": result.reasoning}] if thinks and result.reasoning is not None else []
    wordy = result.text or not (result.calls or result.live_calls)
    text = [{"type": "text", "text": result.text, "citations": None}] if wordy else []
    return [
        *thought,
        *text,
        *({**_call_block(call.id, call.name), "input": call.arguments} for call in result.calls),
    ]


def _call_block(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{id}", "name": name, "input": {}}


def _stop(result: ClientAnswer) -> dict[str, Any]:
    if result.ends_by_calling:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if result.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop}
    return {"stop_reason": "max_tokens" if result.cut else "end_turn", "stop_sequence": None}


def _usage(result: ClientAnswer) -> dict[str, int]:
    return _counts(result.prompt_tokens, result.cached, len(result.reply.ids))


def _counts(prompt: int, cached: int, written: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
    }


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


class _MessageEvents:
    """The events of a message's stream; see `Events`."""

    def __init__(self, call: Call, head: dict[str, Any], thinks: bool) -> None:
        self._call, self._head, self._thinks = call, head, thinks
        self._begun = False
        self._blocks = 0  # that were started
        self._open: str | None = None  # the block that is being filled: its type, or the id of a call
        self._told: set[str] = set()  # all that were

    def piece(self, piece: Piece) -> Iterable[bytes]:
        live = self._call.live
        yield from self._opening((live and live.prompt) or (0, 0))
        if (call := piece.call) is not None:
            block = _call_block(call.id, call.name)
            yield from self._filled(block["id"], block)
            if piece.text:
                yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
        elif piece.kind == "text":
            yield from self._filled("text", {"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": piece.text})
        elif self._thinks:
            yield from self._filled("thinking", {**_THOUGHT, "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})

    def end(self, results: list[ClientAnswer]) -> Iterable[bytes]:
        (result,) = results
        yield from self._opening((result.prompt_tokens, result.cached))
        for block in _blocks(result, self._thinks):
            if (key := block.get("id", block["type"])) in self._told:
                continue
            yield from self._filled(key, {**block, "input": {}} if "input" in block else block)
            if "input" in block:
                written = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield from self._closing()
        yield _event({"type": "message_delta", "delta": _stop(result), "usage": _usage(result)})
        yield _event({"type": "message_stop"})

    def _opening(self, counts: tuple[int, int]) -> Iterable[bytes]:
        """The message begins: tokens that were read, and how many of them earlier answers had."""
        if self._begun:
            return
        self._begun = True
        opening: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counts(*counts, 0),
        }
        yield _event({"type": "message_start", "message": {**self._head, **opening}})

    def _filled(self, kind: str, empty: dict[str, Any]) -> Iterable[bytes]:
        """A block, of this kind or with this id, is being filled."""
        if self._open != kind:
            yield from self._closing()
            self._open, self._blocks = kind, self._blocks + 1
            self._told.add(kind)
            yield _event({"type": "content_block_start", "index": self._blocks - 1, "content_block": empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _closing(self) -> Iterable[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _THOUGHT["signature"]})
        if self._open is not None:
            yield _event({"type": "content_block_stop", "index": self._blocks - 1})
        self._open = None
