"""Children are started, watched, restarted and ended; workers answer calls through crashes and hangs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rlinf.runtime.base.errors import RemoteError, UserError
from rlinf.runtime.processes.supervisor import CallTimeout, Child, ChildDied, Worker

ROOT = Path(__file__).parents[2]
QUICK = (0.01, 1.0, 0.01)

HANDLERS = """
import os, signal, sys, time

class Odd(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} is not {right}")

class Harmful(Exception):
    def __reduce__(self):
        return open, (self.args[0], "w")

class Handler:
    def __init__(self, note=None, start="well"):
        print("made")
        if start == "badly":
            raise ValueError("no such scene")
        self.note = note
        self.calls = 0
    def add(self, a, b=1):
        self.calls += 1
        return a + b
    def count(self):
        return self.calls
    def pid(self):
        return os.getpid()
    def size(self, data):
        return len(data)
    def blob(self, n):
        return b"x" * n
    def crash(self):
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    def crash_once(self, path):
        if not os.path.exists(path):
            open(path, "w").close()
            os._exit(7)
        return "done"
    def hang(self, path=None):
        if path:
            open(path, "w").write(str(os.getpid()))
        while True:
            time.sleep(60)
    def fail(self):
        raise KeyError("apple")
    def odd(self):
        raise Odd(1, 2)
    def leave(self):
        sys.exit(3)
    def unpicklable(self):
        return lambda: None
    def plain(self):
        return {"scores": [1, 2.5, None], "text": "ok"}
    def harmful(self, path):
        return Harmful(path)
    def raise_harmful(self, path):
        raise Harmful(path)
    def send_harmful(self, path, size=0):
        import gc, pickle, socket
        message = pickle.dumps(("result", Harmful(path)))
        channel, = (found for found in gc.get_objects() if isinstance(found, socket.socket) and found.fileno() >= 0)
        channel.sendall((size or len(message)).to_bytes(8, "big") + message)
    def modules(self):
        return "torch" in sys.modules, "rlinf" in sys.modules
    def close(self):
        if self.note:
            open(self.note, "w").write("closed")

