"""OpenAI's `/v1/responses`, whole or as a stream of events.

In: a request's fields; with `previous_response_id` also what was said up to that response. Out: what the official
clients read. Responses are kept as long as their session, unless `store` is false.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlinf.agents.endpoint.asking import (
    Asked,
    JsonForm,
    Said,
    call_message,
    function_schema,
    json_form,
    may_call,
    messages_checked,
    sampling_of,
)
from rlinf.agents.endpoint.errors import ApiError, invalid, unsupported
from rlinf.agents.endpoint.fields import Fields, fields_of, words
from rlinf.agents.endpoint.protocols.chat import IGNORED, call_text, pieces, token_logprobs

if TYPE_CHECKING:
    from aiohttp import web

    from rlinf.agents.endpoint.app import Call

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text", "refusal")
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")


async def answered(call: Call) -> web.StreamResponse:
    """Answer a request."""
    body = call.body
    model = body.wanted("model", body.text("model"))
    body.neutral("parallel_tool_calls", True, why="the model may always call several tools")
    body.neutral("truncation", "disabled", why="what was said is never cut")
    body.neutral("background", False, why="the answer comes with the response")
    for name in ("conversation", "prompt", "max_tool_calls", "moderation", "context_management"):
        body.neutral(name, why="give input, instructions and previous_response_id")
    if (body.whole("top_logprobs", 0, 20) or 0) > 1:
        raise unsupported("top_logprobs", "the record has the log-prob of the token that was drawn alone; take 1")
    body.ignored(*IGNORED, "reasoning", "stream_options")
    wanted = body.array("include")
    if unknown := [each for each in wanted if each not in _INCLUDED]:
        raise unsupported("include", f"{unknown[0]!r:.80} is never there; there is {_INCLUDED[0]}")
    instructions, tools = body.text("instructions"), [_tool(each) for each in body.objects("tools")]
    messages = _said_before(call, body)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]  # of this response alone
    asked = Asked(
        [*system, *messages],
        tools=tools or None,
        calls=may_call(body.any("tool_choice"), "tool_choice"),
        sampling=sampling_of(body, "max_output_tokens", "stop"),
        form=_form(body.object("text")),
    )
    keep, streamed = body.any("store") is not False, body.flag("stream")
    body.done()
    call.endpoint.check_model(model)
    shape = {
        "id": f"resp_{call.id}", "object": "response", "created_at": call.created, "model": model, "error": None,
        "incomplete_details": None, "instructions": instructions, "metadata": body.given.get("metadata") or {},
        "parallel_tool_calls": True, "tools": body.given.get("tools") or [],
        "tool_choice": body.given.get("tool_choice") or "auto",
        "temperature": body.given.get("temperature"), "top_p": body.given.get("top_p"),
        "max_output_tokens": body.given.get("max_output_tokens"),
        "previous_response_id": body.given.get("previous_response_id"), "text": body.given.get("text") or
        {"format": {"type": "text"}}, "truncation": "disabled", "store": keep,
    }  # fmt: skip
    answers = call.answers(asked, f"resp_{call.id}", keep=messages if keep else None)
    logprobs = _INCLUDED[0] in wanted
    if streamed:
        return await call.stream(answers, lambda said: _events(call, shape, said[0], logprobs))
    (said,) = await answers
    return call.json(_whole(call, shape, said, logprobs))


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
        new = _joined([_item(each) for each in fields_of(given, "input")])
    else:
        raise invalid("input", "input must be a string or an array of items")
    return [dict(message) for message in messages_checked([*before, *new], "input")]


def _item(given: Fields) -> dict[str, Any] | None:
    """An item as a message; None for one that says nothing."""
    kind = given.text("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        called = call_message(given.any("name"), given.any("arguments"), given.any("call_id"), given.path("name"))
        return {"role": "assistant", "content": "", "tool_calls": [called]}
    if kind == "function_call_output":
        told = words(given.wanted("output", given.any("output")), given.path("output"), _PARTS)
        return {"role": "tool", "content": told, "tool_call_id": given.text("call_id", "")}
    if kind != "message":
        raise invalid(given.path("type"), f"{given.path('type')}: {kind!r:.50} is not supported")
    role = given.wanted("role", given.text("role"))
    if role not in _ROLES:
        raise invalid(given.path("role"), f"{given.path('role')}: there is no role {role!r:.50}")
    content = words(given.wanted("content", given.any("content")), given.path("content"), _PARTS)
    return {"role": _ROLES[role], "content": content}


def _joined(items: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Messages, with the calls of an answer in its message: the protocol has them as items of their own."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item is None:
            continue
        last = messages[-1] if messages else None
        if "tool_calls" in item and last is not None and last["role"] == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *item["tool_calls"]]
        else:
            messages.append(item)
    return messages


def _tool(given: Fields) -> dict[str, Any]:
    if given.text("type") != "function":
        raise unsupported(given.path("type"), "tools are of the type function and run by the client")
    return function_schema(given.any("name"), given.any("description"), given.any("parameters"), given.path("name"))


def _form(given: Fields | None) -> JsonForm | None:
    if given is None:
        return None
    given.ignored("verbosity")
    form = given.object("format")
    given.done()
    return None if form is None else json_form(form.any("type"), form.any("schema"), "text.format")


# What is told ---------------------------------------------------------------------------------------------------------


def _output(call: Call, said: Said, logprobs: bool) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.text or not said.calls:
        told = token_logprobs(call, said) if logprobs else []
        part: dict[str, Any] = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": told}
        parts = [part] if said.refusal is None else [part, {"type": "refusal", "refusal": said.refusal}]
        status = "incomplete" if said.cut else "completed"
        items.append(
            {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "status": status, "content": parts}
        )
    for number, each in enumerate(said.calls):
        items.append(
            {
                "id": f"fc_{call.id}{number}", "type": "function_call", "call_id": f"call_{each.id}",
                "name": each.name, "arguments": call_text(each), "status": "completed",
            }
        )  # fmt: skip
    return items


def _whole(call: Call, shape: dict[str, Any], said: Said, logprobs: bool) -> dict[str, Any]:
    cut = said.cut and not said.calls
    return {
        **shape,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(call, said, logprobs),
        "usage": {
            "input_tokens": said.read,
            "input_tokens_details": {"cached_tokens": said.cached},
            "output_tokens": len(said.reply.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.read + len(said.reply.ids),
        },
    }


def _events(call: Call, shape: dict[str, Any], said: Said, logprobs: bool) -> Iterable[bytes]:
    from rlinf.agents.endpoint.app import event

    count = -1

    def told(kind: str, **more: Any) -> bytes:
        nonlocal count
        count += 1
        return event({"type": kind, "sequence_number": count, **more}, kind)

    begun = {**shape, "status": "in_progress", "output": [], "usage": None}
    yield told("response.created", response=begun)
    yield told("response.in_progress", response=begun)
    whole = _whole(call, shape, said, logprobs)
    for place, item in enumerate(whole["output"]):
        here: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield told("response.output_item.added", output_index=place, item={**item, "status": "in_progress", **empty})
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield told("response.function_call_arguments.delta", **here, delta=piece)
            yield told("response.function_call_arguments.done", **here, name=item["name"], arguments=item["arguments"])
        else:
            for number, part in enumerate(item["content"]):
                yield from _part_events(told, {**here, "content_index": number}, part)
        yield told("response.output_item.done", output_index=place, item=item)
    yield told(f"response.{whole['status']}", response=whole)


def _part_events(told: Any, here: dict[str, Any], part: dict[str, Any]) -> Iterable[bytes]:
    """A part of a message: added, filled, done."""
    name = "output_text" if part["type"] == "output_text" else "refusal"
    key, more = ("text", {"logprobs": part["logprobs"]}) if name == "output_text" else ("refusal", {})
    empty = {**part, key: "", **({"logprobs": []} if more else {})}
    yield told("response.content_part.added", **here, part=empty)
    for piece in pieces(part[key]):
        yield told(f"response.{name}.delta", **here, delta=piece, **({"logprobs": []} if more else {}))
    yield told(f"response.{name}.done", **here, **{key: part[key]}, **more)
    yield told("response.content_part.done", **here, part=part)
