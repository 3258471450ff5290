"""Episodes by tasks, for runs that learn while they are played: what became of each task, and what is open."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlinf.cli.commands import main
from rlinf.config.load import RunFailure
from rlinf.data.sample import Prompt
from rlinf.runtime.base.errors import UserError
from tests.runs.library.small import small
from tests.runs.library.test_agents import trained

ASYNC = "rlinf.flows.agentic.agentic_async"


def prompts(count):
    return [Prompt(number, np.array([number]), str(number)) for number in range(count)]


async def sevens(task, llm):
    return float((await llm.generate(task.token_ids)).text.count("7"))


async def test_tasks_come_as_they_are_over_and_are_open_until_they_are_settled(tmp_path):
    async with small(tmp_path) as session:
        stream = session.gather_tasks(prompts(3), sevens, n=2)
        found = {made.id: made async for made in stream}
        assert sorted(found) == [0, 1, 2]
        assert all(len(group.samples) == 2 for made in found.values() for group in made.results)
        metrics = await session.train([group for made in found.values() for group in made.results])
        assert (metrics["episodes"], metrics["episodes/calls"]) == (6, 1)
        assert "episodes" not in await session.train([group for made in found.values() for group in made.results])


async def test_open_tasks_are_told_with_what_the_model_has_said_and_can_be_dropped(tmp_path):
    async with small(tmp_path, max_new_tokens=40) as session:
        waits, asked = asyncio.Event(), asyncio.Event()

        async def waiting(task, llm):
            answer = await llm.generate(task.token_ids, min_new_tokens=30)
            if task.id:
                asked.set()
                await waits.wait()
            return float(len(answer.ids))

        stream = aiter(session.gather_tasks(prompts(2), waiting, n=2))
        assert (await anext(stream)).id == 0
        await asked.wait()
        over, still = await session.in_flight()
        assert (over.prompt.id, sorted(over.done), over.left) == (0, [0, 1], {})
        assert (still.prompt.id, sorted(still.left)) == (1, [0, 1])
        assert 30 <= still.tokens <= 80
        session.settled([0])
        (still,) = await session.in_flight()
        again = session.gather_tasks([still], sevens, n=5)  # another program: it asks otherwise
        assert {made.id: len(made.results[0].samples) async for made in again} == {1: 2}
        assert await session.drop([1]) >= 30
        assert await session.in_flight() == []
        assert [made async for made in stream] == []


async def test_tasks_that_fail_one_after_the_other_end_it_with_the_first_ones_cause(tmp_path):
    async def fails(task, llm):
        await llm.generate(task.token_ids)
        raise OSError(f"no tool for {task.id}")

    async with small(tmp_path) as session:
        with pytest.raises(UserError, match=r"8 episodes.*well.*no.*0"):
            await session.gather_tasks(prompts(9), fails, n=2, at_once=1, give_up=4).collect()
        found = await session.gather_tasks(prompts(3), fails, n=2).collect()
        assert [(made.results, made.dropped) for made in found] == [((), "failed")] * 3


async def sometimes(task, llm):
    """Fails at every third task, and at one attempt of every other one."""
    answer = await llm.chat([{"role": "user", "content": task.text}], max_new_tokens=4)
    if task.id % 3 == 0 or (task.id % 3 == 1 and llm.index == 1):
        raise OSError("no such tool")
    return float(answer.text == task.answer)


def test_an_asynchronous_run_accounts_for_attempts_that_fail(tmp_path, capsys):
    found = trained(tmp_path, sometimes, flow=ASYNC, group_size=3, **{"staleness.max": 1})
    assert [row["groups"] for row in found.metrics if "groups" in row] == [4, 4], "others came in their place"
    capsys.readouterr()
    assert main(["ledger", str(found.run_dir)]) == 0
    said = capsys.readouterr().out
    assert "failed" in said
    assert "balances" in said


def test_an_asynchronous_run_whose_attempts_all_fail_ends_and_says_why(tmp_path):
    evaluated = []

    async def later(task, llm):
        await llm.generate("7")
        evaluated.append(task.id)
        if len(evaluated) > 6:  # the evaluation before the first step
            raise OSError("no such tool")
        return 0.0

    with pytest.raises(RunFailure, match=r"8 episodes.*well.*no"):
        trained(tmp_path, later, flow=ASYNC)
