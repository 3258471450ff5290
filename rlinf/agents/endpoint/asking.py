"""One request to the model, whatever protocol it came by, and what the model says to it.

In: messages or token ids with settings. Out: `Said`, as a client may read it: without the text that stopped the answer,
calls of tools apart, checked against the JSON that was asked for. What a client reads is told to the record, so that it
is known when it comes back. Who wakes whom: the model's answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.agents.agent import AgentLLM
from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.errors import ApiError, invalid, unsupported
from rlinf.agents.endpoint.fields import Fields
from rlinf.agents.llm import Reply
from rlinf.agents.tools.calls import ToolCall
from rlinf.agents.trajectories import Key, Turn
from rlinf.runtime.base.errors import RemoteError
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.processes.worker import CallTimeout, Worker

Schema = dict[str, Any]
_SCHEMA_SECONDS = 2.0
"""Seconds for applying one schema: a thousand times what real ones take."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """The answer shall be JSON: the model is told so, and what it says is checked; nothing constrains its tokens."""

    schema: Mapping[str, Any] | None
    """JSON schema of it; None: any object."""
    param: str = ""
    """Where the request says so."""

    @property
    def instruction(self) -> str:
        """What the model is told."""
        if self.schema is None:
            return "Answer with one JSON object and nothing else."
        return f"Answer with JSON of this schema and nothing else: {json.dumps(self.schema, ensure_ascii=False)}"

    async def impossible(self, applying: Applying) -> str | None:
        """Why there can be no answer of the schema, because it is none; None: it is one."""
        return None if self.schema is None else await applying.wrong(self.schema)

    async def wrong(self, text: str, applying: Applying) -> str | None:
        """Why an answer is not what was asked for; None: it is.

        Args:
            text: the answer.
            applying: applies the schema.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"the answer is not valid JSON: {error}"
        if self.schema is None:
            return None if isinstance(value, dict) else "the answer is not a JSON object"
        return await applying.wrong(self.schema, text)


