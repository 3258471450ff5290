"""Rewards for calls of functions, compared as syntax trees: those of the Berkeley function-calling leaderboard.

An answer is a list of calls in Python's syntax, `[weather(city="Rome", days=3)]`, which is read and never run. A row
has the functions' descriptions, and for each right call the values that each parameter may have, "" among those of one
that may be left out.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf.rewards.base import Score, after_thought

_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,  # as JSON has it
    "dict": dict,
    "any": str,
}
_IGNORED = re.compile(r"[ ,./\-_*^]")
"""Characters that do not count in texts: `April 1, 2024` is `april 1 2024`."""
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
Call = tuple[str, Mapping[str, Any]]
"""A function's name and its arguments."""


def function_calls(
    response: str, category: str, function: Sequence[Mapping[str, Any]] = (), ground_truth: Sequence[Any] = ()
) -> Score:
    """1 if the response calls the right functions with right arguments, and nothing else; else 0.

    In a category with "irrelevance" in its name no call is right, in others with "relevance" any call is. Calls beside
    each other ("parallel") may come in any order. Part of the score: the same, by the name of the category. What stands
    before a last `</think>` is no part of the response.

    Args:
        response: what the model wrote.
        category: as the leaderboard names it, such as "live_multiple".
        function: descriptions of the functions, with `name` and `parameters`.
        ground_truth: a mapping for each right call, from its name to the values of each parameter that are right.

    Raises:
        ValueError: a parameter has a type that Python's functions of the leaderboard have not.
    """
    try:
        calls = calls_in(after_thought(response))
    except ValueError:
        calls = None
    if "relevance" in category:
        right = bool(calls) != ("irrelevance" in category)
    else:
        right = calls is not None and _all_fit(calls, category, function, ground_truth)
    return Score(float(right), {category: float(right)})


