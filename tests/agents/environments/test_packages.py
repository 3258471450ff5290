"""Packages themselves, where `make environments` has installed them: what they score is what is learned from."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from rlinf.agents.agent import samples_of
from rlinf.agents.environments.openenv import OpenEnv
from rlinf.agents.environments.verifiers import INSTALLED, Verifiers
from tests.agents.acting import begun
from tests.agents.endpoint.serving import stand

PYTHON = os.path.abspath(INSTALLED)
HERE = Path(__file__).parent
ANSWERS = 1000
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),  # the packages import for a minute on a busy machine
    pytest.mark.skipif(not os.path.exists(PYTHON), reason="verifiers is not installed; `make environments` does"),
]


def _by_itself(code, *data):
    """Run code in the environment of the packages; return what it prints, as JSON."""
    command = [PYTHON, "-c", code]
    printed = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, check=True, cwd="/")
    return json.loads(printed.stdout.splitlines()[-1])


@asynccontextmanager
async def answering(answer):
    """An endpoint whose model says `answer(request)`: a text, or calls of tools as (name, arguments); the model."""

    async def chat(request):
        asked = await request.json()
        said = answer(asked)
        message = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            function = {"name": said[0], "arguments": json.dumps(said[1])}
            message["tool_calls"] = [{"index": 0, "id": "call", "type": "function", "function": function}]
        finish = "stop" if isinstance(said, str) else "tool_calls"
        shape = {"id": "1", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "finish_reason": finish}
        if not asked.get("stream"):
            whole = {**shape, "object": "chat.completion", "usage": usage, "choices": [{**choice, "message": message}]}
            return web.json_response(whole)
        pieces = [{"choices": [{**choice, "delta": message}]}, {"choices": [], "usage": usage}]
        lines = [json.dumps({**shape, "object": "chat.completion.chunk", **piece}) for piece in pieces]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream")

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key="its own")
    finally:
        await runner.cleanup()


def _layout(drawn):
    """A random answer to a task of marble: mostly a legal place for one piece."""
    kind = drawn.choice(["block", "spring", "drum", "bell", "ladder", "marble"])
    piece = {"kind": kind, "x": drawn.randint(-30, 30) * 20, "y": drawn.randint(-90, -25) * 20}
    text = json.dumps([{**piece, "rot": drawn.randint(-6, 6)}])
    return drawn.choice([f"```json\n{text}\n```", text, f"I think: {text}", text[:-1]])


PARTS = ("scored", "answered_legally", "closeness")
MARBLE = """
import asyncio, itertools, json, sys, types
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
answers, parts = json.load(sys.stdin)
taskset = load_taskset(taskset_config_type("marble_v1")(id="marble_v1"))
tasks = list(itertools.islice(taskset.load(), len(answers[0])))

async def scored(task, answer):
    trace = types.SimpleNamespace(last_reply=answer)
    return [await getattr(task, name)(trace) for name in parts]

async def main():
    return [[await scored(*each) for each in zip(tasks, some)] for some in answers]

print(json.dumps(asyncio.run(main())))
"""


async def test_verifiers_scores_are_those_of_the_taskset_itself():
    made = Verifiers("marble_v1", python=PYTHON, size=ANSWERS // 10, held_out=0)
    rows, drawn, said, scores, answers = made.tasks(), random.Random(0), {}, [], []
    async with answering(lambda asked: said[asked["messages"][-1]["content"]]) as llm, made:
        for _ in range(10):
            for row in rows:  # a layout's piece is that of the task, or another
                piece = row["prompt"].split("exactly these, no more and no fewer:\n- 1 x ")[1].split()[0]
                said[row["prompt"]] = _layout(drawn).replace("block", piece).replace("marble", piece)
            answers.append([said[row["prompt"]] for row in rows])
            ended = await asyncio.gather(*(made(SimpleNamespace(row=row), llm) for row in rows))
            scores.append([[score.scores[name] for name in PARTS] for score in ended])
    assert scores == _by_itself(MARBLE, answers, PARTS)
    legal = sum(part[1] for some in scores for part in some)
    assert 50 < legal < ANSWERS == 10 * len(rows)


ECHO = """
import importlib, json, sys
answers, where = json.load(sys.stdin)
sys.path.insert(0, where)
models, server = importlib.import_module("models"), importlib.import_module("server.echo_environment")
scores = []
for answer in answers:
    environment = server.EchoEnvironment()
    environment.reset()
    scores.append(environment.step(models.EchoAction(message=answer)).reward)
