"""OpenAI's `/v1/responses`, whole or as a stream of events.

In: a request's fields; with `previous_response_id` also what was said up to that response. Out: what the official
clients read. Responses are kept as long as their session, unless `store` is false.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
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
from rlinf.agents.endpoint.fields import Fields, fields_of, words
from rlinf.agents.endpoint.protocols.chat import IGNORED, call_text, custom_text, pieces, token_logprobs

if TYPE_CHECKING:
    from aiohttp import web

    from rlinf.agents.endpoint.app import Call

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text", "refusal")
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_FILLED = {
    "message": ("content", ""),
    "reasoning": ("content", ""),
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Kinds of items: the field that a stream fills, and the events that do it."""
_SEAL = "rlinf."
"""Begins our `encrypted_content`; the text of the reasoning follows, in letters that nobody changes."""


async def answered(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body = call.body
    model = body.wanted("model", body.text("model"))
    body.neutral("background", False, why="the answer comes with the response")
    for name in ("conversation", "prompt"):
        body.neutral(name, why="give input, instructions and previous_response_id")
    if body.text("truncation", "disabled") != "disabled":
        body.note("truncation")  # what was said is never cut
    if (body.whole("top_logprobs", 0, 20) or 0) > 1:
        raise unsupported("top_logprobs", "the record has the log-prob of the token that was drawn alone; take 1")
    body.ignored(*IGNORED, "reasoning", "stream_options")
    wanted = body.array("include")
    for each in wanted:
        if each not in _INCLUDED:
            body.note("include", each)
    instructions, tools = body.text("instructions"), _tools(body)
    schemas = [tool.schema for tool in tools.values()]
    parallel = body.flag("parallel_tool_calls", True)
    messages = _said_before(call, body)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]  # of this response alone
    asked = Asked(
        [*system, *messages],
        tools=schemas or None,
        choice=tool_choice(body, schemas, single=not parallel),
        template=template_arguments(body),
        stop_shown=body.flag("include_stop_str_in_output"),
        sampling=sampling_of(body, "max_output_tokens", "stop"),
        form=_form(body.object("text")) or json_wish(body),
    )
    keep, streamed = body.any("store") is not False, body.flag("stream")
    body.done()
    call.endpoint.check_model(model)
    shape = {
        "id": f"resp_{call.id}", "object": "response", "created_at": call.created, "model": model, "error": None,
        "incomplete_details": None, "instructions": instructions, "metadata": body.given.get("metadata") or {},
        "parallel_tool_calls": parallel, "tools": body.given.get("tools") or [],
        "tool_choice": body.given.get("tool_choice") or "auto",
        "temperature": body.given.get("temperature"), "top_p": body.given.get("top_p"),
        "max_output_tokens": body.given.get("max_output_tokens"),
        "previous_response_id": body.given.get("previous_response_id"), "text": body.given.get("text") or
        {"format": {"type": "text"}}, "truncation": "disabled", "store": keep,
    }  # fmt: skip
    answers = call.answers(asked, f"resp_{call.id}", keep=messages if keep else None)
    showing = _Showing(call, tools, logprobs=_INCLUDED[0] in wanted, sealed=_INCLUDED[1] in wanted)
    if streamed:
        return await call.stream(answers, lambda said: _events(showing, shape, said[0]))
    (said,) = await answers
    return call.json(_whole(showing, shape, said))


# What is asked --------------------------------------------------------------------------------------------------------


def _said_before(call: Call, body: Fields) -> list[dict[str, Any]]:
    """All messages but the instructions: those of the response that is gone on from, and the input's."""
    before: list[dict[str, Any]] = []
    if (previous := body.text("previous_response_id")) is not None:
        session = call.endpoint.of_response(previous)
        if session is None or previous not in session.whole or call.session not in (None, session):
            raise ApiError(
                404, f"there is no response {previous!r:.80}: it was not stored, or its session is over",
                code="previous_response_not_found", param="previous_response_id",
            )  # fmt: skip
        call.session = session
        before = [dict(message) for message in session.whole[previous]]
    given = body.wanted("input", body.any("input"))
    if isinstance(given, str):
        new = [{"role": "user", "content": given}]
    elif isinstance(given, list):
        new = _joined([_item(each) for each in fields_of(given, "input", body.unheeded)])
    else:
        raise invalid("input", "input must be a string or an array of items")
    return [dict(message) for message in messages_checked([*before, *new], "input")]


def _item(given: Fields) -> dict[str, Any] | None:
    """An item as a message; None for one that says nothing."""
    kind = given.text("type", "message")
    if kind == "reasoning":
        thought = _thought(given)
        return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None
    if kind in ("function_call", "custom_tool_call"):
        within, name = given.text("namespace"), given.any("name")
        called = name if within is None else f"{within}.{name}"
        written = {"input": given.text("input", "")} if kind == "custom_tool_call" else given.any("arguments")
        call = call_message(called, written, given.any("call_id"), given.path("name"))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        told = words(given.wanted("output", given.any("output")), given.path("output"), _PARTS)
        return {"role": "tool", "content": told, "tool_call_id": given.text("call_id", "")}
    if kind == "additional_tools":
        return None  # see `_tools`
    if kind != "message":
        given.note("type", kind)  # of a tool that OpenAI's servers run, or of how they keep a conversation
        return None
    role = given.wanted("role", given.text("role"))
    if role not in _ROLES:
        raise invalid(given.path("role"), f"{given.path('role')}: there is no role {role!r:.50}")
    content = words(given.wanted("content", given.any("content")), given.path("content"), _PARTS)
    return {"role": _ROLES[role], "content": content}


