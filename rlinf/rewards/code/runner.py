"""Runs tests that are written for pytest and unittest, in the sandbox, where the answer's functions are far away.

In: functions `test_…`, classes of them, `unittest.TestCase`. Out: nothing, or what a test raises. The part of pytest
that tests of functions use is here: the package takes longer to import than most answers take to judge, and an answer
could talk to what it reports. Nothing is skipped: that would be a way for an answer not to be judged.
"""

from __future__ import annotations

import contextlib
import decimal
import fractions
import importlib
import inspect
import io
import itertools
import math
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rlinf.rewards.code.peer import awaited


def run_test(scope: dict[str, Any], path: str) -> None:
    """Run a test function, or a method of a class of tests, with all its parameters; raises what it raises."""
    owner, _, name = path.rpartition(".")
    if owner and hasattr(scope[owner], "setUpClass"):
        _run_case(scope[owner], name)
        return
    function = getattr(scope[owner], name) if owner else scope[name]
    marks = [*getattr(function, "_cases", ()), *(getattr(scope[owner], "_cases", ()) if owner else ())]
    for choice in itertools.product(*marks):
        fixtures = _Fixtures(scope, scope[owner] if owner else None, dict(itertools.chain(*map(dict.items, choice))))
        for params in fixtures.choices(function):
            fixtures.params = params
            fixtures.run(function, name)


def _run_case(kind: Any, name: str) -> None:
    """Run a method of a `unittest.TestCase`, without a result that could be talked to."""
    case = kind(name)
    kind.setUpClass()
    try:
        alone = hasattr(case, "_setupAsyncioRunner")
        if alone:
            case._setupAsyncioRunner()
        try:
            case._callSetUp()
            try:
                case._callTestMethod(getattr(case, name))
            finally:
                case._callTearDown()
        finally:
            while case._cleanups:
                function, args, kwargs = case._cleanups.pop()
                function(*args, **kwargs)
            if alone:
                case._tearDownAsyncioRunner()
    finally:
        kind.tearDownClass()


