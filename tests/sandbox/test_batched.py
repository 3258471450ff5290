"""Many small programs share a sandbox, and none of them has a hand in another's results."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.sandbox.batched import Batched, Returned
from rlinf.sandbox.sandbox import Sandbox

LOOK = """
import os
def f(x): return [name for name in os.listdir('.') if os.lstat(name).st_dev == os.stat('.').st_dev]
"""
"""What is there but for an environment of this test that lies below /tmp, which is shown in each program's own."""


def run(programs, calls=("f(1)",), **more):
    """What became of each, and how many sandboxes it took."""

    async def ran():
        async with Sandbox() as sandbox:
            batched = Batched(sandbox, **more)
            found = await asyncio.gather(*(batched.returned(each, calls) for each in programs))
            return found, batched.sandboxes

    return asyncio.run(asyncio.wait_for(ran(), 100))


def test_hundreds_of_programs_take_a_few_sandboxes_and_each_gets_its_own_results():
    programs = [f"def f(x): return x + {number}" for number in range(200)]
    found, sandboxes = run(programs, ("f(1)", "f(f(0))", "f('a')"), most=64)
    assert [[each.value for each in every] for every in found] == [
        [str(number + 1), str(2 * number), None] for number in range(200)
    ]
    assert all("TypeError" in every[2].error for every in found)
    assert sandboxes <= 6


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("def f(x: return", "SyntaxError"),
        ("f = 1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(0)", "ended before"),
        ("raise SystemExit", "SystemExit"),
        ("while True: pass", "than 2 s"),
        ("import time; f = lambda x: time.sleep(60)", "than 2 s"),
        ("f = lambda x: 'a' * 10**10", "MemoryError"),
        ("import os; os.fork()", "Resource temporarily unavailable"),
        ("import threading; threading.Thread(target=print).start()", "RuntimeError"),
        ("def f(x): return f(x)", "RecursionError"),
        ("f = open('/etc/shadow').read()", "No such file"),
        ("import os; f = lambda x: os.read(0, 1)[0]", "IndexError"),  # where the programs that follow came from
        ("import os\nos.close(3)\nf = str", "ended before"),
        ("import os\nos.write(3, b'not json'); os._exit(0)", "ended before"),
        ("import os\nos.write(3, b'[' * 100000); os._exit(0)", "ended before"),
    ],
)
def test_what_goes_wrong_is_that_programs_alone(program, error):
    (before, found, after), _ = run(["f = abs", program, "f = str"], seconds=2.0)
    assert found[0].value is None
    assert error in found[0].error
    assert (before, after) == ([Returned("1")], [Returned("'1'")])


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_program_that_ends_its_sandbox_takes_no_other_with_it(signal):
    hostile = f"import os, signal\nos.kill(os.getppid(), signal.{signal})\nf = str"
    found, sandboxes = run(["f = abs", hostile, "f = abs", "f = abs"], seconds=2.0)
    assert [each[0].value for each in found[:1] + found[2:]] == ["1"] * 3
    assert found[1][0].value in (None, "'1'")
    assert 2 <= sandboxes <= 6


@pytest.mark.parametrize("path", ["/proc/{}/fd/1", "/proc/{}/mem", "/proc/{}/fd/0", "/dev/stdout", "/proc/self/fd/1"])
def test_results_of_others_cannot_be_written_or_read(path):
    forging = f"""
import os
def f(x):
    with open({path!r}.format(os.getppid()), "r+b", buffering=0) as file:
        file.write(b'[["forged", ""]]\\n' * 3)
"""
    found, _ = run([forging, "f = abs", "f = abs"])
    assert [each[0].value for each in found[1:]] == ["1", "1"]


LOOKING = """
import ctypes, gc, os, re, sys
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
word, bytes_word = re.compile("zy[x]wvu"), re.compile(b"zy[x]wvu")  # without having it in memory itself

def pages(address):
    "All memory around an address, by system calls: unmapped memory is an error there, and no crash."
    reader, end = os.pipe()
    for step in (1, -1):
        place = address & ~4095
        while libc.write(end, ctypes.c_void_p(place), 4096) == 4096:
            yield os.read(reader, 4096)
            place += step * 4096

def f(x):
    frame, found = sys._getframe(1), []
    while frame is not None:
        found += [value for value in frame.f_locals.values() if word.search(str(value))]
        frame = frame.f_back
    for each in gc.get_objects():
        found += [1] if isinstance(each, (dict, list, tuple, set)) and word.search(str(each)) else []
        found += [1] if word.search(str(getattr(each, "__dict__", ""))) else []
    looked = 0
    for address in (id(word), id(found), libc.malloc(100), libc.malloc(200000)):
        last = b""
        for page in pages(address):
            looked += 1
            found += [1] if bytes_word.search(last[-8:] + page) else []
            last = page
    return len(found), looked > 100
"""


def test_a_program_finds_no_other_program_and_no_result_in_its_memory():
    many = "zyxwvu" * 3
    programs = [f"def f(x): return '{many}'"] * 3 + [LOOKING] + [f"f = str\n# {many}" + many * 30000]
    found, sandboxes = run(programs, seconds=20.0, at_once=1)
    assert found[0][0].value == repr(many)
    assert found[3] == [Returned("(0, True)")]
    assert sandboxes <= 2


def test_the_memory_that_is_looked_at_is_the_programs():
    found, _ = run([f"mine = ['zyx' + 'wvu']\n{LOOKING}"], seconds=20.0)
    assert found[0][0].value.endswith(", True)")
    assert found[0] != [Returned("(0, True)")]


def test_files_of_a_program_are_gone_for_the_next():
    leaving = """
import os
def f(x):
    open("left", "w").write("x"); os.makedirs("a/b"); open("a/b/c", "w"); os.symlink("/usr", "a/link")
    os.chmod("a/b", 0); os.chmod("a", 0); os.chmod(".", 0)
"""
    found, sandboxes = run(["f = abs", leaving, LOOK, "f = abs"], at_once=1)
    assert [each[0].value for each in found[2:]] == ["[]", "1"]
    assert sandboxes <= 2


def test_what_cannot_be_removed_is_left_to_no_other():
    deep = "import os\ndef f(x):\n    for _ in range(3000): os.mkdir('d'); os.chdir('d')\n"
    found, _ = run([deep, LOOK], seconds=5.0)
    assert found[1][0].value == "[]"


def test_a_cancelled_caller_leaves_others_their_results():
    async def ran():
        async with Sandbox() as sandbox:
            batched = Batched(sandbox, at_once=1, seconds=30.0)
            slow = asyncio.create_task(batched.returned("import time; time.sleep(0.3)\nf = abs", ["f(1)"]))
            await asyncio.sleep(0)
            others = [asyncio.create_task(batched.returned("f = abs", ["f(1)"])) for _ in range(5)]
            await asyncio.sleep(0.05)
            slow.cancel()
            others[1].cancel()
            found = await asyncio.gather(*others, return_exceptions=True)
            assert isinstance(found.pop(1), asyncio.CancelledError)
            assert found == [[Returned("1")]] * 4
            with pytest.raises(asyncio.CancelledError):
                await slow
            assert not batched._queue

    asyncio.run(asyncio.wait_for(ran(), 60))
