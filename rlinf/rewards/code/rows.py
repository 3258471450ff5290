"""The tests of a prompt, read from its row in any of the published forms.

In: a row's columns. Out: `Script` cases (input and output of a program), `Call` cases (arguments and value of a
function), or `Assertions`. docs/data-and-rewards.md has the table of forms.
"""

from __future__ import annotations

import ast
import base64
import functools
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeGuard

_CASES = ("tests", "test_cases", "input_output", "public_tests", "private_tests", "generated_tests",
            "public_test_cases", "private_test_cases")  # fmt: skip
"""Where cases are; those of all columns that are there count together."""
COLUMNS = (*_CASES, "test", "entry_point", "prompt", "test_list", "challenge_test_list", "test_setup_code",
           "test_imports", "reward_model", "fn_name", "metadata")  # fmt: skip
"""All that is read."""
_LARGEST = 256 << 20
"""Bytes of unpacked cases; LiveCodeBench's largest problem has 100 MB."""


@dataclass(frozen=True, slots=True)
class Script:
    """A case for a whole program."""

    stdin: str
    """What it reads."""
    output: str
    """What it must print."""


@dataclass(frozen=True, slots=True)
class Call:
    """A case for a function."""

    function: str
    """Its name; of a method, if the answer defines a class `Solution` instead."""
    args: tuple[Any, ...]
    """Arguments."""
    values: tuple[Any, ...]
    """Values of which it must return one."""


@dataclass(frozen=True, slots=True)
class Assertions:
    """Statements that raise nothing if the answer is right."""

    pieces: tuple[str, ...]
    """Each counts as one test."""
    setup: str = ""
    """Runs before them."""
    entry: str = ""
    """The answer's function that they call `candidate`."""
    context: str = ""
    """The prompt, which may define what they use."""


Tests = tuple[Script, ...] | tuple[Call, ...] | Assertions


def tests_of(answer: Any, row: Mapping[str, Any]) -> Tests:
    """A prompt's tests.

    Args:
        answer: the prompt's answer, where no column has tests.
        row: the other columns.

    Raises:
        ValueError: there are none in a form that is known.
    """
    test = row.get("test")
    if isinstance(test, str) and "def check(" in test and row.get("entry_point"):
        return Assertions(("check(candidate)",), test, str(row["entry_point"]), str(row.get("prompt") or ""))
    if row.get("test_list") is not None:
        more = row.get("challenge_test_list")
        lines = [*row["test_list"], *(more if more is not None else ())]
        return Assertions(tuple(lines), _setup(row.get("test_setup_code"), row.get("test_imports")))
    if isinstance(test, str) and (found := _functions(test)):
        return Assertions(found, test)
    given = [row[name] for name in _CASES if row.get(name) is not None]
    if not given and isinstance(model := row.get("reward_model"), Mapping):
        given = [model.get("ground_truth")]
    cases: list[Any] = []
    for value in given or [answer]:
        cases += _cases(value, _function(row))
    kinds = {type(case) for case in cases}
    if not cases or len(kinds) != 1:
        raise ValueError(
            f"no tests of programs in this row: there are none in the columns {', '.join(_CASES)}, test, test_list and "
            f"reward_model, nor in the answer {str(answer)[:100]!r}; docs/data-and-rewards.md lists the known forms"
        )
    return Assertions(tuple(cases)) if kinds == {str} else tuple(cases)


@functools.lru_cache(maxsize=16)  # a prompt's answers come together, and all ask for the same ones
def tests_of_items(answer: str, items: tuple[tuple[str, str], ...]) -> Tests:
    """`tests_of` for columns that are all text."""
    return tests_of(answer, dict(items))


def _cases(value: Any, function: str | None) -> list[Any]:
    """Cases of one column."""
    if isinstance(value, str):
        return _of_text(value, function)
    if isinstance(value, Mapping):
        function = value.get("fn_name") or function
        if "assert_case" in value:
            return [str(each) for each in value["assert_case"]]
        inputs, outputs = (_first(value, f"{name}s", name) for name in ("input", "output"))
        if inputs is None or outputs is None:
            return []
        return [_case(*pair, function, False) for pair in zip(inputs, outputs, strict=True)]
    if not isinstance(value, Sequence) and not hasattr(value, "__iter__"):
        return []
    found: list[Any] = []
    for each in value:
        if isinstance(each, str) and "assert" in each:
            found.append(each)
        elif isinstance(each, Mapping) and "input" in each and "output" in each:
            inner = each.get("fn_name") or _function(each) or function
            functional = (each.get("testtype") or each.get("type") or "") in ("functional", "function_call")
            if inner is None and functional:
                raise ValueError("a case is of a function, and neither `fn_name` nor `metadata.func_name` names it")
            found.append(_case(each["input"], each["output"], inner if functional or "fn_name" in each else None, True))
    return found


