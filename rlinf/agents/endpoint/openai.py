"""OpenAI's protocols: `/v1/chat/completions`, `/v1/completions` and `/v1/responses`.

In: a request's fields. Out: what the official clients read, whole or as a stream, which tells words as they come, and
the arguments of a call. `/v1/completions` takes texts and token ids that the model goes on from, as they stand.
`/v1/responses` takes with `previous_response_id` also what was said up to that response; responses are kept as long as
their session, unless `store` is false.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.agents.endpoint.call import Call, event
from rlinf.agents.endpoint.requests import (
    ApiError,
    ClientAnswer,
    Fields,
    JsonForm,
    ModelRequest,
    call_message,
    custom_schema,
    fields_of,
    function_schema,
    invalid,
    json_form,
    json_wish,
    messages_checked,
    sampling_of,
    template_arguments,
    tool_choice,
    unsupported,
    words,
)
from rlinf.agents.endpoint.streaming import LiveCall, Piece
from rlinf.agents.tools.formats import ToolCall

if TYPE_CHECKING:
    from aiohttp import web

_ABOUT_CLIENTS = ("metadata", "user", "safety_identifier", "client_metadata", "reasoning_effort", "verbosity")
_ABOUT_SERVERS = ("store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
IGNORED = (*_ABOUT_CLIENTS, *_ABOUT_SERVERS, "prediction")
"""Fields that say nothing about what the answer means."""
LEAST_LOGPROB = -9999.0
"""Stands for a log-prob that JSON has no number for."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


