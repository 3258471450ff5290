"""Finds the format of a data set of conversations (TRL, verl, ShareGPT, Alpaca) and reads its rows as dialogues.

In: rows as they were written. Out: a `Dialogue` per row, or two of a preference pair; tokens are `rendering.py`'s
business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlinf.config.reading import parse_json
from rlinf.data.datasets.source import DataError, Row, as_text, lookup, missing, unwritable

Kind = Literal["sft", "pairs"]
"""The result of a row: one conversation, or a chosen and a rejected one."""
Message = dict[str, Any]
"""`role`, `content` and whatever else a chat template reads."""

OURS = (
    *("messages", "prompt", "completion", "text", "instruction", "input", "output", "chosen", "rejected", "tools"),
    *("margin", "ref_chosen_logps", "ref_rejected_logps", "images"),
)
"""Names of ours that a mapping of columns may have; None of one says that there is none, whatever a data set has."""
_GUESSES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "problem"),
    "completion": ("completion", "response", "answer"),
    "images": ("images", "image"),
}
"""Columns that mean ours in public data sets, the likeliest first; others are called as ours are."""
_EXPECTED = {"messages": "not a list of messages", **dict.fromkeys(("text", "instruction", "output"), "not text")}
_EITHER = "neither text nor a list of messages"
"""Description of a value that none of our columns takes."""
_ANSWERS = frozenset({"completion", "output", "chosen", "rejected"})
"""Columns that may be a number, written as text."""
_FORMATS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",)),
    "pairs": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
"""Columns that a row must have, by format; the first that fits is taken."""
_SHAREGPT = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Speakers of ShareGPT that chat templates call otherwise."""
_ALPACA = (
    "Below is an instruction that describes a task{also}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n"
)
"""The template of Stanford Alpaca, for tokenizers without a chat template."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation and the part of it that is learned: chat messages, or plain text."""

    prompt: list[Message] | str
    """The part that comes first and is only read, unless everything is learned; may be empty."""
    completion: list[Message] | str
    """The part that follows: of chats, the assistant's turns in it are learned. Has the type of the prompt."""
    tools: list[Any] | None = None
    """Descriptions of tools, for the chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, of this row."""


