"""Tools: functions that a model may call, their JSON schemas, and an agent that lets the model call them.

In: calls of a model, with whatever arguments it wrote. Out: texts for it. A wrong argument, an exception, a deadline
that passes and an output that is too long are texts too, counted, never exceptions of the episode. Who wakes whom: the
end of a function, or its deadline, wakes the `call`; the last of several calls wakes `Tools.run`.

    @tool
    def weather(city: str, days: int = 1) -> str:
        \"\"\"Forecast of the weather.

        Args:
            city: its name in English.
            days: how many.
        \"\"\"

    tools = Tools([weather])
    messages = await tools.run(parsed.calls)

A `Signature` has the JSON schema of a function's arguments and a check of given ones. Types are pydantic's: numbers,
texts, `Literal`, `Optional`, lists, dicts, enums, dataclasses, `TypedDict`s, models, `Annotated` with constraints.
Descriptions are read from the docstring, whichever of the Google, numpy and reST styles it has.

The agent takes a task, and tools by their dotted paths; it lets the model call them until it answers without, and
returns no reward: the run's reward function judges what was said.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import warnings
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_type_hints, overload

from rlinf.agents.arguments import WrongType, WrongValue
from rlinf.agents.llm import ContextFull
from rlinf.agents.tools.formats import ToolCall
from rlinf.config.importing import resolve
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

_PROBLEMS = 5
"""Wrong arguments that a model is told of at once."""


class WrongArguments(ValueError):
    """A model's arguments do not fit; the text says how, to the model."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Name, description and JSON schema of a function, as a model reads them, and a check of arguments."""

    name: str
    """The function's."""
    description: str
    """From the docstring, without its sections; "" if there is none."""
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    check: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Makes the function's arguments of those that a model gave; raises `WrongArguments`."""


def signature_of(function: Callable[..., Any], name: str | None = None) -> Signature:
    """Read a function's signature.

    Args:
        function: every argument has a type hint and can be given by name.
        name: None takes the function's.

    Raises:
        UserError: an argument that no model could give, or packages that are not installed.
    """
    try:
        import docstring_parser
        import pydantic
    except ImportError as error:
        raise UserError(f"tools need the package {error.name}: pip install 'rlinf[agents]'") from None
    name = name or getattr(function, "__name__", "") or type(function).__name__
    if not name.replace("-", "_").isidentifier():
        raise WrongValue(f"tool {name!r}: give it a name of letters, digits and _: tool(function, name=…)")
    docstring = docstring_parser.parse(inspect.getdoc(function) or "")
    descriptions = {each.arg_name: " ".join((each.description or "").split()) for each in docstring.params}
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(_parameters(function, name)):
        has_default = parameter.default is not inspect.Parameter.empty
        # A name of its own for each field, since arguments may be called what pydantic's models have themselves.
        field = pydantic.Field(
            default=parameter.default if has_default else ...,
            alias=parameter.name,
            description=descriptions.get(parameter.name) or _annotated(parameter.annotation),
        )
        fields[f"argument_{place}"] = (parameter.annotation, field)
    config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults that JSON has not: the schema then names none
            model = pydantic.create_model(name, __config__=config, **fields)
            schema = model.model_json_schema(by_alias=True)
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation, TypeError) as error:
        raise WrongType(f"tool {name}: no JSON schema of its arguments: {str(error).splitlines()[0]}") from None
    names = {f"argument_{place}": field.alias for place, field in enumerate(model.model_fields.values())}

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        checked = _checked(model, dict(arguments))
        return {str(names[own]): getattr(checked, own) for own in names if own in checked.model_fields_set}

    description = "\n\n".join(part for part in (docstring.short_description, docstring.long_description) if part)
    return Signature(name, description, _plain(schema), check)


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The arguments, with their types."""
    try:
        hinted = function if inspect.isroutine(function) or inspect.isclass(function) else _called(function)
        hints = get_type_hints(hinted, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise WrongType(f"tool {name}: its type hints cannot be read: {error}") from None
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise WrongType(f"tool {name}: a model gives arguments by name, which {parameter} cannot be given by")
        if parameter.name not in hints:
            raise WrongType(
                f"tool {name}: the argument {parameter.name} has no type hint; write {parameter.name}: str, or what it "
                "is (of a method of an object, pass the bound one: tool(object.method))"
            )
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]


def _annotated(hint: Any) -> str | None:
    """The description in `Annotated[int, "how many"]`."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, str)), None)


def _called(function: Any) -> Any:
    """Return the function whose type hints apply to a callable object: of `functools.partial`, or with `__call__`."""
    return getattr(function, "func", None) or type(function).__call__


