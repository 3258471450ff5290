"""Formats of tool calls of the Llamas, which need no mark: the answer is the call, as JSON or as Python.

In: an answer, and where in it a call begins. Out: `Read`. `calls.CallFormat` does the rest.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import secrets
import tokenize
import warnings
from typing import Any

from rlinf.agents.tools.calls import MOST_CALLS, CallFormat, Malformed, Read
from rlinf.agents.tools.formats import behind_space, call_of, json_at, quoted, several

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
        (found for mark in ("<|eom_id|>", "<|eot_id|>") if (found := text.find(mark, at)) >= 0), default=len(text)
    )
    name, arguments = _call(_expression(text[at:end].strip()), text[at:end])
    return Read(end, ((name.removesuffix(".call"), arguments),))


class Pythonic(CallFormat):
    """Llama 3.2 and 4: the answer is a Python list of calls with named arguments, `[f(a=1), g(b="x")]`.

    `<|python_start|>` and `<|python_end|>` may stand around it.
    """

    name = "pythonic"
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
