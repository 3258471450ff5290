"""A reward for programs: the share of its prompt's tests that an answer's code passes, or all or nothing.

In: a response, and the tests in its row in any of the published forms. They are read as `Script` cases (input and
output of a program), `Call` cases (arguments and value of a function), or `Assertions`; docs/data-and-rewards.md has
the table of forms. Out: a `Score`. Who wakes whom: an answer waits for a place in the sandbox; then for its program, at
most until the deadline of a test.

The judge itself compares what a program printed, or what its functions returned, with what was expected. That never
enters a sandbox where the answer's code runs, so no answer can print, return or overwrite its way to a reward: it must
produce the values. Assertions, which hold both, run in a second sandbox and call the first (`far_side.py`).
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import functools
import inspect
import io
import json
import marshal
import math
import pickle
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeGuard

from rlinf.rewards.base import Score, after_thought, trusted, uncounted
from rlinf.rewards.code import far_side, peer, runner, values
from rlinf.sandbox.limits import Channel, ChannelError, Limits, Program
from rlinf.sandbox.sandbox import Sandbox, isolation, shared

_CASES = (
    *("tests", "test_cases", "input_output", "public_tests", "private_tests", "generated_tests"),
    *("public_test_cases", "private_test_cases"),
)
"""Where cases are; those of all columns that are there count together."""
_TESTS = ("test", "entry_point", "prompt", "test_list", "challenge_test_list", "test_setup_code", "test_imports")
COLUMNS = (*_CASES, *_TESTS, "reward_model", "fn_name", "metadata")
"""All that is read."""
_LARGEST = 256 << 20
"""Bytes of unpacked cases; LiveCodeBench's largest problem has 100 MB."""


@dataclass(frozen=True, slots=True)
class Script:
    """A case for a whole program."""

    stdin: str
    """Text that it reads."""
    output: str
    """Text that it must print."""


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
    if isinstance(test, str) and (loop := _last_loop(test)):
        return Assertions((loop,), test[: test.rindex(loop)])
    if row.get("test_list") is not None:
        more = row.get("challenge_test_list")
        lines = [*row["test_list"], *(more if more is not None else ())]
        return Assertions(tuple(lines), _setup(row.get("test_setup_code"), row.get("test_imports")))
    if isinstance(test, str) and (names := _functions(test)):
        return Assertions(names, test)
    columns = [row[name] for name in _CASES if row.get(name) is not None]
    if not columns and isinstance(model := row.get("reward_model"), Mapping):
        columns = [model.get("ground_truth")]
    cases: list[Any] = []
    for value in columns or [answer]:
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
    cases: list[Any] = []
    for each in value:
        if isinstance(each, str) and "assert" in each:
            cases.append(each)
        elif isinstance(each, Mapping) and "input" in each and "output" in each:
            inner = each.get("fn_name") or _function(each) or function
            functional = (each.get("testtype") or each.get("type") or "") in ("functional", "function_call")
            if inner is None and functional:
                raise ValueError("a case is of a function, and neither `fn_name` nor `metadata.func_name` names it")
            cases.append(_case(each["input"], each["output"], inner if functional or "fn_name" in each else None, True))
    return cases


def _case(arguments: Any, expected: Any, function: str | None, written: bool) -> Script | Call:
    """One case.

    Args:
        given, expected: input and output.
        function: what is called, or None for a program.
        written: arguments are JSON, one a line, as in LiveCodeBench; else a list of them, as in APPS.
    """
    if function is None:
        return Script(_text(arguments), _text(expected))
    if written and isinstance(arguments, str):
        args = tuple(_json(line) for line in arguments.split("\n") if line.strip())
        return Call(function, args, (_json(expected) if isinstance(expected, str) else expected,))
    args = tuple(_json(arguments) if isinstance(arguments, str) else arguments)
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


def _last_loop(text: str) -> str:
    """The loop over all inputs that EvalPlus' tests end with, by its own `assertion`; "" where there is none."""
    if "def assertion(" not in text:
        return ""
    last = ast.parse(text).body[-1]
    return (ast.get_source_segment(text, last) or "") if isinstance(last, ast.For) else ""


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
    """Name something that tests for pytest use and cannot have where the answer is far away; empty if there is no such
    thing."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = {node: [ast.unparse(each) for each in node.decorator_list] for node in functions}
    fixtures = [node for node in functions if any("fixture" in text for text in decorators[node])]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    all_marks = [ast.unparse(each) for node in classes for each in node.decorator_list]
    renamed = any("name=" in text for node in fixtures for text in decorators[node])
    available = {*_FIXTURES, *(node.name for node in fixtures)}
    for node in [*fixtures, *(each for each in functions if _is_test(each))]:
        marks = " ".join([*decorators[node], *all_marks])
        plain = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        missing = [each.arg for each in plain if each.arg not in available and each.arg not in marks]
        if missing and "patch" not in marks and not renamed:
            return f"{node.name} wants a fixture {missing[0]!r} that nobody defines"
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    imported = {name.asname or name.name for node in imports for name in node.names}
    for kind in classes:
        if base := imported & {ast.unparse(one) for one in kind.bases}:
            return f"class {kind.name} derives from the answer's {base.pop()}"
    for each in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        args = [ast.unparse(one) for one in (each.func, *each.args)]
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
    """True if a test or class is marked by `pytest.mark.skip` and the like, or unittest's."""
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


