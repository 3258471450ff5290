"""Episodes end well or badly, and nothing else: what raises, hangs, blocks or comes too late is an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from rlinf import ActorSystem
from rlinf.agents import outcome
from rlinf.agents.agent import AgentLLM, Attempt, samples_of
from rlinf.agents.chat import ChatFormat
from rlinf.agents.episodes import Episodes, LoopWatch
from rlinf.agents.llm import Setting
from rlinf.agents.outcome import Episode, KnownFailures, Tally, here, remark_on
from rlinf.agents.tools.formats import call_format
from rlinf.data.sample import Prompt
from rlinf.engines.base import Completion
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import ActorDied, UserError
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.observe.stalls import open_work, render
from rlinf.runtime.system.observer import report_host
from rlinf.training.batch_metrics import rewards_by_agent
from tests.agents.acting import begun
from tests.agents.speaking import STYLES, tokenizer_of
from tests.runs.library.small import small

TOKENIZER = tokenizer_of(STYLES["chatml"])


class Model:
    """Answers `x` after some virtual seconds; knows which conversations the engine would keep."""

    def __init__(self, seconds=1.0):
        self.seconds, self.kept, self.asked = seconds, set(), 0

    async def answer(self, ids, *, seed, conversation, **sampling):
        self.asked += 1
        self.kept.add(conversation)
        await asyncio.sleep(self.seconds)
        said = np.asarray([TOKENIZER.convert_tokens_to_ids("x")], np.int64)
        return Completion(0, said, np.zeros(1, np.float32), np.zeros(1, np.int32), "length")

    def ended(self, conversation):
        self.kept.discard(conversation)


def play(agent, tasks=1, n=2, *, timeout=60.0, at_once=8, model=None, during=None):
    """Groups and tally of an agent in virtual time, and the seconds that it took; what is left open fails."""
    model, tally, numbers = model or Model(), Tally(), itertools.count()
    setting = Setting(model, 1.0, 4, None, len(TOKENIZER))

    async def episode(task):
        attempt = Attempt(setting, call_format("hermes", TOKENIZER), lambda: next(numbers), here.get().prompt)
        llm = here.get().llm = AgentLLM(attempt, ChatFormat(TOKENIZER), (task,))
        return samples_of(await agent(task, llm), llm)

    def begin(task, index):
        return Episode(task, index, (0,), Prompt(task, np.zeros(1, np.int64)), {})

    async def whole():
        async with ActorSystem.local():
            episodes = Episodes(episode, n, begin, (tally,), timeout=timeout, at_once=at_once, judge=None)
            beside = None if during is None else asyncio.create_task(during())
            found = [group async for group in episodes.groups(range(tasks))]
            if beside is not None:
                await beside
            assert not open_work
            return found

    groups, seconds = run_virtual(whole())
    assert not model.kept, "the engine was told of every conversation's end"
    return groups, tally, seconds


async def well(task, llm):
    await llm.generate("Hi")
    return 1.0


def mixed(bad):
    """An agent whose even tasks go well."""

    async def agent(task, llm):
        return await (well if task % 2 == 0 else bad)(task, llm)

    return agent


@pytest.mark.parametrize(
    ("returned", "remark"),
    [
        ("good", "'good'"),
        (float("nan"), "agent"),
        ([], "[]"),
        ({"nobody": 1.0}, "'nobody'"),
        ({"": "much"}, "agent"),
        (object(), "agent"),
    ],
)
def test_nonsense_is_an_outcome(returned, remark):
    async def nonsense(task, llm):
        await llm.generate("Hi")
        return returned

    groups, tally, _ = play(mixed(nonsense), tasks=2)
    assert [group.prompt.id for group in groups] == [0]
    assert (tally.played, len(tally.failed), tally.timeouts) == (4, 2, 0)
    (warning,) = tally.warnings()
    assert remark in warning


@pytest.mark.parametrize(
    "error",
    [
        KeyError("door"), RuntimeError(), TimeoutError("the tool"), asyncio.CancelledError(),
        SystemExit(2), SystemExit(), GeneratorExit("enough"),
    ],
)  # fmt: skip
def test_what_raises_is_an_outcome(error):
    async def raising(task, llm):
        await llm.generate("Hi")
        raise error

    groups, tally, _ = play(mixed(raising), tasks=2)
    assert len(groups) == 1
    assert len(tally.failed) == 2
    assert type(error).__name__ in tally.remark


async def _leaves(code):
    await asyncio.sleep(0)
    sys.exit(code)


@pytest.mark.parametrize(
    "where",
    [
        lambda: asyncio.gather(_leaves(2), asyncio.sleep(1)),
        lambda: asyncio.create_task(_leaves(2)),
        lambda: asyncio.to_thread(sys.exit, 2),
        lambda: in_thread(lambda: sys.exit(2)),
    ],
    ids=["gather", "task", "executor", "thread"],
)
async def test_leaving_in_a_task_or_thread_of_an_agents_own_ends_that_attempt(where):
    async def leaving(task):
        await where()

    tally = await _played(leaving)
    assert (tally.played, tally.failures) == (2, 2)
    assert "SystemExit: 2" in tally.remark


async def _played(program, *, timeout=20.0, watch=None):
    """What became of two attempts of a program in real time, of which none goes well."""
    tally = Tally()
    episodes = Episodes(
        program, 2, lambda task, index: Episode(task, index, (0,), None, {}), (tally,), timeout=timeout, at_once=2,
        judge=None, watch=watch,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"2 episodes went"):
        async with ActorSystem.local():
            _ = [group async for group in episodes.groups([1])]
    return tally


@pytest.fixture
def listening(monkeypatch):
    """A socket that answers nobody, and a watch that takes it for the endpoint."""
    monkeypatch.setattr("rlinf.agents.episodes._BLOCKED", 0.1)
    monkeypatch.setattr("rlinf.agents.episodes._LOOK", 0.05)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        lines = []
        yield door.getsockname(), LoopWatch(lines.append, door.getsockname), lines


async def test_a_client_that_blocks_while_only_the_loop_could_answer_is_told_and_fails(listening):
    address, watch, lines = listening
    before = signal.getsignal(signal.SIGURG)

    async def blocks(task):
        with contextlib.suppress(Exception), socket.create_connection(address) as client:  # as clients do
            client.makefile("rb").readline()

    tally = await _played(blocks, watch=watch)
    assert "llm.base_url" in tally.remark
    assert "(test_episodes.py:" in tally.remark
    (line,) = lines
    assert re.search(r"test_episodes\.py:\d+ .*asyncio\.to_thread", line)
    assert tally.timeouts == 0
    assert signal.getsignal(signal.SIGURG) == before


def _spins():
    while True:
        pass


@pytest.mark.parametrize("block", [lambda: time.sleep(60), _spins, lambda: subprocess.run(["sleep", "60"])])
async def test_the_time_of_an_episode_ends_code_that_blocks(listening, block):
    _, watch, lines = listening

    async def blocks(task):
        await asyncio.gather(asyncio.to_thread(int), _blocked())

    async def _blocked():
        block()

    tally = await _played(blocks, timeout=0.3, watch=watch)
    assert tally.timeouts == 2
    assert re.search(r"timeout=0\.3 s, .* test_episodes\.py:", tally.remark)
    assert len(lines) == 1


async def test_no_word_of_an_agent_that_awaits(listening):
    _, watch, lines = listening

    async def waits(task):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(time.sleep, 0.3)

    await _played(waits, watch=watch)
    assert lines == []


async def test_the_line_that_is_named_is_the_agents_own_also_in_groups():
    async def fails():
        json.loads("{")

    async def grouped(task):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            group.create_task(fails())

    tally = await _played(grouped)
    assert re.search(r"^JSONDecodeError: .*\(test_episodes\.py:\d+\), and 1 more$", tally.remark)

    async def one(task):
        json.loads("{")

    assert "(test_episodes.py:" in (await _played(one)).remark

    async def returns_nothing(task):
        pass

    line = returns_nothing.__code__.co_firstlineno
    for program in (returns_nothing, functools.partial(returns_nothing)):
        assert (await _played(program)).remark.endswith(f"(test_episodes.py:{line})")


def test_an_agent_that_forgets_to_return_is_told_where_nobody_chose_a_reward():
    llm, _ = begun("Hi", "Ho")
    episode = Episode(0, 0, (0,), None, {}, llm=llm)
    asyncio.run(llm.agent("planner").generate("a")), asyncio.run(llm.agent("worker").generate("a"))
    for returned, whose in ((None, "for 'planner', 'worker'"), ({"worker": 1.0}, "for 'planner'")):
        with pytest.raises(UserError, match=rf"no reward {whose}, .*`return` missing.*reward\.function"):
            outcome.samples_of(samples_of(returned, llm), episode, judged=False)
    assert len(outcome.samples_of(samples_of(None, llm), episode, judged=True)) == 2


def test_a_lost_actor_is_not_the_episodes_own_failure():
    async def lost(task, llm):
        raise ActorDied("rollout[0] is gone")

    with pytest.raises(ActorDied):
        play(mixed(lost), tasks=2)


def test_one_that_hangs_ends_at_its_deadline():
    async def hanging(task, llm):
        await llm.generate("Hi")
        await asyncio.Event().wait()

    groups, tally, seconds = play(mixed(hanging), tasks=2, timeout=30.0)
    assert len(groups) == 1
    assert (len(tally.failed), tally.timeouts) == (2, 2)
    assert seconds == 30.0
    assert re.search(r"timeout=30 s, .* test_episodes\.py:\d+$", tally.remark)


def test_one_that_asks_a_task_for_what_it_has_not_is_told_what_it_has():
    async def asks(task, llm):
        return task.question

    asked = Prompt(0, np.ones(1, np.int64), "2+2", "4", {"level": 3})
    with pytest.raises(AttributeError) as caught:
        asyncio.run(asks(asked, None))
    remark = remark_on(caught.value)
    assert all(each in remark for each in ("question", "task.text", "task.answer", "task.row['level']", " (test_"))


def test_one_that_hangs_in_the_model_leaves_nothing_with_the_engine():
    with pytest.raises(UserError, match=r"2 episodes went"):
        play(well, timeout=30.0, model=Model(seconds=1e6))


def test_one_that_swallows_its_cancellation_is_left_behind_and_holds_nobody_up():
    ends = asyncio.Event()

    async def stubborn(task, llm):
        while not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                pass

    async def later():
        await asyncio.sleep(1000)
        ends.set()

    groups, tally, seconds = play(mixed(stubborn), tasks=2, timeout=30.0, during=later)
    assert len(groups) == 1
    assert tally.timeouts == 2
    assert seconds == 1000.0


def test_the_model_is_not_asked_after_the_end():
    said = []

    async def careless(task, llm):
        await llm.generate("Hi")

        async def goes_on(before):
            try:
                await asyncio.sleep(before)
                await llm.generate("and?")
            except UserError as error:
                said.append(str(error))

        left = [asyncio.create_task(goes_on(0)), asyncio.create_task(goes_on(5))]
        await asyncio.sleep(0.5)
        kept.extend(left)
        return 1.0

    kept: list[asyncio.Task] = []

    async def later():
        await asyncio.sleep(20)
        await asyncio.gather(*kept)

    model = Model()
    groups, tally, _ = play(careless, n=1, model=model, during=later)
    assert len(groups[0].samples) == 1, "what came after the end is not learned"
    assert tally.failed == []
    assert model.asked == 2, "the second late call did not reach the model"
    assert len({*said}) == len(said) == 2
    assert all(line.startswith("llm.generate: ") for line in said)


def test_agents_have_groups_calls_and_an_order_of_their_own():
    """Workers are numbered as they began, whichever answers first."""

    async def team(task, llm):
        async def work(number):
            return await llm.agent("worker").generate(f"{number}")

        await llm.agent("planner", weight=2.0).generate("plan")
        await asyncio.gather(*(work(number) for number in range(3)))
        return {"planner": 1.0, "worker": 0.5}

    class Backwards(Model):
        async def answer(self, ids, *, conversation, **more):
            await asyncio.sleep(100 - conversation)
            return await super().answer(ids, conversation=conversation, **more)

    (planner, worker), tally, _ = play(team, n=2, timeout=None, model=Backwards())
    assert [(each.agent, each.reward, each.weight) for each in planner.samples] == [("planner", 1.0, 2.0)] * 2
    assert [(each.agent, each.reward, each.weight) for each in worker.samples] == [("worker", 0.5, 1 / 3)] * 6
    read = [TOKENIZER.decode(each.prompt.token_ids) for each in worker.samples]
    assert read == ["0", "1", "2"] * 2
    metrics = tally.metrics()
    assert (metrics["agent/planner/calls"], metrics["agent/worker/calls"]) == (1.0, 3.0)
    told = rewards_by_agent([*planner.samples, *worker.samples])
    assert told == {"agent/planner/reward": 1.0, "agent/worker/reward": 0.5}


def test_hundreds_interleave():
    async def waiting(task, llm):
        for _ in range(3):
            await llm.generate("Hi")
            await asyncio.sleep(10)
        return 0.5

    groups, tally, seconds = play(waiting, tasks=100, n=4, at_once=400)
    assert len(groups) == 100
    assert tally.played == 400
    assert seconds == 33.0, "as long as one of them"


def test_no_more_than_asked_for_are_played_at_the_same_time():
    now, most = 0, 0

    async def counting(task, llm):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await llm.generate("Hi")
        now -= 1
        return 1.0

    play(counting, tasks=10, n=4, at_once=7)
    assert most == 7


def test_a_step_that_is_cancelled_frees_all_that_its_episodes_held():
    ended, agents = [], weakref.WeakSet()
    model, numbers = Model(seconds=100.0), itertools.count()
    setting = Setting(model, 1.0, 4, None, len(TOKENIZER))

    async def episode(task):
        attempt = Attempt(setting, call_format("hermes", TOKENIZER), lambda: next(numbers))
        llm = here.get().llm = AgentLLM(attempt, ChatFormat(TOKENIZER), (0,))
        agents.add(llm)
        try:
            await llm.generate("Hi")
        finally:
            ended.append(task)

    async def whole():
        async with ActorSystem.local():
            before = len(asyncio.all_tasks())
            episodes = Episodes(
                episode, 2, lambda task, index: Episode(task, index, (0,), None, {}), (),
                timeout=None, at_once=4, judge=None,
            )  # fmt: skip

            async def step():
                async for _ in episodes.groups(range(10)):
                    pass

            learning = asyncio.create_task(step())
            await asyncio.sleep(1)
            assert len(model.kept) == len(open_work) == 4
            learning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await learning
            assert len(asyncio.all_tasks()) == before
            assert not model.kept
            assert not open_work

    run_virtual(whole())
    assert sorted(ended) == [0, 0, 1, 1]
    gc.collect()
    assert not agents


def test_the_stall_report_names_an_episode_that_waits():
    async def waiting(task, llm):
        await llm.generate("Hi")
        await asyncio.sleep(1000)  # this line is where it waits
        return 1.0

    told = []

    async def look():
        await asyncio.sleep(500)
        host = next(iter(open_work)).host
        told.append(render([report_host(host, ())]))

    play(waiting, n=1, timeout=None, during=look)
    assert re.search(r"episode 0 of task 0 .* 500\.0 s", told[0])
    assert "1 steps done at " in told[0]
    assert "test_episodes.py:" in told[0]


def test_failures_are_told_once_and_again_where_they_are_others_or_many_more_or_fewer():
    known, told = KnownFailures(), []
    key, value = KeyError("door"), ValueError("door")
    steps = [(4, key), (5, key), (1, key), (3, value), (3, key), (0, None), (1, key), (4, key)]
    for number, (failures, cause) in enumerate(steps):
        told += [number for _ in Tally(played=10, failures=failures, remark="door", cause=cause).warnings(known)]
    assert told == [0, 2, 3, 7]


def test_one_that_blocks_the_loop_is_told(monkeypatch):
    monkeypatch.setattr("rlinf.agents.episodes._BLOCKING", 0.02)

    async def blocking(task, llm):
        await llm.generate("Hi")
        time.sleep(0.05)
        return 1.0

    _, tally, _ = play(mixed(blocking), tasks=2)
    assert tally.failed == []
    (warning,) = tally.warnings()
    assert "ran for 0." in warning
    assert "asyncio.to_thread" in warning


def test_what_an_import_blocks_is_the_line_that_asked_for_it():
    frames = {}
    program = compile("def import_(look): return look()", "<frozen importlib._bootstrap>", "exec")
    exec(program, frames)
    line = sys._getframe().f_lineno + 1
    assert frames["import_"](lambda: outcome.blocking_line(sys._getframe(1))) == f"{Path(__file__).name}:{line}"


async def test_a_step_tells_of_the_episodes_of_its_own_batch(tmp_path):
    """The next batch may be under way, or complete, while a step is learned from."""
    async with small(tmp_path) as session:

        async def agent(task, llm):
            await llm.generate("?")
            return float(task)

        first = await session.gather_groups([1, 2], agent, n=4)
        second = await session.gather_groups([1, 2, 3], agent, n=4)
        third = await session.gather_groups([1], agent, n=4)
        assert (await session.train(first))["episodes"] == 8
        assert (await session.train(second[:2]))["episodes"] == 16, "all that no step has told of"
        assert "episodes" not in await session.train(list(third))
