"""An agent passed to `rlinf.train`, named in a configuration, and evaluated: the same function each time."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import ClassVar

import pytest

import rlinf
from rlinf.cli.commands import main
from rlinf.flows.warm_up import warm_up
from tests.runs.library import small

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SMALL = {"prompts_per_step": 4, "group_size": 2, "trace": False, "task.digits": 3, "evaluation.problems": 6}


async def guess(task, llm, bonus=0.0):
    """Answers twice; the second answer counts."""
    asked = [{"role": "user", "content": task.text}]
    first = await llm.chat(asked, max_new_tokens=4)
    second = await llm.chat([*asked, first.message, {"role": "user", "content": ">"}], max_new_tokens=4)
    return rlinf.Score(float(second.text == task.answer) + bonus, {"second": float(len(second.text))})


async def fails(task, llm):
    raise OSError("no such tool")


def plain(task, llm):
    """Works in a thread, where nothing can be awaited."""
    asked = [{"role": "user", "content": task.text}]
    answer = llm.chat(asked, max_new_tokens=4).result()
    return float(asyncio.run(again(llm, asked, answer)).text == task.answer)


async def again(llm, asked, first):
    """Asks from an event loop of one's own."""
    return await llm.chat([*asked, first.message, {"role": "user", "content": ">"}], max_new_tokens=4)


def trained(directory, agent, **more):
    return rlinf.train(small.MODEL, agent=agent, steps=2, run_dir=directory / "run", **{**SMALL, **more})


def test_a_plain_function_works_in_a_thread_and_is_trained_as_a_coroutine_is(tmp_path):
    results = [trained(tmp_path / name, agent) for name, agent in (("plain", plain), ("guess", guess))]
    for result in results:
        assert all(row["episodes/calls"] == 2 for row in result.metrics if "episodes/calls" in row)
        assert not any(row.get("episodes/failed") for row in result.metrics)
    rewards = [[row["reward/mean"] for row in result.metrics if "reward/mean" in row] for result in results]
    assert rewards[0] == rewards[1]


