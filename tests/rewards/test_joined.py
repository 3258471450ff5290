"""Workers of other processes that score for a judge: each sample gets one verdict, whoever comes, leaves or is lost."""

import asyncio
import contextlib
import os
import signal

import pytest

from rlinf.joining.connection import connect
from rlinf.rewards import far_side
from rlinf.rewards.joined import JoinedWorkers
from rlinf.rewards.pool import RewardPool
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import ChildDied
from tests.rewards.test_pool import TIMEOUT, Passing, asked, outcomes, pool, rewards, values

__all__ = ["rewards"]

TOKEN = "of this job"


class Joined:
    """A pool that may be joined, and processes that have, in tasks of this one; their workers are real."""

    def __init__(self, pools):
        self.judge = JoinedWorkers(pools, "judge", 1)
        self.tasks, self.connections = [], []

    async def joins(self):
        """One more has joined; returns what has it leave."""
        leave, ready = asyncio.Event(), asyncio.Event()
        host, port = self.judge.where.split(":")
        self.connections.append(connection := await connect(host, int(port), TOKEN))
        self.tasks.append(task := asyncio.create_task(far_side.score(connection, ready.set, leave)))
        there = len(self.judge.there) + 1
        await until(lambda: task.done() or len(self.judge.there) == there)
        return leave

    async def close(self):
        await self.judge.close()
        for task in self.tasks:
            with contextlib.suppress(ConnectionError):
                await task


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def joined(*pools):
    """Pools may be joined by processes that have one worker for each."""
    made = Joined(pools)
    await made.judge.listen("127.0.0.1:0", None, TOKEN)
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def alone(function="by_word"):
    """A pool that has no workers but those that join, whose deadlines pass as those of `test_pool` do."""
    made = RewardPool(
        f"own_rewards.{function}", None, is_async=function == "waiting", name="reward", workers=1, timeout=TIMEOUT
    )
    passing, start = Passing(), far_side.start_all

    async def watched(workers):
        await start(workers)
        for worker in workers:
            passing.watch(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_side, "start_all", watched)
        async with await asyncio.start_server(passing.hear, "127.0.0.1", 0) as server, joined(made) as joiners:
            patch.setenv("TIME_PASSES", str(server.sockets[0].getsockname()[1]))
            await joiners.joins()
            yield made, joiners
    for runner in [*made._runners]:
        runner.cancel()


async def test_one_that_joined_judges_as_the_judges_own_workers_do(rewards):
    async with alone() as (judge, joiners):
        found = await judge.score(asked("1", "raise x", "hang", "exit", "score", "2.5"))
        with pytest.raises(TypeError, match="pickle"):
            await judge.score([{"response": lambda: 1}])
        assert values(await judge.score(asked("3"))) == [3]
        assert joiners.judge.answered() == 5  # all but the hang and the crash, which nobody scored
        assert joiners.judge.answered() == 0
    assert outcomes(found) == ["ok", "error", "timeout", "error", "ok", "ok"]
    assert values(found) == [1, None, None, None, 0.5, 2.5]
    assert found[1].remark.startswith("KeyError: 'x'")
    assert f"than {TIMEOUT:g} s" in found[2].remark
    assert "exited with status 3" in found[3].remark
    assert await joiners.tasks[0] == "the job has ended"


async def test_async_functions_have_a_deadline_each_there_too(rewards):
    async with alone("waiting") as (judge, _):
        found = await judge.score(asked("1", "hang", "raise", "3"))
    assert outcomes(found) == ["ok", "timeout", "error", "ok"]


GATED = """
import os, time

def gated(response):
    # the answer, once a file says that all may go on; each beginning is noted
    directory, _, number = response.rpartition("/")
    with open(f"{directory}/begun", "a") as file:
        file.write(f"{number}\\n")
    while not os.path.exists(f"{directory}/open"):
        time.sleep(0.01)
    return float(number)
"""


@pytest.fixture
def gated(tmp_path, monkeypatch):
    """A user's function that waits for a file."""
    (tmp_path / "gated_rewards.py").write_text(GATED)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("end", ["lost", "told to leave"])
async def test_what_one_had_when_it_went_is_scored_by_others_and_each_sample_once(gated, monkeypatch, end):
    monkeypatch.setattr("rlinf.rewards.pool._SHARE", 1)
    judge = RewardPool("gated_rewards.gated", None, is_async=False, name="reward", workers=1, timeout=600)
    await judge.start()
    try:
        async with joined(judge) as joiners:
            leaves = [await joiners.joins() for _ in range(2)]
            scored = asyncio.create_task(judge.score(asked(*(f"{gated}/{number}" for number in range(6)))))
            await until(lambda: (gated / "begun").exists() and (gated / "begun").read_text().count("\n") == 3)
            if end == "lost":
                joiners.connections[0].abandon()
            else:
                leaves[0].set()
            await until(lambda: len(joiners.judge.there) == 1)
            assert not scored.done()
            (gated / "open").touch()
            assert values(await scored) == [*range(6)]
            assert 0 < joiners.judge.answered() <= 5
            begun = sorted(map(int, (gated / "begun").read_text().split()))
            assert len(begun) == 7  # one had begun where it was lost
            assert {*begun} == {*range(6)}
            if end != "lost":
                assert "told to leave" in await joiners.tasks[0]
    finally:
        await judge.stop()


async def test_a_judge_whose_own_worker_is_given_up_goes_on_by_one_that_joined_until_that_goes(gated, monkeypatch):
    with monkeypatch.context() as fragile:
        fragile.setattr("rlinf.rewards.pool._MAX_DEATHS", 0)
        judge = RewardPool("gated_rewards.gated", None, is_async=False, name="reward", workers=1, timeout=600)
    await judge.start()
    try:
        async with joined(judge) as joiners:
            await joiners.joins()
            os.kill(judge.workers[0].pid, signal.SIGKILL)
            (gated / "open").touch()
            assert values(await judge.score(asked(*(f"{gated}/{number}" for number in range(10))))) == [*range(10)]
            (gated / "open").unlink()
            scored = asyncio.create_task(judge.score(asked(f"{gated}/1")))
            (member,) = joiners.judge.there
            await until(lambda: member.workers[0].has == 1)
            joiners.connections[0].abandon()
            with pytest.raises(ChildDied):
                await scored
    finally:
        await judge.stop()


async def test_one_whose_worker_is_given_up_leaves_and_its_sample_goes_to_the_next(rewards, monkeypatch, caplog):
    monkeypatch.setattr("rlinf.rewards.pool._MAX_DEATHS", 0)
    async with alone() as (judge, joiners):
        scored = asyncio.create_task(judge.score(asked("exit")))
        for _ in range(2):
            await until(lambda: not joiners.judge.there)
            with pytest.raises(UserError, match="exited with status 3"):
                await joiners.tasks.pop()
            if not scored.done():
                await joiners.joins()
        assert outcomes(await scored) == ["error"]
    assert caplog.text.count("is gone: it failed") == 2


async def test_a_function_that_is_not_there_or_cannot_start_is_said_at_both_ends(rewards, monkeypatch, caplog):
    async with pool() as judge, joined(judge) as joiners:
        for source, said in (("own_rewards.nowhere", "nowhere"), ("own_rewards.Refusing", "no licence")):
            monkeypatch.setitem(judge.made_of, "source", source)
            await joiners.joins()
            with pytest.raises(UserError, match=said):
                await joiners.tasks.pop()
        await until(lambda: caplog.text.count("is gone: it could not make what it was told") == 2)
        assert values(await judge.score(asked("1"))) == [1]
