"""Environments of verifiers: what becomes of an episode that ends well, raises, hangs, floods, or kills its process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlinf.agents.environments import verifiers
from rlinf.agents.environments.verifiers import Verifiers
from rlinf.config.load import RunFailure
from rlinf.runtime.base.errors import UserError

HERE = Path(__file__).parent
LLM = SimpleNamespace(base_url="http://127.0.0.1:1/v1", api_key="its own")
REAL = Path(verifiers.INSTALLED)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(verifiers, "_WORKER", ("-P", str(HERE / "stand_in_verifiers.py")))


def environment(taskset="all", **more):
    return Verifiers(taskset, python=sys.executable, **more)


def rows_by_name(made):
    return {row["name"]: SimpleNamespace(row=row) for row in made.tasks()}


async def test_an_episodes_reward_is_the_sum_of_its_weighted_rewards_and_each_is_named():
    made = environment()
    async with made:
        score = await made(rows_by_name(made)["0.25"], LLM)
    assert score.value == 1.25
    assert score.scores == {"right": 0.25, "style": 1.0, "turns": 2.0}


@pytest.mark.parametrize(("name", "cause"), [("error", "the tool is gone"), ("death", "died: out of memory")])
async def test_an_episode_that_goes_wrong_is_an_error_with_its_cause_and_the_next_one_is_played(name, cause):
    made = environment()
    async with made:
        tasks = rows_by_name(made)
        silent = asyncio.create_task(made(tasks["silence"], LLM))
        with pytest.raises(RuntimeError, match=cause):
            await made(tasks[name], LLM)
        if name == "death":
            with pytest.raises(RuntimeError, match=cause):
                await silent
        else:
            silent.cancel()
        assert (await made(tasks["0.25"], LLM)).value == 1.25


async def test_a_flood_is_read_and_stops_nobody():
    made = environment()
    async with made:
        scores = await asyncio.gather(*(made(rows_by_name(made)["flood"], LLM) for _ in range(20)))
    assert {score.value for score in scores} == {0.5}


async def test_an_episode_that_is_given_up_is_cancelled_there_too():
    made = environment()
    async with made:
        tasks = rows_by_name(made)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made(tasks["silence"], LLM), 0.05)
        assert (await made(tasks["unscored"], LLM)).scores["cancelled"] == 1.0


async def test_a_process_that_dies_again_and_again_ends_the_run():
    made = environment()
    async with made:
        task = rows_by_name(made)["death"]
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                await made(task, LLM)
        with pytest.raises(RunFailure, match="3 times in a row: out of memory"):
            await made(task, LLM)


async def test_its_process_ends_with_the_run():
    made = environment()
    async with made:
        process = made._worker.pid
        os.kill(process, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_the_last_tasks_are_held_out():
    made = environment(size=20, held_out=3)
    assert [row["task"] for row in made.held_out()] == [21, 22]  # of 23, at most one in eight
    assert [row["task"] for row in made.tasks()] == list(range(21))
    assert [row["task"] for row in environment(size=23, held_out=1).held_out()] == [23]


def test_a_row_has_what_is_asked_for_of_its_tasks_data():
    assert environment(size=1, held_out=0, columns=["solution"]).tasks() == [
        {"prompt": "task 0", "name": "0.25", "task": 0, "solution": "shown"}
    ]


@pytest.mark.parametrize(("taskset", "cause"), [("broken", "taskset 'broken' not found"), ("empty", "no tasks")])
def test_a_taskset_without_tasks_is_an_error_that_says_why(taskset, cause):
    with pytest.raises(UserError, match=cause):
        environment(taskset).tasks()


def test_a_task_that_is_long_in_the_making_is_an_error_that_says_how_many_there_were_and_what_to_do():
    with pytest.raises(UserError, match=r"0 of 23 tasks.*agent\.args\.starting.*agent\.args\.size"):
        environment(size=20, held_out=3, starting=1e-9).tasks()


def test_an_interpreter_that_is_none_is_named():
    with pytest.raises(UserError, match="python='/no/python'"):
        Verifiers("counting", python="/no/python").tasks()


def test_without_verifiers_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="make environments"):
        Verifiers("gsm8k")


@pytest.mark.peers
@pytest.mark.skipif(not REAL.exists(), reason="verifiers is not installed; `make environments` does")
async def test_the_real_verifiers_plays_a_taskset_against_an_endpoint(monkeypatch):
    from aiohttp import web

    async def chat(request):
        asked = await request.json()
        assert request.headers["Authorization"] == "Bearer its own"
        message = {"role": "assistant", "content": asked["messages"][-1]["content"][:1] + "7"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        shape = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response({**shape, "choices": [choice], "usage": usage})

    monkeypatch.undo()
    interpreter = str(REAL.absolute())
    monkeypatch.chdir(HERE)  # where the taskset is
    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    llm = SimpleNamespace(base_url=f"http://127.0.0.1:{port}/v1", api_key="its own")
    made = Verifiers("counting_taskset", python=interpreter)
    try:
        async with made:
            score = await made(SimpleNamespace(row=made.tasks()[7]), llm)
            process = psutil.Process(made._worker.pid)
            family = [process, *process.children(recursive=True)]
    finally:
        await runner.cleanup()
    assert score.scores == {"sevens": 1.0, "length": 2.0}  # the answer is 77
    assert score.value == 1.0
    assert psutil.wait_procs(family, timeout=60)[1] == []