_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
"""How far two numbers may be apart of which one has a decimal point, relative to the larger, or at all: what published
judges of programming contests allow most often."""


def same_output(output: str, expected: str) -> bool:
    """True if two texts have the same words in the same lines, numbers with a decimal point up to rounding.

    Space at the ends of lines, and empty lines at the end, do not count.
    """
    mine, theirs = _lines(output), _lines(expected)
    if mine == theirs:
        return True
    if len(mine) != len(theirs):
        return False
    pairs = [(one.split(), other.split()) for one, other in zip(mine, theirs, strict=True)]
    return all(len(one) == len(other) and all(map(_same_word, one, other)) for one, other in pairs)


def same_value(output: Any, expected: Any) -> bool:
    """True if a value is the one that was written as JSON: tuples are lists there, and keys are texts."""
    if isinstance(output, list | tuple) and isinstance(expected, list | tuple):
        return len(output) == len(expected) and all(map(same_value, output, expected))
    if isinstance(output, dict) and isinstance(expected, dict):
        mine = {str(key): value for key, value in output.items()}
        theirs = {str(key): value for key, value in expected.items()}
        return mine.keys() == theirs.keys() and all(same_value(mine[key], theirs[key]) for key in theirs)
    if isinstance(output, set | frozenset) and isinstance(expected, list):
        return len(output) == len(expected) and output == {
            item for item in expected if not isinstance(item, list | dict)
        }
    if isinstance(output, float) or isinstance(expected, float):
        numbers = (int, float)
        return isinstance(output, numbers) and isinstance(expected, numbers) and _close(output, expected)
    return bool(output == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if "." not in other and "e" not in other.lower():
        return False
    try:
        return _close(float(one), float(other))
    except ValueError:
        return False


def _close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:
        return False  # an integer that no float holds


_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "python3", "py")
_STATEMENT = re.compile(
    r"^[ \t]*(?:(?:async )?(?:def|class)\b|(?:import|from)\s+\w|(?:for|while|if|with)\b.*:|print\(|\w[\w., ]*=[^=])",
    re.MULTILINE,
)
"""Statements that a program has, and that the text which it prints mostly has not."""
_SENT = (values, peer, runner)
"""Modules of ours that `far_side` imports, in their order."""
_FAR_SIDE = """
import marshal, sys, types
with open("far_side", "rb") as file:
    *modules, main = marshal.load(file)
for name, code in modules:
    sys.modules[name] = types.ModuleType(name)
    exec(code, sys.modules[name].__dict__)
exec(main)
"""
"""The program that the sandbox runs: modules that were compiled by this interpreter, which is the sandbox's, too."""
_LARGE = 1 << 20
"""Characters of tests that take longer to read than an event loop may be kept waiting, some 10 ms."""
_START = 2.0
"""Seconds that an answer's code has to define its functions, beyond a test's: imports such as numpy are in them."""


@trusted  # nothing of the answer runs in this process, and every wait has a deadline
async def code(
    response: str,
    answer: Any = "",
    *,
    award: Literal["all", "share"] = "all",
    seconds_per_test: float = 4.0,
    seconds_in_all: float = 30.0,
    most_tests: int | None = None,
    memory_mb: int = 1024,
    allow_weak: bool = False,
    **row: Any,
) -> Score:
    """1 if the program in the response passes all tests of its row, else 0; or the share that it passes.

    The program is the last fenced block in Python, or all of a response that has no fence. `reward.timeout` does not
    count for it: a program that never ends is wrong, while an answer that takes the judge too long counts as not drawn.

    Args:
        response: what the model wrote.
        answer, row: where the tests are; see `rows.tests_of`.
        award: `all` or nothing, which stops at the first test that fails; or the `share`.
        seconds_per_test: in which a test must end.
        seconds_in_all: of all tests together; those that did not get to run count as failed.
        most_tests: that are run, those with the longest input; None for all.
        memory_mb: that a program may use.
        allow_weak: score, too, where the kernel has no namespaces for us: programs could then read the tests' files.

    Raises:
        ValueError: the row has no tests in a form that is known, or they do not run.
        SandboxError: programs cannot be kept apart on this machine.
    """
    tests = _longest(
        await _read(answer, {name: row[name] for name in COLUMNS if row.get(name) is not None}), most_tests
    )
    count = len(tests.pieces) if isinstance(tests, Assertions) else len(tests)
    program = extracted(response)
    if program is None:
        return Score(0.0, {"tests": 0.0, "program": 0.0})
    limits = Limits(
        cpu_seconds=seconds_per_test, wall_seconds=seconds_per_test, memory_bytes=memory_mb << 20, output_bytes=4 << 20
    )
    with uncounted():
        run = _Run(shared(allow_weak=allow_weak), limits, seconds_in_all, award == "all")
        passed = await run.passed(program, tests)
    return Score(
        float(passed == count) if award == "all" else passed / count, {"tests": passed / count, "program": 1.0}
    )