def run(path):
    open(path, "w").write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that children import; they do not import this one, so that they start fast."""
    (tmp_path / "child_handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "child_handlers:Handler"
    sys.modules.pop("child_handlers", None)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What the tests wait for happens in processes that know nothing of us, so here, and only here, we ask again."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


def pid_in(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


# Lives -----------------------------------------------------------------------------------------------------------


async def test_a_child_runs_until_it_is_stopped() -> None:
    async with Child(["sleep", "60"], name="sleeper") as child:
        pid = child.pid
        assert pid is not None
        assert alive(pid)
        assert child.up
    assert not alive(pid)
    assert child.pid is None
    await child.failed()  # being stopped is no failure


async def test_a_crashed_child_is_restarted_after_growing_pauses_until_the_limit(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    child = Child(
        python(
            f"import time; open({str(starts)!r}, 'a').write(f'{{time.time()}}\\n'); print('boom'); raise SystemExit(9)"
        ),
        name="weak",
        max_restarts=3,
        backoff=(0.05, 4.0, 0.4),
    )
    await child.start()
    with pytest.raises(ChildDied, match="weak") as caught:
        await child.failed()
    assert child.restarts == 3
    assert caught.value.returncode == 9
    assert "boom" in caught.value.output
    assert "raise SystemExit(9)" in str(caught.value)  # the command
    assert "died 4 times" in caught.value.__notes__[0]
    times = [float(line) for line in starts.read_text().split()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert [pause >= least for pause, least in zip(pauses, (0.05, 0.2, 0.4), strict=True)] == [True] * 3
    with pytest.raises(ChildDied):
        await child.ready()
    await child.stop()


async def test_the_end_of_a_life_is_awaited_and_the_next_one_is_ready_after_it() -> None:
    async with Child(["sleep", "60"], name="weak", backoff=QUICK) as child:
        ending = asyncio.create_task(child.ended())
        await asyncio.sleep(0)
        assert not ending.done()
        before = child.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await ending
        assert not child.up
        await child.ready()
        assert child.pid not in (None, before)
    await asyncio.wait_for(child.ended(), 60)


async def test_deaths_are_forgotten_once_it_was_up_for_long_enough() -> None:
    child = Child(
        python("import time; time.sleep(0.02)"), name="mayfly", max_restarts=1, backoff=QUICK, reset_after=0.0
    )
    async with child:
        await until(lambda: child.restarts >= 4)


async def test_a_child_that_never_ran_is_not_retried() -> None:
    with pytest.raises(ChildDied, match="no-such-program") as caught:
        await Child(["no-such-program"], name="typo", health=never).start()
    assert caught.value.returncode == 127


async def test_a_child_that_does_not_become_healthy_in_time_is_killed() -> None:
    child = Child(["sleep", "60"], name="slow", health=never, start_deadline=0.2)
    with pytest.raises(ChildDied, match=r"healthy 0\.2.*after"):
        await child.start()
    assert child.pid is None


async def never(child: Child) -> bool:
    return False


async def test_a_hung_child_is_killed_and_restarted() -> None:
    hung: set[int | None] = set()
    back = asyncio.Event()

    async def health(child: Child) -> bool:
        if child.pid in hung:
            await asyncio.Event().wait()
        return True

    async def on_restart(child: Child) -> None:
        back.set()

    child = Child(
        ["sleep", "60"],
        name="sim",
        health=health,
        health_interval=0.02,
        health_deadline=0.1,
        backoff=QUICK,
        on_restart=on_restart,
    )
    async with child, asyncio.timeout(60):
        first = child.pid
        assert first is not None
        hung.add(first)
        await back.wait()
        assert child.pid != first
        assert not alive(first)
        assert child.restarts == 1


async def test_a_health_check_may_fail_for_a_while() -> None:
    answers: Iterator[Exception | bool] = iter([ConnectionRefusedError(), False, True, OSError(), False, True, True])
    asked = asyncio.Event()

    async def health(child: Child) -> bool:
        answer = next(answers, None)
        if answer is None:
            asked.set()
            return True
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with Child(["sleep", "60"], name="server", health=health, health_interval=0.01) as child, asyncio.timeout(60):
        await asked.wait()
        assert child.restarts == 0


async def test_restart_replaces_the_process_and_is_no_death() -> None:
    async with Child(["sleep", "60"], name="server", max_restarts=0) as child:
        first = child.pid
        await child.restart()
        assert child.pid not in (None, first)
        assert child.restarts == 1


@pytest.mark.parametrize("escape", ["", "os.setsid();"])
async def test_stopping_ends_grandchildren_and_what_ignores_sigterm(tmp_path: Path, escape: str) -> None:
    note = tmp_path / "pid"
    code = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            {escape}
            open({str(note)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    async with Child(python(code), name="family", stop_deadline=0.1) as child:
        pids = [child.pid or 0, await until(lambda: pid_in(note))]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


async def test_what_a_crashed_child_leaves_behind_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
        import os, time
        if (pid := os.fork()) == 0:
            os.setsid()
            time.sleep(60)
        open({str(note)!r}, "w").write(str(pid))
    """
    child = Child(python(code), name="careless", max_restarts=0)
    await child.start()
    with pytest.raises(ChildDied):
        await child.failed()
    assert not alive(pid_in(note))


async def test_a_killed_keeper_takes_its_child_along() -> None:
    async with Child(["sleep", "60"], name="sleeper", backoff=QUICK) as child:
        pid = child.pid
        assert pid is not None
        keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: not alive(pid) and child.restarts == 1)


async def test_environment_folder_and_log_are_the_childs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    code = "import os; print(os.getcwd(), os.environ.get('RANK'), os.environ['EXTRA']); raise SystemExit(1)"
    log = tmp_path / "log"
    child = Child(
        python(code), name="c", env={"RANK": None, "EXTRA": "7"}, cwd=tmp_path, log=log, max_restarts=1, backoff=QUICK
    )
    await child.start()
    with pytest.raises(ChildDied) as caught:
        await child.failed()
    line = f"{tmp_path} None 7"
    assert caught.value.output == (line,)
    assert log.read_text().splitlines() == [line, line]


async def test_only_the_last_lines_of_output_are_kept() -> None:
    child = Child(python("for i in range(10000): print(i)"), name="chatty", max_restarts=0, lines=3)
    await child.start()
    with pytest.raises(ChildDied) as caught:
        await child.failed()
    assert caught.value.output == ("9997", "9998", "9999")


