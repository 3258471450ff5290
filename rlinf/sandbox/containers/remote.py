"""Containers of another machine: the client, and the server that gives it those of any provider; one wire, both ends.

In: `start`, and requests to a container; at the server HTTP requests with a token. Out: results. Who wakes whom: a
request waits for its answer, and hanging up cancels it. A session is a WebSocket that stays open for as long as its
client lives: when it closes, in any way, the server ends the session's containers. A connection of a container that is
carried on to its client is told of by one WebSocket, and has another one of its own.

    RLINF_CONTAINERS_TOKEN=… python -m rlinf.sandbox.containers.remote --host 0.0.0.0 --port 8460
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hmac
import itertools
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import aiohttp
from aiohttp import web

from rlinf.runtime.base.tasks import OwnDirectory, cancel_all
from rlinf.sandbox.containers.protocol import (
    LIMITS,
    Container,
    ContainerEnded,
    Containers,
    ContainersError,
    pack,
    unpack,
)
from rlinf.sandbox.inside.forwarder import Ends
from rlinf.sandbox.limits import Limits, Result

_URL, _TOKEN = "RLINF_CONTAINERS_URL", "RLINF_CONTAINERS_TOKEN"
_SESSION = "X-Rlinf-Session"
"""The header that names a session."""
_HEARTBEAT = 20.0
"""Seconds between signs of life in both directions."""
_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (ContainersError, ContainerEnded, FileNotFoundError)
}
"""Errors that travel, by name."""
_SLACK = 60.0
"""Seconds beyond a command's own in which the server must have answered."""
_STATUS = {FileNotFoundError: 404, ContainerEnded: 410, ContainersError: 400}
_LARGEST = 64 << 20
"""Bytes of a request that is no upload."""
_PART = 1 << 16
"""Bytes of a connection that are carried at a time."""


class RemoteContainer:
    """A container on another machine. Made by `Remote.start`."""

    def __init__(self, owner: Remote, name: str, workdir: str, limits: Limits):
        self.name, self.workdir = name, workdir
        self._owner, self._limits, self._over = owner, limits, False

    async def run(
        self,
        command: str | Sequence[str],
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
    ) -> Result:
        """See `Container.run`."""
        text = stdin.encode() if isinstance(stdin, str) else stdin
        body = {
            "command": command if isinstance(command, str) else list(command),
            "seconds": seconds,
            "cwd": cwd,
            "env": dict(env or {}),
            "stdin": base64.b64encode(text).decode(),
        }
        wait = _SLACK + (self._limits.wall_seconds if seconds is None else seconds)
        timeout = aiohttp.ClientTimeout(total=wait)
        return Result(**await self._owner.call("POST", f"/containers/{self.name}/run", json=body, timeout=timeout))

    async def upload(self, source: str | Path | bytes, target: str) -> None:
        """See `Container.upload`."""
        with await asyncio.to_thread(pack, source, "/root") as file:
            await self._owner.call("PUT", f"/containers/{self.name}/files", params={"path": target}, data=file)

    async def download(self, source: str, target: str | Path) -> None:
        """See `Container.download`."""
        with tempfile.TemporaryFile() as file:
            await self._owner.call("GET", f"/containers/{self.name}/files", params={"path": source}, into=file)
            file.seek(0)
            await asyncio.to_thread(unpack, file, target)

    async def forward(self, host: str, port: int) -> int:
        """See `Container.forward`. The server tells of each connection, which one to the address is then joined to."""
        return await self._owner.forward(self.name, host, port)

    async def snapshot(self) -> str:
        """See `Container.snapshot`."""
        return str((await self._owner.call("POST", f"/containers/{self.name}/snapshot"))["image"])

    async def end(self) -> None:
        """See `Container.end`."""
        await self._owner.forwarded_no_more(self.name)
        if not self._over and self._owner.connected:
            self._over = True
            with contextlib.suppress(ContainerEnded):
                await self._owner.call("DELETE", f"/containers/{self.name}")