class Applying:
    """Applies the schemas of clients in a process of its own, which begins with the first and is killed where one takes
    longer than `_SCHEMA_SECONDS`: the event loop, and with it the run, never waits for a pattern."""

    def __init__(self) -> None:
        self._child: Worker | None = None
        self._starting = asyncio.Lock()

    async def wrong(self, schema: Mapping[str, Any], text: str | None = None) -> str | None:
        """Why a text is not JSON of a schema, or, without a text, why the schema is none; None: nothing is wrong."""
        try:
            async with self._starting:
                if self._child is None:
                    child = Worker("rlinf.agents.checks:Schemas", name="schemas of clients", answers="json")
                    await child.start()
                    self._child = child
            said = await self._child.call("wrong", schema, text, timeout=_SCHEMA_SECONDS)
        except CallTimeout:
            return f"the schema cannot be applied within {_SCHEMA_SECONDS:g} s: take simpler patterns"
        except (ChildDied, RemoteError, TypeError) as error:  # TypeError: nested too deeply to be sent
            return f"the schema cannot be applied: {type(error).__name__}"
        return None if said is None else str(said)

    async def close(self) -> None:
        """End the process."""
        if self._child is not None:
            await self._child.stop()
            self._child = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """As the chat template takes them; empty where `ids` go on."""
    ids: np.ndarray | None = None
    """Token ids that the model goes on from, int64 [tokens]."""
    tools: list[Schema] | None = None
    """Schemas of those that the model is shown."""
    calls: bool = True
    """It may call them."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of `llm.chat`."""
    form: JsonForm | None = None
    """The JSON that is wanted."""
    count: int = 1
    """Answers."""

    def told(self) -> list[dict[str, Any]]:
        """The messages, with what the model is told of the form that is wanted in the system's."""
        if self.form is None:
            return self.messages
        said = self.form.instruction
        if self.messages[0]["role"] == "system":
            first = {**self.messages[0], "content": f"{self.messages[0]['content']}\n\n{said}"}
            return [first, *self.messages[1:]]
        return [{"role": "system", "content": said}, *self.messages]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer, as a client reads it."""

    reply: Reply
    """What the model generated."""
    text: str
    """What it says, without its calls and the text that stopped it."""
    calls: tuple[ToolCall, ...]
    """Tools that it calls."""
    stop: str | None
    """The text that stopped it."""
    refusal: str | None
    """Why it is not the JSON that was asked for."""
    read: int
    """Tokens that the model had before it."""
    cached: int
    """Of those, how many an earlier answer had."""
    turn: Turn
    """Its place in the record."""
    key: Key
    """Of the history that ends with it as the client knows it; empty for answers to token ids."""

    @property
    def cut(self) -> bool:
        """A limit ended it."""
        return self.reply.finish in ("length", "abort")


def template_of(llm: AgentLLM, tools: Sequence[Schema] | None) -> ChatFormat:
    """How messages become tokens where the model is shown these tools."""
    chat = llm.trajectories.chat
    return chat.with_arguments(tools=list(tools)) if tools else chat


async def ask(llm: AgentLLM, asked: Asked, applying: Applying) -> Said:
    """Let the model answer once.

    Args:
        llm: the model.
        asked: what.
        applying: applies the schema of the answer, if one is asked for.

    Raises:
        UserError: it cannot; see `AgentLLM.chat`.
    """
    reply: Reply
    calls: tuple[ToolCall, ...] = ()
    if asked.ids is not None:
        reply = await llm.generate(asked.ids, **asked.sampling)
        turn = llm.trajectories.turns[-1]  # recorded last, in this very tick
        text = reply.text
    else:
        if not llm.trajectories.chat.has_template:
            llm.trajectories.chat.warn(
                "endpoint",
                "messages of the endpoint's clients are joined as they are, without their roles: the tokenizer has no "
                "chat template; set data.chat_template",
            )
        answer = await llm.chat(asked.told(), tools=asked.tools, **asked.sampling)
        assert answer.turn is not None
        reply, turn = answer, answer.turn
        calls = answer.calls if asked.calls else ()
        text = answer.content if calls else answer.text
    stop = None
    if reply.finish == "text":
        found = [(text.find(each), each) for each in asked.sampling.get("stop", ()) if each in text]
        if found:
            at, stop = min(found)
            text = text[:at]
    refusal = await asked.form.wrong(text, applying) if asked.form is not None and not calls else None
    cached = 0 if turn.parent is None else turn.parent.length
    key = b""
    if asked.ids is None:
        key = llm.trajectories.also(turn, message_of(text, calls))
    return Said(reply, text, calls, stop, refusal, turn.length - len(reply.ids), cached, turn, key)


def message_of(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An answer as the record knows it when it comes back."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [call.message for call in calls]
    return message


# What protocols have in common ---------------------------------------------------------------------------------------


def function_schema(name: Any, description: Any, parameters: Any, path: str) -> Schema:
    """A tool as chat templates read it.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(name, str) or not name:
        raise invalid(path, f"{path} must have a name")
    if description is not None and not isinstance(description, str):
        raise invalid(path, f"{path}: its description must be a string")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(path, f"{path}: its parameters must be a JSON schema, an object")
    shown: Schema = {"name": name, "description": description or ""}
    shown["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def may_call(choice: Any, param: str) -> bool:
    """Whether tools may be called, by `tool_choice` in any protocol.

    Raises:
        ApiError: it says that one must be.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in (None, "auto"):
        return True
    if kind == "none":
        return False
    raise unsupported(param, "nothing constrains what the model writes, so it cannot be made to call a tool; take auto")


def json_form(kind: Any, schema: Any, param: str) -> JsonForm | None:
    """The form that an answer shall have.

    Raises:
        ApiError: there is no such form, or the schema is none.
    """
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return JsonForm(None)
    if kind != "json_schema":
        raise invalid(param, f"{param}.type must be text, json_object or json_schema")
    if not isinstance(schema, dict):
        raise invalid(param, f"{param}: its schema must be an object")
    return JsonForm(schema, param)


def arguments_of(given: Any, path: str) -> Any:
    """Arguments of a call as an object, where they are the text of one.

    Raises:
        ApiError: neither a text nor an object.
    """
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise invalid(path, f"{path} must be a string of JSON")
    try:
        return json.loads(given) if given else {}
    except (ValueError, RecursionError):
        return given


def call_message(name: Any, arguments: Any, id: Any, path: str) -> dict[str, Any]:
    """A call in an assistant's message.

    Raises:
        ApiError: it has no name.
    """
    if not isinstance(name, str) or not name:
        raise invalid(path, f"{path} must have a name")
    return {
        "id": id if isinstance(id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(arguments, f"{path}.arguments")},
    }


def sampling_of(body: Fields, longest: str, stop: str) -> dict[str, Any]:
    """Settings that all protocols have, by the names of `llm.chat`.

    Args:
        body: the request.
        longest: its field of how many tokens an answer may have.
        stop: its field of texts that end an answer.
    """
    chosen: dict[str, Any] = {
        "max_new_tokens": body.whole(longest, 1),
        "temperature": body.number("temperature", 0, 100),
        "top_p": body.number("top_p", 0, 1),
        "top_k": body.whole("top_k", -1),
        "stop": list(body.texts(stop)) or None,
    }
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    return {name: value for name, value in chosen.items() if value is not None}


def messages_checked(messages: list[dict[str, Any]], param: str) -> list[dict[str, Any]]:
    """Messages, if there are any.

    Raises:
        ApiError: there is none.
    """
    if not messages:
        raise ApiError(400, f"{param} must have at least one message", code="invalid_value", param=param)
    return messages
