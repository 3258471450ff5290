"""Parsers of tool calls in a model's answer, and the choice of the format that a model writes them in.

In: the text of an answer. Out: `Parsed`: the calls, the text around them, and what was wrong with calls that cannot be
read. Nothing here raises because of what a model wrote. `call_format` chooses a format by its name or by the markers in
a tokenizer's chat template.

    parsed = call_format(None, tokenizer).parse(reply.text)
    for call in parsed.calls:
        print(call.name, call.arguments)

Formats with marked calls are Hermes and Qwen, Qwen3-Coder, DeepSeek, Mistral; those of the Llamas need no mark: the
answer is the call, as JSON or as Python. Each reads from where a call begins and returns a `Read`; `CallFormat` does
the rest.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import keyword
import re
import secrets
import tokenize
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from transformers import PreTrainedTokenizerBase

from rlinf.agents.chat import copied
from rlinf.config.importing import resolve
from rlinf.engines.grammars import Form
from rlinf.runtime.base.errors import UserError

Schema = Mapping[str, Any]
"""A tool for chat templates and OpenAI's API: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model asks for a tool."""

    id: str
    """Names the call in the tool's answer: nine letters and digits, which Mistral's templates ask for. It is made of
    its place in the answer, and that: the same in every repetition of a run."""
    name: str
    """Name of the tool; there need not be one of this name."""
    arguments: dict[str, Any]
    """By name, as JSON has them; not checked against the tool."""

    @property
    def message(self) -> dict[str, Any]:
        """An entry of `tool_calls` in an assistant message, as chat templates read it; a copy."""
        function = {"name": self.name, "arguments": copied(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}

    def of_answer(self, answer: str, place: int) -> ToolCall:
        """The call with an id that no other call has.

        Args:
            answer: names the answer that it stands in.
            place: its number there.
        """
        return replace(self, id=call_id(answer, place))


def call_id(answer: str, place: int) -> str:
    """The id of a call, known before the call is; see `ToolCall.of_answer`."""
    return hashlib.sha256(f"{answer} {place}".encode()).hexdigest()[:9]


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer split into its text and its tool calls."""

    content: str
    """The text without the calls, thinking included, no white space at its ends."""
    calls: tuple[ToolCall, ...] = ()
    """In the order in which they were written."""
    broken: tuple[str, ...] = ()
    """For each call that cannot be read, why: a sentence that the model can be told."""


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a format's parser at the place where a call begins."""

    end: int
    """The first character behind it."""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and arguments."""
    broken: tuple[str, ...] = ()
    """For each call that cannot be read, why."""


class Malformed(ValueError):
    """A call that cannot be read; the text says why."""


MOST_CALLS = 128
"""Calls that are read in one answer, broken ones among them: no task needs more at once, and a model that repeats the
mark of a call would have thousands of results written back to it."""
_MOST_READS = 2 * MOST_CALLS
"""Places in one answer where a call is looked for. Each may cost a look at the whole answer."""
_MOST_BROKEN = 16
"""Broken calls of one answer that the model is told of one by one."""
_THINKING = re.compile(r"</?think>")


class CallFormat:
    """How one family of models writes tool calls.

    A format of one's own is a subclass with `opens` and `read`; `call_format` takes its dotted path.
    """

    name: ClassVar[str] = ""
    """Name by which `call_format` chooses it."""
    opens: ClassVar[re.Pattern[str]]
    """Matches, never empty, where calls begin."""
    marks: ClassVar[tuple[str, ...] | None] = None
    """Texts with one of which every call begins, for clients that read an answer as it comes: up to there it is text.
    One of a single character begins a call only where nothing was said before it. None: calls begin otherwise, and such
    clients get the answer at its end."""
    heads: ClassVar[tuple[re.Pattern[str], re.Pattern[str]] | None] = None
    """Match what stands from one of the marks on before the arguments, an object of JSON, of the first call; and what
    stands before those of a further one behind the arguments of the one before. One group is the name: called `name`
    where another object has name and arguments. For clients that read an answer as it comes; None: they are told of a
    call when it is whole."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end an answer in this format, besides the model's end tokens."""
    untyped: ClassVar[bool] = False
    """Arguments are written as bare texts, whose types only the tool's schema tells."""
    around: ClassVar[tuple[str, str, str] | None] = None
    """Texts before and behind a call that is an object of JSON, and between two of them; None: calls are something
    else, and nothing keeps answers to them."""
    arguments: ClassVar[str] = "arguments"
    """Name of the arguments in that object."""

    def form(self, tools: Sequence[Schema], *, single: bool = False, free: bool = False) -> Form | None:
        """The form of answers that call tools; None: there is none for this format.

        Args:
            tools: that may be called, at least one.
            single: one call, and not several.
            free: an answer may have other text too, or that alone.
        """
        if self.around is None or (free and not self.around[0]):
            return None
        before, after, between = self.around
        calls = [self._call_schema(number, tool["function"]) for number, tool in enumerate(tools)]
        return Form(json.dumps({"anyOf": calls}), before, after, None if single else between, free=free)

    def _call_schema(self, number: int, function: Mapping[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters") or {"type": "object"}
        moved = _moved(parameters, f"#/anyOf/{number}/properties/{self.arguments}")
        properties = {"name": {"const": function["name"]}, self.arguments: moved}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def read(self, text: str, match: re.Match[str]) -> Read | None:
        """Read the calls that begin at a match of `opens`.

        Args:
            text: the whole answer.
            match: where in it.

        Returns:
            What stands there; None if it is no call after all.

        Raises:
            Malformed: it cannot be read, and the rest of the text neither.
        """
        raise NotImplementedError

    def parse(self, text: str, tools: Iterable[Schema] = ()) -> Parsed:
        """Tell calls from other text. Calls inside `<think>…</think>` are thoughts, not calls.

        Args:
            text: an answer, without its end token or with it.
            tools: schemas of the tools that there are; formats that do not write types take them from here.

        Returns:
            What was found; any text gives something.
        """
        texts, calls, broken = self._apart(text)
        if self.untyped:
            schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
            calls = [(name, typed(arguments, schemas.get(name, {}))) for name, arguments in calls]
        numbered: list[ToolCall] = []
        for name, arguments in calls[:MOST_CALLS]:
            try:
                numbered.append(ToolCall(_id(len(numbered), name, arguments), name, arguments))
            except (ValueError, RecursionError):  # half a surrogate pair, infinity, a number of 5,000 digits
                broken.append(f"{name}: the arguments cannot be written as JSON")
        if len(broken) > _MOST_BROKEN:
            broken[_MOST_BROKEN:] = [f"{len(broken) - _MOST_BROKEN} more calls cannot be read"]
        if len(calls) > MOST_CALLS:
            broken.append(f"only the first {MOST_CALLS} calls of an answer are read")
        return Parsed("".join(texts).strip(), tuple(numbered), tuple(broken))

    def _apart(self, text: str) -> tuple[list[str], list[tuple[str, dict[str, Any]]], list[str]]:
        """The text around calls, names and arguments of the calls, and what is wrong with broken ones."""
        texts: list[str] = []
        calls: list[tuple[str, dict[str, Any]]] = []
        broken: list[str] = []
        opening, thinking = _Ahead(self.opens, text), _Ahead(_THINKING, text)
        at = reads = 0
        while (match := opening.of(at)) is not None:
            thought = thinking.of(at)
            if thought is not None and thought.start() <= match.start():
                behind = _behind_thought(text, thought)
                texts.append(text[at:behind])
                at = behind
                continue
            if reads >= _MOST_READS or len(calls) + len(broken) >= MOST_CALLS:
                broken.append(f"only the first {MOST_CALLS} calls of an answer are read")
                break
            result, reads = self._read(text, match), reads + 1
            if thought is not None and thought.group() == "</think>" and not _spans(result, thought):
                texts.append(text[at : thought.end()])  # the prompt had begun to think: all before was thought
                at = thought.end()
                continue
            if result is None:
                texts.append(text[at : match.end()])
                at = match.end()
                continue
            texts.append(text[at : match.start()])
            calls += result.calls
            broken += result.broken
            at = max(result.end, match.end())
        texts.append(text[at:])
        return texts, calls, broken

    def _read(self, text: str, match: re.Match[str]) -> Read | None:
        try:
            return self.read(text, match)
        except Malformed as error:
            return Read(len(text), broken=(str(error),))


class _Ahead:
    """The next match of a pattern, from places that only grow: no part of the text is searched twice.

    Args:
        pattern: it.
        text: where.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._pattern, self._text, self._match = pattern, text, pattern.search(text)

    def of(self, place: int) -> re.Match[str] | None:
        """The first match from a place on."""
        if self._match is not None and self._match.start() < place:
            self._match = self._pattern.search(self._text, place)
        return self._match


def _behind_thought(text: str, opening: re.Match[str]) -> int:
    """Where thinking ends that begins, or ends, at a match."""
    if opening.group() == "</think>":
        return opening.end()
    end = text.find("</think>", opening.end())
    return len(text) if end < 0 else end + len("</think>")


def _spans(result: Read | None, thought: re.Match[str]) -> bool:
    """True if `</think>` stands inside a good call, as part of an argument."""
    return result is not None and not result.broken and result.end >= thought.end()


def _id(place: int, name: str, arguments: Mapping[str, Any]) -> str:
    """Nine letters and digits, which Mistral's templates ask for; the same in every repetition of a run.

    Raises:
        ValueError, RecursionError: the arguments are nothing that JSON in UTF-8 can hold.
    """
    described = json.dumps([place, name, arguments], ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(described.encode()).hexdigest()[:9]


def typed(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with texts read as JSON where the schema does not want a text.

    Args:
        arguments: by name.
        parameters: JSON schema of them, an object; what it does not tell stays as it is.
    """
    properties = parameters.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, schemas.get(name)) for name, value in arguments.items()}


def _typed(value: Any, schema: Any) -> Any:
    if not isinstance(value, str) or not isinstance(schema, Mapping) or _takes_text(schema):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        lower = value.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lower, value)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return any(isinstance(choice, Mapping) and _takes_text(choice) for choice in choices)
    if values := schema.get("enum"):
        return any(isinstance(value, str) for value in values)
    return "const" not in schema or isinstance(schema["const"], str)


