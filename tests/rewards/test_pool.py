"""Rewards in child processes: what hangs, crashes or raises costs its own sample and nothing else.

A deadline passes when a reward says that time passes (`pass_time`), however slow the machine is.
"""

import asyncio
import contextlib
import functools
import os
import re
from dataclasses import replace
from textwrap import dedent

import pytest

from rlinf.rewards.pool import RewardPool
from rlinf.runtime.processes.supervisor import ChildDied, Worker

TIMEOUT = 30.0
"""Seconds that no machine needs for one of these rewards."""
LONGER = 35
"""Seconds that are longer than that with what the pool itself adds, and shorter than what a start may take."""
TIME = f"""
    import os, socket, time

    LONGER = {LONGER}
    monotonic, passed = time.monotonic, 0.0
    time.monotonic = lambda: monotonic() + passed

    def pass_time(seconds):
        # in this process, and where its deadline is; then this goes on
        global passed
        passed += seconds
        with socket.create_connection(("127.0.0.1", int(os.environ["TIME_PASSES"]))) as there:
            there.sendall(f"{{os.getpid()}} {{seconds}}\\n".encode())
            there.recv(1)
"""
REWARDS = """
    import asyncio, ctypes, os, sys, time
    import own_time
    from own_time import LONGER, pass_time
    from rlinf.rewards.base import Score

    def hang():
        pass_time(LONGER)
        time.sleep(1000)

    def by_word(response):
        word, _, rest = response.partition(" ")
        if word == "hang":
            hang()
        if word == "exit":
            os._exit(3)
        if word == "segfault":
            ctypes.string_at(0)
        if word == "sys.exit":
            sys.exit("bye")
        if word == "raise":
            raise KeyError(rest)
        if word == "nan":
            return float("nan")
        if word == "text":
            return "good"
        if word == "slow":
            pass_time(LONGER / 3)
            return 1.0
        if word == "sleep":
            time.sleep(0.3)
            return 1.0
        if word == "score":
            return Score(0.5, {"part": 2.0}, "x")
        if word == "pid":
            return os.getpid()
        return float(word)

    class Harmful:
        def __init__(self, path):
            self.path = path
        def __reduce__(self):
            return open, (self.path, "w")

    def quietly_seizing(response):
        # from the next call on, the child answers with something else than verdicts
        from rlinf.rewards.base import Scorer
        word, _, path = response.partition(" ")
        answers = {"object": [Harmful(path)], "none": [], "number": 7, "verdict": [{"outcome": "ok", "value": "1.0"}]}
        Scorer.plain_verdicts = lambda *_: answers[word]
        return 1.0

    class Counting:
        def __init__(self, start=0):
            self.seen = start
        def __call__(self, response):
            self.seen += 1
            return self.seen

    class Refusing:
        def __init__(self):
            raise RuntimeError("no licence")
        def __call__(self, response):
            return 1.0

    def missing(response):
        import no_such_module  # noqa: F401

    def cold(response):
        import slow_module  # longer than the deadline, in every process anew
        if response == "hang":
            hang()
        return slow_module.VALUE

    async def cold_together(response):
        import slow_module
        if response == "hang":
            await hang_together()
        return slow_module.VALUE

    async def hang_together():
        while len(asyncio.all_tasks()) > 2:  # this and the one that gathers: the others have their verdicts
            await asyncio.sleep(0)
        own_time.passed += LONGER  # here alone: this process is to notice, before it is killed
        await asyncio.sleep(1000)

    def endless(response):
        import endless_module  # noqa: F401

    together = 0
    async def waiting(response):
        global together
        together += 1
        if response == "hang":
            await hang_together()
        if response == "block":
            hang()
        if response == "raise":
            raise KeyError(response)
        await asyncio.sleep(0.05)
        return together
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A user's own file, in a directory on the path."""
    (tmp_path / "own_rewards.py").write_text(dedent(REWARDS))
    (tmp_path / "own_time.py").write_text(dedent(TIME))
    slow = "own_time.pass_time(own_time.LONGER / 2)\n"
    (tmp_path / "slow_module.py").write_text(f"import own_time, slow_part\n{slow}VALUE = slow_part.VALUE\n")
    (tmp_path / "slow_part.py").write_text(f"import own_time\n{slow}VALUE = 7.0\n")
    (tmp_path / "endless_module.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)


class Passing:
    """Hears from children that time passes, and moves the deadline of the call that they answer."""

    def __init__(self):
        self._limits = {}

    def watch(self, worker: Worker) -> None:
        loop, answer = asyncio.get_running_loop(), worker._answer
        self._limits[worker] = loop.create_future()

        async def watched(channel, limit):
            self._limits[worker].set_result(limit)
            try:
                return await answer(channel, limit)
            finally:
                self._limits[worker] = loop.create_future()

        worker._answer = watched

    async def hear(self, reader, writer) -> None:
        pid, seconds = (await reader.readline()).split()
        (worker,) = (each for each in self._limits if each.pid == int(pid))
        limit = await self._limits[worker]
        limit.reschedule(limit.when() - float(seconds))
        writer.write(b"!")
        writer.close()


@contextlib.asynccontextmanager
async def pool(function="by_word", args=None, *, workers=1, timeout=TIMEOUT):
    passing = Passing()
    async with await asyncio.start_server(passing.hear, "127.0.0.1", 0) as server:
        os.environ["TIME_PASSES"] = str(server.sockets[0].getsockname()[1])
        async with _pool(function, args, workers, timeout) as children:
            for worker in children.workers:
                passing.watch(worker)
            yield children


@contextlib.asynccontextmanager
async def _pool(function, args, workers, timeout):
    made = RewardPool(
        f"own_rewards.{function}",
        args,
        is_async=function in ("waiting", "cold_together"),
        name="reward",
        workers=workers,
        timeout=timeout,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def asked(*responses):
    return [{"response": response} for response in responses]


def values(verdicts):
    return [verdict.value for verdict in verdicts]


def outcomes(verdicts):
    return [verdict.outcome for verdict in verdicts]


async def test_verdicts_come_in_the_order_of_the_samples(rewards):
    async with pool(workers=2) as children:
        both = await asyncio.gather(children.score(asked(*map(str, range(100)))), children.score(asked("5", "6")))
    assert [values(each) for each in both] == [list(range(100)), [5, 6]]


async def test_what_raises_or_returns_no_number_is_an_error_of_its_sample(rewards):
    async with pool() as children:
        found = await children.score(asked("1", "raise here", "nan", "text", "sys.exit", "score", "2"))
    assert outcomes(found) == ["ok", "error", "error", "error", "error", "ok", "ok"]
    assert values(found) == [1, None, None, None, None, 0.5, 2]
    assert found[1].remark.startswith("KeyError: 'here'")
    assert "own_rewards.py" in found[1].remark
    assert "by_word" in found[1].trace
    assert "finite number" in found[2].remark
    assert re.search(r"own_rewards\.py:\d+", found[2].remark), "where the function is, and not who looked at it"
    assert "base.py" not in found[2].remark
    assert (found[5].scores, found[5].extracted) == ({"part": 2.0}, "x")


async def test_a_hang_is_killed_and_only_it_times_out(rewards):
    async with pool() as children:
        found = await children.score(asked("1", "2", "hang", "3"))
        again = await children.score(asked("4"))
    assert outcomes(found) == ["ok", "ok", "timeout", "ok"]
    assert f"than {TIMEOUT:g} s" in found[2].remark
    assert values(again) == [4]


@pytest.mark.parametrize("function", ["cold", "cold_together"])
async def test_a_first_import_counts_against_no_deadline_and_a_hang_after_it_does(rewards, function):
    async with pool(function) as children:
        first = await children.score(asked("1", "2", "3"))
        second = await children.score(asked("hang", "4"))
        third = await children.score(asked("5"))  # of a plain function in a new process, which is cold again
    assert values(first) == [7.0, 7.0, 7.0]
    assert outcomes(second) == ["timeout", "ok"]
    assert values(third) == [7.0]


async def test_an_import_that_never_ends_has_the_deadline_of_a_start(rewards):
    async with pool("endless", timeout=0.2) as children:
        for worker in children.workers:
            worker._rules = replace(worker._rules, start_deadline=0.5)
        assert outcomes(await children.score(asked("1"))) == ["timeout"]


@pytest.mark.parametrize(("word", "how"), [("exit", "exited with status 3"), ("segfault", "SIGSEGV")])
async def test_a_crash_is_tried_again_and_only_it_is_an_error(rewards, word, how):
    async with pool() as children:
        found = await children.score(asked("1", word, "2"))
        assert values(await children.score(asked("3"))) == [3]
        assert children.workers[0].restarts == 3  # in company, and twice alone
    assert outcomes(found) == ["ok", "error", "ok"]
    assert how in found[1].remark


async def test_many_slow_samples_are_no_hang(rewards):
    async with pool() as children:
        before = (await children.score(asked("pid")))[0].value
        found = await children.score(asked(*["slow"] * 6, "1"))  # in all twice the deadline of one
        assert (await children.score(asked("pid")))[0].value == before
    assert outcomes(found) == ["ok"] * 7


async def test_a_hang_does_not_hold_up_the_other_children(rewards):
    async with pool(workers=2, timeout=600) as children:
        hanging = asyncio.create_task(children.score(asked("hang")))
        await asyncio.sleep(0.1)
        for number in range(20):
            assert values(await children.score(asked(str(number)))) == [number]
        assert not hanging.done()
        hanging.cancel()


async def test_whatever_the_mixture_each_sample_gets_its_own_verdict(rewards):
    kinds = {"1": "ok", "raise x": "error", "nan": "error", "exit": "error", "hang": "timeout", "score": "ok"}
    often, seldom = ["1", "raise x", "nan", "score"], ["hang", "exit"]
    groups = [[(seldom if (i + 5 * k) % 23 == 7 else often)[(i * 7 + k) % 2] for i in range(8)] for k in range(8)]
    assert sum(word in seldom for group in groups for word in group) >= 2
    async with pool(workers=2) as children:
        found = await asyncio.gather(*(children.score(asked(*group)) for group in groups))
    assert [outcomes(each) for each in found] == [[kinds[word] for word in group] for group in groups]


async def test_a_class_is_made_once_per_child(rewards):
    async with pool("Counting", {"start": 10}) as children:
        assert values(await children.score(asked("", ""))) == [11, 12]
        assert values(await children.score(asked(""))) == [13]


async def test_a_child_that_cannot_be_made_says_why(rewards):
    with pytest.raises(ChildDied, match="no licence"):
        async with pool("Refusing", workers=2):
            pass


async def test_a_missing_module_is_hopeless(rewards):
    async with pool("missing") as children:
        (found,) = await children.score(asked("1"))
    assert found.hopeless
    assert "no_such_module" in found.remark


async def test_async_functions_run_together_with_a_deadline_each(rewards):
    async with pool("waiting") as children:
        found = await children.score(asked("1", "2", "hang", "raise", "3"))
        assert children.workers[0].restarts == 0
    assert outcomes(found) == ["ok", "ok", "timeout", "error", "ok"]
    assert values(found)[0] == 5  # all had begun when the first was done


async def test_an_async_function_that_blocks_is_killed(rewards, monkeypatch):
    monkeypatch.setattr("rlinf.rewards.pool._GRACE", 0.1)
    async with pool("waiting") as children:
        found = await children.score(asked("1", "block"))
    assert outcomes(found) == ["ok", "timeout"]


async def test_a_cancelled_call_takes_its_waiting_samples_away(rewards):
    async with pool() as children:
        task = asyncio.create_task(children.score(asked(*["sleep"] * 1000)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert values(await children.score(asked("7"))) == [7]  # and not after the 300 s that they take


async def test_arguments_that_do_not_pickle_are_an_error_of_the_caller(rewards):
    async with pool() as children:
        with pytest.raises(TypeError, match="pickle"):
            await children.score([{"response": lambda: 1}])
        assert values(await children.score(asked("1"))) == [1]


async def test_who_waits_when_the_pool_is_stopped_is_told(rewards):
    async with pool(timeout=60) as children:
        waiting = asyncio.create_task(children.score(asked("hang")))
        await asyncio.sleep(0.1)
    with pytest.raises(ChildDied):
        await waiting
    with pytest.raises(ChildDied):
        await children.score(asked("1"))


async def test_children_that_only_die_are_given_up(rewards, monkeypatch):
    monkeypatch.setattr("rlinf.rewards.pool._MAX_DEATHS", 1)
    async with pool() as children:
        with pytest.raises(ChildDied):
            await children.score(asked("exit", "exit", "1"))


def of_script(response, scale=1.0):
    """As if the script that runs had it."""
    return scale * len(response)


of_script.__module__ = "__main__"


@pytest.mark.parametrize(
    "function",
    [
        lambda response: 1.0,
        of_script,
        functools.partial(of_script, scale=2.0),
        {"a": {"function": functools.partial(of_script, scale=2.0), "weight": 2.0}},
    ],
)
def test_a_function_that_cannot_be_sent_is_refused_with_advice(function):
    with pytest.raises(ValueError, match="dotted path"):
        RewardPool(function, None, is_async=False, name="r", workers=1, timeout=1)


@pytest.mark.parametrize("word", ["object", "none", "number", "verdict"])
async def test_a_function_that_seizes_its_child_gets_no_further_than_its_own_verdicts(rewards, tmp_path, word):
    mark = tmp_path / "mark"
    async with pool("quietly_seizing") as judges:
        first = await judges.score(asked(f"{word} {mark}"))
        second = await judges.score(asked(f"{word} {mark}"))
    assert outcomes(first) == ["ok"]
    assert outcomes(second) == ["error"]
    assert not mark.exists()
