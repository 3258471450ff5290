"""Resources servers of NeMo Gym: sessions by cookie, all that was said in the verdict's request, faults as outcomes.

The server here answers as those of nemo-gym 0.4.0 do: a session's cookie with signs in it that clients like to quote,
422 for a body that does not fit, and a verdict that repeats the request.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiohttp import web

from rlinf.agents.environments.nemo_gym import NemoGym
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
TOOLS = [{"type": "function", "name": name, "description": "", "parameters": COUNT} for name in ("add", "flood")]
ASKED = [
    {"role": "developer", "content": "Count."},
    {"role": "user", "content": [{"type": "input_text", "text": "up"}]},
]


def row(number, **more):
    return {"responses_create_params": {"input": ASKED, "tools": TOOLS}, "initial": number, "expected": 9, **more}


@pytest.fixture
async def server(tmp_path):
    """A server that counts, its requests for a verdict, and a file of its tasks."""
    counts, verdicts = {}, []

    async def seed(request):
        wanted = await request.json()
        if "initial" not in wanted:
            return web.json_response({"detail": "initial: field required"}, status=422)
        name = f"eyJzIjo{len(counts)}fQ==.ab-c_d"
        counts[name] = wanted["initial"]
        answer = web.json_response({})
        answer.headers["Set-Cookie"] = f"Counter___c={name}; path=/; Max-Age=1209600; httponly; samesite=lax"
        return answer

    async def add(request):
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return web.json_response({"detail": "count: should be an integer"}, status=422)
        counts[request.headers["Cookie"].partition("=")[2]] += count
        return web.json_response({"success": True})

    async def flood(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(300):
            await answer.write(b"x" * (1 << 16))
        return answer

    async def verify(request):
        wanted = await request.json()
        verdicts.append(wanted)
        if wanted.get("silent"):
            return web.json_response({})
        count = counts[request.headers["Cookie"].partition("=")[2]]
        return web.json_response({**wanted, "reward": float(count == wanted["expected"]), "count": count, "why": "x"})

    application = web.Application()
    handlers = {"seed_session": seed, "add": add, "flood": flood, "verify": verify}
    application.add_routes([web.post(f"/{name}", handler) for name, handler in handlers.items()])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    data = tmp_path / "tasks.jsonl"
    tasks = [*(row(number) for number in range(8)), row(0, silent=True), {"responses_create_params": {"input": "hi"}}]
    data.write_text("\n".join(map(json.dumps, tasks)))
    yield SimpleNamespace(url=f"http://127.0.0.1:{runner.addresses[0][1]}", data=str(data), verdicts=verdicts)
    await runner.cleanup()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(environment, number, *lines):
    llm, actor = begun(*lines)
    return await environment(SimpleNamespace(row={"task": number}), llm), actor.read


async def test_sessions_beside_each_other_are_their_own_and_the_verdict_reads_all_that_was_said(server):
    async with NemoGym(server.url, server.data) as environment:
        first = {number: "So: " + call("add", count=9 - 2 * number) for number in range(8)}
        lines = {number: (said, call("add", count=number), "done") for number, said in first.items()}
        sessions = await asyncio.gather(*(played(environment, number, *said) for number, said in lines.items()))
    for score, read in sessions:
        assert (score.value, score.scores) == (1.0, {"reward": 1.0, "count": 9.0})
        assert "Count." in read[0]
        assert '{"success": true}' in read[1].removeprefix(read[0])
    items = [item["type"] for item in server.verdicts[0]["response"]["output"]]
    turn = ["function_call", "function_call_output"]
    assert items == ["message", *turn, *turn, "message"]
    first, second = server.verdicts[0]["response"]["output"][1:3]
    assert first["call_id"] == second["call_id"]
    assert json.loads(first["arguments"])["count"] in {9 - 2 * number for number in range(8)}


async def test_what_a_tool_refuses_is_told_to_the_model(server):
    async with NemoGym(server.url, server.data) as environment:
        score, read = await played(environment, 1, call("add", count="many"), call("none"), call("flood"), "no")
    assert score.value == 0.0
    assert "should be an integer" in read[1]
    assert "there is no tool none" in read[2]
    assert "more than" in read[3]


@pytest.mark.parametrize(("number", "why"), [(8, "no reward"), (9, "seed_session: status 422.*initial")])
async def test_a_server_without_a_verdict_is_the_episodes_outcome(server, number, why):
    async with NemoGym(server.url, server.data) as environment:
        with pytest.raises(RuntimeError, match=why):
            await played(environment, number, "x")


def test_the_last_tasks_of_a_file_are_held_out_and_what_is_no_task_is_named(tmp_path):
    data = tmp_path / "tasks.jsonl"
    data.write_text("\n".join(json.dumps(row(number)) for number in range(20)) + "\n")
    environment = NemoGym("http://127.0.0.1:9", str(data))
    assert [each["task"] for each in environment.held_out()] == [18, 19]
    assert environment.tasks()[0] == {"prompt": "up", "task": 0}
    data.write_text('{"responses_create_params": {"input": "a"}}\n{"input": "b"}\n')
    with pytest.raises(UserError, match=r"tasks\.jsonl:2.*responses_create_params"):
        NemoGym("http://127.0.0.1:9", str(data))
    with pytest.raises(UserError, match="data"):
        NemoGym("http://127.0.0.1:9", str(tmp_path / "none"))
