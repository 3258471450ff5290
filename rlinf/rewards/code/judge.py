"""A reward for programs: the share of its prompt's tests that an answer's code passes, or all or nothing.

In: what a model wrote, and the tests of its row. Out: a `Score`. Who wakes whom: an answer waits for a place in the
sandbox; then for its program, at most until the deadline of a test.

The judge itself compares. What was expected never enters a sandbox where the answer's code runs, so no answer can
print, return or overwrite its way to a reward: it must produce the values. Assertions, which hold both, run in a second
sandbox and call the first (`far_side.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import marshal
import re
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlinf.rewards.base import trusted
from rlinf.rewards.code import far_side, peer, runner, values
from rlinf.rewards.code.compare import same_output, same_value
from rlinf.rewards.code.rows import COLUMNS, Assertions, Call, Script, Tests, tests_of, tests_of_items
from rlinf.rewards.score import Score
from rlinf.rewards.scorer import uncounted
from rlinf.sandbox.limits import Limits
from rlinf.sandbox.running import Channel, ChannelError, Program
from rlinf.sandbox.sandbox import Sandbox, shared
from rlinf.sandbox.server import isolation

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "python3", "py")
_STATEMENT = re.compile(
    r"^[ \t]*(?:(?:async )?(?:def|class)\b|(?:import|from)\s+\w|(?:for|while|if|with)\b.*:|print\(|\w[\w., ]*=[^=])",
    re.MULTILINE,
)
"""What a program has, and what it prints mostly has not."""
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


code.__ready__ = _ready  # type: ignore[attr-defined]


def extracted(response: str) -> str | None:
    """The program of a response: its last fenced block in Python, or all of it if there is no fence; None if neither.

    A block without a language counts where none is said to be Python, and one that looks like a program before what may
    be its output.
    What a model thinks aloud, up to `</think>`, is left out.
    """
    said = response.rpartition("</think>")[2]
    blocks = [(language.lower(), text) for language, text in _FENCED.findall(said)]
    named = [text for language, text in blocks if language in _PYTHON]
    plain = [text for language, text in blocks if not language]
    if found := named or [text for text in plain if _STATEMENT.search(text)] or plain:
        return str(found[-1])
    return said if said.strip() and "```" not in said else None


async def _read(answer: Any, row: dict[str, Any]) -> Tests:
    """A row's tests; large ones are read in a thread."""
    texts = [text for text in row.values() if isinstance(text, str)]
    read = functools.partial(tests_of, answer, row)
    if len(texts) == len(row) and isinstance(answer, str):
        read = functools.partial(tests_of_items, answer, tuple(row.items()))
    return await asyncio.to_thread(read) if sum(map(len, texts)) > _LARGE else read()


def _longest(tests: Tests, most: int | None) -> Tests:
    """At most so many cases, those with the longest input, in their order; assertions all."""
    if most is None or isinstance(tests, Assertions) or len(tests) <= most:
        return tests
    sizes = [len(case.stdin) if isinstance(case, Script) else len(repr(values.encode(case.args))) for case in tests]
    kept = sorted(sorted(range(len(tests)), key=lambda index: -sizes[index])[:most])
    return tuple(tests[index] for index in kept)  # type: ignore[return-value]


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
            found = await self._sandbox.run_python(program, stdin=case.stdin, limits=self._limits)
            right = found.ok and same_output(found.stdout, case.output)
            passed += right
            self._left -= found.seconds
            if (self._stop and not right) or self._left <= 0:
                break
        return passed

    async def _calls(self, program: str, cases: list[Call]) -> int:
        passed = done = 0
        while done < len(cases) and self._left > 0:  # once per process: one that hangs or crashes takes its test along
            async with self._timed(), self._candidate(program) as candidate:
                if candidate is None:
                    return passed
                while done < len(cases):
                    case = cases[done]
                    done += 1
                    right = await self._in_time(_returns(candidate, case))
                    passed += right is True
                    if self._stop and not right:
                        return passed
                    if right is None:
                        break
        return passed

    async def _assertions(self, program: str, tests: Assertions) -> int:
        passed = done = 0
        while done < len(tests.pieces) and self._left > 0:
            async with self._timed(), self._candidate(program) as candidate:
                if candidate is None:
                    return passed
                async with self._program("tests") as own:
                    order = {"setup": tests.setup, "pieces": tests.pieces[done:], "entry": tests.entry}
                    await own.channel.send(json.dumps({**order, "context": tests.context}).encode())
                    while done < len(tests.pieces):
                        done += 1
                        right = await self._in_time(_holds(own.channel, candidate))
                        passed += right is True
                        if self._stop and not right:
                            return passed
                        if right is None:
                            break
        return passed

    async def _in_time(self, test: Awaitable[bool]) -> bool | None:
        """Whether a test is passed; None if its program hangs or has ended, so that no other test can use it."""
        try:
            async with asyncio.timeout(min(self._limits.wall_seconds, self._left)):
                return await test
        except (TimeoutError, ChannelError):
            return None

    def _program(self, side: str) -> contextlib.AbstractAsyncContextManager[Program]:
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
    """What lies beside the program `_FAR_SIDE`."""
    compiled = [(each.__name__, compile(Path(str(each.__file__)).read_bytes(), each.__name__, "exec"))
                for each in (*_SENT, far_side)]  # fmt: skip
    return {"far_side": marshal.dumps([*compiled[:-1], compiled[-1][1]])}


async def _returns(candidate: Channel, case: Call) -> bool:
    """Whether a call returns what it must."""
    await candidate.send(json.dumps(values.call(case.function, case.args)).encode())
    status, *rest = await _answer(candidate)
    try:
        found = values.decode(rest[0]) if status == "value" else None
        return status == "value" and any(same_value(found, value) for value in case.values)
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
        return False  # no plain value, or none at all: what comes from there may be anything


async def _holds(tests: Channel, candidate: Channel) -> bool:
    """Whether the next assertion holds; carries its calls to the answer's code, unread, and what it says back.

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
        found = json.loads(await candidate.receive())
    except (ValueError, RecursionError):
        return ["nonsense"]
    return found if isinstance(found, list) and found else ["nonsense"]
