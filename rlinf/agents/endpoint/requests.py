"""Requests to an endpoint, whatever protocol they came by: their fields, the model's answer, and errors.

In: the bytes of a body, read field by field. Out: values of the right types, or an `ApiError` that names the field and
is answered in the form of the API that the client speaks; names of fields that are not honoured go to the record of who
asks. What is wrong inside the run is never told to a client, only that it failed.

A request that is right is put to the model, and `ClientAnswer` is its answer as a client may read it: without the text
that stopped the answer, reasoning and calls of tools apart, checked against the JSON that was asked for. What a client
reads is told to the record, so that it is known when it comes back. Who wakes whom: the model's answer.

Where the engine can, an answer is kept to the JSON or the calls that were asked for while it is decoded (`enforced`).
Elsewhere these are wishes of the client's: where an answer does not call tools as wished, the model is told so, as the
user, and asked once more. All of that is one line of the record, with every token learned once; the client sees the
second answer alone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlinf.agents.agent import AgentLLM, Answer
from rlinf.agents.chat import ChatFormat, begins_thought
from rlinf.agents.endpoint.streaming import THINK, THOUGHT, Live, LiveAnswer, LiveCall, Reading
from rlinf.agents.llm import ContextFull, Listener, Reply
from rlinf.agents.tools.formats import ToolCall
from rlinf.agents.trajectories import Key, Turn
from rlinf.data.datasets.conversations import call_arguments
from rlinf.engines.grammars import Form
from rlinf.runtime.base.errors import RemoteError, UserError
from rlinf.runtime.processes.supervisor import CallTimeout, ChildDied, Worker

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: a sentence for who sent it.
        code: a word for programs, such as `context_length_exceeded`.
        param: what in the request is wrong.
        retry_after: seconds after which the same may be asked again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """To send with it."""
        return {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after + 0.5)))}

    def body(self, *, anthropic: bool) -> dict[str, Any]:
        """Return the JSON body of the error, as clients of the API read it."""
        if anthropic:
            kind = _ANTHROPIC.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception) -> ApiError | None:
    """Translate an exception of the model to a client's error; None: it is no mistake of the client's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFull):
        return ApiError(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_value")
    return None


def invalid(param: str, message: str) -> ApiError:
    """A value that cannot be."""
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A wish that is not granted, and that would change the answer."""
    return ApiError(400, f"{param} is not supported: {why}", code="unsupported_parameter", param=param)


LARGEST = 2**31 - 1
"""Whole numbers of a request are at most this."""
_PLACE = re.compile(r"\[\d+\]")
_KINDS = {str: "a string", bool: "true or false", list: "an array", dict: "an object"}


def parsed(raw: bytes) -> Fields:
    """A request's body.

    Raises:
        ApiError: it is no JSON object, or holds what JSON in UTF-8 cannot.
    """
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return Fields(body)


def _no_constant(name: str) -> Any:
    raise ValueError(f"there is no {name} in JSON")


class Fields:
    """A JSON object; null counts as left out.

    Args:
        given: it.
        path: where it stands in the request.
        unheeded: where to note what is not honoured; None begins a list.
    """

    def __init__(self, value: Mapping[str, Any], path: str = "", unheeded: dict[str, None] | None = None) -> None:
        self.given, self._path = value, path
        self._known: set[str] = set()
        self.unheeded: dict[str, None] = {} if unheeded is None else unheeded
        """Names of fields that are not honoured, in order; those of a list without their places in it."""

    def path(self, name: str) -> str:
        """A field as errors call it."""
        return f"{self._path}.{name}" if self._path else name

    def any(self, name: str) -> Any:
        """A value of any type; None: left out."""
        self._known.add(name)
        return self.given.get(name)

    def _of(self, kind: type, name: str, default: Any) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise invalid(self.path(name), f"{self.path(name)} must be {_KINDS[kind]}")
        return value

    def text(self, name: str, default: str | None = None) -> Any:
        """A text."""
        return self._of(str, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._of(bool, name, default))

    def array(self, name: str) -> list[Any]:
        """A list, empty where it is left out."""
        return list(self._of(list, name, []))

    def object(self, name: str) -> Fields | None:
        """An object; None: left out."""
        value = self._of(dict, name, None)
        return None if value is None else Fields(value, self.path(name), self.unheeded)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return fields_of(self.array(name), self.path(name), self.unheeded)

    def wanted(self, name: str, value: Any) -> Any:
        """A value that must be there.

        Raises:
            ApiError: it is not.
        """
        if value is None:
            raise ApiError(
                400, f"{self.path(name)} is missing", code="missing_required_parameter", param=self.path(name)
            )
        return value

    def whole(self, name: str, low: int, high: int = LARGEST) -> int | None:
        """A whole number; None: left out."""
        value = self.any(name)
        if value is None or (type(value) is int and low <= value <= high):
            return value
        raise invalid(self.path(name), f"{self.path(name)} must be a whole number from {low} to {high}")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number; None: left out."""
        value = self.any(name)
        if value is None or (type(value) in (int, float) and low <= value <= high):
            return None if value is None else float(value)
        raise invalid(self.path(name), f"{self.path(name)} must be a number from {low:g} to {high:g}")

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or several, none of them empty."""
        value = self.any(name)
        listed = [value] if isinstance(value, str) else value or []
        if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
            raise invalid(self.path(name), f"{self.path(name)} must be a text or an array of texts, none of them empty")
        return tuple(listed)

    def ignored(self, *names: str) -> None:
        """Fields that say nothing about the answer."""
        self._known.update(names)

    def note(self, name: str, value: Any = None) -> None:
        """Note that a field is not honoured.

        Args:
            name: the field.
            value: that is not, where others are.
        """
        self._known.add(name)
        path = _PLACE.sub("", self.path(name))
        self.unheeded[path if value is None else f"{path}={value!s:.40}"] = None

    def wish(self, *names: str) -> None:
        """Fields that are wishes of which none is granted: they are noted where they say something."""
        for name in names:
            if self.any(name) not in (None, False, [], {}, ""):
                self.note(name)

    def neutral(self, name: str, *values: Any, why: str) -> None:
        """A field that is supported only where it changes nothing.

        Args:
            name: the field.
            values: that change nothing, besides null.
            why: it is not supported.
        """
        value = self.any(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            raise unsupported(self.path(name), why)

    def done(self) -> None:
        """Note all that nobody has asked for."""
        for name, value in self.given.items():
            if name not in self._known and value is not None:
                self.note(name)


def fields_of(items: list[Any], path: str, unheeded: dict[str, None] | None = None) -> list[Fields]:
    """Objects of a list.

    Args:
        items: it.
        path: where it stands in the request.
        unheeded: where to note what is not honoured.

    Raises:
        ApiError: one of them is none.
    """
    fields = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"{path}[{number}]", f"{path}[{number}] must be an object")
        fields.append(Fields(item, f"{path}[{number}]", unheeded))
    return fields


def words(content: Any, path: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a message's content: a string, or a list of parts that are texts.

    Raises:
        ApiError: a part is something else, such as a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string or an array of parts")
    texts = []
    for part in fields_of(content, path):
        kind = part.text("type")
        if kind not in kinds:
            raise invalid(
                part.path("type"), f"{part.path('type')}: {kind!r} is not supported; there is {', '.join(kinds)}"
            )
        text = part.text("refusal" if kind == "refusal" else "text")
        texts.append(part.wanted("text", text))
    return "".join(texts)


Schema = dict[str, Any]
_SCHEMA_SECONDS = 2.0
"""Seconds for applying one schema: a thousand times what real ones take."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """The answer shall be JSON: the model is told so, and what it says is checked."""

    schema: Mapping[str, Any] | None
    """JSON schema of it; None: any object."""
    param: str = ""
    """Where the request says so."""

    @property
    def instruction(self) -> str:
        """Instruction to the model to answer in this form."""
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
                    child = Worker("rlinf.agents.arguments:Schemas", name="schemas of clients", answers="json")
                    await child.start()
                    self._child = child
            problem = await self._child.call("wrong", schema, text, timeout=_SCHEMA_SECONDS)
        except CallTimeout:
            return f"the schema cannot be applied within {_SCHEMA_SECONDS:g} s: take simpler patterns"
        except (ChildDied, RemoteError, TypeError) as error:  # TypeError: nested too deeply to be sent
            return f"the schema cannot be applied: {type(error).__name__}"
        return None if problem is None else str(problem)

    async def close(self) -> None:
        """End the process."""
        if self._child is not None:
            await self._child.stop()
            self._child = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls a client wishes for, by `tool_choice` and its like in any protocol."""

    may: bool = True
    """Tools may be called."""
    must: bool = False
    """One has to be called."""
    name: str | None = None
    """The one that has to be called; None: any."""
    single: bool = False
    """Not more than one may be called."""
    strict: frozenset[str] = frozenset()
    """Tools whose arguments have to be of their schema."""

    def unmet(self, calls: Sequence[ToolCall], broken: Sequence[str]) -> str | None:
        """A line for the model about calls that are not as wished; None: they are."""
        if self.must and not any(self.name in (None, call.name) for call in calls):
            demand = "Answer by calling a tool." if self.name is None else f"Answer by calling the tool {self.name}."
            return " ".join([*broken[:1], demand])
        if self.single and len(calls) > 1:
            return "Call one tool at a time."
        return None

    def calls_for_client(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Those of an answer's calls that the client is given."""
        if not self.may:
            return ()
        named = [call for call in calls if call.name == self.name]
        return tuple(named or calls)[: 1 if self.single else None]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A client's request, read from the body: messages or token ids, tools and settings."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages as the chat template takes them; empty where `ids` go on."""
    ids: np.ndarray | None = None
    """Token ids that the model goes on from, int64 [tokens]."""
    tools: list[Schema] | None = None
    """Schemas of those that the model is shown."""
    choice: ToolChoice = ToolChoice()
    """Which of them it shall call."""
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""
    stop_shown: bool = False
    """The text that stops the answer is part of it."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of `llm.chat`."""
    form: JsonForm | None = None
    """The JSON that is wanted."""
    enforced: Form | None = None
    """The form that the answer is kept to while it is decoded; see `enforced`."""
    count: int = 1
    """Answers."""

    @property
    def asks_again(self) -> bool:
        """The first answer need not be the one that the client is given: it may call tools in another way than wished,
        unless it is kept to that while it is decoded."""
        choice = self.choice
        return self.enforced is None and bool(self.tools) and choice.may and (choice.must or choice.single)

    def messages_with_instruction(self) -> list[dict[str, Any]]:
        """The messages, with what the model is told of the form that is wanted in the system's."""
        if self.form is None:
            return self.messages
        instruction = self.form.instruction
        if self.messages[0]["role"] == "system":
            first = {**self.messages[0], "content": f"{self.messages[0]['content']}\n\n{instruction}"}
            return [first, *self.messages[1:]]
        return [{"role": "system", "content": instruction}, *self.messages]


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """One answer, as a client reads it."""

    reply: Reply
    """Reply as the model generated it."""
    text: str
    """Its words, without its reasoning, its calls and the text that stopped it."""
    reasoning: str | None
    """Its thoughts before the text; None: there are none, or nobody knows how it marks them."""
    calls: tuple[ToolCall, ...]
    """Tools that it calls."""
    stop: str | None
    """The text that stopped it."""
    refusal: str | None
    """Why it is not the JSON that was asked for."""
    prompt_tokens: int
    """Tokens that the model had before it."""
    cached: int
    """Number of those tokens that belong to the earlier turn that it goes on from."""
    turn: Turn
    """Its place in the record."""
    key: Key
    """Key of the history that ends with it as the client knows it; empty for answers to token ids."""
    again: bool = False
    """It is the second answer: the first was not what the client wished for."""
    live_calls: tuple[LiveCall, ...] = ()
    """Calls that the client of a stream is told piece by piece."""

    @property
    def half_calls(self) -> list[LiveCall]:
        """Calls that the client of a stream was told of, and that are none."""
        return [call for call in self.live_calls if not call.readable]

    @property
    def ends_by_calling(self) -> bool:
        """It ended with calls of tools, and not by a limit within one."""
        return not self.cut if self.half_calls else bool(self.calls)

    @property
    def message(self) -> dict[str, Any]:
        """It, as the record knows it when it comes back, with its reasoning or without."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        pieces = [call_message(each.name, each.written, each.id, "tool_calls") for each in self.live_calls]
        if calls := [*pieces, *(call.message for call in self.calls[len(pieces) - len(self.half_calls) :])]:
            message["tool_calls"] = calls
        return message

    @property
    def cut(self) -> bool:
        """A limit ended it."""
        return self.reply.finish in ("length", "abort")


def template_of(llm: AgentLLM, request: ModelRequest) -> ChatFormat:
    """How messages become tokens where the model is shown these tools, with these arguments of the template."""
    more = {**request.template, **({"tools": list(request.tools)} if request.tools else {})}
    return llm.trajectories.chat.with_arguments(**more)


async def enforced(llm: AgentLLM, request: ModelRequest, body: Fields) -> ModelRequest:
    """The request, with the form that its answer is kept to while it is decoded, where one is asked for.

    Args:
        llm: the model.
        request: as it was read.
        body: of what; tools whose schema is not kept to, because nobody insists on it, are noted there.

    Raises:
        ApiError: a schema has a keyword that cannot be enforced, and the text names it.
    """
    choice, param = request.choice, "response_format"
    tools = (
        [tool for tool in request.tools or () if choice.name in (None, tool["function"]["name"])] if choice.may else []
    )
    form: Form | None = None
    if tools and (choice.must or choice.strict):
        param = "tools"
        loose = [tool for tool in tools if tool["function"]["name"] not in choice.strict]
        whole = {"single": choice.single, "free": not choice.must}
        form = llm.call_format.form(tools, **whole)
        if form is not None and loose and llm.no_forms is None and await llm.unenforced(form) is not None:
            body.note("tools.parameters", "not enforced")
            form = llm.call_format.form([_loosened(tool) if tool in loose else tool for tool in tools], **whole)
    elif not tools and request.form is not None:
        param = request.form.param or param
        form = Form(json.dumps({"type": "object"} if request.form.schema is None else request.form.schema))
    elif request.form is None:
        return request
    if form is None or llm.no_forms is not None:
        why = await llm.unenforced(form) if tools else llm.no_forms
        why = why or "tools may be called, too"
        text = f"what clients ask of an answer's form is told to the model and checked, and not enforced: {why}"
        llm.trajectories.chat.warn("forms", text)
        return request
    if (why := await llm.unenforced(form)) is not None:
        raise invalid(param, f"{param}: {why}")
    return replace(request, enforced=form)


def _loosened(tool: Schema) -> Schema:
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


async def ask(
    llm: AgentLLM, request: ModelRequest, applying: Applying, *, thinks: bool, live: Live | None = None, number: int = 0
) -> ClientAnswer:
    """Let the model answer once.

    Args:
        llm: the model.
        request: what.
        applying: applies the schema of the answer, if one is asked for.
        thinks: the model writes `<think>…</think>` before its answers.
        live: is told the answer as it comes; None: nobody is.
        number: of the answer there.

    Raises:
        UserError: it cannot; see `AgentLLM.chat`.
    """
    tokenizer, stops = llm.trajectories.chat.tokenizer, tuple(request.sampling.get("stop", ()))
    if request.ids is not None:
        hears = None if live is None else live.answer(number, tokenizer, Reading(stops))
        reply = await llm.generate(request.ids, listener=hears, **request.sampling)
        turn = llm.trajectories.turns[-1]  # recorded last, in this very tick
        text, stop = _until_stopped(reply, reply.text, request)
        return _client_answer(reply, turn, text, stop)
    if not llm.trajectories.chat.has_template:
        llm.trajectories.chat.warn(
            "endpoint",
            "messages of the endpoint's clients are joined as they are, without their roles: the tokenizer has no "
            "chat template; set data.chat_template",
        )
    listener: LiveAnswer | None = None
    if live is not None and not request.asks_again:
        format = llm.call_format if request.choice.may else None
        listener = live.answer(number, tokenizer, Reading(stops, thinks, format))
    answer, first = await _answer_as_wished(llm, request, listener)
    assert answer.turn is not None
    calls, whole = request.choice.calls_for_client(answer.calls), answer.text
    thinking = thinks and begins_thought(tokenizer, answer.turn.new_ids)
    if thinking and THOUGHT not in whole:
        calls = ()  # it was cut while it thought of them
    live_calls: tuple[LiveCall, ...] = ()
    if listener is not None:
        calls, live_calls = listener.settled(_until_stopped(answer, whole, request)[0], calls)
    text, stop = _until_stopped(answer, _beside_calls(answer) if calls or live_calls else whole, request)
    reasoning, text = split_thought(text, thinking=thinking) if thinks else (None, text)
    refusal = await request.form.wrong(text, applying) if request.form is not None and not calls else None
    result = replace(
        _client_answer(answer, answer.turn, text, stop), calls=calls, live_calls=live_calls, reasoning=reasoning
    )
    key = llm.trajectories.also(answer.turn, result.message, in_place_of=first)
    return replace(result, refusal=refusal, key=key, again=first is not None)


def _beside_calls(answer: Answer) -> str:
    """The text beside calls; what was told of it before the first call came does not change."""
    whole = answer.text
    return f"{whole[: len(whole) - len(whole.lstrip())]}{answer.content}" if answer.content else ""


def _client_answer(reply: Reply, turn: Turn, text: str, stop: str | None) -> ClientAnswer:
    cached = 0 if turn.parent is None else turn.parent.length
    return ClientAnswer(reply, text, None, (), stop, None, turn.length - len(reply.ids), cached, turn, b"")


async def _answer_as_wished(
    llm: AgentLLM, request: ModelRequest, listener: Listener | None
) -> tuple[Answer, Turn | None]:
    """The answer; and, where it is the second one, the first, which did not call tools as wished."""
    messages = request.messages_with_instruction()
    form = {} if request.enforced is None else {"schema": request.enforced}
    more = {"tools": request.tools, "chat_template_kwargs": request.template, **form, **request.sampling}
    answer = await llm.chat(messages, listener=listener, **more)
    why = request.choice.unmet(answer.calls, answer.broken) if request.asks_again else None
    if why is None or answer.finish in ("length", "abort"):
        return answer, None
    try:
        return await llm.chat([*messages, answer.message, {"role": "user", "content": why}], **more), answer.turn
    except ContextFull:
        return answer, None


def _until_stopped(reply: Reply, text: str, request: ModelRequest) -> tuple[str, str | None]:
    """A text up to what stopped it, and that."""
    places = [(text.find(each), each) for each in request.sampling.get("stop", ()) if each in text]
    if reply.finish != "text" or not places:
        return text, None
    at, stop = min(places)
    return (text if request.stop_shown else text[:at]), stop


def split_thought(text: str, *, thinking: bool = False) -> tuple[str | None, str]:
    """Take a text apart into what was thought in it and what is said.

    Args:
        text: an answer.
        thinking: the prompt has begun the thought.
    """
    inside = text.lstrip()
    if not thinking and not inside.startswith(THINK):
        return None, text
    thought, ended, rest = inside.removeprefix(THINK).partition(THOUGHT)
    return thought.strip() or None, rest.lstrip() if ended else ""


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
    function: Schema = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def custom_schema(name: Any, description: Any, path: str) -> Schema:
    """A tool that takes a text of any form, as one of a single argument, `input`; its grammar is not enforced."""
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_schema(name, description, text, path)


def tool_choice(body: Fields, tools: Sequence[Schema], *, single: bool) -> ToolChoice:
    """Which tools shall be called, by a request's `tool_choice` in any protocol; a wish for what is not there is noted.

    Args:
        body: the request.
        tools: that the model is shown.
        single: not more than one at a time.
    """
    wished = replace(_wished(body, single), strict=frozenset(_strict(body.any("tools"))))
    names = {tool["function"]["name"] for tool in tools}
    if wished.must and not (names if wished.name is None else wished.name in names):
        body.note("tool_choice")
        return ToolChoice(single=single)
    return wished


def _strict(tools: Any, within: str = "") -> Iterator[str]:
    """Names of the tools that are `strict`, in any protocol."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping):
            inner = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
            if tool.get("strict") is True or inner.get("strict") is True:
                yield f"{within}{inner.get('name')}"
            yield from _strict(tool.get("tools"), f"{tool.get('name')}.")


def _wished(body: Fields, single: bool) -> ToolChoice:
    value = body.any("tool_choice")
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind in (None, "auto", "none"):
        return ToolChoice(may=kind != "none", single=single)
    if kind in ("required", "any"):
        return ToolChoice(must=True, single=single)
    if not isinstance(kind, str):
        raise invalid("tool_choice", "tool_choice must be a string, or an object with a type")
    inner: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(inner.get(kind), Mapping):
        inner = inner[kind]  # Chat Completions has it one level deeper
    if kind in ("function", "custom", "tool"):
        if isinstance(name := inner.get("name"), str) and name:
            return ToolChoice(must=True, name=name, single=single)
        raise invalid("tool_choice", "tool_choice must name its tool")
    if kind == "allowed_tools":
        body.note("tool_choice", kind)
        return ToolChoice(must=inner.get("mode") == "required", single=single)
    body.note("tool_choice", kind)
    return ToolChoice(single=single)


_OF_RENDERING = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments that say how a template is rendered, and not what it shows."""


def template_arguments(body: Fields) -> dict[str, Any]:
    """The arguments that a request has for the chat template, `chat_template_kwargs` as vLLM and SGLang have them."""
    arguments = body.object("chat_template_kwargs")
    if arguments is None:
        return {}
    for name in sorted(arguments.given.keys() & _OF_RENDERING):
        arguments.note(name)
    return {name: value for name, value in arguments.given.items() if name not in _OF_RENDERING}


def json_wish(body: Fields) -> JsonForm | None:
    """The form that vLLM's own fields ask for: `guided_json`, or `structured_outputs.json`."""
    outputs = body.object("structured_outputs")
    schema, param = body.any("guided_json"), "guided_json"
    if schema is None and outputs is not None:
        schema, param = outputs.any("json"), "structured_outputs.json"
        outputs.done()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"{param} is not valid JSON: {error}") from None
    return None if schema is None else json_form("json_schema", schema, param)


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


def arguments_of(value: Any, path: str) -> Any:
    """Arguments of a call as an object, where they are the text of one.

    Raises:
        ApiError: neither a text nor an object.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise invalid(path, f"{path} must be a string of JSON")
    return call_arguments(value)


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


def sampling_of(body: Fields, longest: str, stop: str, least: int = 1) -> dict[str, Any]:
    """Settings that all protocols have, by the names of `llm.chat`.

    Args:
        body: the request.
        longest: its field of how many tokens an answer may have.
        stop: its field of texts that end an answer.
        least: tokens that an answer has to be allowed.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": body.whole(longest, least),
        "min_new_tokens": body.whole("min_tokens", 0),
        "temperature": body.number("temperature", 0, 100),
        "top_p": body.number("top_p", 0, 1),
        "top_k": body.whole("top_k", -1),
        "min_p": body.number("min_p", 0, 1),
        "seed": body.whole("seed", -(2**63), 2**63 - 1),
        "stop": list(body.texts(stop)) or None,
    }
    if settings["top_k"] == -1:
        settings["top_k"] = 0
    body.wish("stop_token_ids", "ignore_eos")
    return {name: value for name, value in settings.items() if value is not None}


def messages_checked(messages: list[dict[str, Any]], param: str) -> list[dict[str, Any]]:
    """Messages, if there are any.

    Raises:
        ApiError: there is none.
    """
    if not messages:
        raise ApiError(400, f"{param} must have at least one message", code="invalid_value", param=param)
    return messages
