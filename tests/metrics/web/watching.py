"""What tests of `rlinf watch` have in common: run directories, a job that lives, and a server with somebody at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from rlinf.dashboard.runs import RunList
from rlinf.dashboard.server import Guard, runner_of


def write_run(directory: Path, steps: int = 4, planned: int | None = None) -> Path:
    """The files of a run that has taken some steps."""
    directory.mkdir(parents=True)
    (directory / "environment.json").write_text(json.dumps({"steps": planned or steps, "hosts": 1}))
    (directory / "resolved.yaml").write_text(f"name: {directory.name}\nsteps: {planned or steps}\n")
    (directory / "metrics.jsonl").touch()
    for step in range(steps + 1):
        add(directory, "metrics.jsonl", {"step": step, "reward/mean": step / 10, "timing/step": 0.5})
        if step:
            add(directory, "samples.jsonl", {"step": step, "prompt": "p", "response": f"<b>{step}</b>", "reward": 1.0})
    return directory


def add(directory: Path, name: str, row: dict) -> None:
    """A line more."""
    with (directory / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


class Page:
    """Somebody who has the token."""

    def __init__(self, session: aiohttp.ClientSession, port: int, guard: Guard) -> None:
        self.session, self.port, self.guard = session, port, guard
        self.cookie = {"Cookie": f"rlinf-watch-{port}={guard.token}"}

    def url(self, path: str) -> URL:
        return URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        return await self.session.get(self.url(path), headers={**self.cookie, **headers})

    async def json(self, path: str):
        async with await self.get(path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def do(self, run: str, what: str, **headers: str) -> tuple[int, dict]:
        url = self.url(f"/api/runs/{run}/do")
        headers = {"X-Rlinf": "1", **self.cookie, **headers}
        async with self.session.post(url, json={"what": what}, headers=headers) as answer:
            return answer.status, await answer.json()

    async def raw(self, sent: bytes) -> bytes:
        """The answer to bytes that need not be HTTP."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        try:
            return await reader.readline()
        finally:
            writer.close()

    async def run(self) -> str:
        """Id of the only run."""
        (run,) = await self.json("/api/runs")
        return run["id"]

    @contextlib.asynccontextmanager
    async def events(self, query: str, **headers: str) -> AsyncIterator[Events]:
        async with await self.get(f"/api/events?{query}", **headers) as answer:
            assert answer.status == 200, await answer.text()
            yield Events(answer)


class Events:
    """A stream of events, read by one who waits for some of them."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.id = ""

    async def next(self, *kinds: str) -> dict:
        """The next event of one of these kinds."""
        while True:
            line = (await self._answer.content.readline()).decode()
            assert line, "the stream has ended"
            if line.startswith("id: "):
                self.id = line[4:].strip()
            elif line.startswith("data: ") and (event := json.loads(line[6:]))["kind"] in kinds:
                return event


@contextlib.asynccontextmanager
async def open_page(*named: Path) -> AsyncIterator[Page]:
    """A server that shows directories, and who looks at it."""
    listening = socket.create_server(("127.0.0.1", 0))
    guard = Guard("127.0.0.1")
    runner = runner_of(RunList(named), guard)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield Page(session, listening.getsockname()[1], guard)
    finally:
        await runner.cleanup()


class Job:
    """A job that lives: it has a feed, and does what it is asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.listeners: set[asyncio.StreamWriter] = set()
        self.heard = asyncio.Event()
        self.left = asyncio.Event()
        self.asked: list[str] = []
        self.silent = False
        """It answers nothing that it is asked."""
        self.greeting: list[dict] = [{"kind": "status", "status": "generating step 3", "step": 2, "asked": []}]

    def tell(self, message: dict | bytes) -> None:
        for writer in self.listeners:
            writer.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    def hang_up(self) -> None:
        for writer in list(self.listeners):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.listeners.add(writer)
        for message in self.greeting:
            writer.write(json.dumps(message).encode() + b"\n")
        self.heard.set()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                said = json.loads(line)
                self.asked.append(said["do"])
                if self.silent:
                    continue
                done = {"kind": "did", "id": said["id"], "said": f"{said['do']} after step 3", "ok": True}
                writer.write(json.dumps(done).encode() + b"\n")
        self.listeners.discard(writer)
        writer.close()
        self.left.set()


@contextlib.asynccontextmanager
async def job(directory: Path, **live: object) -> AsyncIterator[Job]:
    """A job that writes to a run directory."""
    with tempfile.TemporaryDirectory() as place:
        here = Job(directory)
        server = await asyncio.start_unix_server(here._serve, path=f"{place}/feed")
        write_live(directory, socket=f"{place}/feed", **live)
        try:
            yield here
        finally:
            (directory / "live.json").unlink(missing_ok=True)
            server.close()
            here.hang_up()


def write_live(directory: Path, **said: object) -> None:
    """A live.json, of this process unless it is said otherwise."""
    told = {"pid": os.getpid(), "machine": socket.gethostname(), "socket": "/nowhere", "began": 0.0, **said}
    (directory / "live.json").write_text(json.dumps(told))


def dead_pid() -> int:
    """Of a process that was there and is no more."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child