async def chat_reply(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body, model = call.body, call.model()
    request = _request_of(body)
    form = TokenForm(call, _logprobs(body), body.flag("return_token_ids"))
    with_usage = wants_usage(body)
    call.accept(model)
    head: dict[str, Any] = {"id": f"chatcmpl-{call.id}", "created": call.created, "model": model}

    def whole(results: list[ClientAnswer]) -> dict[str, Any]:
        choices = [_choice(form, number, each) for number, each in enumerate(results)]
        value = {**head, "object": "chat.completion", "choices": choices, "usage": usage(results)}
        return {**value, "prompt_token_ids": prompt_ids(results[0])} if form.ids else value

    return await call.reply(lambda: call.answers(request, head["id"]), whole, _ChatEvents(form, head, with_usage))


@dataclass(frozen=True, slots=True)
class TokenForm:
    """Whatever a client wants to know of the tokens of answers."""

    call: Call
    """The request."""
    logprobs: bool
    """Each token with its log-prob."""
    ids: bool
    """Token ids."""

    def content_logprobs(self, result: ClientAnswer) -> dict[str, Any] | None:
        """The log-probs of a chat's answer; None: they are not wanted."""
        return {"content": token_logprobs(self.call, result), "refusal": None} if self.logprobs else None


# What is asked --------------------------------------------------------------------------------------------------------


def _request_of(body: Fields) -> ModelRequest:
    check_plain_sampling(body)
    body.neutral("repetition_penalty", 1, 1.0, why=_NO_PENALTIES)
    body.neutral("modalities", ["text"], why="the model writes text alone")
    for name in ("audio", "functions", "function_call"):
        body.neutral(name, why="take messages and tools of the type function")
    body.wanted("messages", body.any("messages"))
    messages = [_message(each) for each in body.objects("messages")]
    tools = [tool for each in body.objects("tools") if (tool := _tool(each)) is not None]
    choice = tool_choice(body, tools, single=not body.flag("parallel_tool_calls", True))
    sampling = sampling_of(body, "max_tokens", "stop")
    if (longest := body.whole("max_completion_tokens", 1)) is not None:
        sampling["max_new_tokens"] = longest
    return ModelRequest(
        messages_checked(messages, "messages"),
        tools=tools or None,
        choice=choice,
        template=template_arguments(body),
        stop_shown=body.flag("include_stop_str_in_output"),
        sampling=sampling,
        form=_form(body.object("response_format")) or json_wish(body),
        count=body.whole("n", 1, 128) or 1,
    )


_NO_PENALTIES = "log-probs that are learned from know no penalties"


def check_plain_sampling(body: Fields) -> None:
    """See that answers are sampled from what the model says, and nothing else."""
    for name in ("frequency_penalty", "presence_penalty"):
        body.neutral(name, 0, 0.0, why=_NO_PENALTIES)
    body.neutral("logit_bias", {}, why="log-probs that are learned from know no bias")
    body.ignored(*IGNORED)


def wants_usage(body: Fields) -> bool:
    """True if a stream ends with the count of its tokens."""
    options = body.object("stream_options")
    return options is not None and options.flag("include_usage")


def logprob_count(body: Fields, name: str) -> int | None:
    """The number of log-probs of each token that a field asks for; at most that of the token itself can be told."""
    count = body.whole(name, 0, 20)
    if count is not None and count > 1:
        raise unsupported(name, "the record has the log-prob of the token that was drawn alone; take 1")
    return count


def _message(fields: Fields) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = fields.wanted("role", fields.text("role"))
    if role not in _ROLES:
        raise invalid(fields.path("role"), f"{fields.path('role')}: there is no role {role!r:.50}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    content = fields.any("content")
    if content is None and role != "assistant":
        fields.wanted("content", None)
    message: dict[str, Any] = {"role": _ROLES[role], "content": words(content, fields.path("content"), kinds)}
    calls = fields.objects("tool_calls")
    if calls and role != "assistant":
        raise invalid(fields.path("tool_calls"), f"{fields.path('tool_calls')}: only the assistant calls tools")
    if fields.any("function_call") is not None:
        raise unsupported(fields.path("function_call"), "take tool_calls")
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    if role == "assistant" and (thought := fields.any("reasoning_content") or fields.any("reasoning")):
        message["reasoning_content"] = words(thought, fields.path("reasoning_content"))
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if (name := fields.text("name")) is not None:
        message["name"] = name
    return message


def _call(fields: Fields) -> dict[str, Any]:
    if fields.text("type", "function") == "custom":
        custom = fields.wanted("custom", fields.object("custom"))
        written = {"input": custom.text("input", "")}
        return call_message(custom.any("name"), written, fields.any("id"), fields.path("custom"))
    function = fields.wanted("function", fields.object("function"))
    return call_message(function.any("name"), function.any("arguments"), fields.any("id"), fields.path("function"))


def _tool(fields: Fields) -> dict[str, Any] | None:
    """A tool as chat templates read it; None for one that the client does not run."""
    kind = fields.text("type", "function")
    if kind == "custom":
        custom = fields.wanted("custom", fields.object("custom"))
        return custom_schema(custom.any("name"), custom.any("description"), fields.path("custom"))
    if kind != "function":
        fields.note("type", kind)
        return None
    function = fields.wanted("function", fields.object("function"))
    path = fields.path("function")
    return function_schema(function.any("name"), function.any("description"), function.any("parameters"), path)


def customs(body: Fields) -> set[str]:
    """Names of the tools that take a text of any form."""
    return {each.given["custom"]["name"] for each in body.objects("tools") if each.given.get("type") == "custom"}


def _form(fields: Fields | None) -> JsonForm | None:
    if fields is None:
        return None
    shape = fields.object("json_schema")
    return json_form(fields.any("type"), None if shape is None else shape.any("schema"), "response_format")


def _logprobs(body: Fields) -> bool:
    """True if log-probs are wanted; at most that of the token itself can be told."""
    wanted = body.flag("logprobs")
    if logprob_count(body, "top_logprobs") and not wanted:
        raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    return wanted


# What is told ---------------------------------------------------------------------------------------------------------


def usage(results: list[ClientAnswer]) -> dict[str, Any]:
    """Tokens of a response."""
    written = sum(len(each.reply.ids) for each in results)
    return {
        "prompt_tokens": results[0].prompt_tokens,
        "completion_tokens": written,
        "total_tokens": results[0].prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": results[0].cached},
    }


def prompt_ids(result: ClientAnswer) -> list[int]:
    """All tokens that the model had before an answer."""
    return [int(token) for token in result.turn.ids()[: result.prompt_tokens]]


def call_text(call: ToolCall) -> str:
    """Arguments of a call, as clients read them."""
    return json.dumps(call.arguments, ensure_ascii=False)


def custom_text(call: ToolCall) -> str:
    """The text that a custom tool is given."""
    value = call.arguments.get("input")
    return value if isinstance(value, str) else call_text(call)


def token_pairs(call: Call, result: ClientAnswer) -> list[tuple[str, float]]:
    """Every token of an answer as a text, and its log-prob."""
    assert call.session is not None
    tokenizer = call.session.llm.trajectories.chat.tokenizer
    texts = [str(tokenizer.decode([int(token)])) for token in result.reply.ids]
    return [(text, max(float(value), LEAST_LOGPROB)) for text, value in zip(texts, result.reply.logprobs, strict=True)]


def token_logprobs(call: Call, result: ClientAnswer) -> list[dict[str, Any]]:
    """Every token of an answer with its log-prob."""
    entries = [
        {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}
        for text, value in token_pairs(call, result)
    ]
    return [{**entry, "top_logprobs": [entry]} for entry in entries]


def _finish(result: ClientAnswer) -> str:
    return "tool_calls" if result.ends_by_calling else "length" if result.cut else "stop"


def _call_shown(each: ToolCall, custom: bool) -> dict[str, Any]:
    """A call, as clients read it."""
    if custom:
        return {"id": each.id, "type": "custom", "custom": {"name": each.name, "input": custom_text(each)}}
    return {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": call_text(each)}}


def _choice(form: TokenForm, number: int, result: ClientAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": result.refusal}
    if result.reasoning is not None:
        message["reasoning_content"] = result.reasoning
    if result.calls:
        message["content"] = result.text or None
        message["tool_calls"] = [_call_shown(each, each.name in customs(form.call.body)) for each in result.calls]
    content = form.content_logprobs(result)
    choice = {"index": number, "message": message, "logprobs": content, "finish_reason": _finish(result)}
    return {**choice, "token_ids": result.reply.ids.tolist()} if form.ids else choice


class _ChatEvents:
    """The chunks of a chat's stream; see `Events`."""

    def __init__(self, form: TokenForm, head: dict[str, Any], with_usage: bool) -> None:
        self._form, self._with_usage = form, with_usage
        self._head = {**head, "object": "chat.completion.chunk"}
        self._begun: set[int] = set()
        self._calls: dict[int, list[str]] = defaultdict(list)  # ids of those that were told, by the answers' numbers
        self._customs = customs(form.call.body)

    def piece(self, piece: Piece) -> Iterable[bytes]:
        yield from self._opening(piece.number)
        if (call := piece.call) is not None:
            ids = self._calls[piece.number]
            if call.name in self._customs:  # what they are given is part of their arguments
                return
            function = {"arguments": piece.text}
            if call.id in ids:
                entry: dict[str, Any] = {"index": ids.index(call.id), "function": function}
            else:
                ids.append(call.id)
                named = {"name": call.name, **function}
                entry = {"index": len(ids) - 1, "id": call.id, "type": "function", "function": named}
            yield self._chunk(piece.number, {"tool_calls": [entry]})
            return
        key = "content" if piece.kind == "text" else "reasoning_content"
        yield self._chunk(piece.number, {key: piece.text})

    def end(self, results: list[ClientAnswer]) -> Iterable[bytes]:
        for number, result in enumerate(results):
            yield from self._opening(number)
            ids = self._calls[number]
            for place, each in enumerate([each for each in result.calls if each.id not in ids], len(ids)):
                whole = _call_shown(each, each.name in self._customs)
                yield self._chunk(number, {"tool_calls": [{"index": place, **whole}]})
            if result.refusal is not None:
                yield self._chunk(number, {"refusal": result.refusal})
            yield self._chunk(number, {}, _finish(result), self._form.content_logprobs(result))
        yield from stream_end(self._head, usage(results) if self._with_usage else None)

    def _opening(self, number: int) -> Iterable[bytes]:
        if number not in self._begun:
            self._begun.add(number)
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})

    def _chunk(self, number: int, delta: dict[str, Any], finish: str | None = None, content: Any = None) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": content, "finish_reason": finish}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._with_usage else {})})


def stream_end(head: dict[str, Any], counts: dict[str, Any] | None) -> Iterable[bytes]:
    """Last events of a stream, with its count of tokens where that is wanted."""
    if counts is not None:
        yield event({**head, "choices": [], "usage": counts})
    yield b"data: [DONE]\n\n"


_RESPONSES_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text", "refusal")
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_FILLED = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Kinds of calls: the field that a stream fills, and the events that do it."""
_ECHOED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "temperature", "top_p", "max_output_tokens", "previous_response_id")),
    "metadata": {},
    "tools": [],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
}
"""Fields of a request that stand in its response, and what stands there where they were left out."""
_SEAL = "rlinf."
"""Begins our `encrypted_content`; the text of the reasoning follows, in letters that nobody changes."""


async def responses_reply(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body, model = call.body, call.model()
    body.neutral("background", False, why="the answer comes with the response")
    for name in ("conversation", "prompt"):
        body.neutral(name, why="give input, instructions and previous_response_id")
    if body.text("truncation", "disabled") != "disabled":
        body.note("truncation")  # what was said is never cut
    logprob_count(body, "top_logprobs")
    body.ignored(*IGNORED, "reasoning", "stream_options")
    wanted = body.array("include")
    for each in wanted:
        if each not in _INCLUDED:
            body.note("include", each)
    instructions, tools = body.text("instructions"), _tools(body)
    schemas = [tool.schema for tool in tools.values()]
    parallel = body.flag("parallel_tool_calls", True)
    messages = _messages_before(call, body)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]  # of this response alone
    request = ModelRequest(
        [*system, *messages],
        tools=schemas or None,
        choice=tool_choice(body, schemas, single=not parallel),
        template=template_arguments(body),
        stop_shown=body.flag("include_stop_str_in_output"),
        sampling=sampling_of(body, "max_output_tokens", "stop"),
        form=_responses_form(body.object("text")) or json_wish(body),
    )
    keep = body.any("store") is not False
    call.accept(model)
    shape = {
        **{name: default if body.given.get(name) is None else body.given[name] for name, default in _ECHOED.items()},
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": parallel,
        "truncation": "disabled",
        "store": keep,
    }
    showing = _Showing(call, tools, logprobs=_INCLUDED[0] in wanted, sealed=_INCLUDED[1] in wanted)
    return await call.reply(
        lambda: call.answers(request, f"resp_{call.id}", keep=messages if keep else None),
        lambda results: _whole(showing, shape, results[0]),
        _ResponseEvents(showing, shape),
    )


# What is asked --------------------------------------------------------------------------------------------------------


def _messages_before(call: Call, body: Fields) -> list[dict[str, Any]]:
    """All messages but the instructions: those of the response that is gone on from, and the input's."""
    before: list[dict[str, Any]] = []
    if (previous := body.text("previous_response_id")) is not None:
        session = call.endpoint.of_response(previous)
        if session is None or previous not in session.whole or call.session not in (None, session):
            why = f"there is no response {previous!r:.80}: it was not stored, or its session is over"
            raise ApiError(404, why, code="previous_response_not_found", param="previous_response_id")
        call.session = session
        before = [dict(message) for message in session.whole[previous]]
    value = body.wanted("input", body.any("input"))
    if isinstance(value, str):
        new = [{"role": "user", "content": value}]
    elif isinstance(value, list):
        new = _joined([_item(each) for each in fields_of(value, "input", body.unheeded)])
    else:
        raise invalid("input", "input must be a string or an array of items")
    return [dict(message) for message in messages_checked([*before, *new], "input")]


def _item(fields: Fields) -> dict[str, Any] | None:
    """An item as a message; None for one that says nothing."""
    kind = fields.text("type", "message")
    if kind == "reasoning":
        thought = _thought(fields)
        return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None
    if kind in ("function_call", "custom_tool_call"):
        within, name = fields.text("namespace"), fields.any("name")
        called = name if within is None else f"{within}.{name}"
        written = {"input": fields.text("input", "")} if kind == "custom_tool_call" else fields.any("arguments")
        call = call_message(called, written, fields.any("call_id"), fields.path("name"))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = words(fields.wanted("output", fields.any("output")), fields.path("output"), _PARTS)
        return {"role": "tool", "content": text, "tool_call_id": fields.text("call_id", "")}
    if kind == "additional_tools":
        return None  # see `_tools`
    if kind != "message":
        fields.note("type", kind)  # of a tool that OpenAI's servers run, or of how they keep a conversation
        return None
    role = fields.wanted("role", fields.text("role"))
    if role not in _RESPONSES_ROLES:
        raise invalid(fields.path("role"), f"{fields.path('role')}: there is no role {role!r:.50}")
    content = words(fields.wanted("content", fields.any("content")), fields.path("content"), _PARTS)
    return {"role": _RESPONSES_ROLES[role], "content": content}


def _thought(fields: Fields) -> str:
    """The text of a reasoning item: its content, or what we had sealed, or its summary."""
    if parts := fields.objects("content"):
        return "".join(part.text("text", "") for part in parts)
    sealed = fields.text("encrypted_content", "")
    if sealed.startswith(_SEAL):
        try:
            return base64.urlsafe_b64decode(sealed.removeprefix(_SEAL)).decode()
        except ValueError:
            return ""
    return "".join(part.text("text", "") for part in fields.objects("summary"))


def _joined(items: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Messages, with the reasoning before an answer and the calls in it: the protocol has them as items of their
    own."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item is None:
            continue
        last = messages[-1] if messages else None
        if last is None or last["role"] != "assistant" or item["role"] != "assistant":
            messages.append(item)
        elif "tool_calls" in item:
            last["tool_calls"] = [*last.get("tool_calls", ()), *item["tool_calls"]]
        elif "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
            last["content"] = item["content"]
        else:
            messages.append(item)
    return messages


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool as the model is shown it, and as the client knows it."""

    schema: dict[str, Any]
    """For the chat template."""
    name: str
    """The client's."""
    namespace: str | None = None
    """The group in which the client has it; the model reads `namespace.name`."""
    custom: bool = False
    """It takes a text of any form."""


def _tools(body: Fields) -> dict[str, _Tool]:
    """The tools that the client runs, by the names that the model reads: those of the request, and those that its
    items add."""
    tools: dict[str, _Tool] = {}

    def add(fields: Fields, namespace: str | None) -> None:
        kind, name = fields.text("type", ""), fields.any("name")
        if kind not in ("function", "custom"):
            fields.note("type", kind)
            return
        full_name = name if namespace is None or not isinstance(name, str) else f"{namespace}.{name}"
        if kind == "custom":
            schema = custom_schema(full_name, fields.any("description"), fields.path("name"))
        else:
            schema = function_schema(
                full_name, fields.any("description"), fields.any("parameters"), fields.path("name")
            )
        tools[full_name] = _Tool(schema, name, namespace, kind == "custom")

    items = body.any("input")
    added = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    more = [each for each in fields_of(added, "input", body.unheeded) if each.any("type") == "additional_tools"]
    for tool_fields in [tool for holder in (body, *more) for tool in holder.objects("tools")]:
        if tool_fields.any("type") != "namespace":
            add(tool_fields, None)
            continue
        for inner in tool_fields.objects("tools"):
            add(inner, tool_fields.wanted("name", tool_fields.text("name")))
    return tools


def _responses_form(fields: Fields | None) -> JsonForm | None:
    if fields is None:
        return None
    fields.ignored("verbosity")
    form = fields.object("format")
    fields.done()
    return None if form is None else json_form(form.any("type"), form.any("schema"), "text.format")


# What is told ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Showing:
    """How a response is shown to its client."""

    call: Call
    """The request."""
    tools: dict[str, _Tool]
    """By the names that the model reads."""
    logprobs: bool
    """Each token with its log-prob."""
    sealed: bool
    """Reasoning with a text that a client which keeps nothing else of it sends back."""


def _thought_item(showing: _Showing, text: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    item: dict[str, Any] = {"id": f"rs_{showing.call.id}", "type": "reasoning", "summary": [], "content": parts}
    if showing.sealed:
        item["encrypted_content"] = _SEAL + base64.urlsafe_b64encode(text.encode()).decode()
    return {**item, "status": "completed"}


def _message_item(showing: _Showing, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{showing.call.id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": parts,
    }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(showing: _Showing, number: int, each: ToolCall, written: str | None = None) -> dict[str, Any]:
    """A call.

    Args:
        showing: how.
        number: which of the answer's.
        each: the call.
        written: its arguments as they were told; None: they were not.
    """
    tool = showing.tools.get(each.name)
    item = {"call_id": f"call_{each.id}", "name": each.name if tool is None else tool.name, "status": "completed"}
    if tool is not None and tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool is not None and tool.custom:
        return {**item, "id": f"ctc_{showing.call.id}{number}", "type": "custom_tool_call", "input": custom_text(each)}
    arguments = call_text(each) if written is None else written
    return {**item, "id": f"fc_{showing.call.id}{number}", "type": "function_call", "arguments": arguments}


def _output(showing: _Showing, result: ClientAnswer) -> list[dict[str, Any]]:
    call, items = showing.call, list[dict[str, Any]]()
    if result.reasoning is not None:
        items.append(_thought_item(showing, result.reasoning))
    if result.text or not (result.calls or result.live_calls):
        part = _text_part(result.text, token_logprobs(call, result) if showing.logprobs else [])
        parts = [part] if result.refusal is None else [part, {"type": "refusal", "refusal": result.refusal}]
        items.append(_message_item(showing, parts, "incomplete" if result.cut else "completed"))
    live = {each.id: each for each in result.live_calls}
    half = [ToolCall(each.id, each.name, {}) for each in result.half_calls]
    for number, one in enumerate([*(each for each in result.calls if each.id in live), *half]):
        item = _call_item(showing, number, one, live[one.id].written)
        items.append(item if live[one.id].readable else {**item, "status": "incomplete"})
    more = [each for each in result.calls if each.id not in live]
    items += [_call_item(showing, number, each) for number, each in enumerate(more, len(live))]
    return items


def _whole(showing: _Showing, shape: dict[str, Any], result: ClientAnswer) -> dict[str, Any]:
    cut = result.cut and not result.ends_by_calling
    return {
        **shape,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(showing, result),
        "usage": {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached},
            "output_tokens": len(result.reply.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": result.prompt_tokens + len(result.reply.ids),
        },
    }


def _key_of(item: dict[str, Any]) -> str:
    """Part of the answer that an item is: `reasoning`, `text` or the id of a call."""
    named = {"reasoning": "reasoning", "message": "text"}.get(item["type"])
    return named or str(item["call_id"].removeprefix("call_"))


class _ResponseEvents:
    """The events of a response's stream; see `Events`."""

    def __init__(self, showing: _Showing, shape: dict[str, Any]) -> None:
        self._showing, self._shape = showing, shape
        self._count = 0  # events so far
        self._places: dict[str, int] = {}  # of the items that were added: "reasoning", "text", ids of calls
        self._thought: str | None = None  # reasoning that is being told
        self._calls: list[str] = []  # ids of those that come piece by piece

    def piece(self, piece: Piece) -> Iterable[bytes]:
        yield from self._opening()
        if piece.kind != "reasoning":
            yield from self._thought_over()
        if piece.call is not None:
            yield from self._call_piece(piece.call, piece.text)
            return
        if piece.kind not in self._places:
            yield from self._added(piece.kind)
        if piece.kind == "reasoning":
            self._thought = (self._thought or "") + piece.text
        more: dict[str, Any] = {"logprobs": []} if piece.kind == "text" else {}
        name = "reasoning_text" if piece.kind == "reasoning" else "output_text"
        yield self._event(f"response.{name}.delta", **self._part(piece.kind), delta=piece.text, **more)

    def end(self, results: list[ClientAnswer]) -> Iterable[bytes]:
        whole = _whole(self._showing, self._shape, results[0])
        yield from self._opening()
        for item in whole["output"]:
            key = _key_of(item)
            if item["type"] in _FILLED:
                yield from self._call(key, item)
                continue
            if key not in self._places:
                yield from self._added(key)
            if key == "text" or self._thought is not None:
                yield from self._closing(key, item)
        whole["output"] = sorted(whole["output"], key=lambda item: self._places[_key_of(item)])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._count += 1
        return event({"type": kind, "sequence_number": self._count - 1, **more}, kind)

    def _opening(self) -> Iterable[bytes]:
        if not self._count:
            opening = {**self._shape, "status": "in_progress", "output": [], "usage": None}
            yield self._event("response.created", response=opening)
            yield self._event("response.in_progress", response=opening)

    def _thought_over(self) -> Iterable[bytes]:
        if self._thought is not None:
            yield from self._closing("reasoning", _thought_item(self._showing, self._thought))

    def _part(self, key: str, number: int = 0) -> dict[str, Any]:
        """Where a part of an item stands."""
        name = "rs" if key == "reasoning" else "msg"
        here = {"item_id": f"{name}_{self._showing.call.id}", "output_index": self._places[key]}
        return {**here, "content_index": number}

    def _added(self, key: str) -> Iterable[bytes]:
        """An item of reasoning or a message is added, without its words."""
        self._places[key] = len(self._places)
        if key == "reasoning":
            self._thought = ""
        item = _thought_item(self._showing, "") if key == "reasoning" else _message_item(self._showing, [], "")
        item = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=self._places[key], item=item)
        if key == "text":
            yield self._event("response.content_part.added", **self._part(key), part=_text_part("", []))

    def _closing(self, key: str, item: dict[str, Any]) -> Iterable[bytes]:
        """An item of reasoning, or the message, is whole."""
        for number, part in enumerate(item["content"]):
            here, name = self._part(key, number), part["type"]
            if name == "refusal":
                yield self._event("response.content_part.added", **here, part={**part, "refusal": ""})
                yield self._event("response.refusal.delta", **here, delta=part["refusal"])
                yield self._event("response.refusal.done", **here, refusal=part["refusal"])
            else:
                more = {"logprobs": part["logprobs"]} if name == "output_text" else {}
                yield self._event(f"response.{name}.done", **here, text=part["text"], **more)
            if name != "reasoning_text":
                yield self._event("response.content_part.done", **here, part=part)
        yield self._event("response.output_item.done", output_index=self._places[key], item=item)
        if key == "reasoning":
            self._thought = None

    def _call_piece(self, call: LiveCall, text: str) -> Iterable[bytes]:
        """Some of the arguments of a call."""
        if call.id not in self._calls:
            self._calls.append(call.id)
        number = self._calls.index(call.id)
        item = _call_item(self._showing, number, ToolCall(call.id, call.name, {}), "")
        if item["type"] != "function_call":  # what a custom tool is given is part of its arguments
            return
        if call.id not in self._places:
            yield from self._call_added(call.id, item)
        if text:
            yield self._call_delta(call.id, item, text)

    def _call_added(self, key: str, item: dict[str, Any]) -> Iterable[bytes]:
        place = self._places[key] = len(self._places)
        yield self._event("response.output_item.added", output_index=place, item={**item, "status": "in_progress"})

    def _call_delta(self, key: str, item: dict[str, Any], text: str) -> bytes:
        here: dict[str, Any] = {"item_id": item["id"], "output_index": self._places[key]}
        return self._event(f"response.{_FILLED[item['type']][1]}.delta", **here, delta=text)

    def _call(self, key: str, item: dict[str, Any]) -> Iterable[bytes]:
        """A call is whole, or will be no more than half; it is told at once where it was not."""
        field, kind = _FILLED[item["type"]]
        if key not in self._places:
            yield from self._call_added(key, {**item, field: ""})
            yield self._call_delta(key, item, item[field])
        here: dict[str, Any] = {"item_id": item["id"], "output_index": self._places[key]}
        named = {"name": item["name"]} if field == "arguments" else {}
        if item["status"] == "completed":
            yield self._event(f"response.{kind}.done", **here, **named, **{field: item[field]})
        yield self._event("response.output_item.done", output_index=self._places[key], item=item)
