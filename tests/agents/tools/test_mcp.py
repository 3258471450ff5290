"""MCP: tools of a real server, a child process or called by HTTP; it dies with us, and its death is a text."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.agents.tools.formats import ToolCall
from rlinf.agents.tools.mcp import mcp_tools
from rlinf.runtime.base.errors import UserError
from tests.launching import launch
from tests.runtime.programs.jobs import free_port

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'rlinf[mcp]'")
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


def gone(*pids, seconds=30.0):
    """Wait for the end of processes that need not be our children."""
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([watched], [], [], seconds)[0]:
                return False
        finally:
            os.close(watched)
    return True


async def test_a_servers_tools_are_tools_like_others_and_it_is_started_again_when_it_died(monkeypatch, caplog):
    monkeypatch.setenv("SECRET", "s")
    async with mcp_tools(SERVER, prefix="t_", timeout=20, env={"GIVEN": "g"}) as tools:
        add = tools["t_add"]
        assert add.schema["function"]["description"] == "Add two numbers."
        assert add.parameters["properties"]["a"]["type"] == "integer"
        calls = [ToolCall(str(a), "t_add", {"a": a, "b": "5"}) for a in range(3)]
        assert [message["content"] for message in await tools.run(calls)] == ["5", "6", "7"]
        assert "valid integer" in await add.call({"a": "x"})
        assert (await tools["t_fail"].call({"why": "no"})).startswith("Error: ")
        assert await tools["t_environment"].call({"name": "GIVEN"}) == "g"
        assert await tools["t_environment"].call({"name": "SECRET"}) == "none"
        assert " 0.2 seconds" in await tools["t_hang"].call({"seconds": 1}, timeout=0.2)
        assert await add.call({"a": 1}) == "2"
        assert tools.counts == {"ok": 6, "error": 2, "timeout": 1}
        pids = [int(pid) for pid in (await tools["t_spawn"].call({})).split()]
        waiting = asyncio.ensure_future(tools["t_hang"].call({"seconds": 100}))
        assert "die failed: " in await tools["t_die"].call({})
        assert "hang failed: " in await waiting
        again = await asyncio.gather(*(add.call({"a": number}) for number in range(3)))
        assert again == ["1", "2", "3"]
        assert gone(*pids)
        pids = [int(pid) for pid in (await tools["t_spawn"].call({})).split()]
    assert gone(*pids)
    (line,) = caplog.messages
    assert "mcp_server.py" in line


async def test_an_exception_or_a_cancellation_inside_ends_the_server():
    pids: list[int] = []
    begun = asyncio.Event()

    async def inside(error=None):
        async with mcp_tools(SERVER) as tools:
            pids.extend(int(pid) for pid in (await tools["spawn"].call({})).split())
            if error is not None:
                raise error
            begun.set()
            await tools["hang"].call({"seconds": 100}, timeout=50)

    with pytest.raises(KeyError, match="mine"):
        await inside(KeyError("mine"))
    running = asyncio.ensure_future(inside())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(pids) == 4
    assert gone(*pids)


def test_the_server_and_what_it_started_die_with_a_run_that_is_killed():
    run = launch(*SERVER, program=Path(__file__).with_name("mcp_killed.py"), expect=-9)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    assert gone(*pids)


async def test_a_server_is_reached_by_http():
    port = free_port()
    server = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert any("running on" in line for line in server.stderr)
        async with mcp_tools(url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer x"}) as tools:
            assert await tools["add"].call({"a": 1, "b": 2}) == "3"
            server.kill()
            server.wait()
            assert (await tools["add"].call({"a": 1}, timeout=5)).startswith("Error: add")
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"command": ["no-such-command"]}, "no-such-command"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('bad start')"]}, r"said:.*start"),
        ({"command": ["sleep", "100"], "start_timeout": 0.3}, r"listed.*0\.3 seconds"),
        ({"command": [sys.executable, "-c", "print('nonsense')"]}, "MCP server"),
        ({"url": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp: "),
    ],
)
async def test_a_server_that_does_not_start_is_the_users_error(how, said):
    with pytest.raises(UserError, match=said):
        async with mcp_tools(**how):
            pass


@pytest.mark.parametrize("how", [{}, {"command": "uvx server"}, {"command": []}, {"command": ["a"], "url": "b"}])
async def test_a_server_is_named_in_one_way(how):
    with pytest.raises(ValueError, match=r"give.*command"):
        async with mcp_tools(**how):
            pass