def _checked(model: Any, arguments: dict[str, Any]) -> Any:
    """Arguments as a model of pydantic; texts that do not fit are tried as JSON."""
    from pydantic import ValidationError

    try:
        return model.model_validate(arguments)
    except ValidationError as first:
        again = dict(arguments)
        for problem in first.errors(include_url=False, include_context=False):
            if problem["loc"] and isinstance(text := arguments.get(str(problem["loc"][0])), str):
                try:
                    again[str(problem["loc"][0])] = json.loads(text)
                except (ValueError, RecursionError):
                    pass
        try:
            return model.model_validate(again)
        except ValidationError:
            raise WrongArguments(_problems(model, first)) from None


def _problems(model: Any, error: Any) -> str:
    """Describe pydantic's validation errors, for the model."""
    lines = []
    for problem in error.errors(include_url=False)[:_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            lines.append(f"{where} is missing")
        elif problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            lines.append(f"there is no argument {where}")
        else:
            lines.append(f"{where}: {problem['msg']}, not {_short(problem['input'])}")
    others = error.error_count() - len(lines)
    expected = ", ".join(str(field.alias) for field in model.model_fields.values()) or "none"
    return "; ".join(lines) + (f"; and {others} more" if others > 0 else "") + f". The arguments are: {expected}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without titles, and with what it refers to in place of references, unless those go in circles."""
    definitions = schema.pop("$defs", {})
    plain = _inlined(schema, definitions, ())
    if "#/$defs/" in json.dumps(plain, default=str):
        plain["$defs"] = {name: _inlined(each, definitions, (name,)) for name, each in definitions.items()}
    plain.pop("description", None)  # of pydantic's base class
    plain.setdefault("properties", {})
    return dict(plain)


def _inlined(node: Any, definitions: Mapping[str, Any], within: tuple[str, ...], named: bool = False) -> Any:
    """A part of a schema; `named`: its keys are names of arguments, not words of JSON schema."""
    if isinstance(node, list):
        return [_inlined(each, definitions, within) for each in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if not named and isinstance(reference, str):
        name = reference.rpartition("/")[2]
        if name in within:
            return node
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inlined(definitions[name], definitions, (*within, name)), **siblings}
    inlined = {}
    for key, value in node.items():
        if named:
            inlined[key] = _inlined(value, definitions, within)
        elif key in ("default", "enum", "const"):
            inlined[key] = value
        elif key != "title" and (key != "additionalProperties" or value):
            inlined[key] = _inlined(value, definitions, within, named=key == "properties")
    return inlined


Outcome = Literal["ok", "wrong_arguments", "error", "timeout", "too_long", "unknown", "broken"]
"""Outcomes of a call; `too_long` was answered with a part, `unknown` named no tool, `broken` could not be read."""

_TIMEOUT = 30.0
"""Seconds of a call: an episode has minutes."""
_LONGEST = 10_000
"""Characters of an output, some 3,000 tokens."""
_REASON = 500
"""Characters of an exception's text that the model is shown."""
_GRACE = 1.0
"""Seconds that a cancelled function has to end before it is left to itself."""
_THREADS = 64
"""Plain functions that run at the same time; more of them wait for their turn."""

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""Whose turn it is, on each event loop."""
_left_alone: set[asyncio.Future[Any]] = set()
"""Cancelled calls that have not ended: a task that nobody refers to could be lost on the way."""


class ToolFailed(Exception):
    """Raised by a tool for a model to read: its text is the answer, counted as an error."""


@dataclass(slots=True, eq=False)
class Tool:
    """A function that a model may call. `tool` makes one of a function; called itself, it is that function."""

    name: str
    """Name that the model calls it by."""
    description: str
    """Description of its purpose, for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    function: Callable[..., Any]
    """Takes the arguments by name. A coroutine function runs on the event loop, any other in a thread."""
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Makes the function's arguments of those that the model gave; raises `WrongArguments`."""
    timeout: float = _TIMEOUT
    """Seconds of one call."""
    longest: int = _LONGEST
    """Characters of an output that the model is given."""
    counts: Counter[Outcome] = field(default_factory=Counter)
    """Counts of the calls so far, by outcome."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool for chat templates and OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any] | str, *, timeout: float | None = None) -> str:  # noqa: ASYNC109
        """Call it for a model.

        Args:
            arguments: by name, or the same as JSON; what a model wrote, so anything.
            timeout: seconds; None for the tool's own.

        Returns:
            The output: a text as it is, anything else as JSON; or a text that begins with `Error:`.
        """
        outcome, text = await self._outcome(arguments, self.timeout if timeout is None else timeout)
        if len(text) > self.longest:
            surplus = len(text) - self.longest
            text = f"{text[: self.longest]}\n[cut: {surplus:,} more characters; ask for less]"
            outcome = "too_long" if outcome == "ok" else outcome
        self.counts[outcome] += 1
        return text

    async def _outcome(self, arguments: Any, seconds: float) -> tuple[Outcome, str]:
        try:
            keywords = self.check(_object(arguments))
        except WrongArguments as error:
            return "wrong_arguments", _error(f"{self.name}: {error}")
        except Exception as error:  # of a validator of the user's own
            return "wrong_arguments", _error(f"{self.name}: {_described(error)}")
        if _is_async(self.function):
            return await self._ended(self._awaited(keywords), seconds)
        loop = asyncio.get_running_loop()
        async with _turns.setdefault(loop, asyncio.Semaphore(_THREADS)):
            return await self._ended(self._in_thread(keywords), seconds)

    async def _ended(self, work: Any, seconds: float) -> tuple[Outcome, str]:
        """The outcome of a call that begins now, or that its time is over."""
        running = asyncio.ensure_future(work)
        try:
            await asyncio.wait([running], timeout=seconds)
            if running.done():
                return running.result() if not running.cancelled() else ("error", _error(f"{self.name} was cancelled"))
            return "timeout", _error(f"{self.name} took longer than {seconds:g} seconds and was given up")
        finally:
            await _stop(running)

    async def _awaited(self, keywords: dict[str, Any]) -> tuple[Outcome, str]:
        try:
            return "ok", output_text(await self.function(**keywords))
        except (Exception, SystemExit) as error:
            return "error", self._failure(error)

    async def _in_thread(self, keywords: dict[str, Any]) -> tuple[Outcome, str]:
        def run() -> tuple[Outcome, str]:
            try:
                return "ok", output_text(self.function(**keywords))
            except BaseException as error:  # SystemExit, too, would end the thread without a word
                return "error", self._failure(error)

        return await in_thread(functools.partial(contextvars.copy_context().run, run))

    def _failure(self, error: BaseException) -> str:
        return _error(str(error) if isinstance(error, ToolFailed) else f"{self.name} raised {_described(error)}")


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = _TIMEOUT,
    longest: int = _LONGEST,
) -> Any: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = _TIMEOUT,
    longest: int = _LONGEST,
) -> Any:
    """Make a tool of a function; `@tool`, `@tool(timeout=5)` and `tool(function)` alike.

    A coroutine function runs on the event loop and is cancelled at its deadline. Any other runs in a thread, which
    nothing can stop: at its deadline the model is told, and the thread goes on to its end.

    Args:
        function: every argument has a type hint; the docstring describes it and, in a section of their own, the
            arguments. A `Tool` is taken as it is where nothing else is given.
        name: None takes the function's.
        description: None takes the docstring's.
        timeout: seconds of one call.
        longest: characters of an output that the model is given; what is more is cut, and the model told.

    Raises:
        UserError: an argument without a type, of a type that JSON has not, or that cannot be given by name.
        ValueError: a time or length that cannot be.
    """
    if function is None:
        return functools.partial(tool, name=name, description=description, timeout=timeout, longest=longest)
    if isinstance(function, Tool):
        function = function.function
    if not callable(function):
        raise WrongType(f"tool: {function!r} is no function")
    if not timeout > 0 or longest < 1:
        raise WrongValue(f"tool: timeout={timeout} and longest={longest} must be above 0")
    signature = signature_of(function, name)
    text = signature.description if description is None else description
    return Tool(signature.name, text, signature.parameters, function, signature.check, timeout, longest)


class HasCalls(Protocol):
    """An answer with tool calls, such as `Parsed`."""

    @property
    def calls(self) -> Sequence[ToolCall]:
        """Those that can be read."""

    @property
    def broken(self) -> Sequence[str]:
        """For each call that cannot be read, a sentence that the model can be told."""


class Tools:
    """Several tools, by their names.

    Args:
        tools: `Tool`s, or functions to make some of.

    Raises:
        UserError: two of one name, or a function that makes no tool.
    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._others: Counter[Outcome] = Counter()
        for each in tools:
            own = each if isinstance(each, Tool) else tool(each)
            if own.name in self._tools:
                raise WrongValue(f"tools: two are called {own.name}; name one of them otherwise: tool(…, name=…)")
            self._tools[own.name] = own

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """All of them, for `llm.chat(…, tools=…)`, chat templates and OpenAI's API."""
        return [each.schema for each in self]

    @property
    def counts(self) -> Counter[Outcome]:
        """Counts of the calls so far, by outcome, including those that named no tool."""
        return sum((each.counts for each in self), Counter(self._others))

    async def run(
        self,
        calls: ToolCall | Iterable[ToolCall] | HasCalls,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[dict[str, Any]]:
        """Run what a model asked for, all at once.

        Args:
            calls: of one answer; an answer with `calls` and `broken` has the broken ones told to the model too.
            timeout: seconds of each; None for the tools' own.

        Returns:
            A message of the role `tool` for each call, in their order, with `tool_call_id`, `name` and `content`; then
            one for each broken call.
        """
        broken: Sequence[str] = ()
        if isinstance(calls, ToolCall):
            readable: list[ToolCall] = [calls]
        elif isinstance(calls, Iterable):
            readable = list(calls)
        else:
            readable, broken = list(calls.calls), calls.broken
        running = [asyncio.ensure_future(self._run(call, timeout)) for call in readable]
        try:
            texts = [await each for each in running]
        finally:
            await _stop(*running)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(readable, texts, strict=True)
        ]
        self._others["broken"] += len(broken)
        error_texts = [_error(f"this tool call cannot be read: {why}") for why in broken]
        return [*messages, *({"role": "tool", "content": text} for text in error_texts)]

    async def _run(self, call: ToolCall, seconds: float | None) -> str:
        if call.name not in self._tools:
            self._others["unknown"] += 1
            return _error(f"there is no tool {_clean(call.name)[:60]}; there are: {', '.join(self._tools) or 'none'}")
        return await self._tools[call.name].call(call.arguments, timeout=seconds)


async def _stop(*calls: asyncio.Future[Any]) -> None:
    """Cancel those calls that have not ended; one that does not listen is left to itself."""
    running = [call for call in calls if not call.done()]
    for call in running:
        call.cancel()
        _left_alone.add(call)
        call.add_done_callback(_left_alone.discard)
    if running:
        await asyncio.wait(running, timeout=_GRACE)


def _object(arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise WrongArguments(f"the arguments are no valid JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise WrongArguments("the arguments must be a JSON object")
    return arguments


def _is_async(function: Any) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - its own is asked for, not whether there is one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def output_text(value: Any) -> str:
    """An output as a text: itself, or its JSON; arrays as lists, what JSON has not as `str` shows it."""
    if isinstance(value, str):
        return _clean(value)
    from pydantic_core import to_json

    return _clean(to_json(value, fallback=_listed, inf_nan_mode="constants").decode())


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # numpy and torch


def _clean(text: str) -> str:
    """A text that tokenizers take: they refuse halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()


def _described(error: BaseException) -> str:
    reason = _clean(" ".join(str(error).split()))[:_REASON]
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _error(text: str) -> str:
    return f"Error: {_clean(text)}"


Declared = TypeVar("Declared", bound=Callable[..., Any])
"""An agent: a function or a class."""


def offers_tools(agent: Declared) -> Declared:
    """Declare that an agent offers its model tools, so that a chat template that hides them is refused before a run
    starts, and not by its first episode. An object says it by an attribute of this name.

    Args:
        agent: a function or a class.
    """
    agent.offers_tools = True  # type: ignore[attr-defined]
    return agent


@offers_tools
async def use_tools(task: Any, llm: Any, *, tools: Sequence[str], turns: int = 8) -> None:
    """Work on a task: the model calls tools, reads their results, which are not learned from, and answers.

    Args:
        task: a chat, or a text that the user says.
        llm: the model.
        tools: dotted paths of functions or `Tool`s, such as `rlinf.agents.tools.arithmetic.calculator`.
        turns: answers of the model at most; calls in the last one are not run.

    Raises:
        ImportError, AttributeError: there is no such tool.
        UserError: a tool cannot be called by models; the chat template refuses the messages.
    """
    messages = list(task.row.get("messages") or [{"role": "user", "content": task.text}])
    await conversation(messages, llm, turns, tools=Tools([resolve(path) for path in tools]))


async def conversation(
    messages: list[Any],
    llm: Any,
    turns: int,
    *,
    tools: Any,
    runs_last: bool = False,
    check: Callable[[], Awaitable[None]] | None = None,
) -> list[tuple[Any, list[Any]]]:
    """Let the model work with tools, until an answer has no call, its turns are over, or its context is full.

    Args:
        messages: what was said so far; what is said is added.
        llm: the model.
        turns: answers at most.
        tools: that it may call.
        runs_last: the calls of the last of them are run, too.
        check: awaited when calls have been run; what it raises ends the work.

    Returns:
        Each answer with the results of its calls, none where they were not run.

    Raises:
        ContextFull: what was said so far is too long.
    """
    exchanges: list[tuple[Any, list[Any]]] = []
    for turn in range(turns):
        try:
            answer = await llm.chat(messages, tools=tools)
        except ContextFull:
            if not turn:
                raise  # the task alone is too long
            break
        results: list[Any] = []
        exchanges.append((answer, results))
        if not (answer.calls or answer.broken) or (turn == turns - 1 and not runs_last):
            break
        results += await answer.results()
        messages += [answer.message, *results]
        if check is not None:
            await check()
    return exchanges