print(json.dumps(scores))
"""


async def test_openenvs_scores_are_those_of_the_environment_itself(tmp_path):
    scripts = os.path.dirname(PYTHON)
    subprocess.run([f"{scripts}/openenv", "init", "echo"], cwd=tmp_path, check=True, capture_output=True)
    where, drawn = str(tmp_path / "echo"), random.Random(0)
    answers = ["".join(drawn.choices("ab 7\n", k=drawn.randint(1, 40))) for _ in range(ANSWERS)]
    words = ["-m", "uvicorn", "server.app:app", "--app-dir", where, "--host", "{host}", "--port", "{port}"]
    scores = []
    async with OpenEnv([PYTHON, *words], turns=1) as environment:
        for number, answer in enumerate(answers):
            llm, _ = begun(answer)
            scores.append((await environment(SimpleNamespace(row={"seed": number}), llm)).value)
    assert scores == _by_itself(ECHO, answers, where)


@pytest.mark.parametrize("harness", ["null", "bash"])
async def test_tools_of_a_taskset_are_called_by_a_harness_and_a_judge_by_its_url(harness, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("KEY_OF_THE_JUDGE", "its own")

    def answer(asked):
        last = asked["messages"][-1]
        if asked["model"] == "judge":
            return "yes"
        if last["role"] == "tool":
            return f"It is {last['content']}."
        assert "sums_add" in {tool["function"]["name"] for tool in asked["tools"]}
        return "sums_add", {"left": int(last["content"].split()[0]), "right": 30}

    async with answering(answer) as llm:
        where = {"base_url": llm.base_url, "api_key_var": "KEY_OF_THE_JUDGE", "model": "judge"}
        judge = {"id": "reference", "weight": 0.5, **where}
        taskset = {"id": "tool_taskset", "task": {"judges": [judge]}}
        agent = {"harness": {"id": harness}, "max_turns": 4}
        async with Verifiers({"taskset": taskset, "agent": agent}, python=PYTHON, held_out=0) as made:
            score = await made(SimpleNamespace(row=made.tasks()[7]), llm)
    assert score.value == 1.5
    assert score.scores["right"] == 1.0


async def test_attempts_that_are_scored_as_a_group_have_each_its_own_reward_and_who_does_not_learn_has_none(
    monkeypatch,
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    answers = ["70", "I judge.", "00", "77"]
    async with stand(*answers, limits={"models": ["*"]}) as here:
        settings = {"id": "ranking_env", "taskset": {"id": "counting_taskset"}}
        async with Verifiers(settings, python=PYTHON, held_out=0) as made:
            scores = await made(SimpleNamespace(row=made.tasks()[3]), here.llm)
        samples = samples_of(scores, here.llm)
    own = [text.count("7") / 2 for text in answers if "7" in text or "0" in text]
    ranks = [sum(other < each for other in own) / 2 for each in own]
    assert [(score.scores["sevens"], score.scores["rank"]) for score in scores.values()] == [
        (reward, rank / 2) for reward, rank in zip(own, ranks, strict=True)
    ]
    assert list(scores) == ["agent-1", "agent-2", "agent-3"]
    assert [(one.agent, one.reward) for one in samples] == [
        (name, reward + rank / 2) for name, reward, rank in zip(scores, own, ranks, strict=True)
    ]
    spoken = [here.model.tokenizer.decode(one.learned(one.response_ids)) for one in samples]
    assert [text[:2] for text in spoken] == ["70", "00", "77"]