def test_an_agent_is_trained_named_and_evaluated(tmp_path, capsys):
    path = f"{__name__}.guess"
    passed = trained(tmp_path / "passed", guess, **{"agent.args": {"bonus": 0.5}, "data.chat_template": TEMPLATE})
    named = trained(tmp_path / "named", path, **{"agent.args": {"bonus": 0.5}})
    assert [row.get("loss") for row in passed.metrics] == [row.get("loss") for row in named.metrics]
    assert all(row["episodes/calls"] == 2 for row in passed.metrics if "episodes/calls" in row)
    assert all(row["reward/mean"] >= 0.5 for row in passed.metrics if "reward/mean" in row)
    assert passed.tokenizer().chat_template == TEMPLATE  # whoever loads the model speaks to it as it was taught
    assert named.tokenizer().chat_template is None
    capsys.readouterr()
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"agent": {"function": path, "args": {"bonus": 0.25}}, "task": {"digits": 3}}))
    output = tmp_path / "answers.jsonl"
    given = [
        "--model",
        str(passed.run_dir / "checkpoints/latest/hf"),
        "--config",
        str(config),
        "--output",
        str(output),
        "evaluation.problems=6",
    ]
    assert main(["evaluate", *given]) == 0
    assert [json.loads(line)["reward"] for line in output.read_text().splitlines()] == [0.25] * 6
    Counting.log.clear()
    assert main(["evaluate", *given, f"agent.function={__name__}.Counting", "agent.args={}"]) == 0
    assert Counting.log == ["opened", "closed"]
    hides = "data.chat_template={% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    tools = ["agent.function=rlinf.agents.tools.tool.use_tools", "agent.args={tools: []}", hides]
    assert main(["evaluate", *given, *tools]) == 2
    assert "data.chat_template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("agent", "more", "said"),
    [
        (f"{__name__}.SMALL", {}, "`async def agent(task, llm)`"),
        (lambda task: 1.0, {}, "agent(task, llm, **agent.args)"),
        (f"{__name__}.nobody", {}, "agent.function = tests.runs.library.test_agents.nobody: importing it failed"),
        (guess, {"agent.args": {"malus": 1}}, "agent(task, llm, **agent.args)"),
        (guess, {"agent.call_format": "morse"}, "agent.call_format = morse: "),
        (guess, {"flow": "rlinf.flows.grpo"}, "rlinf.flows.grpo takes no session"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_be_is_one_message(tmp_path, agent, more, said):
    with pytest.raises(rlinf.ConfigError) as error:
        trained(tmp_path, agent, **more)
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def length(response):
    return float(len(response))


async def forgets(task, llm):
    await llm.chat([{"role": "user", "content": task.text}], max_new_tokens=4)


def test_a_forgotten_reward_is_an_error_where_nobody_chose_a_judge(tmp_path, capsys):
    rows, more = [{"prompt": f"{number}?"} for number in range(8)], {"tokenizer": {"characters": "0123456789?"}}
    line = forgets.__code__.co_firstlineno
    with pytest.raises(rlinf.RunFailure, match=rf"no reward.*is a `return` missing.*\(test_agents\.py:{line}\)"):
        trained(tmp_path / "forgets", forgets, data=rows, **more)
    assert "return value" not in capsys.readouterr().out
    chosen = trained(tmp_path / "chosen", forgets, data=rows, rewards=length, **{**more, "reward.isolate": "never"})
    assert not any(row.get("episodes/failed") for row in chosen.metrics)
    assert capsys.readouterr().out.count("return value") == 1


def test_an_agent_that_never_succeeds_says_why(tmp_path):
    with pytest.raises(rlinf.RunFailure, match=r"^step 1:.*6 episodes.*well.*OSError:"):
        trained(tmp_path, fails)


# What lasts for all episodes ------------------------------------------------------------------------------------------


class Counting:
    """An agent with a server that is there for all episodes; `log` has what became of it."""

    log: ClassVar[list[str]] = []

    def __init__(self, failing=False, waiting=None):
        self.failing, self.waiting = failing, waiting

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.answers, "127.0.0.1", 0)
        self.log.append("opened")

    async def __aexit__(self, *error):
        self.server.close()
        await self.server.wait_closed()
        self.log.append("closed")
        return True  # it may not swallow what ends the run

    async def answers(self, reader, writer):
        writer.write(b"1" if await reader.read(1) == b"7" else b"0")
        writer.close()

    async def __call__(self, task, llm):
        answer = await llm.chat([{"role": "user", "content": task.text}], max_new_tokens=4)
        if self.waiting is not None:
            self.waiting.set()
            await asyncio.Event().wait()
        if self.failing:
            raise OSError("no such tool")
        reader, writer = await asyncio.open_connection(*self.server.sockets[0].getsockname())
        writer.write(answer.text[:1].encode() or b"0")
        said = await reader.read(1)
        writer.close()
        return float(said)


@asynccontextmanager
async def counting(failing=False):
    async with AsyncExitStack() as stack:
        agent = Counting(failing)
        await stack.enter_async_context(agent)
        yield agent


class Unopened(Counting):
    async def __aenter__(self):
        raise ConnectionError("no such server")


class Plain:
    """Made once, with nothing to close."""

    def __init__(self):
        Counting.log.append("opened")

    async def __call__(self, task, llm):
        return await guess(task, llm)


@pytest.fixture
def log():
    Counting.log.clear()
    return Counting.log


@pytest.mark.parametrize(
    ("agent", "args", "ends"),
    [
        (Counting, {}, ["opened", "closed"]),
        (f"{__name__}.counting", {"failing": False}, ["opened", "closed"]),
        (Counting(), {}, ["opened", "closed"]),
        (counting(), {}, ["opened", "closed"]),
        (Plain, {}, ["opened"]),
    ],
)  # fmt: skip
def test_what_an_agent_holds_is_opened_once_for_all_episodes_and_closed_once(tmp_path, log, agent, args, ends):
    result = trained(tmp_path, agent, **{"agent.args": args})
    assert log == ends
    assert sum(row.get("episodes", 0) for row in result.metrics) == 16
    assert not any(row.get("episodes/failed") for row in result.metrics)


def test_what_an_agent_holds_is_closed_when_the_run_fails_and_the_error_names_the_agents_line(tmp_path, log):
    line = Counting.__call__.__code__.co_firstlineno
    with pytest.raises(rlinf.RunFailure, match=r"6 episodes.*well.*\(test_agents\.py:(\d+)\)") as error:
        trained(tmp_path, Counting, **{"agent.args": {"failing": True}})
    assert log == ["opened", "closed"]
    assert line < int(re.search(r"py:(\d+)", str(error.value)).group(1)) < line + 10


async def test_what_an_agent_holds_is_closed_when_the_run_is_cancelled(tmp_path, log):
    waiting = asyncio.Event()
    agent = Counting(waiting=waiting)
    run = asyncio.create_task(rlinf.train_async(small.MODEL, agent=agent, run_dir=tmp_path / "run", **SMALL))
    await waiting.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert log == ["opened", "closed"]


def test_an_agent_that_cannot_be_opened_ends_the_run_before_anything_is_started(tmp_path, log):
    with pytest.raises(ConnectionError, match=r"such server"):
        trained(tmp_path, Unopened)
    assert log == []
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@contextmanager
def blocking():
    yield guess


async def undecorated():
    yield guess


@pytest.mark.parametrize(
    ("agent", "more", "said"),
    [
        (blocking, {}, "@asynccontextmanager"),
        (undecorated, {}, "@asynccontextmanager"),
        (Counting, {"agent.args": {"malus": 1}}, "agent.args"),
        (Counting(), {"agent.args": {"failing": True}}, "made already"),
        (rlinf.Score, {}, r"called.*Score"),
    ],
)  # fmt: skip
def test_what_cannot_be_opened_as_an_agent_is_one_message(tmp_path, agent, more, said):
    with pytest.raises(rlinf.ConfigError, match=said):
        trained(tmp_path, agent, **more)


def by_heart(task, messages):
    """Says the answer in its second turn, and nothing in its first."""
    return task.answer if len(messages) > 1 else ""


async def other(task, messages):
    """Half of its answers are right."""
    return by_heart(task, messages) if task.id % 2 else "1"


def test_a_warm_up_learns_what_a_player_said_in_the_models_place(tmp_path, monkeypatch, capsys):
    batches = []

    async def heard(stream, rollout, trainer, **more):
        batches.extend([batch async for batch in stream])
        return await warm_up(batches, rollout, trainer, **more)

    monkeypatch.setattr("rlinf.runs.text.warm_up", heard)
    short = {"data.chat_template": TEMPLATE, "max_new_tokens": 4, "evaluation.problems": 0}
    sft = {"steps": 3, "batch_size": 4, "episodes": 6}
    result = trained(tmp_path, {"function": guess, "player": other}, sft={**sft, "least_reward": 1.0}, **short)
    assert "3 conversations of 6 episodes of the player, mean reward 0.500: 3 steps" in capsys.readouterr().out
    assert [len(batch) for batch in batches] == [4, 4, 4]
    tokenizer = result.tokenizer()
    for example in batches[0]:
        asked = tokenizer.decode(example.prompt_ids)
        said = tokenizer.decode(example.response_ids[example.loss_mask]).split(tokenizer.eos_token)
        assert said == ["", "".join(sorted(re.sub(r"\D", "", asked))), ""]
        assert ">" in tokenizer.decode(example.response_ids[~example.loss_mask])
    again = trained(tmp_path / "named", guess, sft=sft, **{**short, "agent.player": f"{__name__}.by_heart"})
    assert "6 conversations of 6 episodes of the player, mean reward 1.000" in capsys.readouterr().out
    assert not again.metrics[0]["episodes/failed"]


@pytest.mark.parametrize(
    ("agent", "player", "sft", "said"),
    [
        (guess, f"{__name__}.nobody", {"steps": 1}, "agent.player = tests.runs.library.test_agents.nobody: importing"),
        (guess, f"{__name__}.SMALL", {"steps": 1}, "agent.player = tests.runs.library.test_agents.SMALL: this is no"),
        (guess, lambda task: "", {"steps": 1}, "player(task, messages)"),
        (guess, by_heart, {}, "set sft.steps"),
        (None, by_heart, {"steps": 1}, "there is no agent.function"),
        (guess, None, {"steps": 1, "least_reward": 1.0}, "sft.least_reward = 1.0: there is no player"),
    ],
)
def test_a_player_that_cannot_be_is_one_message(tmp_path, agent, player, sft, said):
    with pytest.raises(rlinf.ConfigError) as error:
        trained(tmp_path, {"function": agent, "player": player}, sft=sft)
    assert said in str(error.value)
