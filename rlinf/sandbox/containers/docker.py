"""Containers of Docker or Podman, by their HTTP API over the unix socket.

In: `start`, and requests to a container. Out: results. Who wakes whom: a command waits for the end of its stream; a
look at the size of what its container wrote comes every few seconds, since the daemon tells of it only when asked.

Each container carries a label with this process as its owner. A watcher process removes them when the owner is gone,
and whatever it missed (a machine that lost its power) is removed when the next provider starts on that machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp

from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.sandbox.containers.protocol import (
    BACKLOG,
    LIMITS,
    ContainerEnded,
    Containers,
    ContainersError,
    Forwarding,
    ended_unless_started,
    pack,
    unpack,
)
from rlinf.sandbox.inside import forwarder, reaper
from rlinf.sandbox.limits import Limits, Outcome, Result
from rlinf.sandbox.sandbox import launch

_LOOK_EVERY = 2.0
"""Seconds between looks at what a container has written."""
_KILL_SECONDS = 15.0
_MARK = "RLINF_COMMAND"
"""A variable that all processes of a command have, by which they are found when it is to end."""
_KILL = (
    'while f=$(grep -l {mark} /proc/[0-9]*/environ 2>/dev/null); [ -n "$f" ]; do for p in $f; do p=${{p#/proc/}}; '
    "kill -9 ${{p%/environ}} 2>/dev/null; done; done; true"
)
"""Ends all processes of a command, those too that left its session. One that is killed is there until it has had its
turn to die, however busy the machine is: this ends when none is there."""
_WAIT = "while :; do sleep 3600; done"
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
_FORWARDER = Path(forwarder.__file__).read_text(encoding="utf-8")


class DockerContainer:
    """A container of a daemon. Made by `Docker.start`."""

    def __init__(self, owner: Docker, name: str, workdir: str, limits: Limits):
        self.name, self.workdir, self.limits = name, workdir, limits
        self._owner = owner
        self._count = itertools.count()
        self._cause = ""
        self._forwarding = Forwarding()

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
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        source = ""
        if stdin:
            source = f"/tmp/.stdin-{next(self._count)}"
            await self.upload(stdin.encode() if isinstance(stdin, str) else stdin, source)
        mark = f"{_MARK}={uuid.uuid4().hex}"
        variables = [f"{key}={value}" for key, value in (env or {}).items()] + [mark]
        reads = f"exec < {source}; rm -f {source}" if source else "exec < /dev/null"
        line = ["/bin/sh", "-c", f'{reads}; exec "$@"', "sh", *argv]
        request = {"Cmd": line, "Env": variables, "WorkingDir": cwd or self.workdir}
        start = time.monotonic()
        outcome, out, err, code = await self._exec(request, mark, seconds or self.limits.wall_seconds)
        if not outcome and await self._written() > self.limits.file_bytes:
            outcome = "disk"
        if outcome == "disk":
            await self._end(f"disk: it wrote more than {self.limits.file_bytes} bytes (limit file_bytes)")
        if code is not None and 128 < code < 193:
            state = (await self._inspect()).get("State", {}) if code == 137 else {}
            outcome, code = outcome or ("memory" if state.get("OOMKilled") else "killed"), 128 - code
        status = None if outcome in ("timeout", "output", "disk", "memory") else code
        ended: Outcome = outcome or ("error" if code else "ok")
        texts = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        return Result(ended, texts[0], texts[1], status, time.monotonic() - start)

    async def upload(self, source: str | Path | bytes, target: str) -> None:
        """See `Container.upload`."""
        with await asyncio.to_thread(pack, source, target) as file:
            await self._call("PUT", "archive", params={"path": "/"}, data=file)
        if await self._written() > self.limits.file_bytes:
            await self._end(f"disk: it wrote more than {self.limits.file_bytes} bytes (limit file_bytes)")
            self._check()

    async def download(self, source: str, target: str | Path) -> None:
        """See `Container.download`."""
        with tempfile.TemporaryFile() as file:
            try:
                await self._call("GET", "archive", params={"path": os.path.join(self.workdir, source)}, into=file)
            except FileNotFoundError:
                raise FileNotFoundError(f"container {self.name}: {source}: there is no such file") from None
            file.seek(0)
            await asyncio.to_thread(unpack, file, target)

    async def snapshot(self) -> str:
        """See `Container.snapshot`."""
        self._check()
        return await self._owner.commit(self.name, self.workdir)

    async def forward(self, host: str, port: int) -> int:
        """See `Container.forward`. A process in the container carries connections to a socket of its own directory."""
        self._check()
        path = self._owner.directory(self.name) / str(next(self._count))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o666)  # the container's user is another one; its directory lies in one that is ours alone
        listening.listen(BACKLOG)
        self._forwarding.add(listening, host, port)
        result = await self.run(["python3", "-c", _FORWARDER, str(path)], seconds=60.0)
        if not result.ok:
            why = (result.stderr.strip().splitlines() or [result.outcome])[-1]
            raise ContainersError(f"container {self.name}: connections are carried on by its python3: {why}")
        return int(result.stdout)

    async def end(self) -> None:
        """See `Container.end`."""
        await self._end("it was ended")

    async def _exec(
        self, request: dict[str, Any], mark: str, seconds: float
    ) -> tuple[Outcome | None, bytes, bytes, int | None]:
        """Run a command to its end or to a limit; returns the limit, what it printed, and its status."""
        command = await self._call("POST", "exec", json={**request, "AttachStdout": True, "AttachStderr": True})
        parts: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        reading = asyncio.ensure_future(self._read(command["Id"], parts))
        outcome: Outcome | None = None
        try:
            end = time.monotonic() + seconds
            while not reading.done() and outcome is None:
                rest = end - time.monotonic()
                await asyncio.wait([reading], timeout=max(0.0, min(_LOOK_EVERY, rest)))
                if reading.done():
                    break
                if rest <= 0:
                    outcome = "timeout"
                elif await self._written() > self.limits.file_bytes:
                    outcome = "disk"
            if reading.done() and reading.result():
                outcome = "output"
        finally:
            finished = reading.done() and not reading.cancelled() and outcome is None
            reading.cancel()
            if not finished:
                await asyncio.shield(self._kill(mark))
        if not finished:
            return outcome, bytes(parts[1]), bytes(parts[2]), None
        state = await self._owner.call("GET", f"/exec/{command['Id']}/json")
        return None, bytes(parts[1]), bytes(parts[2]), state["ExitCode"]

    async def _read(self, name: str, parts: dict[int, bytearray]) -> bool:
        """Read the frames of a command's output; true if there are more bytes than are taken."""
        room = self.limits.output_bytes
        async with self._owner.request("POST", f"/exec/{name}/start", json={"Detach": False, "Tty": False}) as reply:
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    head = await reply.content.readexactly(8)
                    size = int.from_bytes(head[4:], "big")
                    while size:
                        data = await reply.content.readexactly(min(size, 1 << 16))
                        size -= len(data)
                        parts[head[0]] += data[:room]
                        room -= len(data)
                        if room < 0:
                            return True
        return False

    async def _kill(self, mark: str) -> None:
        """End a command that runs; where that fails, its container is ended."""
        try:
            line = ["/bin/sh", "-c", _KILL.format(mark=mark)]
            async with asyncio.timeout(_KILL_SECONDS):
                command = await self._call("POST", "exec", json={"Cmd": line, "AttachStdout": True})
                async with self._owner.request("POST", f"/exec/{command['Id']}/start", json={"Detach": False}) as reply:
                    await reply.read()
                state = await self._owner.call("GET", f"/exec/{command['Id']}/json")
            if not state["ExitCode"]:
                return
        except ContainerEnded:
            return
        except (TimeoutError, ContainersError):
            pass  # it may be that nothing more can be started in it
        await self._end("a command in it could not be killed")

    async def _written(self) -> int:
        return int((await self._inspect(size="1")).get("SizeRw") or 0)

    async def _inspect(self, **params: str) -> dict[str, Any]:
        return dict(await self._call("GET", "json", params=params))

    async def _call(self, method: str, what: str, **more: Any) -> Any:
        """Ask the daemon about this container.

        Raises:
            ContainerEnded: it is gone.
            FileNotFoundError: it lacks a file that is asked for.
        """
        self._check()
        try:
            return await self._owner.call(method, f"/containers/{self.name}/{what}", **more)
        except (FileNotFoundError, ContainersError) as error:
            text = str(error).lower()
            if not any(words in text for words in ("no such container", "not running", "no container with")):
                raise
            self._cause = self._cause or f"the daemon says: {error}"
        self._check()

    def _check(self) -> None:
        if self._cause:
            raise ContainerEnded(f"container {self.name} has ended: {self._cause}")

    async def _end(self, cause: str) -> None:
        if not self._cause:
            self._cause = cause
            await self._forwarding.close()
            await self._owner.remove(self)


