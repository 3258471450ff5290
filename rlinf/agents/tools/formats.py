"""Formats of tool calls that are marked: Hermes and Qwen, Qwen3-Coder, DeepSeek, Mistral.

In: an answer, and where in it a call begins. Out: `Read`. `calls.CallFormat` does the rest.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from rlinf.agents.tools.calls import MOST_CALLS, CallFormat, Malformed, Read

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
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


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
    name, given = value["name"], value.get("arguments", value.get("parameters"))
    if isinstance(given, str):
        try:
            given = json_at(given, 0)[0]
        except Malformed:
            pass
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise Malformed(f"the arguments of {name} must be a JSON object")
    return name, given


def _closed(text: str, at: int, mark: str, end: int) -> int:
    """Behind the nearest mark before `end`, or that end if a model that stopped left it out."""
    found = text.find(mark, at, end)
    return end if found < 0 else found + len(mark)


def _until(text: str, at: int, *marks: str) -> int:
    """Before the nearest of these marks, or the end of the text."""
    end = len(text)
    for mark in marks:
        if (found := text.find(mark, at, end)) >= 0:
            end = found
    return end


class Hermes(CallFormat):
    """Hermes, Qwen2.5, Qwen3 and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    name = "hermes"
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


class DeepSeek(CallFormat):
    """DeepSeek-V3, -R1 and -V3.1, whose calls stand between special tokens.

    Each is `function<｜tool▁sep｜>name`, a line end and the arguments in a fenced block of JSON; from V3.1 on
    `name<｜tool▁sep｜>{…}`.
    """

    name = "deepseek_v3"
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


_ARGUED = re.compile(r"\s*+([\w.\-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
"""Nothing in it is tried twice (`+`): a name and 8,000 spaces would take a second."""


class Mistral(CallFormat):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls; later `[TOOL_CALLS]name[ARGS]{…}`, once for each call."""

    name = "mistral"
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