def _ready(**args: Any) -> None:
    """See before a run begins that its judge can work.

    Args:
        args: what is bound for every sample.

    Raises:
        ValueError: an argument is unknown, or has a value that cannot be.
        SandboxError: programs cannot be kept apart on this machine.
    """
    own = [name for name, each in inspect.signature(code).parameters.items() if each.kind is each.KEYWORD_ONLY]
    if unknown := args.keys() - {*own, *COLUMNS, "answer"}:
        raise ValueError(f"reward code does not take {sorted(unknown)}; it takes {own}")
    if args.get("award", "all") not in ("all", "share"):
        raise ValueError(f"reward code: award is {args['award']!r}; it is `all` or `share`")
    for name in ("seconds_per_test", "seconds_in_all", "most_tests", "memory_mb"):
        value = args.get(name)
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"reward code: {name} is {value!r}; it must be a number above 0")
    isolation(allow_weak=bool(args.get("allow_weak", False)))


vars(code)["__ready__"] = _ready


def extracted(response: str) -> str | None:
    """The program of a response: its last fenced block in Python, or all of it if there is no fence; None if neither.

    A block without a language counts where none is said to be Python, and one that looks like a program before what may
    be its output.
    What a model thinks aloud, up to `</think>`, is left out.
    """
    rest = after_thought(response)
    blocks = [(language.lower(), text) for language, text in _FENCED.findall(rest)]
    named = [text for language, text in blocks if language in _PYTHON]
    plain = [text for language, text in blocks if not language]
    if candidates := named or [text for text in plain if _STATEMENT.search(text)] or plain:
        return str(candidates[-1])
    return rest if rest.strip() and "```" not in rest else None


async def _read(answer: Any, row: dict[str, Any]) -> Tests:
    """A row's tests; large ones are read in a thread."""
    texts = [text for text in row.values() if isinstance(text, str)]
    read_tests = functools.partial(tests_of, answer, row)
    if len(texts) == len(row) and isinstance(answer, str):
        read_tests = functools.partial(tests_of_items, answer, tuple(row.items()))
    return await asyncio.to_thread(read_tests) if sum(map(len, texts)) > _LARGE else read_tests()


def _longest(tests: Tests, most: int | None) -> Tests:
    """At most so many cases, those with the longest input, in their order; assertions all."""
    if most is None or isinstance(tests, Assertions) or len(tests) <= most:
        return tests
    sizes = [len(case.stdin) if isinstance(case, Script) else len(repr(values.encode(case.args))) for case in tests]
    indices = sorted(sorted(range(len(tests)), key=lambda index: -sizes[index])[:most])
    return tuple(tests[index] for index in indices)  # type: ignore[return-value]


_Test = Callable[[int], Awaitable[bool]]
"""Runs the test of a number; true if it is passed."""