def _thought(given: Fields) -> str:
    """The text of a reasoning item: its content, or what we had sealed, or its summary."""
    if parts := given.objects("content"):
        return "".join(part.text("text", "") for part in parts)
    sealed = given.text("encrypted_content", "")
    if sealed.startswith(_SEAL):
        try:
            return base64.urlsafe_b64decode(sealed.removeprefix(_SEAL)).decode()
        except ValueError:
            return ""
    return "".join(part.text("text", "") for part in given.objects("summary"))


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
    found: dict[str, _Tool] = {}

    def add(given: Fields, namespace: str | None) -> None:
        kind, name = given.text("type", ""), given.any("name")
        if kind not in ("function", "custom"):
            given.note("type", kind)
            return
        shown = name if namespace is None or not isinstance(name, str) else f"{namespace}.{name}"
        if kind == "custom":
            schema = custom_schema(shown, given.any("description"), given.path("name"))
        else:
            schema = function_schema(shown, given.any("description"), given.any("parameters"), given.path("name"))
        found[shown] = _Tool(schema, name, namespace, kind == "custom")

    items = body.any("input")
    added = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    more = [each for each in fields_of(added, "input", body.unheeded) if each.any("type") == "additional_tools"]
    for given in [tool for holder in (body, *more) for tool in holder.objects("tools")]:
        if given.any("type") != "namespace":
            add(given, None)
            continue
        for inner in given.objects("tools"):
            add(inner, given.wanted("name", given.text("name")))
    return found


def _form(given: Fields | None) -> JsonForm | None:
    if given is None:
        return None
    given.ignored("verbosity")
    form = given.object("format")
    given.done()
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


def _output(showing: _Showing, said: Said) -> list[dict[str, Any]]:
    call, items = showing.call, list[dict[str, Any]]()
    if said.reasoning is not None:
        parts = [{"type": "reasoning_text", "text": said.reasoning}]
        thought: dict[str, Any] = {"id": f"rs_{call.id}", "type": "reasoning", "summary": [], "content": parts}
        if showing.sealed:
            thought["encrypted_content"] = _SEAL + base64.urlsafe_b64encode(said.reasoning.encode()).decode()
        items.append({**thought, "status": "completed"})
    if said.text or not said.calls:
        told = token_logprobs(call, said) if showing.logprobs else []
        part: dict[str, Any] = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": told}
        parts = [part] if said.refusal is None else [part, {"type": "refusal", "refusal": said.refusal}]
        status = "incomplete" if said.cut else "completed"
        items.append(
            {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "status": status, "content": parts}
        )
    for number, each in enumerate(said.calls):
        tool = showing.tools.get(each.name)
        shown: dict[str, Any] = {
            "id": f"fc_{call.id}{number}", "type": "function_call", "call_id": f"call_{each.id}",
            "name": each.name if tool is None else tool.name, "arguments": call_text(each), "status": "completed",
        }  # fmt: skip
        if tool is not None and tool.namespace is not None:
            shown["namespace"] = tool.namespace
        if tool is not None and tool.custom:
            del shown["arguments"]
            shown |= {"id": f"ctc_{call.id}{number}", "type": "custom_tool_call", "input": custom_text(each)}
        items.append(shown)
    return items


def _whole(showing: _Showing, shape: dict[str, Any], said: Said) -> dict[str, Any]:
    cut = said.cut and not said.calls
    return {
        **shape,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(showing, said),
        "usage": {
            "input_tokens": said.read,
            "input_tokens_details": {"cached_tokens": said.cached},
            "output_tokens": len(said.reply.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.read + len(said.reply.ids),
        },
    }


def _events(showing: _Showing, shape: dict[str, Any], said: Said) -> Iterable[bytes]:
    from rlinf.agents.endpoint.app import event

    count = -1

    def told(kind: str, **more: Any) -> bytes:
        nonlocal count
        count += 1
        return event({"type": kind, "sequence_number": count, **more}, kind)

    begun = {**shape, "status": "in_progress", "output": [], "usage": None}
    yield told("response.created", response=begun)
    yield told("response.in_progress", response=begun)
    whole = _whole(showing, shape, said)
    for place, item in enumerate(whole["output"]):
        here: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        key, kind = _FILLED[item["type"]]
        empty = {key: [] if key == "content" else ""}
        yield told("response.output_item.added", output_index=place, item={**item, "status": "in_progress", **empty})
        if key == "content":
            for number, part in enumerate(item["content"]):
                yield from _part_events(told, {**here, "content_index": number}, part)
        else:
            for piece in pieces(item[key]):
                yield told(f"response.{kind}.delta", **here, delta=piece)
            named = {"name": item["name"]} if key == "arguments" else {}
            yield told(f"response.{kind}.done", **here, **named, **{key: item[key]})
        yield told("response.output_item.done", output_index=place, item=item)
    yield told(f"response.{whole['status']}", response=whole)


def _part_events(told: Any, here: dict[str, Any], part: dict[str, Any]) -> Iterable[bytes]:
    """A part of a message or of reasoning: added, filled, done."""
    name = part["type"]
    if name == "reasoning_text":
        for piece in pieces(part["text"]):
            yield told("response.reasoning_text.delta", **here, delta=piece)
        yield told("response.reasoning_text.done", **here, text=part["text"])
        return
    key, more = ("text", {"logprobs": part["logprobs"]}) if name == "output_text" else ("refusal", {})
    empty = {**part, key: "", **({"logprobs": []} if more else {})}
    yield told("response.content_part.added", **here, part=empty)
    for piece in pieces(part[key]):
        yield told(f"response.{name}.delta", **here, delta=piece, **({"logprobs": []} if more else {}))
    yield told(f"response.{name}.done", **here, **{key: part[key]}, **more)
    yield told("response.content_part.done", **here, part=part)