class _Fixtures:
    """The arguments of one test, from fixtures and `parametrize`.

    Args:
        scope: of the tests' module.
        kind: the class of the test, if it has one.
        given: arguments by `parametrize`.
    """

    def __init__(self, scope: dict[str, Any], kind: Any, arguments: dict[str, Any]):
        self._scope, self._given = scope, arguments
        self._self = kind() if kind is not None else None
        self.params: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._ends: list[Callable[[], Any]] = []

    def choices(self, function: Any) -> list[dict[str, Any]]:
        """Each choice of parameters of the fixtures that a test needs."""
        values_of, todo = {}, [*self._needed(function)]
        while todo:
            name = todo.pop()
            fixture = self._fixture(name)
            if name in self._given or name in values_of or fixture is None:
                continue
            values_of[name] = [_values(each, 1)[0] for each in fixture._fixture["params"] or [None]]
            todo += self._needed(fixture)
        return [dict(zip(values_of, values, strict=True)) for values in itertools.product(*values_of.values())]

    def run(self, function: Any, name: str) -> None:
        """Run the test with one choice of parameters."""
        self._made = {}
        bound = getattr(self._self, name) if self._self is not None else function
        try:
            if self._self is not None and hasattr(self._self, "setup_method"):
                setup = self._self.setup_method
                setup(*[bound] * len(inspect.signature(setup).parameters))
            args = {each: self._value(each) for each in self._needed(function)}
            value = bound(**{each: args[each] for each in _parameters(function)})
            if inspect.iscoroutine(value):
                awaited(value)
            if self._self is not None and hasattr(self._self, "teardown_method"):
                self._self.teardown_method(*[bound] * len(inspect.signature(self._self.teardown_method).parameters))
        finally:
            while self._ends:
                self._ends.pop()()

    def _needed(self, function: Any) -> list[str]:
        owners = [self._scope, *([vars(type(self._self))] if self._self is not None else [])]
        members = [pair for owner in owners for pair in owner.items()]
        automatic = [name for name, each in members if getattr(each, "_fixture", {}).get("autouse")]
        return [*dict.fromkeys([*(automatic if not hasattr(function, "_fixture") else []), *_parameters(function)])]

    def _fixture(self, name: str) -> Any:
        owner = vars(type(self._self)) if self._self is not None else {}
        for each in (owner.get(name), self._scope.get(name), *owner.values(), *self._scope.values()):
            marks = getattr(each, "_fixture", None) if isinstance(each, types.FunctionType) else None
            if marks and marks["name"] == name:
                return each
        return None

    def _value(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        if name not in self._made:
            fixture = self._fixture(name)
            self._made[name] = self._built_in(name) if fixture is None else self._of(fixture, name)
        return self._made[name]

    def _of(self, fixture: Any, name: str) -> Any:
        request = types.SimpleNamespace(param=self.params.get(name), addfinalizer=self._ends.append)
        args = {each: request if each == "request" else self._value(each) for each in _parameters(fixture)}
        own = [self._self] if "self" in inspect.signature(fixture).parameters else []
        value = fixture(*own, **args)
        if inspect.isgenerator(value):
            rest = value
            value = next(rest)
            self._ends.append(lambda: next(rest, None))
        return awaited(value) if inspect.iscoroutine(value) else value

    def _built_in(self, name: str) -> Any:
        if name == "tmp_path":
            return pathlib.Path(tempfile.mkdtemp())
        if name in ("capsys", "capfd"):
            was, sys.stdout = sys.stdout, io.StringIO()
            self._ends.append(lambda: setattr(sys, "stdout", was))
            return types.SimpleNamespace(readouterr=_read_out)
        if name == "monkeypatch":
            patch = _Patch()
            self._ends.append(patch.undo)
            return patch
        raise TypeError(f"fixture {name!r} is not known")


class _Captured(NamedTuple):
    out: str
    err: str = ""


def _read_out() -> _Captured:
    text = sys.stdout.getvalue() if isinstance(sys.stdout, io.StringIO) else ""
    sys.stdout = io.StringIO()
    return _Captured(text)


def _parameters(function: Any) -> list[str]:
    patches = [each for each in getattr(function, "patchings", ()) if not each.attribute_name]
    mocks = sum(type(each.new).__name__ == "_SentinelObject" for each in patches)  # `mock.patch` gives these itself
    names = [*inspect.signature(function).parameters.values()]
    plain = names[mocks + (bool(names) and names[0].name == "self") :] if mocks else names
    required = [each for each in plain if each.name != "self" and each.default is each.empty]
    return [each.name for each in required if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _values(value: Any, count: int) -> Sequence[Any]:
    """Values of one case of `parametrize`."""
    if isinstance(value, _Param):
        return value.values
    return (value,) if count == 1 else tuple(value)


class _Param:
    def __init__(self, *values: Any, **_: Any):
        self.values = values


class _Patch:
    """pytest's monkeypatch: sets things, and sets them back."""

    def __init__(self) -> None:
        self._was: list[Callable[[], Any]] = []

    def setattr(self, target: Any, name: Any, value: Any = None, **_: Any) -> None:
        """Set an attribute."""
        if isinstance(target, str):
            path, attribute = target.rpartition(".")[::2]
            target, name, value = importlib.import_module(path), attribute, name
        was = getattr(target, name)
        self._was.append(lambda: setattr(target, name, was))
        setattr(target, name, value)

    def setitem(self, mapping: Any, key: Any, value: Any) -> None:
        """Set an item."""
        was = dict(mapping)
        self._was.append(lambda: (mapping.clear(), mapping.update(was)))
        mapping[key] = value

    def setenv(self, name: str, value: str, **_: Any) -> None:
        """Set a variable of the environment."""
        self.setitem(os.environ, name, value)

    def undo(self) -> None:
        """Set all back."""
        while self._was:
            self._was.pop()()


class _Approx:
    """A number, or a container of numbers, up to rounding."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False):
        self._expected, self._relative, self._absolute, self._nan = expected, rel, abs, nan_ok

    def __eq__(self, other: Any) -> bool:
        return self._near(other, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, one: Any, expected: Any) -> bool:
        if hasattr(type(one), "_mixed"):
            return False
        if isinstance(expected, dict):
            alike = isinstance(one, dict) and one.keys() == expected.keys()
            return alike and all(self._near(one[key], expected[key]) for key in expected)
        if hasattr(expected, "tolist") or hasattr(one, "tolist"):
            return self._near(*(each.tolist() if hasattr(each, "tolist") else each for each in (one, expected)))
        if isinstance(expected, list | tuple):
            return isinstance(one, list | tuple) and len(one) == len(expected) and all(map(self._near, one, expected))
        if one == expected:
            return True
        numbers: Any = (int, float, complex, decimal.Decimal, fractions.Fraction)
        if not (isinstance(one, numbers) and isinstance(expected, numbers)) or math.isinf(abs(expected)):
            return False
        if one != one or expected != expected:
            return self._nan and one != one and expected != expected
        kind = type(expected) if isinstance(expected, decimal.Decimal) else float
        usual = 1e-6 if self._absolute is None else 0
        relative = kind(usual if self._relative is None else self._relative)
        least = kind(1e-12 if self._absolute is None else self._absolute)
        return bool(abs(one - expected) <= max(least, relative * abs(expected)))


class _Raises(contextlib.AbstractContextManager[Any]):
    """Passes if the block raises."""

    value: Any = None

    def __init__(self, kinds: Any, match: Any = None):
        self._kinds, self._match = kinds, match

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None:
            raise AssertionError("nothing was raised")
        if not isinstance(error, self._kinds):
            return False
        self.value, self.type = error, kind
        return self._match is None or self.match(self._match)

    def match(self, pattern: Any) -> bool:
        """The text of what was raised has the pattern in it."""
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern!r} is not in {str(self.value)!r}")
        return True


def _raises(kinds: Any, *function: Any, match: Any = None, **kwargs: Any) -> Any:
    block = _Raises(kinds, match)
    if function:
        with block:
            function[0](*function[1:], **kwargs)
    return block


class _Marks:
    """`pytest.mark`: parameters count, other marks do not."""

    def __getattr__(self, name: str) -> Any:
        return self._parametrize if name == "parametrize" else self._nothing

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function

    def _parametrize(self, names: Any, values: Iterable[Any], **_: Any) -> Any:
        keys = [each.strip() for each in names.split(",") if each.strip()] if isinstance(names, str) else [*names]
        cases = [dict(zip(keys, _values(each, len(keys)), strict=True)) for each in values]

        def marked(function: Any) -> Any:
            function._cases = [cases, *getattr(function, "_cases", ())]
            return function

        return marked


def _fixture(function: Any = None, *, params: Any = None, autouse: bool = False, name: Any = None, **_: Any) -> Any:
    def made(function: Any) -> Any:
        function._fixture = {"name": name or function.__name__, "params": params and [*params], "autouse": autouse}
        return function

    return made if function is None else made(function)


def _fail(reason: str = "", *_: Any, **__: Any) -> None:
    """Skipping fails, too: it would be a way for an answer not to be judged."""
    raise AssertionError(reason)


def pytest_module() -> types.ModuleType:
    """The part of pytest that tests of functions use; the package takes longer to import than most answers to judge."""
    module = types.ModuleType("pytest")
    module.__dict__.update(approx=_Approx, raises=_raises, mark=_Marks(), fixture=_fixture, param=_Param)
    module.__dict__.update(fail=_fail, skip=_fail, importorskip=importlib.import_module, main=lambda *_: 0)
    module.__dict__.update(MonkeyPatch=_Patch, FixtureRequest=object)
    return module