class _Run:
    """The tests of one answer.

    Args:
        sandbox: where programs run.
        limits: of one test.
        seconds: of all tests.
        stop: at the first that fails.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, seconds: float, stop: bool):
        self._sandbox, self._limits, self._left, self._stop = sandbox, limits, seconds, stop

    async def passed(self, program: str, tests: Tests) -> int:
        """How many tests a program passes."""
        if isinstance(tests, Assertions):
            return await self._assertions(program, tests)
        scripts = [case for case in tests if isinstance(case, Script)]
        calls = [case for case in tests if isinstance(case, Call)]
        return await self._scripts(program, scripts) if scripts else await self._calls(program, calls)

    async def _scripts(self, program: str, cases: list[Script]) -> int:
        passed = 0
        for case in cases:
            result = await self._sandbox.run_python(program, stdin=case.stdin, limits=self._limits)
            right = result.ok and same_output(result.stdout, case.output)
            passed += right
            self._left -= result.seconds
            if (self._stop and not right) or self._left <= 0:
                break
        return passed

    async def _calls(self, program: str, cases: list[Call]) -> int:
        @contextlib.asynccontextmanager
        async def begin(candidate: Channel, _: int) -> AsyncIterator[_Test]:
            yield lambda number: _returns(candidate, cases[number])

        return await self._passed(program, len(cases), begin)

    async def _assertions(self, program: str, tests: Assertions) -> int:
        @contextlib.asynccontextmanager
        async def begin(candidate: Channel, first: int) -> AsyncIterator[_Test]:
            async with self._program("tests") as own:
                order = {"setup": tests.setup, "pieces": tests.pieces[first:], "entry": tests.entry}
                await own.channel.send(json.dumps({**order, "context": tests.context}).encode())
                yield lambda _: _holds(own.channel, candidate)

        return await self._passed(program, len(tests.pieces), begin)

    async def _passed(
        self, program: str, count: int, begin: Callable[[Channel, int], AbstractAsyncContextManager[_Test]]
    ) -> int:
        """How many of `count` tests a program passes.

        Args:
            begin: given the program and the number of the first test, what runs a test by its number.
        """
        passed = done = 0
        while done < count and self._left > 0:  # once per process: one that hangs or crashes takes its test along
            async with self._timed(), self._candidate(program) as candidate:
                if candidate is None:
                    return passed
                async with begin(candidate, done) as test:
                    while done < count:
                        right = await self._in_time(test(done))
                        done += 1
                        passed += right is True
                        if self._stop and not right:
                            return passed
                        if right is None:
                            break
        return passed

    async def _in_time(self, test: Awaitable[bool]) -> bool | None:
        """True if a test is passed; None if its program hangs or has ended, so that no other test can use it."""
        try:
            async with asyncio.timeout(min(self._limits.wall_seconds, self._left)):
                return await test
        except (TimeoutError, ChannelError):
            return None

    def _program(self, side: str) -> AbstractAsyncContextManager[Program]:
        """One of the two programs of `far_side.py`."""
        return self._sandbox.program(_FAR_SIDE, args=[side], files=_files(), limits=self._whole(), channel=True)

    @contextlib.asynccontextmanager
    async def _candidate(self, program: str) -> AsyncIterator[Channel | None]:
        """The answer's code, ready for calls; None if it cannot be run."""
        async with self._program("candidate") as running:
            ready = False
            with contextlib.suppress(TimeoutError, ChannelError):
                async with asyncio.timeout(_START + self._limits.wall_seconds):
                    await running.channel.send(json.dumps(program).encode())
                    ready = (await _answer(running.channel))[0] == "value"
            yield running.channel if ready else None

    @contextlib.asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """A place in the sandbox; what is spent there counts."""
        async with self._sandbox.place():
            start = time.monotonic()
            try:
                yield
            finally:
                self._left -= time.monotonic() - start

    def _whole(self) -> Limits:
        """Limits of a program that runs many tests."""
        seconds = _START + self._limits.wall_seconds + max(self._left, 0)
        return replace(self._limits, wall_seconds=seconds, cpu_seconds=seconds)


@functools.cache
def _files() -> dict[str, bytes]:
    """The files that lie beside the program `_FAR_SIDE`."""
    sources = [(each.__name__, Path(str(each.__file__)).read_bytes()) for each in (*_SENT, far_side)]
    compiled = [(name, compile(source, name, "exec")) for name, source in sources]
    return {"far_side": marshal.dumps([*compiled[:-1], compiled[-1][1]])}


async def _returns(candidate: Channel, case: Call) -> bool:
    """Call a function of the answer; True if it returns what it must."""
    await candidate.send(json.dumps(values.call(case.function, case.args)).encode())
    status, *rest = await _answer(candidate)
    try:
        output = values.decode(rest[0]) if status == "value" else None
        return status == "value" and any(same_value(output, value) for value in case.values)
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return False  # no plain value, or none at all: what comes from there may be anything


async def _holds(tests: Channel, candidate: Channel) -> bool:
    """True if the next assertion holds; carries its calls to the answer's code, unread, and the replies back.

    Raises:
        ValueError: what is to run before the assertions does not.
    """
    while True:
        message = await tests.receive()
        status, *rest = json.loads(message)
        if status in ("passed", "failed"):
            return bool(status == "passed")
        if status == "broken":
            raise ValueError(f"the tests of this row do not run: {rest[0]}")
        await candidate.send(message)
        await tests.send(await candidate.receive())


async def _answer(candidate: Channel) -> list[Any]:
    """A message of the answer's code, whatever it is."""
    try:
        message = json.loads(await candidate.receive())
    except (ValueError, RecursionError):
        return ["nonsense"]
    return message if isinstance(message, list) and message else ["nonsense"]