class Docker(Containers):
    """Containers of Docker or Podman on this machine. Belongs to one event loop.

    Args:
        socket: the daemon's; None takes DOCKER_HOST, else the usual one of Docker, else of Podman.
        base: the image of containers for which none is named.
        forwards: containers may `forward`: each sees a directory of its own of this machine, for sockets.
    """

    def __init__(self, socket: str | Path | None = None, *, base: str = "python:3.12-slim", forwards: bool = False):
        named = os.environ.get("DOCKER_HOST", "").removeprefix("unix://")
        usual = next((path for path in _SOCKETS if os.path.exists(path)), _SOCKETS[0])
        self._socket, self._base = str(socket or named or usual), base
        self._http: aiohttp.ClientSession | None = None
        self._watcher: tuple[subprocess.Popen[bytes], Any] | None = None
        self._starting = asyncio.Lock()
        self._owner = reaper.owner(os.getpid())
        self._boxes: set[DockerContainer] = set()
        self._snapshots: list[str] = []
        self._forwards = forwards
        self._room: OwnDirectory | None = None

    async def start(
        self,
        image: str | Path | None = None,
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = LIMITS,
        network: bool = False,
    ) -> DockerContainer:
        """See `Containers.start`.

        Args:
            image: a name that the daemon has, or a snapshot; None takes `base`.
            workdir, env, limits, network: as there.
        """
        await self._open()
        name = str(image or self._base)
        body: dict[str, Any] = {
            "Image": name,
            "Entrypoint": ["/bin/sh", "-c", _WAIT],
            "Cmd": [],
            "Env": [f"{key}={value}" for key, value in (env or {}).items()],
            "Labels": {reaper.LABEL: self._owner},
            "HostConfig": {
                "Init": True,
                "Memory": limits.memory_bytes,
                "MemorySwap": limits.memory_bytes,
                "PidsLimit": limits.processes,
                "NetworkMode": "bridge" if network else "none",
                "SecurityOpt": ["no-new-privileges"],
                "Ulimits": [{"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files}],
            },
            **({"WorkingDir": workdir} if workdir else {}),
        }
        own = f"rlinf-{uuid.uuid4().hex[:12]}"
        if self._room is not None:
            self.directory(own).mkdir(mode=0o755)
            body["HostConfig"]["Binds"] = [f"{self.directory(own)}:{self.directory(own)}"]
        box = DockerContainer(self, own, workdir or "/", limits)
        self._boxes.add(box)
        try:
            async with ended_unless_started(box):
                await self.call("POST", "/containers/create", params={"name": own}, json=body)
                await self.call("POST", f"/containers/{own}/start")
                if workdir is None:
                    box.workdir = (await self.call("GET", f"/containers/{own}/json"))["Config"].get("WorkingDir") or "/"
        except FileNotFoundError as error:
            raise ContainersError(f"image {name!r} is not at {self._socket}: docker pull {name}") from error
        return box

    def directory(self, name: str) -> Path:
        """The directory of this machine that a container sees at the same path.

        Raises:
            ContainersError: containers see none.
        """
        if self._room is None:
            raise ContainersError("containers of Docker that connect to this machine: Docker(forwards=True)")
        return self._room.path / name

    async def close(self) -> None:
        """See `Containers.close`."""
        if self._http is None:
            return
        await asyncio.gather(*(box.end() for box in list(self._boxes)))
        for name in self._snapshots:
            with contextlib.suppress(FileNotFoundError):
                await self.call("DELETE", f"/images/{name}", params={"force": "true"})
        self._snapshots.clear()
        if self._watcher is not None:
            process, control = self._watcher
            process.kill()
            control.close()
            await asyncio.to_thread(process.wait)
        await self._http.close()
        self._http = None
        if self._room is not None:
            self._room.remove()

    async def commit(self, name: str, workdir: str) -> str:
        """Keep a container's files as an image."""
        tag = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        params = {"container": name, "repo": "rlinf-snapshot", "tag": tag}
        changes = f"LABEL {reaper.LABEL}={self._owner}\nWORKDIR {workdir}"
        # a body, though it says nothing: the daemon refuses what has another type than JSON
        await self.call("POST", "/commit", params={**params, "changes": changes}, json={})
        self._snapshots.append(f"rlinf-snapshot:{tag}")
        return self._snapshots[-1]

    async def remove(self, box: DockerContainer) -> None:
        """Remove a container with all that is in it."""
        self._boxes.discard(box)
        with contextlib.suppress(FileNotFoundError):
            await self.call("DELETE", f"/containers/{box.name}", params={"force": "true", "v": "true"})
        if self._room is not None:
            await asyncio.to_thread(shutil.rmtree, self.directory(box.name), ignore_errors=True)

    async def call(self, method: str, path: str, *, into: IO[bytes] | None = None, **more: Any) -> Any:
        """Ask the daemon; returns its answer as data, or writes it to a file."""
        async with self.request(method, path, **more) as reply:
            if into is not None:
                async for part in reply.content.iter_chunked(1 << 16):
                    into.write(part)
                return None
            text = await reply.read()
            return json.loads(text) if text.strip().startswith((b"{", b"[")) else None

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of the daemon while it is read.

        Raises:
            FileNotFoundError: it knows no such thing.
            ContainersError: it refuses, or it is not there.
        """
        assert self._http is not None
        try:
            async with self._http.request(method, f"http://docker/v1.41{path}", **more) as reply:
                if reply.status >= 400:
                    text = (await reply.text()).strip()
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        text = json.loads(text)["message"]
                    if reply.status == 404:
                        raise FileNotFoundError(text)
                    raise ContainersError(f"{self._socket}: {method} {path}: {reply.status} {text}")
                yield reply
        except aiohttp.ClientError as error:
            raise ContainersError(
                f"no Docker or Podman at {self._socket} ({error}): start it, or name its socket by "
                "DOCKER_HOST=unix://PATH"
            ) from error

    async def _open(self) -> None:
        """Connect, remove what owners that are gone left behind, and start the watcher."""
        async with self._starting:
            if self._http is not None:
                return
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            connector = aiohttp.UnixConnector(path=self._socket, limit=0)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
            try:
                await self.call("GET", "/_ping")
                await asyncio.to_thread(reaper.reap, self._socket, reaper.is_gone)
                self._room = OwnDirectory("docker") if self._forwards else None
                settings = {"socket": self._socket, "label": self._owner}
                process, control, _ = await asyncio.to_thread(launch, "reaper", settings)
                self._watcher = process, control
            except BaseException:
                http, self._http = self._http, None
                await http.close()
                raise