async def test_a_python_function_can_be_a_child(handlers: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with Child("child_handlers:run", {"path": str(note)}, name="job") as child:
        assert await until(lambda: pid_in(note)) == child.pid


async def test_a_child_that_was_not_started_says_so() -> None:
    with pytest.raises(UserError, match="not started"):
        await Child(["true"], name="idle").ready()


def test_child_died_travels_between_processes() -> None:
    died = ChildDied("child 'a' exited")
    died.returncode, died.output = -9, ("last",)
    copy = pickle.loads(pickle.dumps(died))
    assert (str(copy), copy.returncode, copy.output) == (str(died), -9, ("last",))


# Death with the parent -------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys, threading
from rlinf.runtime.processes.supervisor import Child
from rlinf.runtime.processes.supervisor import Worker

FAMILY = '''
import os, time
if os.fork() == 0:
    os.setsid()
print(os.getpid(), file=open(NOTE, "a"), flush=True)
time.sleep(60)
'''

async def main(note):
    child = Child([sys.executable, "-S", "-c", FAMILY.replace("NOTE", repr(note))], name="family")
    worker = Worker("child_handlers:Handler", name="busy")
    await asyncio.gather(child.start(), worker.start())
    await worker.call("hang", note + ".worker")

note, where = sys.argv[1:]
if where == "thread":
    thread = threading.Thread(target=asyncio.run, args=(main(note),))
    thread.start()
    thread.join()
else:
    asyncio.run(main(note))
"""


@pytest.mark.parametrize("where", ["main", "thread"])
async def test_nothing_is_left_when_the_parent_is_killed(handlers: str, tmp_path: Path, where: str) -> None:
    note = tmp_path / "pids"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(note), where], env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )

    def pids() -> list[int]:
        found = [int(pid) for pid in note.read_text().split()] if note.exists() else []
        busy = pid_in(Path(f"{note}.worker"))
        return [*found, busy] if len(found) == 2 and busy else []

    try:
        family = await until(pids, seconds=30)
        assert all(alive(pid) for pid in family)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: not any(alive(pid) for pid in family), seconds=5)


# Workers ---------------------------------------------------------------------------------------------------------


async def test_a_worker_answers_calls_with_results_and_errors_and_keeps_its_object(handlers: str) -> None:
    async with Worker(handlers, name="w") as worker:
        assert await worker.call("modules") == (False, False), "it imports only what its target imports"
        assert await worker.call("add", 1) == 2
        assert await worker.call("add", "a", b="b") == "ab"
        assert await asyncio.gather(*(worker.call("add", i) for i in range(5))) == [1, 2, 3, 4, 5]
        assert await worker.call("count") == 7
        with pytest.raises(KeyError, match="apple") as caught:
            await worker.call("fail")
        (note,) = caught.value.__notes__
        assert "w.fail()" in note
        assert 'raise KeyError("apple")' in note
        for method, text in (("odd", r"Odd: 1.*2"), ("leave", "SystemExit: 3")):  # which cannot travel as they are
            with pytest.raises(RemoteError, match=text):
                await worker.call(method)
        with pytest.raises(TypeError, match=r"unpicklable\(\).*function"):
            await worker.call("unpicklable")
        with pytest.raises(TypeError, match=r"arguments.*w\.add\(\)"):
            await worker.call("add", lambda: None)
        size = 8 << 20
        assert await worker.call("size", bytes(size)) == size
        assert len(await worker.call("blob", size)) == size
        assert await worker.call("pid") == worker.pid
        assert worker.restarts == 0
    with pytest.raises(UserError, match=r"arguments.*'w'"):
        Worker(handlers, {"note": lambda: None}, name="w")


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_event_loops_carry_calls_crashes_timeouts_and_stops(handlers: str, factory: Callable[[], Any]) -> None:
    async def scenario() -> None:
        async with Worker(handlers, name="w", backoff=QUICK) as worker:
            assert await worker.call("size", b"x" * (1 << 20)) == 1 << 20
            with pytest.raises(ChildDied):
                await worker.call("crash")
            with pytest.raises(CallTimeout):
                await worker.call("hang", timeout=0.05)
            assert await worker.call("add", 1) == 2

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(scenario(), 20))


async def test_a_crash_fails_the_call_that_ran_and_no_other(handlers: str) -> None:
    async with Worker(handlers, name="w", backoff=QUICK) as worker:
        results = await asyncio.gather(worker.call("crash"), worker.call("add", 1), return_exceptions=True)
        crashed, answered = results
        assert isinstance(crashed, ChildDied)
        assert crashed.returncode == -signal.SIGSEGV
        assert "about to crash" in str(crashed)
        assert "crash()" in str(crashed)
        assert answered == 2
        assert worker.restarts == 1


async def test_a_worker_that_keeps_crashing_is_given_up(handlers: str) -> None:
    async with Worker(handlers, name="w", backoff=QUICK, max_restarts=2) as worker:
        results = await asyncio.gather(*(worker.call("crash") for _ in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [ChildDied] * 5
        assert worker.restarts == 2
        with pytest.raises(ChildDied):
            await worker.failed()


async def test_an_object_that_cannot_be_made_fails_the_start_with_its_traceback(handlers: str) -> None:
    with pytest.raises(ChildDied, match=r"such scene") as caught:
        await Worker(handlers, {"start": "badly"}, name="w").start()
    assert caught.value.returncode == 1


async def test_a_call_past_its_deadline_costs_the_process(handlers: str) -> None:
    async with Worker(handlers, name="w", max_restarts=0) as worker:
        first = worker.pid
        with pytest.raises(CallTimeout, match=r"w\.hang\(\) exceeded.*0\.1"):
            await worker.call("hang", timeout=0.1)
        assert await worker.call("pid") != first
        assert worker.restarts == 1


async def test_cancelling_a_running_call_ends_it_and_cancelling_a_waiting_one_does_not(
    handlers: str, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    async with Worker(handlers, name="w", max_restarts=0) as worker:
        running = asyncio.create_task(worker.call("hang", str(note)))
        waiting = asyncio.create_task(worker.call("add", 1))
        pid = await until(lambda: pid_in(note))
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert alive(pid)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await worker.call("add", 2) == 3
        assert not alive(pid)


async def test_stopping_closes_the_object_and_fails_running_calls(handlers: str, tmp_path: Path) -> None:
    note, busy = tmp_path / "note", tmp_path / "busy"
    worker = Worker(handlers, {"note": str(note)}, name="w")
    await worker.start()
    running = asyncio.create_task(worker.call("hang", str(busy)))
    await until(lambda: pid_in(busy))
    await worker.stop()
    assert note.read_text() == "closed"
    with pytest.raises(ChildDied):
        await running
    with pytest.raises(ChildDied, match="stopped"):
        await worker.call("add", 1)


# Workers that are not trusted ------------------------------------------------------------------------------------


async def test_a_worker_may_answer_in_json(handlers: str) -> None:
    async with Worker(handlers, name="w", answers="json") as worker:
        assert await worker.call("plain") == {"scores": [1, 2.5, None], "text": "ok"}
        with pytest.raises(RemoteError, match="KeyError: 'apple'") as caught:
            await worker.call("fail")
        assert "raised in w.fail()" in caught.value.__notes__[0]
        with pytest.raises(RemoteError, match=r"result.*unpicklable"):
            await worker.call("unpicklable")
        assert await worker.call("add", 1, b=2) == 3


async def test_what_a_worker_answers_in_json_runs_no_code_here(handlers: str, tmp_path: Path) -> None:
    """Each of these would make a file where a pickle is read."""
    marks = {method: tmp_path / method for method in ("harmful", "raise_harmful", "send_harmful")}
    async with Worker(handlers, name="w", answers="json") as worker:
        for method, mark in marks.items():
            with pytest.raises(RemoteError):
                await worker.call(method, str(mark))
    assert not any(mark.exists() for mark in marks.values())
    async with Worker(handlers, name="w") as worker:  # the same where pickles are read: the test would notice
        for method, mark in marks.items():
            with contextlib.suppress(Exception):
                await worker.call(method, str(mark))
    assert all(mark.exists() for mark in marks.values())


async def test_a_worker_that_claims_to_send_too_much_is_replaced(handlers: str, tmp_path: Path) -> None:
    async with Worker(handlers, name="w", answers="json") as worker:
        pid = worker.pid
        with pytest.raises(RemoteError, match=f"{1 << 60} bytes"):
            await worker.call("send_harmful", str(tmp_path / "mark"), 1 << 60)
        assert await worker.call("add", 1) == 2
        assert worker.pid != pid
