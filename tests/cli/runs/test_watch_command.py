"""`rlinf watch`, as it is typed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from rlinf.cli.commands import main
from rlinf.dashboard import runs, server
from rlinf.dashboard.server import CannotListen, Where
from tests.launching import ROOT
from tests.metrics.web.watching import dead_pid, write_live, write_run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere", "nowhere: there is no such directory"),
        ("empty", "empty is no run's directory and has none in it: there is no metrics.jsonl"),
        ("file", "file: there is no such directory"),
        ("run --port 70000", "--port 70000: ports are numbers up to 65535"),
        ("run --host 203.0.113.7", "--host 203.0.113.7 --port 8265: Cannot assign requested address"),
        ("run --host a..b", "--host a..b: this is no name or address of a machine"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(tmp_path, monkeypatch, capsys, given, said):
    write_run(tmp_path / "run")
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *given.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


def get(address: str, path: str, cookie: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", path, headers={"Cookie": cookie})
    return connection.getresponse()


def test_a_page_is_served_until_ctrl_c_which_ends_it_quietly(tmp_path):
    write_run(tmp_path / "outputs" / "r")
    command = [sys.executable, "-m", "rlinf", "watch", str(tmp_path / "outputs"), "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            address = watching.stdout.readline().strip()
            port = urlsplit(address).port
            assert f"ssh -L {port}:127.0.0.1:{port} " in watching.stdout.readline()
            entered = get(address, address.partition(f":{port}")[2])
            cookie = (entered.getheader("Set-Cookie") or "").partition(";")[0]
            (run,) = json.load(get(address, "/api/runs", cookie))
            state = get(address, f"/api/runs/{run['id']}/state", cookie)
            assert (run["status"], json.load(state)["step"]) == ("finished", 4)
        finally:
            watching.send_signal(signal.SIGINT)
            out, err = watching.communicate(timeout=60)
    assert (watching.returncode, out, err) == (0, "", "")


def test_neither_the_server_nor_what_it_reads_runs_with_brings_torch():
    program = "import rlinf.dashboard.server, rlinf.dashboard.state, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


@contextlib.asynccontextmanager
async def served(directory, where: Where):
    """The lines that a watcher says; until it is told to end, unless it has ended by itself."""
    said: asyncio.Queue[str] = asyncio.Queue()
    serving = asyncio.create_task(server.serve([directory], where, said.put_nowait))
    try:
        yield said, serving
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await serving


async def test_a_second_watcher_takes_another_port_unless_it_is_told_which(tmp_path, monkeypatch):
    run = write_run(tmp_path / "r")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "PORT", port)
        async with served(run, Where()) as (said, _):
            assert urlsplit(await said.get()).port != port
        with pytest.raises(CannotListen, match=f"{port}: Address already"):
            await server.serve([run], Where(port=port), print)


async def test_who_listens_to_the_network_is_told_what_that_means(tmp_path):
    async with served(write_run(tmp_path / "r"), Where(host="0.0.0.0", port=0)) as (said, _):
        assert urlsplit(await said.get()).hostname == socket.gethostname().lower()
        assert "whoever reads along on the network" in await said.get()


async def test_a_machine_without_a_browser_says_so(tmp_path, monkeypatch):
    asked = []
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(server.webbrowser, "open", lambda address: bool(asked.append(address)))
    async with served(write_run(tmp_path / "r"), Where(port=0, browser=True)) as (said, _):
        address = await said.get()
        assert await said.get() == "no browser can be opened here: open the address above in one"
        assert asked == [address]


@pytest.mark.parametrize("end", ["in order", "killed"])
async def test_the_page_of_a_job_stays_a_while_after_the_jobs_end(tmp_path, monkeypatch, end):
    monkeypatch.setattr(runs, "TICK", 0.01)
    monkeypatch.setattr(server, "LINGER", 0.05)
    run = write_run(tmp_path / "r")
    write_live(run)
    async with served(run, Where(port=0, until_ended=True)) as (said, serving):
        await said.get()
        await asyncio.sleep(0.1)
        assert not serving.done()
        if end == "killed":
            write_live(run, pid=dead_pid())
        else:
            (run / "live.json").unlink()
        await serving
        assert said.empty()


async def test_the_page_of_a_job_does_not_outlive_the_process_that_started_it_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "TICK", 0.01)
    monkeypatch.setattr(server, "LINGER", 0.05)
    (tmp_path / "r").mkdir()  # the job was killed before it had written anything
    parents = iter([7, 7, 1])
    monkeypatch.setattr(server.os, "getppid", lambda: next(parents, 1))
    async with served(tmp_path / "r", Where(port=0, until_ended=True)) as (_, serving):
        await serving
