"""An interpreter in the sandbox remembers, and survives nothing that it should not."""

import asyncio

import pytest

from rlinf.agents.tools.python import python, python_in, result_text
from rlinf.sandbox.limits import Limits, Result, SandboxError
from rlinf.sandbox.sandbox import Sandbox, shared
from rlinf.sandbox.session import PythonSession


@pytest.fixture
async def sandbox():
    async with Sandbox() as made:
        try:
            await made.isolation()
        except SandboxError as error:
            pytest.skip(str(error))
        yield made


async def test_variables_are_kept_and_a_last_expression_is_shown(sandbox):
    async with PythonSession(sandbox) as session:
        assert (await session.run("import math\ndef f(x):\n    return x + y\ny = 3")).stdout == ""
        assert (await session.run("print('so'); f(4)")).stdout == "so\n7\n"
        assert (await session.run("None")).stdout == ""
        found = await session.run("f('a')")
        assert (found.outcome, found.exit_code) == ("error", 1)
        assert "TypeError" in found.stderr
        assert "interpreter" not in found.stderr
        assert (await session.run("exit(3)")).exit_code == 3
        assert (await session.run("y")).stdout == "3\n"


async def test_one_that_does_not_end_is_replaced_by_an_empty_one(sandbox):
    async with PythonSession(sandbox, limits=Limits(wall_seconds=3)) as session:
        assert (await session.run("x = 1")).ok
        assert (await session.run("import time; time.sleep(1e6)")).outcome == "timeout"
        assert "NameError" in (await session.run("x")).stderr


async def test_a_fork_of_the_interpreter_answers_nothing(sandbox):
    async with PythonSession(sandbox) as session:
        assert (await session.run("import os\nchild = os.fork()\nif child: os.waitpid(child, 0)")).stdout == ""
        assert (await session.run("if not os.fork(): raise ValueError\n1 / 0")).exit_code == 1
        assert (await session.run("2 + 3")).stdout == "5\n"
        assert (await session.run("7")).stdout == "7\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.write(3, (3).to_bytes(8, 'big') + b'[1]')",
        "import os; os.write(3, (1 << 62).to_bytes(8, 'big'))",
        "import os; os.write(3, (9).to_bytes(8, 'big') + b'not JSON!')",
        "import os; os.write(3, (100000).to_bytes(8, 'big') + b'[' * 100000)",
    ],
)
async def test_what_breaks_the_interpreter_ends_it(sandbox, code):
    async with PythonSession(sandbox) as session:
        assert (await session.run(code)).outcome == "killed"
        assert (await session.run("1 + 1")).stdout == "2\n"


async def test_output_is_limited(sandbox):
    async with PythonSession(sandbox, limits=Limits(output_bytes=1000)) as session:
        found = await session.run("print('x' * 10000)")
        assert (found.outcome, len(found.stdout)) == ("output", 500)
        assert (await session.run("1")).stdout == "1\n"


async def test_a_cancelled_piece_does_not_answer_the_next(sandbox):
    async with PythonSession(sandbox) as session:
        task = asyncio.create_task(session.run("import time; time.sleep(0.3); 'old'"))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.run("'new'")).stdout == "'new'\n"


async def test_pieces_of_several_callers_come_one_after_the_other(sandbox):
    async with PythonSession(sandbox) as session:
        await session.run("x = 0")
        await asyncio.gather(*(session.run("y = x; import time; time.sleep(0.01); x = y + 1") for _ in range(5)))
        assert (await session.run("x")).stdout == "5\n"


async def test_the_tool_tells_a_model_what_happened(sandbox):
    assert await python("print(6 * 7)") == "42"
    assert await python("x = 1") == result_text(_ok(""))
    assert (await python("1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert "status 3]" in await python("raise SystemExit(3)")
    await shared().close()
    async with PythonSession(sandbox, limits=Limits(wall_seconds=3)) as session:
        tool = python_in(session)
        assert (tool.__name__, await tool("x = 2"), await tool("x")) == ("python", result_text(_ok("")), "2")
        assert "variables" in await tool("import time; time.sleep(1e6)")
    assert await python_in(sandbox)("print(1)") == "1"


def test_long_output_keeps_both_ends():
    text = result_text(_ok("a" * 5000 + "b" * 5000))
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "6000 characters left out" in text


def _ok(text):
    return Result("ok", text, "", 0, 0.1)