FORMATS = {
    "hermes": "rlinf.agents.tools.formats.Hermes",
    "qwen3_coder": "rlinf.agents.tools.formats.Qwen3Coder",
    "deepseek_v3": "rlinf.agents.tools.formats.DeepSeek",
    "mistral": "rlinf.agents.tools.formats.Mistral",
    "llama3_json": "rlinf.agents.tools.formats.LlamaJson",
    "pythonic": "rlinf.agents.tools.formats.Pythonic",
}
"""The formats by their names, which are those of vLLM's `--tool-call-parser`."""
_MARKERS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)
"""Markers in a chat template that tell the format, most telling first."""


def _moved(schema: Any, path: str) -> Any:
    """A schema as it stands inside of another, at a path: its references go there."""
    if isinstance(schema, list):
        return [_moved(each, path) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    inside = {name: _moved(each, path) for name, each in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        inside["$ref"] = path + to[1:]
    return inside


def call_format(name: str | CallFormat | type[CallFormat] | None, tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """The format in which a model writes tool calls.

    Args:
        name: one of `FORMATS`, the dotted path of a `CallFormat`, or one. None: the format that the chat template
            shows; `hermes`, which most models know, where it shows none.
        tokenizer: the model's.

    Raises:
        UserError: there is no such format.
    """
    choice: Any = _shown_by(tokenizer) if name is None else name
    if isinstance(choice, str):
        if choice not in FORMATS and "." not in choice:
            raise UserError(
                f"call format {choice!r}: there is none of this name; take one of {', '.join(FORMATS)}, null for the "
                "one that the chat template shows, or the dotted path of a rlinf.agents.tools.formats.CallFormat"
            )
        try:
            choice = resolve(FORMATS.get(choice, choice))
        except (ImportError, AttributeError) as error:
            raise UserError(f"call format {choice!r}: {error}") from None
    format = choice() if isinstance(choice, type) else choice
    if not isinstance(format, CallFormat):
        raise UserError(f"call format {name!r} is no rlinf.agents.tools.formats.CallFormat but {type(format).__name__}")
    return format


def _shown_by(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template or ""
    text = " ".join(template.values()) if isinstance(template, dict) else str(template)
    return next((name for marker, name in _MARKERS if marker in text), "hermes")


_SPACE = re.compile(r"\s*")
_SHOWN = 60
"""Characters of a broken call that the model is shown."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
"""Lets line ends stand inside texts: models write code that way, and it cannot be misunderstood."""


def json_at(text: str, at: int) -> tuple[Any, int]:
    """A JSON value behind white space, and where it ends.

    Raises:
        Malformed: there is none.
    """
    begin = behind_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise Malformed(
            f"no valid JSON: {error.msg} at character {error.pos - begin} of {quoted(text, begin)}"
        ) from None
    except ValueError as error:
        raise Malformed(f"no valid JSON: {error}") from None
    except RecursionError:
        raise Malformed("no valid JSON: nested too deeply") from None
    return value, end


def behind_space(text: str, at: int) -> int:
    """Where the next character stands that is no white space."""
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def quoted(text: str, at: int) -> str:
    """The beginning of a broken call, for the model."""
    part = text[at : at + _SHOWN + 1]
    return part if len(part) <= _SHOWN else f"{part[:_SHOWN]}…"


def call_of(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call as JSON: `{"name": …, "arguments": {…}}`, or `parameters` in their place.

    Raises:
        Malformed: it is none.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # the shape of OpenAI's API
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise Malformed('a tool call is a JSON object with "name" and "arguments"')
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json_at(arguments, 0)[0]
        except Malformed:
            pass
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {name} must be a JSON object")
    return name, arguments


def _closed(text: str, at: int, mark: str, end: int) -> int:
    """Behind the nearest mark before `end`, or that end if a model that stopped left it out."""
    place = text.find(mark, at, end)
    return end if place < 0 else place + len(mark)


def _until(text: str, at: int, *marks: str) -> int:
    """Before the nearest of these marks, or the end of the text."""
    end = len(text)
    for mark in marks:
        if (place := text.find(mark, at, end)) >= 0:
            end = place
    return end


_QUOTED = r'(?:[^"\\]|\\.)++'


def _of_json(arguments: str) -> str:
    """Pattern of what stands before the arguments in a call that is an object of JSON.

    Args:
        arguments: their name there.
    """
    return rf'\s*+\{{\s*+"name"\s*+:\s*+"(?P<name>{_QUOTED})"\s*+,\s*+"{arguments}"\s*+:\s*+(?=\{{)'


def _heads(first: str, further: str, head: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Heads of calls, see `CallFormat.heads`.

    Args:
        first: pattern of what stands before the first call.
        further: of what stands between the arguments of a call and the next one.
        head: of a call up to its arguments.
    """
    return re.compile(f"{first}{head}"), re.compile(f"{further}{head}")


class Hermes(CallFormat):
    """Hermes, Qwen2.5, Qwen3 and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    name = "hermes"
    marks = ("<tool_call>",)
    heads = _heads("<tool_call>", r"\s*+\}\s*+(?:</tool_call>\s*+)?+<tool_call>", _of_json("arguments"))
    around = ("<tool_call>\n", "\n</tool_call>", "\n")
    opens = re.compile(r"<tool_call>")

    def read(self, text: str, match: re.Match[str]) -> Read:
        try:
            value, end = json_at(text, match.end())
            call = call_of(value)
        except Malformed as error:
            following = _until(text, match.end(), "<tool_call>")
            return Read(_closed(text, match.end(), "</tool_call>", following), broken=(str(error),))
        behind = behind_space(text, end)
        if text.startswith("</tool_call>", behind):
            return Read(behind + len("</tool_call>"), (call,))
        if behind < len(text) and not text.startswith("<", behind):  # another mark, or the end token
            following = _until(text, end, "<tool_call>")
            why = f"</tool_call> must follow the JSON object, not {quoted(text, behind)}"
            return Read(_closed(text, end, "</tool_call>", following), broken=(why,))
        return Read(end, (call,))


_NAMED = re.compile(r"<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")


class Qwen3Coder(CallFormat):
    """Qwen3-Coder and later Qwens: `<function=name><parameter=key>value</parameter>…</function>` inside `<tool_call>`.

    Values are texts; line ends next to the tags are not part of them.
    """

    name = "qwen3_coder"
    marks = ("<tool_call>", "<function=")
    opens = re.compile(r"<tool_call>\s*(?=<function=)|<function=|<tool_call>")
    untyped = True

    def read(self, text: str, match: re.Match[str]) -> Read:
        named = _NAMED.match(text, match.start() if match.group() == "<function=" else match.end())
        following = _until(text, match.end() + 1, "<tool_call>")
        if named is None or not named.group(1).strip():
            end = _closed(text, match.end(), "</tool_call>", following)
            return Read(end, broken=("a tool call is <function=name>, its parameters, </function>",))
        name, at, arguments = named.group(1).strip(), named.end(), dict[str, Any]()
        while (parameter := _PARAMETER.match(text, at)) is not None:
            end = text.find("</parameter>", parameter.end())
            if end < 0:
                why = f"{name}: </parameter> is missing behind <parameter={parameter.group(1)}>"
                return Read(following, broken=(why,))
            value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[parameter.group(1).strip()] = value
            at = end + len("</parameter>")
        behind = behind_space(text, at)
        if not text.startswith("</function>", behind):
            why = f"{name}: </function> must follow the parameters, not {quoted(text, behind) or 'the end'}"
            return Read(_closed(text, behind, "</tool_call>", following), broken=(why,))
        behind += len("</function>")
        closing = behind_space(text, behind)
        if match.group() != "<function=" and text.startswith("</tool_call>", closing):
            behind = closing + len("</tool_call>")
        return Read(behind, ((name, arguments),))


_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCED = re.compile(r"([^\n]*)\n```json\s*")
_FENCE = re.compile(r"\s*```")
_SEPARATOR = "<｜tool▁sep｜>"
_NAMED_BEFORE = (
    rf"{_BEGIN}(?:[^\n<]*+{_SEPARATOR}(?P<fenced>[^\n{{]*+)\n```json\s*+|(?P<word>[^\n<]*+){_SEPARATOR}\s*+)(?=\{{)"
)


class DeepSeek(CallFormat):
    """DeepSeek-V3, -R1 and -V3.1, whose calls stand between special tokens.

    Each is `function<｜tool▁sep｜>name`, a line end and the arguments in a fenced block of JSON; from V3.1 on
    `name<｜tool▁sep｜>{…}`.
    """

    name = "deepseek_v3"
    marks = (_ALL_BEGIN, _BEGIN, _ALL_END)
    heads = _heads(rf"(?:{_ALL_BEGIN}\s*+)?+", rf"\s*+(?:```\s*+)?+(?:{_END}\s*+)?+", _NAMED_BEFORE)
    opens = re.compile(f"{_ALL_BEGIN}|{_BEGIN}|{_ALL_END}")

    def read(self, text: str, match: re.Match[str]) -> Read:
        if match.group() == _ALL_END:
            return Read(match.end())
        at = behind_space(text, match.end()) if match.group() == _ALL_BEGIN else match.start()
        if not text.startswith(_BEGIN, at):
            return Read(match.end(), broken=(f"{_BEGIN} must follow {_ALL_BEGIN}",))
        calls: list[tuple[str, dict[str, Any]]] = []
        broken: list[str] = []
        while text.startswith(_BEGIN, at) and len(calls) + len(broken) <= MOST_CALLS:
            end = _until(text, at + len(_BEGIN), _BEGIN, _ALL_END)
            try:
                call, end = _deepseek_call(text, at + len(_BEGIN), end)
                calls.append(call)
            except Malformed as error:
                broken.append(str(error))
            at = behind_space(text, end)
        return Read(end, tuple(calls), tuple(broken))


def _deepseek_call(text: str, at: int, end: int) -> tuple[tuple[str, dict[str, Any]], int]:
    before, separator, _ = text[at:end].partition("<｜tool▁sep｜>")
    if not separator:
        raise Malformed("<｜tool▁sep｜> is missing between a call's name and its arguments")
    at += len(before) + len(separator)
    fenced = _FENCED.match(text, at)
    name = (before if fenced is None else fenced.group(1)).strip()
    arguments, at = json_at(text, at if fenced is None else fenced.end())
    call = call_of({"name": name, "arguments": arguments})
    if fenced is not None and (fence := _FENCE.match(text, at)) is not None:
        at = fence.end()
    behind = behind_space(text, at)
    return call, behind + len(_END) if text.startswith(_END, behind) else at


_WORDED = r"\s*+(?P<word>[\w.\-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)"
"""Nothing in it is tried twice (`+`): a name and 8,000 spaces would take a second."""
_ARGUED = re.compile(_WORDED)


class Mistral(CallFormat):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls; later `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

    name = "mistral"
    marks = ("[TOOL_CALLS]",)
    heads = _heads(
        r"\[TOOL_CALLS\]", r"\s*+(?:\}\s*+,|\[TOOL_CALLS\])", rf"(?:\s*+\[?+{_of_json('arguments')}|{_WORDED})"
    )
    opens = re.compile(r"\[TOOL_CALLS\]")

    def read(self, text: str, match: re.Match[str]) -> Read:
        argued = _ARGUED.match(text, match.end())
        following = _until(text, match.end(), "[TOOL_CALLS]")
        try:
            value, end = json_at(text, match.end() if argued is None else argued.end())
            if argued is not None:
                value = {"name": argued.group(1), "arguments": value}
        except Malformed as error:
            return Read(following, broken=(str(error),))
        return Read(end, *several(value))


def several(value: Any) -> tuple[tuple[tuple[str, dict[str, Any]], ...], tuple[str, ...]]:
    """The calls of a JSON list of them, or of one, and what is wrong with the others."""
    calls, broken = [], []
    for each in value if isinstance(value, list) else [value]:
        try:
            calls.append(call_of(each))
        except Malformed as error:
            broken.append(str(error))
    return tuple(calls), tuple(broken)


_FRESH = r"(?:\A|(?<=</think>))\s*"
"""Nothing was said yet."""
_BETWEEN = re.compile(r"\s*+[;,]?+\s*+(?=\{)|\s*+<\|python_tag\|>\s*+")
_BUILT_IN = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")
_LONGEST = 50_000
"""Characters of Python that are parsed; more is no call, and Python's own parser suffers from depth."""
_RENAMED = f"k{secrets.token_hex(8)}_"
"""Stands before names that Python keeps for itself, so that they parse; another in each process, so that no name begins
with it."""


class LlamaJson(CallFormat):
    """Llama 3.1 to 3.3: the answer is `{"name": …, "parameters": {…}}`, or several of them with `;` between.

    `<|python_tag|>` may stand before. Behind it `tool.call(query="…")`, the way of Llama's own tools, is read too.
    """

    name = "llama3_json"
    marks = ("<|python_tag|>", "{")
    heads = _heads(r"(?:<\|python_tag\|>)?+", r"\s*+\}\s*+[;,]?+", _of_json("parameters"))
    around, arguments = ("", "", "; "), "parameters"
    opens = re.compile(rf"<\|python_tag\|>|{_FRESH}\{{")

    def read(self, text: str, match: re.Match[str]) -> Read | None:
        tagged = not match.group().endswith("{")
        at = match.end() if tagged else match.end() - 1
        if tagged and _BUILT_IN.match(text, at):
            return _built_in(text, at)
        calls: list[Any] = []
        broken: list[str] = []
        while True:
            try:
                value, end = json_at(text, at)
            except Malformed as error:
                if not calls and not tagged and not re.match(r'\{\s*"(name|type)"', text[at:]):
                    return None  # prose or data that happens to begin with a brace
                return Read(len(text), tuple(calls), (*broken, str(error)))
            if not calls and not tagged and not _looks_like_call(value):
                return None
            good, bad = several(value)
            calls += good
            broken += bad
            between = _BETWEEN.match(text, end)
            if between is None or len(calls) + len(broken) > MOST_CALLS:
                return Read(end, tuple(calls), tuple(broken))
            at = between.end()


def _looks_like_call(value: Any) -> bool:
    try:
        call_of(value)
    except Malformed:
        return False
    inner = value.get("function", value)
    return not isinstance(inner, dict) or "parameters" in inner or "arguments" in inner


def _built_in(text: str, at: int) -> Read:
    end = min(
        (place for mark in ("<|eom_id|>", "<|eot_id|>") if (place := text.find(mark, at)) >= 0), default=len(text)
    )
    name, arguments = _call(_expression(text[at:end].strip()), text[at:end])
    return Read(end, ((name.removesuffix(".call"), arguments),))


class Pythonic(CallFormat):
    """Llama 3.2 and 4: the answer is a Python list of calls with named arguments, `[f(a=1), g(b="x")]`.

    `<|python_start|>` and `<|python_end|>` may stand around it.
    """

    name = "pythonic"
    marks = ("<|python_start|>", "[")
    opens = re.compile(rf"<\|python_start\|>\s*|{_FRESH}\[\s*(?=[A-Za-z_][\w.]*\s*\()")

    def read(self, text: str, match: re.Match[str]) -> Read | None:
        tagged = match.group().startswith("<|python_start|>")
        at = match.end() if tagged else behind_space(text, match.start())
        end = text.find("<|python_end|>", at)
        behind = len(text) if end < 0 else end + len("<|python_end|>")
        inside = text[at : len(text) if end < 0 else end]
        if end < 0:
            inside = inside[: inside.rfind("]") + 1] or inside
            behind = at + len(inside)
        node = _expression(inside.strip())
        calls, broken = [], []
        for each in node.elts if isinstance(node, ast.List) else [node]:
            try:
                calls.append(_call(each, inside))
            except Malformed as error:
                broken.append(str(error))
        return Read(behind, tuple(calls), tuple(broken))


def _expression(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise Malformed(f"the call is longer than {_LONGEST:,} characters")
    try:
        try:
            return _parsed(text)
        except SyntaxError:
            if (renamed := _without_keywords(text)) == text:
                raise
            return _parsed(renamed)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = getattr(error, "msg", "") or "nested too deeply"
        raise Malformed(f"no Python expression: {why} in {quoted(text, 0)}") from None


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        return ast.parse(text, mode="eval").body


def _without_keywords(text: str) -> str:
    """The text with other names for tools and arguments that are called as keywords of Python are, such as `import` and
    `from`; as it is if it cannot be read that far."""
    lines = [*io.StringIO(text, newline="\n")]
    try:
        tokens = [*tokenize.generate_tokens(iter(lines).__next__)]
    except (tokenize.TokenError, SyntaxError):
        return text
    for before, token, after in reversed([*zip([tokens[0], *tokens], tokens, tokens[1:], strict=False)]):
        named = after.string in ("(", "=", ".") or before.string == "."
        row, column = token.start
        if named and keyword.iskeyword(token.string) and lines[row - 1].startswith(token.string, column):
            lines[row - 1] = f"{lines[row - 1][:column]}{_RENAMED}{lines[row - 1][column:]}"
    return "".join(lines)


def _call(node: ast.expr, text: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise Malformed(f"a tool call is name(argument=value, …), not {quoted(text, 0)}")
    name = _dotted(node.func)
    if node.args or any(each.arg is None for each in node.keywords):
        raise Malformed(f"{name}: write every argument with its name, as in {name}(argument=value)")
    return name, {str(each.arg).removeprefix(_RENAMED): _value(each.value, name) for each in node.keywords}


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Malformed("a tool is called by its name")
    return ".".join(part.removeprefix(_RENAMED) for part in (node.id, *reversed(parts)))


_NAMES = {"true": True, "false": False, "null": None}


def _value(node: ast.expr, name: str) -> Any:
    """A literal as JSON has it."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return _NAMES[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, name) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            written = [
                (key.value, value) for key, value in zip(keys, values, strict=True) if isinstance(key, ast.Constant)
            ]
            return {str(key): _value(value, name) for key, value in written}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return number
    raise Malformed(f"{name}: an argument must be a plain value: text, number, true, false, null, list or dict")
