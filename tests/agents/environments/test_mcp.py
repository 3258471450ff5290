"""MCP servers as environments: sessions of their own, their scores, and what becomes of servers that misbehave."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.agents.environments.mcp import MCP
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'rlinf[mcp]'")
GAME = [sys.executable, str(Path(__file__).with_name("mcp_game.py"))]


def call(name, **arguments):
    parts = ", ".join(f'"{key}": {value!r}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{parts}}}}}\n</tool_call>'


async def played(environment, seed, *lines, **row):
    llm, actor = begun(*lines)
    chat, actor.offered = llm.chat, {}

    def seen(messages, tools):
        actor.offered = {each.name: each.description for each in tools}
        return chat(messages, tools=tools)

    llm.chat = seen
    task = SimpleNamespace(row={"seed": seed, **row}, text=f"Guess number {seed}.")
    return await environment(task, llm), actor


@pytest.mark.parametrize("command", [GAME, [*GAME, "{port}"]], ids=["a server for each session", "one for all"])
async def test_sessions_beside_each_other_are_their_own(command):
    seeds = (3, 5) if command == GAME else range(6)
    async with MCP(command, score="score", start="begin") as environment:
        lines = {seed: (call("guess", number=4), call("guess", number=seed), str(seed % 4)) for seed in seeds}
        games = await asyncio.gather(*(played(environment, seed, *lines[seed]) for seed in seeds))
    for seed, (score, actor) in zip(seeds, games, strict=True):
        read = actor.read
        assert score.value == float(seed % 4 == seed)
        assert score.scores == {"reward": score.value, "guesses": 2.0}
        assert read[-1].startswith(read[0])
        assert f"Guess number {seed}." in read[0]
        assert ("lower" if seed < 4 else "right" if seed == 4 else "higher") in read[1].removeprefix(read[0])
        assert "guess" in actor.offered
        assert not {"score", "begin"} & actor.offered.keys(), "the model does not score itself"


async def test_resources_can_be_read_and_a_reward_function_may_score():
    async with MCP(GAME, turns=3) as environment:
        score, actor = await played(
            environment, 7, call("read_resource", uri="rules://game").replace("'", '"'), "seven"
        )
    assert score is None
    assert "below ten" in actor.read[1].removeprefix(actor.read[0])
    assert "How it is played" in actor.offered["read_resource"]


@pytest.mark.parametrize(
    ("said", "why"),
    [(call("die"), "it is gone.*the game is broken"), (call("hang"), "does not answer any more")],
)  # fmt: skip
async def test_a_server_that_dies_or_hangs_is_the_episodes_outcome(monkeypatch, said, why):
    monkeypatch.setattr("rlinf.agents.tools.mcp._PING", 0.5)
    async with MCP(GAME, score="score", start="begin", timeout=2.0) as environment:
        with pytest.raises(RuntimeError, match=why):
            await played(environment, 1, said, "1")


async def test_one_server_for_all_is_started_again_when_it_died():
    async with MCP([*GAME, "{port}"], score="score", start="begin", timeout=5.0) as environment:
        with pytest.raises(RuntimeError, match=r"gone|answer"):
            await played(environment, 1, call("die"), "1")
        score, _ = await played(environment, 1, "1")
    assert score.value == 1.0


async def test_what_floods_is_cut_and_what_is_no_score_is_an_outcome():
    async with MCP(GAME, score="score", start="begin") as environment:
        score, actor = await played(environment, 2, call("flood"), "2")
        assert score.value == 1.0
        assert len(actor.read[1]) - len(actor.read[0]) < 20_000
    async with MCP(GAME, score="nonsense", start="begin") as environment:
        with pytest.raises(RuntimeError, match="nonsense gave no reward: 'well'"):
            await played(environment, 2, "2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"score": "none"}, "'none'"), ({"start": "score"}, "answer"), ({"server": ["no-such-word"]}, "no-such-word")],
)  # fmt: skip
async def test_a_mistake_is_named(arguments, named):
    async with MCP(**{"server": GAME, **arguments}) as environment:
        with pytest.raises((UserError, RuntimeError), match=named):
            await played(environment, 2, "2")
    with pytest.raises(UserError, match="server"):
        MCP("no url")
    with pytest.raises(UserError, match=r"data\.train"):
        MCP(GAME).tasks()
