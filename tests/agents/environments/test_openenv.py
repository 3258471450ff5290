"""Servers of OpenEnv: sessions beside each other, errors that name the server's, what is not there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from rlinf.agents.environments.openenv import OpenEnv
from rlinf.config.load import RunFailure
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun

FIELDS = {"message": {"type": "string"}, "metadata": {"type": "object"}}
SILENT = 99
"""A session of this seed never begins."""
ERRORS = {
    "error": {"message": "the tool is gone", "code": "EXECUTION_ERROR"},
    "full": {"message": "at capacity", "code": "CAPACITY_REACHED", "active_sessions": 7, "max_sessions": 7},
}


@pytest.fixture
async def url():
    """A server that speaks as openenv-core 0.3 does: three steps, a sixth of a reward for each seven."""

    async def session(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        step, seed = 0, 0
        async for message in socket:
            wanted = message.json()
            data = wanted.get("data", {})
            if wanted["type"] == "close":
                break
            if wanted["type"] == "reset":
                seed, step, reward = data["seed"], 0, None
                if seed == SILENT:
                    continue
            elif data["message"] == "hang up":
                break
            elif data["message"] in ERRORS:
                await socket.send_json({"type": "error", "data": ERRORS[data["message"]]})
                continue
            else:
                step, reward = step + 1, data["message"].count("7") / 6
            seen = {"text": f"seed {seed}, step {step}", "count": step, "hint": "sevens"}
            told = {"observation": seen, "reward": reward, "done": step == 3}
            await socket.send_json({"type": "observation", "data": told})
        await socket.close()
        return socket

    async with serving(session) as where:
        yield where


@contextlib.asynccontextmanager
async def serving(session):
    async def schema(request):
        return web.json_response({"action": {"properties": FIELDS}})

    application = web.Application()
    application.router.add_get("/ws", session)
    application.router.add_get("/schema", schema)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_servers_pings_are_answered_while_the_model_thinks():
    answered, thoughts = asyncio.Event(), []

    async def session(request):
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        for done in (False, True):
            await socket.receive()
            await socket.send_json({"type": "observation", "data": {"observation": {}, "reward": 1, "done": done}})
            if not done:
                await socket.ping()
                assert (await socket.receive()).type is aiohttp.WSMsgType.PONG
                answered.set()
        await socket.close()
        return socket

    async def think(messages):
        await answered.wait()
        thoughts.append(messages)
        return SimpleNamespace(message={"role": "assistant", "content": "7"}, text="7")

    async with serving(session) as url, OpenEnv(url) as environment:
        score = await environment(SimpleNamespace(row={"seed": 0}), SimpleNamespace(chat=think))
    assert (score.value, len(thoughts)) == (1.0, 1)


async def played(environment, seed, *lines):
    llm, actor = begun(*lines)
    return await environment(SimpleNamespace(row={"seed": seed}), llm), actor.read, llm


async def test_sessions_beside_each_other_are_their_own_and_a_session_is_one_conversation(url):
    async with OpenEnv(url) as environment:
        sessions = await asyncio.gather(*(played(environment, seed, "7", "77", "no") for seed in range(20)))
    for seed, (score, read, llm) in enumerate(sessions):
        assert score.value == pytest.approx(0.5)
        assert score.scores == {"done": 1.0, "turns": 3.0}
        assert read[-1].startswith(read[0])
        assert [f"seed {seed}, step {step}" in read[-1] for step in range(4)] == [True, True, True, False]
        assert len(llm.samples(0.0)) == 1


async def test_a_session_that_does_not_end_is_ended(url):
    async with OpenEnv(url, turns=2, instructions="Say sevens.") as environment:
        score, read, _ = await played(environment, 0, "7", "7")
    assert score.scores == {"done": 0.0, "turns": 2.0}
    assert read[0].startswith("Say sevens.")


async def test_an_observation_is_told_by_a_template_of_its_fields(url):
    async with OpenEnv(url, observation="{count} {hint}") as environment:
        _, read, _ = await played(environment, 3, "7", "7", "7")
        assert read[0].startswith("0 sevens")
    async with OpenEnv(url, observation="{score}") as environment:
        with pytest.raises(UserError, match="text, count, hint"):
            await played(environment, 3, "7")


@pytest.mark.parametrize(
    ("line", "cause"), [("error", "the tool is gone"), ("full", r"agent\.at_once=7\b"), ("hang up", "hung up at step")]
)
async def test_a_session_that_goes_wrong_is_an_error_with_the_servers_cause(url, line, cause):
    async with OpenEnv(url) as environment:
        with pytest.raises(RuntimeError, match=cause):
            await played(environment, 0, "7", line)
        assert (await played(environment, 0, "7", "7", "7"))[0].value == pytest.approx(0.5)


async def test_a_server_that_does_not_answer_in_its_time_is_an_error_of_the_session(url):
    async with OpenEnv(url, timeout=1e-3) as environment:
        with pytest.raises(RuntimeError, match=r"reset: no answer within 0\.001 s .agent\.args\.timeout"):
            await played(environment, SILENT, "7")


@pytest.mark.parametrize("fields", [{**FIELDS, "mood": {}}, {"metadata": {}}])
async def test_an_action_of_several_fields_wants_one_named(url, fields, monkeypatch):
    for name in FIELDS.keys() - fields.keys():
        monkeypatch.delitem(FIELDS, name)
    for name in fields.keys() - FIELDS.keys():
        monkeypatch.setitem(FIELDS, name, {})
    with pytest.raises(UserError, match=r"agent\.args\.action"):
        await OpenEnv(url).__aenter__()


async def test_an_action_that_the_server_does_not_have_is_named(url):
    with pytest.raises(UserError, match=r"action.*'mood'.*message"):
        await OpenEnv(url, action="mood").__aenter__()


@pytest.mark.parametrize("action", [None, "message"])
@pytest.mark.parametrize("body", ["not found", "[1]", "{}", '{"action": 5}'])
async def test_a_url_that_serves_something_else_is_a_mistake_of_the_user(action, body):
    async def anything(request):
        return web.Response(text=body, status=404 if body == "not found" else 200)

    application = web.Application()
    application.router.add_get("/{path:.*}", anything)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(UserError, match=rf"{address}.*no server of OpenEnv"):
            await OpenEnv(address, action=action).__aenter__()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://no-such-host.invalid:80", "ftp://127.0.0.1"])
async def test_a_url_that_nobody_serves_is_a_mistake_of_the_user(address):
    with pytest.raises(UserError, match=f"server={address}.*nobody answers"):
        await OpenEnv(address, action="message").__aenter__()


async def test_a_server_that_cannot_be_started_is_told_with_its_last_words():
    with pytest.raises(RunFailure, match=r"no such port.*120 s to answer at .*/health"):
        await OpenEnv([sys.executable, "-c", "import sys; sys.exit('no such port')"]).__aenter__()


def test_rows_are_seeds_and_none_is_both_learned_from_and_held_out():
    environment = OpenEnv("http://127.0.0.1:1", size=5, held_out=3)
    learned, held_out = environment.tasks(), environment.held_out()
    assert [row["seed"] for row in learned] == list(range(5))
    assert {row["seed"] for row in learned}.isdisjoint(row["seed"] for row in held_out)
    assert len(held_out) == 3


def test_a_server_is_a_url_or_the_words_of_a_command():
    for wrong in ("localhost", "", []):
        with pytest.raises(UserError, match="server"):
            OpenEnv(wrong)