def _case(given: Any, expected: Any, function: str | None, written: bool) -> Script | Call:
    """One case.

    Args:
        given, expected: input and output.
        function: what is called, or None for a program.
        written: arguments are JSON, one a line, as in LiveCodeBench; else a list of them, as in APPS.
    """
    if function is None:
        return Script(_text(given), _text(expected))
    if written and isinstance(given, str):
        args = tuple(_json(line) for line in given.split("\n") if line.strip())
        return Call(function, args, (_json(expected) if isinstance(expected, str) else expected,))
    args = tuple(_json(given) if isinstance(given, str) else given)
    wrapped = not written and isinstance(expected, Sequence) and not isinstance(expected, str) and len(expected) == 1
    return Call(function, args, (expected, expected[0]) if wrapped else (expected,))  # APPS has both


def _of_text(text: str, function: str | None) -> list[Any]:
    """Cases that a text has: JSON, assertions, or LiveCodeBench's packed JSON."""
    text = text.strip()
    if text.startswith(("{", "[")):
        return _cases(_json(text), function)
    if "assert" in text:
        return list(_statements(text))
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        return []
    if not packed:
        return []
    try:
        unpacked = zlib.decompressobj().decompress(packed, _LARGEST)
        return _cases(_json(_Text(io.BytesIO(unpacked)).load()), function)
    except (zlib.error, pickle.UnpicklingError, TypeError) as error:
        raise ValueError(f"cases cannot be unpacked: {error}") from error


class _Text(pickle.Unpickler):
    """Reads a pickled text, which needs no class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} where a text was expected")


def _statements(text: str) -> tuple[str, ...]:
    """Assertions of a text, each with the statements before it that are none."""
    pieces, before = [], []
    for node in ast.parse(text).body:
        source = ast.get_source_segment(text, node) or ""
        before.append(source)
        if isinstance(node, ast.Assert):
            pieces.append("\n".join(before))
            before = []
    return tuple(pieces)


def _functions(text: str) -> tuple[str, ...]:
    """Calls of the tests of a text: functions `test_…`, methods of classes `Test…` and of unittest's cases.

    Those that are marked to be skipped, or expected to fail, are none.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ()
    names = [node.name for node in tree.body if _is_test(node)]
    if reason := _beyond(tree):
        raise ValueError(f"the tests of this row cannot be judged: {reason}; docs/data-and-rewards.md has what can")
    for node in tree.body:
        if (
            isinstance(node, ast.ClassDef)
            and not _left_out(node)
            and (node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases))
        ):
            names += [f"{node.name}.{method.name}" for method in node.body if _is_test(method)]
    return tuple(f"__run_test__({name!r})" for name in names)


_FIXTURES = {"self", "cls", "request", "tmp_path", "capsys", "capfd", "monkeypatch"}
"""Arguments of tests and fixtures that are there without being defined."""


def _beyond(tree: ast.Module) -> str:
    """What tests for pytest use that cannot be had where the answer is far away; empty if there is no such thing."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = {node: [ast.unparse(each) for each in node.decorator_list] for node in functions}
    fixtures = [node for node in functions if any("fixture" in text for text in decorators[node])]
    all_marks = [ast.unparse(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
                 for each in node.decorator_list]  # fmt: skip
    renamed = any("name=" in text for node in fixtures for text in decorators[node])
    known = {*_FIXTURES, *(node.name for node in fixtures)}
    for node in [*fixtures, *(each for each in functions if _is_test(each))]:
        marks = " ".join([*decorators[node], *all_marks])
        plain = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        missing = [each.arg for each in plain if each.arg not in known and each.arg not in marks]
        if missing and "patch" not in marks and not renamed:
            return f"{node.name} wants a fixture {missing[0]!r} that nobody defines"
    imported = {name.asname or name.name for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "solution" for name in node.names}  # fmt: skip
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and (base := imported & {ast.unparse(one) for one in each.bases}):
            return f"class {each.name} derives from the answer's {base.pop()}"
        args = [ast.unparse(one) for one in (each.func, *each.args)] if isinstance(each, ast.Call) else []
        if args[1:] and args[0].endswith(("patch", "setattr")) and args[1][1:].startswith("solution."):
            return f"a call of {args[0]} replaces a part of the answer"
    return ""


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test")
        and not _left_out(node)
    )


def _left_out(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether it is marked by `pytest.mark.skip` and the like, or unittest's."""
    marks = [ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list]
    return bool({"skip", "skipIf", "skipif", "skipUnless", "xfail", "expectedFailure"} & {*marks})


def _json(text: str) -> Any:
    """JSON, with integers of any length: `int` refuses texts above 4,300 digits, for which it is slow."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else int(Decimal(digits)))


def _function(row: Mapping[str, Any]) -> str | None:
    """The function that a row's cases call."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        metadata = _json(metadata) if metadata.strip().startswith("{") else None
    inner = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return row.get("fn_name") or inner or None


def _setup(code: Any, imports: Any) -> str:
    return "\n".join([*(imports if imports is not None else ()), str(code or "")])


def _first(value: Mapping[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)
