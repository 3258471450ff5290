"""Tool calls in what a model wrote, and which format a model writes them in.

In: the text of an answer. Out: `Parsed`: the calls, the text around them, and what was wrong with calls that cannot be
read. Nothing here raises because of what a model wrote. The formats themselves are in `formats.py` and `llama.py`;
`call_format` chooses one by its name or by the markers in a tokenizer's chat template.

    parsed = call_format(None, tokenizer).parse(reply.text)
    for call in parsed.calls:
        print(call.name, call.arguments)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from rlinf.agents.chat import copied
from rlinf.config.importing import resolve
from rlinf.runtime.base.errors import UserError

Schema = Mapping[str, Any]
"""A tool for chat templates and OpenAI's API: `{"type": "function", "function": {"name": …, "parameters": {…}}}`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model asks for a tool."""

    id: str
    """Names the call in the tool's answer: nine letters and digits, which Mistral's templates ask for. It is made of
    the call itself, its place, and the answer that it stands in: the same in every repetition of a run."""
    name: str
    """Of the tool; there need not be one of this name."""
    arguments: dict[str, Any]
    """By name, as JSON has them; not checked against the tool."""

    @property
    def message(self) -> dict[str, Any]:
        """An entry of `tool_calls` in an assistant message, as chat templates read it; a copy."""
        function = {"name": self.name, "arguments": copied(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}

    def of_answer(self, answer: str) -> ToolCall:
        """The call with an id that no other answer has for an equal one.

        Args:
            answer: names the answer that it stands in.
        """
        return replace(self, id=hashlib.sha256(f"{answer} {self.id}".encode()).hexdigest()[:9])


@dataclass(frozen=True, slots=True)
class Parsed:
    """What an answer says, and which tools it asks for."""

    content: str
    """The text without the calls, thinking included, no white space at its ends."""
    calls: tuple[ToolCall, ...] = ()
    """In the order in which they were written."""
    broken: tuple[str, ...] = ()
    """For each call that cannot be read, why: a sentence that the model can be told."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a format found where a call begins."""

    end: int
    """The first character behind it."""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and arguments."""
    broken: tuple[str, ...] = ()
    """What is wrong with the others."""


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
    """What `call_format` knows it by."""
    opens: ClassVar[re.Pattern[str]]
    """Matches, never empty, where calls begin."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Texts that end an answer in this format, besides the model's end tokens."""
    untyped: ClassVar[bool] = False
    """Arguments are written as bare texts, whose types only the tool's schema tells."""

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
        said, calls, broken = self._apart(text)
        if self.untyped:
            known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
            calls = [(name, typed(arguments, known.get(name, {}))) for name, arguments in calls]
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
        return Parsed("".join(said).strip(), tuple(numbered), tuple(broken))

    def _apart(self, text: str) -> tuple[list[str], list[tuple[str, dict[str, Any]]], list[str]]:
        """The text around calls, names and arguments of the calls, and what is wrong with broken ones."""
        said: list[str] = []
        calls: list[tuple[str, dict[str, Any]]] = []
        broken: list[str] = []
        opening, thinking = _Ahead(self.opens, text), _Ahead(_THINKING, text)
        at = reads = 0
        while (match := opening.of(at)) is not None:
            thought = thinking.of(at)
            if thought is not None and thought.start() <= match.start():
                behind = _behind_thought(text, thought)
                said.append(text[at:behind])
                at = behind
                continue
            if reads >= _MOST_READS or len(calls) + len(broken) >= MOST_CALLS:
                broken.append(f"only the first {MOST_CALLS} calls of an answer are read")
                break
            read, reads = self._read(text, match), reads + 1
            if thought is not None and thought.group() == "</think>" and not _spans(read, thought):
                said.append(text[at : thought.end()])  # the prompt had begun to think: all before was thought
                at = thought.end()
                continue
            if read is None:
                said.append(text[at : match.end()])
                at = match.end()
                continue
            said.append(text[at : match.start()])
            calls += read.calls
            broken += read.broken
            at = max(read.end, match.end())
        said.append(text[at:])
        return said, calls, broken

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


def _behind_thought(text: str, begun: re.Match[str]) -> int:
    """Where thinking ends that begins, or ends, at a match."""
    if begun.group() == "</think>":
        return begun.end()
    end = text.find("</think>", begun.end())
    return len(text) if end < 0 else end + len("</think>")


def _spans(read: Read | None, thought: re.Match[str]) -> bool:
    """Whether `</think>` stands inside a good call, as part of an argument."""
    return read is not None and not read.broken and read.end >= thought.end()


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
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(value, known.get(name)) for name, value in arguments.items()}


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
    "llama3_json": "rlinf.agents.tools.llama.LlamaJson",
    "pythonic": "rlinf.agents.tools.llama.Pythonic",
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
"""What in a chat template tells the format, most telling first."""


def call_format(name: str | CallFormat | type[CallFormat] | None, tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """The format in which a model writes tool calls.

    Args:
        name: one of `FORMATS`, the dotted path of a `CallFormat`, or one. None: the format that the chat template
            shows; `hermes`, which most models know, where it shows none.
        tokenizer: the model's.

    Raises:
        UserError: there is no such format.
    """
    chosen: Any = _shown_by(tokenizer) if name is None else name
    if isinstance(chosen, str):
        if chosen not in FORMATS and "." not in chosen:
            raise UserError(
                f"call format {chosen!r}: there is none of this name; take one of {', '.join(FORMATS)}, null for the "
                "one that the chat template shows, or the dotted path of a rlinf.agents.tools.calls.CallFormat"
            )
        try:
            chosen = resolve(FORMATS.get(chosen, chosen))
        except (ImportError, AttributeError) as error:
            raise UserError(f"call format {chosen!r}: {error}") from None
    made = chosen() if isinstance(chosen, type) else chosen
    if not isinstance(made, CallFormat):
        raise UserError(f"call format {name!r} is no rlinf.agents.tools.calls.CallFormat but {type(made).__name__}")
    return made


def _shown_by(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template or ""
    text = " ".join(template.values()) if isinstance(template, dict) else str(template)
    return next((name for marker, name in _MARKERS if marker in text), "hermes")