class Remote(Containers):
    """Containers of a server. Belongs to one event loop.

    Args:
        url: of the server; None takes RLINF_CONTAINERS_URL.
        token: that it asks for; None takes RLINF_CONTAINERS_TOKEN.

    Raises:
        ContainersError: neither an argument nor a variable says it.
    """

    def __init__(self, url: str | None = None, token: str | None = None):
        url, token = url or os.environ.get(_URL, ""), token or os.environ.get(_TOKEN, "")
        for variable, value in ((_URL, url), (_TOKEN, token)):
            if not value:
                raise ContainersError(f"containers of another machine: {variable} must be set; docs/containers.md")
        self._url, self._token = url.rstrip("/"), token
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._listening: asyncio.Task[object] | None = None
        self._starting = asyncio.Lock()
        self._headers: dict[str, str] = {}
        self._forwarding: dict[str, list[asyncio.Task[None]]] = {}

    @property
    def connected(self) -> bool:
        """True while the session lasts."""
        return self._listening is not None and not self._listening.done()

    async def start(
        self,
        image: str | Path | None = None,
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = LIMITS,
        network: bool = False,
    ) -> RemoteContainer:
        """See `Containers.start`.

        Args:
            image: what the server's provider takes; paths are the server's.
            workdir, env, limits, network: as there.
        """
        await self._open()
        body = {
            "image": None if image is None else str(image),
            "workdir": workdir,
            "env": dict(env or {}),
            "limits": asdict(limits),
            "network": network,
        }
        answer = await self.call("POST", "/containers", json=body)  # the server ends it where nobody waits any more
        return RemoteContainer(self, answer["name"], answer["workdir"], limits)

    async def close(self) -> None:
        """See `Containers.close`."""
        if self._http is None:
            return
        assert self._socket is not None
        assert self._listening is not None
        for name in [*self._forwarding]:
            await self.forwarded_no_more(name)
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._socket.close()
        await self._http.close()
        self._http = self._listening = None

    async def call(self, method: str, path: str, *, into: IO[bytes] | None = None, **more: Any) -> Any:
        """Ask the server; returns its answer as data, or writes it to a file.

        Raises:
            ContainersError: it refuses, or does not answer.
            ContainerEnded, FileNotFoundError: as it says.
        """
        if self._http is None or not self.connected:
            raise ContainerEnded(f"the session with the containers' server {self._url} has ended")
        try:
            async with self._http.request(method, self._url + path, headers=self._headers, **more) as reply:
                if reply.status >= 400:
                    answer = await _error(reply)
                    raise _ERRORS.get(answer["error"], ContainersError)(answer["text"])
                if into is None:
                    return await reply.json()
                async for part in reply.content.iter_chunked(1 << 16):
                    into.write(part)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ContainerEnded(f"the containers' server {self._url} does not answer: {error!r}") from error

    async def forward(self, name: str, host: str, port: int) -> int:
        """Carry connections of a container on to an address of this machine; returns the container's port."""
        way = await self.call("POST", f"/containers/{name}/forward")
        try:
            line = await self._line(f"/ways/{way['name']}")
        except aiohttp.ClientError as error:
            raise ContainerEnded(f"container {name} has ended, or its server {self._url}: {error!r}") from error
        task = asyncio.create_task(self._accept(line, way["name"], host, port), name="forwarding of a container")
        self._forwarding.setdefault(name, []).append(task)
        return int(way["port"])

    async def forwarded_no_more(self, name: str) -> None:
        """End the connections of a container."""
        tasks = self._forwarding.pop(name, [])
        await cancel_all(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()  # raises what ended it

    async def _accept(self, line: aiohttp.ClientWebSocketResponse, way: str, host: str, port: int) -> None:
        async with line, asyncio.TaskGroup() as carrying:
            async for message in line:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break  # its machine is gone
                carrying.create_task(self._carry(f"/ways/{way}/{int(message.data)}", host, port))

    async def _carry(self, path: str, host: str, port: int) -> None:
        with contextlib.suppress(OSError, aiohttp.ClientError):  # who connected sees that it is over
            async with await self._line(path) as line:
                await _across(line, await asyncio.open_connection(host, port))

    async def _line(self, path: str) -> aiohttp.ClientWebSocketResponse:
        assert self._http is not None
        return await self._http.ws_connect(self._url + path, headers=self._headers, heartbeat=_HEARTBEAT)

    async def _open(self) -> None:
        async with self._starting:
            if self._http is not None:
                return
            self._headers = {"Authorization": f"Bearer {self._token}"}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
            try:
                self._socket = await http.ws_connect(
                    f"{self._url}/session", headers=self._headers, heartbeat=_HEARTBEAT
                )
                self._headers[_SESSION] = (await self._socket.receive_json())["session"]
            except BaseException as error:
                await http.close()
                if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
                    raise ContainersError(f"the containers' server {self._url} refuses the token") from error
                if isinstance(error, (aiohttp.ClientError, OSError)):
                    raise ContainersError(
                        f"no containers' server at {self._url} ({error}): start it there: "
                        "python -m rlinf.sandbox.containers.remote"
                    ) from error
                raise
            self._listening = asyncio.create_task(self._socket.receive())  # ends with the session
            self._http = http


async def _error(reply: aiohttp.ClientResponse) -> dict[str, str]:
    with contextlib.suppress(ValueError, KeyError, TypeError, aiohttp.ClientError):
        answer = await reply.json()
        return {"error": str(answer["error"]), "text": str(answer["text"])}
    return {"error": "", "text": f"{reply.method} {reply.url}: {reply.status} {reply.reason}"}


async def _across(line: aiohttp.ClientWebSocketResponse | web.WebSocketResponse, near: Ends) -> None:
    """Carry bytes both ways between a WebSocket and an end of a connection until both have said all, which an empty
    text says there; or until one is gone, which the other one then sees."""
    reader, writer = near

    async def outward() -> None:
        while part := await reader.read(_PART):
            await line.send_bytes(part)
        await line.send_str("")

    async def inward() -> None:
        async for message in line:
            if message.type is not aiohttp.WSMsgType.BINARY:
                writer.write_eof()
                return
            writer.write(message.data)
            await writer.drain()
        raise ConnectionResetError("the other machine hung up")

    both = [asyncio.create_task(outward()), asyncio.create_task(inward())]
    try:
        await asyncio.gather(*both)
    except BaseException as error:
        writer.transport.abort()
        await cancel_all(both)
        if not isinstance(error, (OSError, aiohttp.ClientError)):
            raise
    else:
        writer.close()  # when what was written is sent


class _Way:
    """Connections of a container that wait for its client.

    Args:
        box: the container.
    """

    def __init__(self, box: Container) -> None:
        self.box = box
        self.told: asyncio.Queue[int | None] = asyncio.Queue()
        """Numbers of connections as they come; None: there will be no more."""
        self.connections: dict[int, Ends] = {}
        """Those that nobody has taken yet."""
        self._numbers = itertools.count()

    async def open(self) -> int:
        """Listen on this machine, and in the container; returns its port there."""
        self._listening = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            return await self.box.forward(*self._listening.sockets[0].getsockname()[:2])
        except BaseException:
            self.close()
            raise

    async def _connected(self, *near: Any) -> None:
        number = next(self._numbers)
        self.connections[number] = near
        self.told.put_nowait(number)

    def close(self) -> None:
        """End what waits, and take no more; what is carried ends with the container."""
        self._listening.close()
        self.told.put_nowait(None)
        for _, writer in self.connections.values():
            writer.transport.abort()
        self.connections.clear()


class Server:
    """Sessions with their containers.

    Args:
        containers: their provider.
        token: that requests must have.
        most: containers at once, of all sessions together.
    """

    def __init__(self, containers: Containers, token: str, most: int):
        self._containers, self._token, self._most = containers, token, most
        self._sessions: dict[str, dict[str, Container]] = {}
        self._ways: dict[str, _Way] = {}
        self._count = 0
        self._endings: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """The server as an application of aiohttp; run it with `handler_cancellation`."""
        app = web.Application(middlewares=[self._checked], client_max_size=_LARGEST)
        app.add_routes(
            [
                web.get("/session", self._session),
                web.post("/containers", self._start),
                web.post("/containers/{name}/run", self._run),
                web.put("/containers/{name}/files", self._upload),
                web.get("/containers/{name}/files", self._download),
                web.post("/containers/{name}/snapshot", self._snapshot),
                web.post("/containers/{name}/forward", self._forward),
                web.get("/ways/{way}", self._tell),
                web.get("/ways/{way}/{number}", self._join),
                web.delete("/containers/{name}", self._end),
            ]
        )
        app.cleanup_ctx.append(self._closing)
        return app

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        credential = request.headers.get("Authorization", "")
        if not hmac.compare_digest(credential.encode(), f"Bearer {self._token}".encode()):
            return web.json_response({"error": "ContainersError", "text": "the token is wrong"}, status=401)
        try:
            return await handler(request)
        except tuple(_ERRORS.values()) as error:
            status = next(number for kind, number in _STATUS.items() if isinstance(error, kind))
            return web.json_response({"error": type(error).__name__, "text": str(error)}, status=status)
        except (ValueError, TypeError, KeyError) as error:
            text = f"{request.method} {request.path}: {error!r}"
            return web.json_response({"error": "ContainersError", "text": text}, status=400)

    async def _closing(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*self._endings)
        await self._containers.close()

    async def _session(self, request: web.Request) -> web.StreamResponse:
        """Hold a session for as long as its client lives."""
        line = web.WebSocketResponse(heartbeat=_HEARTBEAT)
        await line.prepare(request)
        name = uuid.uuid4().hex
        boxes = self._sessions[name] = {}
        try:
            await line.send_json({"session": name})
            async for _ in line:
                pass
        finally:
            del self._sessions[name]
            await self._ended([*boxes.values()])
        return line

    async def _start(self, request: web.Request) -> web.Response:
        boxes = self._boxes(request)
        body = await request.json()
        if self._count >= self._most:
            raise ContainersError(f"the server runs {self._count} containers already; --most allows no more")
        self._count += 1
        try:
            more = {"workdir": body["workdir"], "env": body["env"], "network": bool(body["network"])}
            box = await self._containers.start(body["image"], limits=Limits(**body["limits"]), **more)
        except BaseException:
            self._count -= 1
            raise
        if boxes is not self._sessions.get(request.headers[_SESSION]):  # it closed meanwhile
            await self._ended([box])
            raise ContainerEnded("the session has ended")
        boxes[box.name] = box
        return web.json_response({"name": box.name, "workdir": box.workdir})

    async def _run(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        more = {"seconds": body["seconds"], "cwd": body["cwd"], "env": body["env"]}
        result = await self._box(request).run(body["command"], stdin=base64.b64decode(body["stdin"]), **more)
        return web.json_response(asdict(result))

    async def _upload(self, request: web.Request) -> web.Response:
        box = self._box(request)
        with OwnDirectory("upload") as scratch, tempfile.TemporaryFile() as file:
            async for part in request.content.iter_chunked(1 << 16):
                file.write(part)
            file.seek(0)
            await asyncio.to_thread(unpack, file, scratch / "root", links=True)
            await box.upload(scratch / "root", request.query["path"])
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        box = self._box(request)
        with OwnDirectory("download") as scratch:
            await box.download(request.query["path"], scratch / "root")
            with await asyncio.to_thread(pack, scratch / "root", "/root") as file:
                reply = web.StreamResponse()
                await reply.prepare(request)
                while part := await asyncio.to_thread(file.read, 1 << 20):
                    await reply.write(part)
                await reply.write_eof()
        return reply

    async def _snapshot(self, request: web.Request) -> web.Response:
        return web.json_response({"image": await self._box(request).snapshot()})

    async def _forward(self, request: web.Request) -> web.Response:
        way, name = _Way(self._box(request)), uuid.uuid4().hex
        port = await way.open()
        self._ways[name] = way
        return web.json_response({"name": name, "port": port})

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Tell the client of a container's connections as they come, until it hangs up or the container has ended."""
        way, line = self._way(request), web.WebSocketResponse(heartbeat=_HEARTBEAT)
        await line.prepare(request)

        async def tell() -> None:
            while (number := await way.told.get()) is not None:
                await line.send_str(str(number))
            await line.close()

        telling = asyncio.create_task(tell())
        try:
            async for _ in line:
                pass
        finally:
            await cancel_all([telling])
        return line

    async def _join(self, request: web.Request) -> web.StreamResponse:
        """Carry a connection of a container to its client."""
        near, line = self._way(request).connections.pop(int(request.match_info["number"])), web.WebSocketResponse()
        try:
            await line.prepare(request)
            await _across(line, near)
            await line.close()
        except BaseException:
            near[1].transport.abort()
            raise
        return line

    def _way(self, request: web.Request) -> _Way:
        way = self._ways.get(request.match_info["way"])
        if way is None or way.box.name not in self._boxes(request):
            raise ContainerEnded("the container has ended")
        return way

    async def _end(self, request: web.Request) -> web.Response:
        box = self._box(request)
        del self._boxes(request)[box.name]
        await self._ended([box])
        return web.json_response({})

    async def _ended(self, boxes: list[Container]) -> None:
        """End containers, even where who asked for it hangs up meanwhile."""

        for name, way in [*self._ways.items()]:
            if way.box in boxes:
                way.close()
                del self._ways[name]

        async def end() -> None:
            try:
                await asyncio.gather(*(box.end() for box in boxes))
            finally:
                self._count -= len(boxes)

        task = asyncio.create_task(end())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        await asyncio.shield(task)

    def _boxes(self, request: web.Request) -> dict[str, Container]:
        boxes = self._sessions.get(request.headers.get(_SESSION, ""))
        if boxes is None:
            raise ContainerEnded("the session has ended")
        return boxes

    def _box(self, request: web.Request) -> Container:
        name = request.match_info["name"]
        box = self._boxes(request).get(name)
        if box is None:
            raise ContainerEnded(f"container {name} has ended: it was ended")
        return box


def main() -> None:
    """Serve containers until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rlinf.sandbox.containers.remote", description="Serve containers.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8460, help="port to listen at (8460)")
    parser.add_argument("--most", type=int, default=64, help="containers at once (64)")
    parser.add_argument("--images", help="directory of images by name, for containers by namespaces")
    parser.add_argument("--docker", action="store_true", help="containers of Docker or Podman instead of namespaces")
    wishes = parser.parse_args()
    token = os.environ.get(_TOKEN, "")
    if len(token) < 16:
        sys.exit(f"error: {_TOKEN} must hold a token of 16 characters or more; clients give the same")
    containers: Containers
    if wishes.docker:
        from rlinf.sandbox.containers.docker import Docker

        containers = Docker(forwards=True)
    else:
        from rlinf.sandbox.containers.namespaces import Namespaces

        containers = Namespaces(images=wishes.images)
    app = Server(containers, token, wishes.most).app()
    web.run_app(app, host=wishes.host, port=wishes.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