def calls_in(text: str) -> list[Call]:
    """The calls of an answer, whose brackets may be missing.

    Raises:
        ValueError: it is no list of calls.
    """
    text = text.strip("`\n ")
    text = f"{'' if text.startswith('[') else '['}{text}{'' if text.endswith(']') else ']'}"
    try:
        tree = ast.parse(text.strip("'"), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:  # the latter two of brackets without an end
        raise ValueError(f"no list of calls: {error}") from error
    calls = [tree] if isinstance(tree, ast.Call) else getattr(tree, "elts", [None])
    if not all(isinstance(each, ast.Call) for each in calls):
        raise ValueError("no list of calls")
    return [_call(each) for each in calls]


def _call(tree: ast.Call) -> Call:
    names, place = [], tree.func
    while isinstance(place, ast.Attribute):
        names.append(place.attr)
        place = place.value
    if isinstance(place, ast.Name):
        names.append(place.id)
    return ".".join(reversed(names)), {str(each.arg): _value(each.value) for each in tree.keywords}


def _value(tree: ast.expr) -> Any:
    """The value of an argument; names and calls without keywords are texts, since there is nothing that they name."""
    match tree:
        case ast.Constant():
            return "..." if tree.value is Ellipsis else tree.value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp():
            return _computed(tree)
        case ast.List():
            return [_value(each) for each in tree.elts]
        case ast.Tuple():
            return tuple(_value(each) for each in tree.elts)
        case ast.Dict():
            return _mapping(tree)
        case ast.Name():
            return tree.id
        case ast.Call() if tree.keywords:
            name, arguments = _call(tree)
            return {name: arguments}
        case ast.Call() | ast.Subscript():
            return ast.unparse(tree)
    raise ValueError(f"an argument is a {type(tree).__name__}")


def _mapping(tree: ast.Dict) -> dict[Any, Any]:
    if None in tree.keys:
        raise ValueError("an argument unpacks a mapping")
    try:
        return {
            _value(key): _value(value) for key, value in zip(tree.keys, tree.values, strict=True) if key is not None
        }
    except TypeError as error:
        raise ValueError(f"an argument has a key that is none: {error}") from error


def _computed(tree: ast.BinOp) -> Any:
    """The sum, or the like, of two numbers."""
    first, second, of = _value(tree.left), _value(tree.right), _ARITHMETIC.get(type(tree.op))
    if of is None or not (isinstance(first, int | float) and isinstance(second, int | float)):
        raise ValueError("an argument computes what is none of two numbers")
    try:
        return of(first, second)
    except ArithmeticError as error:
        raise ValueError(f"an argument cannot be computed: {error}") from error


def _all_fit(
    calls: Sequence[Call], category: str, functions: Sequence[Mapping[str, Any]], truths: Sequence[Mapping[str, Any]]
) -> bool:
    """True if there is a call for each right one, and no other."""
    if len(calls) != len(truths):
        return False
    rest, named = list(calls), {each["name"]: each for each in reversed(functions)}
    for truth in truths:
        (name,) = truth
        description = functions[0] if "parallel" not in category and "multiple" not in category else named[name]
        fitting = next((call for call in rest if _fits(call, description, truth[name])), None)
        if fitting is None:
            return False
        rest.remove(fitting)
    return True


def _fits(call: Call, description: Mapping[str, Any], right: Mapping[str, Sequence[Any]]) -> bool:
    name, arguments = call
    parameters = description["parameters"]
    if name != description["name"] or not arguments.keys() >= set(parameters["required"]):
        return False
    if not arguments.keys() <= parameters["properties"].keys() & right.keys():
        return False
    if not all(_is_one(value, parameters["properties"][each], right[each]) for each, value in arguments.items()):
        return False
    return all(each in arguments or "" in values for each, values in right.items())


def _is_one(value: Any, parameter: Mapping[str, Any], right: Sequence[Any]) -> bool:
    """True if an argument has the parameter's type and one of the right values."""
    kind = parameter["type"]
    expected = _type(kind)
    inner: type | None = None
    if kind in ("array", "tuple"):
        inner = _type(parameter["items"]["type"])
    if kind == "tuple" and isinstance(value, tuple):
        value = list(value)
    if kind == "float" and type(value) is int:
        value = float(value)
    usual = _usual(right)
    variable = usual is not None and usual is not expected  # something that was said before: named, and not spelt out
    if type(value) is expected:
        if isinstance(value, list) and inner and not any(_has_items(value, each, inner) for each in right):
            return False
    elif usual is None or type(value) is not usual:
        return False
    else:
        variable = True
    return value in right if variable else _equals(value, expected, inner, right)


def _type(kind: str) -> type:
    if kind not in _TYPES:
        raise ValueError(f"function: a parameter is of the type {kind!r}, which is none of {', '.join(_TYPES)}")
    return _TYPES[kind]


def _usual(values: Sequence[Any]) -> type | None:
    """The type of the first right value; None if there is none but to leave it out."""
    return next((type(each) for each in values if each != ""), None)


def _has_items(value: Sequence[Any], right: Any, inner: type) -> bool:
    if not isinstance(right, list):
        return True
    return all(type(item) is inner or (_usual(right) is not None and type(item) is _usual(right)) for item in value)


def _equals(value: Any, expected: type, inner: type | None, right: Sequence[Any]) -> bool:
    if expected is dict:
        return _is_mapping(value, right)
    if expected is list and inner is dict:
        return any(
            len(value) == len(each)
            and all(_is_mapping(*pair) for pair in zip(value, ([one] for one in each), strict=True))
            for each in right
        )
    if expected is str:
        return _plain(value) in [_plain(each) for each in right if isinstance(each, str)]
    if expected is list:
        return [*map(_plain, value)] in [[*map(_plain, each)] for each in right]
    return value in right


def _is_mapping(value: Any, right: Sequence[Any]) -> bool:
    """True if a mapping has, for each key of one of the right ones, one of its values."""
    if not isinstance(value, Mapping):
        return False
    for each in right:
        if each == "" or not value.keys() <= each.keys():
            continue
        same = all(_plain(item) in [*map(_plain, each[key])] for key, item in value.items())
        if same and all(key in value or "" in items for key, items in each.items()):
            return True
    return False


def _plain(value: Any) -> Any:
    """A text without what does not count in texts; anything else as it is."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
