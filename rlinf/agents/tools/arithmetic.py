"""A calculator tool: arithmetic of a model, worked out exactly where that is possible, without `eval`.

In: an expression as a text. Out: its value as a text. An expression is parsed as Python and only numbers, the signs of
arithmetic and a few functions of `math` are computed; sizes are bounded, so that it ends in milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlinf.agents.tools.tool import ToolFailed, tool

_LONGEST = 1_000
"""Characters of an expression."""
_BITS = 10_000
"""Size of a whole number on the way, some 3,000 digits: products of such take microseconds."""
_DIGITS = 300
"""Digits of a result that are written; larger ones are shown as powers of ten."""

Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": lambda number, places=0: round(number, max(-_BITS, min(places, _BITS))) if places else round(number),
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e}


@tool(timeout=5.0)
async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses; abs, sqrt, log, exp, round, min, max, gcd, sin, cos,
            tan, floor, ceil, pi and e. Such as "12 * (3 + 4)".
    """
    return value_of(expression)


def value_of(expression: str) -> str:
    """The value of an arithmetic expression, as a text: `84`, `0.5`.

    A quotient that is whole is written as a whole number; other numbers with 12 significant digits.

    Raises:
        ToolFailed: it is no such expression, has no value, or a number in it is too large.
    """
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > _LONGEST:
        raise ToolFailed(f"the expression has {len(text):,} characters; at most {_LONGEST:,} are worked out")
    try:
        return _shown(_value(ast.parse(text, mode="eval").body))
    except ToolFailed:
        raise
    except ZeroDivisionError:
        raise ToolFailed("division by zero") from None
    except OverflowError:
        raise ToolFailed("a number is too large") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolFailed("this is no arithmetic expression") from None
    except (ValueError, TypeError) as error:  # a root of a negative number; the wrong number of arguments
        raise ToolFailed(f"no value: {error}") from None


def _value(node: ast.AST) -> Number:
    match node:
        case ast.Constant(value=bool()):
            raise ToolFailed("this is no arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _combined(type(sign), _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(each) for each in given)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ToolFailed(f"{name} is not known here")
    raise ToolFailed("this is no arithmetic expression")


def _combined(sign: type[ast.operator], left: Number, right: Number) -> Number:
    if sign is ast.Div and isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right  # exact, however large
    whole = isinstance(left, int) and isinstance(right, int)
    if sign is ast.Pow and whole and abs(left) > 1 and int(left).bit_length() * right > _BITS:
        raise ToolFailed("the power is too large")
    return _bounded(_BINARY[sign](left, right))


def _bounded(number: Any) -> Number:
    """A number that further ones may be made of."""
    if not isinstance(number, int | float):
        raise ToolFailed("no value: it is not a real number")
    if (isinstance(number, int) and number.bit_length() > _BITS) or not math.isfinite(
        number if isinstance(number, float) else 0
    ):
        raise ToolFailed("a number is too large")
    return number


def _shown(number: Number) -> str:
    if isinstance(number, float):
        return f"{number:.12g}"
    text = str(number)
    return text if len(text) <= _DIGITS else f"about {text.removeprefix('-')[0]}e{len(text.removeprefix('-')) - 1}"