@dataclass(frozen=True, slots=True)
class Format:
    """The layout of one data set."""

    kind: Kind
    """The result of each of its rows."""
    columns: Mapping[str, str]
    """Ours to theirs."""
    chat: bool = False
    """Plain texts of prompt and completion are turns of a chat."""
    system: str | None = None
    """System message for chats that have none; makes every row a chat."""
    has_template: bool = False
    """The tokenizer has a chat template, so instructions (Alpaca) become chats."""

    @staticmethod
    def find(
        rows: Sequence[Row],
        columns: Mapping[str, Any],
        *,
        kind: Kind,
        where: str,
        chat: bool = False,
        system: str | None = None,
        has_template: bool = False,
    ) -> Format:
        """Tell the format by the first rows.

        Args:
            rows: the first ones.
            columns: ours to theirs, as the user said; every column must be there.
            kind: what is to be made of a row.
            where: the data set, for messages.
            chat, system, has_template: see the fields.

        Raises:
            DataError: a column is not there, or the columns are those of no format.
        """
        if unknown := columns.keys() - set(OURS):
            raise DataError(f"data.columns: {sorted(unknown)} is none of ours, which are {', '.join(OURS)}")
        names = sorted({name for row in rows for name in row})
        matches: dict[str, str] = {}
        for ours in OURS:
            if ours in columns and columns[ours] is None:
                continue
            guesses = (str(columns[ours]),) if ours in columns else _GUESSES.get(ours, (ours,))
            theirs = next((name for name in guesses if any(lookup(row, name) is not None for row in rows)), None)
            if theirs is not None:
                matches[ours] = theirs
            elif ours in columns:
                raise DataError(f"{where} has no column {columns[ours]!r} for {ours}; there are {names}")
        fits = next((wanted for wanted in _FORMATS[kind] if set(wanted) <= matches.keys()), None)
        if fits is None:
            layouts = "; or ".join(" and ".join(wanted) for wanted in _FORMATS[kind])
            raise DataError(
                f"{where} has the columns {names}, and {'a pair' if kind == 'pairs' else 'a conversation'} needs "
                f"{layouts}: name yours in data.columns, such as {{{_FORMATS[kind][0][-1]}: YOUR_COLUMN}}"
            )
        optional = ("input",) if fits == ("instruction", "output") else ()
        names_used = {
            ours
            for ours in matches
            if ours in (*fits, *optional, "tools", "margin", "images") or ours.startswith("ref_")
        }
        return Format(kind, {ours: matches[ours] for ours in OURS if ours in names_used}, chat, system, has_template)

    @property
    def named(self) -> list[tuple[str, str]]:
        """Pairs of a column's name here and its name in the data set, for messages."""
        return list(self.columns.items())

    @property
    def top_level(self) -> list[str]:
        """Columns whose values are looked at in each row."""
        return [part for name in self.columns.values() for part in {name, name.partition(".")[0]}]

    def problem_in(self, row: Row) -> str | None:
        """Describe in words why a row cannot be used; None if it can."""
        try:
            dialogues = self.pair(row) if self.kind == "pairs" else (self.dialogue(row),)
        except DataError as error:
            return str(error)
        texts = (text for each in dialogues for text in (each.prompt, each.completion))
        return next((wrong for text in texts if (wrong := unwritable(text)) is not None), None)

    def value(self, row: Row, ours: str) -> Any:
        """The value of one of our columns in a row; None if there is none."""
        return lookup(row, self.columns[ours]) if ours in self.columns else None

    def dialogue(self, row: Row) -> Dialogue:
        """A row as one conversation.

        Raises:
            DataError: it is none; the text says why, without the row's place.
        """
        if "messages" in self.columns:
            messages = self._chat(row, "messages")
            if not any(message["role"] == "assistant" for message in messages):
                raise DataError(f"column {self.columns['messages']!r} has no turn of the assistant to learn")
            return self._dialogue(row, [], messages)
        if "instruction" in self.columns:
            return self._instruction(row)
        if "completion" in self.columns:
            return self._dialogue(row, *self._two(row, "prompt", "completion"))
        return Dialogue("", self._text(row, "text"))

    def pair(self, row: Row) -> tuple[Dialogue, Dialogue]:
        """A row as the chosen and the rejected conversation, with the same prompt.

        Raises:
            DataError: it is none; the text says why, without the row's place.
        """
        if "prompt" in self.columns:
            prompt, better = self._two(row, "prompt", "chosen")
            _, rejected = self._two(row, "prompt", "rejected")
        else:
            one, other = self._said(row, "chosen"), self._said(row, "rejected")
            if type(one) is not type(other):
                raise DataError("the chosen and the rejected one are not both text or both lists of messages")
            prompt, better, rejected = _common(one, other)
        if better == rejected:
            raise DataError("the chosen and the rejected one are the same")
        return self._dialogue(row, prompt, better), self._dialogue(row, prompt, rejected)

    def _dialogue(self, row: Row, prompt: Any, completion: Any) -> Dialogue:
        """With what else a chat template takes of the row."""
        if isinstance(completion, str) and (self.chat or self.system is not None):
            prompt, completion = [_turn("user", prompt)], [_turn("assistant", completion)]
        if isinstance(completion, str):
            return Dialogue(prompt, completion)
        system = self.system
        if system is not None and [*prompt, *completion][0]["role"] != "system":
            prompt = [_turn("system", system), *prompt]
        args = {name: row[name] for name in ("enable_thinking",) if row.get(name) is not None}
        return Dialogue(prompt, completion, self._tools(row), args)

    def _instruction(self, row: Row) -> Dialogue:
        instruction, output = self._text(row, "instruction"), self._text(row, "output")
        context = self.value(row, "input") or ""
        if self.has_template or self.chat or self.system is not None:
            question = f"{instruction}\n\n{context}" if context else instruction
            opening = [_turn("system", row["system"])] if isinstance(row.get("system"), str) and row["system"] else []
            return self._dialogue(row, [*opening, _turn("user", question)], [_turn("assistant", output)])
        also = ", paired with an input that provides further context" if context else ""
        passage = f"### Input:\n{context}\n\n" if context else ""
        return Dialogue(_ALPACA.format(also=also, instruction=instruction, context=passage), output)

    def _two(self, row: Row, first: str, second: str) -> tuple[Any, Any]:
        """Prompt and completion, both text or both chats; a text that follows a chat is the assistant's turn."""
        prompt, completion = self._said(row, first), self._said(row, second)
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [_turn("assistant", completion)]
        if isinstance(prompt, str) and isinstance(completion, list):
            prompt = [_turn("user", prompt)]
        if not completion:
            raise DataError(f"column {self.columns[second]!r} is empty")
        return prompt, completion

    def _said(self, row: Row, ours: str) -> list[Message] | str:
        value = self.value(row, ours)
        is_text = isinstance(value, str | int | float) or value is None
        return self._text(row, ours) if is_text else self._chat(row, ours)

    def _text(self, row: Row, ours: str) -> str:
        value = self.value(row, ours)
        if ours in _ANSWERS and isinstance(value, int | float) and not missing(value):
            value = as_text(value)
        if not isinstance(value, str):
            there = "missing" if missing(value) else f"a {type(value).__name__}, {_EXPECTED.get(ours, _EITHER)}"
            raise DataError(f"column {self.columns[ours]!r} is {there}")
        return value

    def _chat(self, row: Row, ours: str) -> list[Message]:
        """Messages by `role` and `content`, those of ShareGPT by `from` and `value` too."""
        value = self.value(row, ours)
        if not isinstance(value, list | tuple) or not value:
            reason = "missing" if missing(value) else "empty" if value == [] else f"a {type(value).__name__}"
            raise DataError(f"column {self.columns[ours]!r} is {reason}, {_EXPECTED.get(ours, _EITHER)}")
        messages = [message_of(each, f"column {self.columns[ours]!r}") for each in value]
        if "from" in value[0] and messages[0]["role"] != "system" and isinstance(row.get("system"), str):
            messages = [_turn("system", row["system"]), *messages] if row["system"] else messages
        return messages

    def _tools(self, row: Row) -> list[Any] | None:
        value = self.value(row, "tools")
        try:
            tools = parse_json(value) if isinstance(value, str) and value else without_nulls(value)
        except ValueError as error:
            raise DataError(f"column {self.columns['tools']!r} is no JSON: {error}") from error
        return list(tools) if tools else None


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def message_of(value: Any, where: str) -> Message:
    """One message as chat templates take it, wherever it comes from: `role` and `content`, ShareGPT's `from` and
    `value` too; without the null fields, however deep, by which tables fill up what other rows have; with the arguments
    of calls as objects.

    Args:
        value: a mapping.
        where: it stands, for errors.

    Raises:
        DataError: it is no message.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where} has a {type(value).__name__} where a message is expected")
    message: Message = without_nulls(value)
    if "role" not in message and "from" in message:
        speaker = str(message.pop("from"))
        message = {"role": _SHAREGPT.get(speaker, speaker), "content": message.pop("value", ""), **message}
    if "role" not in message:
        raise DataError(f'{where} has a message that is neither {{"role", "content"}} nor {{"from", "value"}}')
    message.setdefault("content", "")  # of calls of tools
    return with_arguments(message)


def with_arguments(message: Mapping[str, Any]) -> Message:
    """A message whose calls of tools have their arguments as objects; see `call_arguments`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as an object."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    return {**call, "arguments": call_arguments(call.get("arguments"))} if "name" in call else dict(call)


def call_arguments(arguments: Any) -> Any:
    """Arguments of a call as an object: OpenAI's API and most data sets have the JSON text of one, which templates
    would write as a text within JSON. What is no text of an object stays."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = parse_json(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def without_nulls(value: Any) -> Any:
    """A copy of mappings and lists without keys whose value is null, which tables cannot tell from missing ones."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def _common(one: Any, other: Any) -> tuple[Any, Any, Any]:
    """Split two conversations into their common beginning and what follows in each, as TRL's `extract_prompt` does."""
    shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared and isinstance(one, str) and one[shared - 1] == " ":
        shared -= 1  # tokens begin with their space
    if shared >= min(len(one), len(other)):
        if not isinstance(one, str) or not min(len(one), len(other)):
            raise DataError("one of chosen and rejected is the beginning of the other")
        shared = min(len(one), len(other)) - 1  # as TRL does: behind it, the end token tells them apart
    return one[:shared], one[shared:], other[shared:]
