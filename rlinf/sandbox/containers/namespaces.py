"""Containers by the namespaces of this machine: no daemon, no root, 20 ms for each; what they write lies in memory.

In: `start`, and requests to a container. Out: results. Who wakes whom: a request waits for the answer of its servant in
the container (`inside/boxes.py`); hanging up kills what it started. A fork server starts with the first container and
ends, with all of them and their files, when this process ends in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from rlinf.sandbox.containers.images import Image, ImageFile, layers_of
from rlinf.sandbox.containers.protocol import (
    LIMITS,
    ContainerEnded,
    Containers,
    ContainersError,
    Forwarding,
    ended_unless_started,
    pack,
    unpack,
)
from rlinf.sandbox.inside import confine, reaper
from rlinf.sandbox.inside.supervise import LENGTH
from rlinf.sandbox.limits import Limits, Program, Result, SandboxError
from rlinf.sandbox.sandbox import launch

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "xterm"}
_ADVICE = (
    "it takes user namespaces, overlays and a /proc in them (Linux 5.12; sysctl user.max_user_namespaces > 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0; inside Docker `--privileged`, or serve containers from another "
    "machine: docs/containers.md)"
)


class Box:
    """A container by namespaces. Made by `Namespaces.start`."""

    def __init__(self, owner: Namespaces, name: str, image: Image, limits: Limits, workdir: str):
        self.name, self.workdir, self.image, self.limits = name, workdir, image, limits
        self._owner = owner
        self._report: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._door: socket.socket | None = None
        self._cause: str | None = None
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
        with _memory_file(stdin.encode() if isinstance(stdin, str) else stdin) as file:
            variables = {**_ENVIRONMENT, **self.image.env, **(env or {})}
            request = {"do": "run", "command": argv, "env": variables, "cwd": cwd or self.workdir}
            return await self._ask(request, file.fileno(), seconds)

    async def upload(self, source: str | Path | bytes, target: str) -> None:
        """See `Container.upload`."""
        with await asyncio.to_thread(pack, source, target) as file:
            await self.put("upload", file)

    async def download(self, source: str, target: str | Path) -> None:
        """See `Container.download`."""
        with tempfile.TemporaryFile() as file:
            result = await self._ask({"do": "download", "path": os.path.join(self.workdir, source)}, file.fileno())
            if result.exit_code == 2:
                raise FileNotFoundError(f"container {self.name}: {result.stderr.strip()}")
            self._check(result, f"download of {source}")
            file.seek(0)
            await asyncio.to_thread(unpack, file, target)

    async def snapshot(self) -> str:
        """See `Container.snapshot`."""
        name, layer = self._owner.new_layer()
        directory = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check(await self._ask({"do": "snapshot"}, directory), "snapshot")
        finally:
            os.close(directory)
        layers = (str(layer), *self.image.layers)
        self._owner.snapshots[name] = replace(self.image, layers=layers, workdir=self.workdir)
        return name

    async def forward(self, host: str, port: int) -> int:
        """See `Container.forward`. The socket that listens in the container's network is handed out to us."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._check(await self._ask({"do": "listen"}, theirs.fileno()), "forward")
            ours.setblocking(False)
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        listening = socket.socket(fileno=descriptors[0])
        self._forwarding.add(listening, host, port)
        return int(listening.getsockname()[1])

    async def end(self) -> None:
        """See `Container.end`."""
        await self._ended("it was ended")

    async def put(self, kind: str, file: IO[bytes]) -> None:
        """Have a tar file unpacked in the container: as an `upload`, or as a `layer` of its image."""
        self._check(await self._ask({"do": kind}, file.fileno()), kind)

    async def begin(self, control: socket.socket, spec: Mapping[str, Any]) -> None:
        """Ask a fork server for the container.

        Raises:
            ContainersError: the kernel refuses.
        """
        (ours, report), (door, theirs) = socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door = door
        with report, theirs:
            socket.send_fds(control, [json.dumps(spec).encode()], [report.fileno(), theirs.fileno()])
        self._report = await asyncio.open_unix_connection(sock=ours)
        if (word := await self._report[0].readline()) != b"ok\n":
            await self._ended("it did not start")
            raise ContainersError(
                f"a container cannot be started here: {word.decode() or 'it ended at once'}; {_ADVICE}"
            )

    async def _ask(self, request: dict[str, Any], data: int, seconds: float | None = None) -> Result:
        """Have a request done; `data` is the descriptor that it is given."""
        limits = self.limits if seconds is None else replace(self.limits, wall_seconds=seconds)
        message = pickle.dumps({**request, "limits": asdict(limits)})
        if self._door is None:
            raise ContainerEnded(f"container {self.name} has ended: {self._cause}")
        with contextlib.ExitStack() as ours:
            link, theirs = socket.socketpair()
            ours.enter_context(link)
            link.setblocking(False)
            try:
                with theirs:
                    socket.send_fds(self._door, [b"!"], [theirs.fileno(), data])
                reader, writer = await asyncio.open_unix_connection(sock=link)
                ours.callback(writer.transport.abort)
                writer.write(len(message).to_bytes(LENGTH, "big") + message)
                result = await Program(reader, limits, None).result()
            except (OSError, SandboxError) as error:
                raise ContainerEnded(
                    f"container {self.name} has ended: {await self._ended('a command ended what ran it')}"
                ) from error
        if result.outcome == "disk":
            await self._ended(f"disk: it wrote more than {limits.file_bytes} bytes (limit file_bytes)")
        return result

    def _check(self, result: Result, what: str) -> None:
        """Raise what went wrong in copying files."""
        if result.outcome == "disk":
            raise ContainerEnded(f"container {self.name} has ended: {self._cause}")
        if not result.ok:
            raise ContainersError(f"container {self.name}: {what}: {result.stderr.strip() or result.outcome}")

    async def _ended(self, cause: str) -> str:
        """End it and wait until nothing of it is left; returns why it ended, which the first to say so knows."""
        door, self._door = self._door, None
        if door is None:
            return self._cause or cause
        self._cause = cause
        if self._report is not None:
            with contextlib.suppress(OSError):  # before the door closes, whose end its guard would take for the cause
                self._report[1].write_eof()
        door.close()
        await self._forwarding.close()
        self._owner.boxes.discard(self)
        if self._report is not None:
            reader, writer = self._report
            with contextlib.suppress(OSError):
                if message := await reader.read():
                    self._cause = message.decode(errors="replace")
            writer.transport.abort()
        return self._cause


class Namespaces(Containers):
    """Containers of this machine. Belongs to one event loop.

    Args:
        directory: where images lie, unpacked; None takes `~/.cache/rlinf/containers`.
        images: a directory of images by name: `NAME.tar` as of `docker save`, or `NAME/`, a directory as of
            `skopeo copy … oci:NAME`; `/` and `:` in a name are `_` in the file's.
        visible: directories of this machine that containers without an image see besides `/usr`, read-only; None takes
            those of this interpreter and its packages, whose programs are then first on the path.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        images: str | Path | None = None,
        visible: Sequence[str] | None = None,
    ):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._directory = Path(directory or os.path.join(cache, "rlinf", "containers"))
        self._images = Path(images) if images is not None else None
        self._visible = [sys.base_prefix, sys.prefix] if visible is None else [*visible]
        path = f"{sys.prefix}/bin:{_PATH}" if visible is None else _PATH
        self._base = Image((), {"PATH": path}, "/", tuple(self._visible))
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._starting = asyncio.Lock()
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._run_directory, self._count = Path(), 0
        self._ready: dict[str, asyncio.Future[Image]] = {}
        self.boxes: set[Box] = set()
        self.snapshots: dict[str, Image] = {}

    async def start(
        self,
        image: str | Path | None = None,
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = LIMITS,
        network: bool = False,
    ) -> Box:
        """See `Containers.start`.

        Args:
            image: a snapshot; a name in `images`, or of a registry where `skopeo` is installed; a file of
                `docker save` or an OCI layout, packed or not; a directory, which is then the root; None shows
                `/usr` and the interpreter of this machine.
            workdir, env, limits, network: as there.
        """
        await self._serve()
        files = self._base if image is None else await self._image(str(image))
        files = replace(files, env={**files.env, **(env or {})})
        return await self._begin(files, workdir or files.workdir, limits, network)

    async def close(self) -> None:
        """See `Containers.close`."""
        await asyncio.gather(*(box.end() for box in list(self.boxes)))
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)
        self._server = None
        self._ready.clear()
        self.snapshots.clear()

    def new_layer(self) -> tuple[str, Path]:
        """A name, and an empty directory of the containers' user, which goes with the run."""
        self._count += 1
        return f"snapshot:{self._count}", _private(self._run_directory / f"layer-{self._count}")

    async def _serve(self) -> None:
        async with self._starting:
            if self._server is not None and self._server[0].poll() is None:
                return
            self._run_directory = await asyncio.to_thread(_run_directory, self._directory)
            process, control, answer = await asyncio.to_thread(launch, "boxes", {"directory": str(self._run_directory)})
            self._server = process, control
            self._finalizer = weakref.finalize(self, _end_server, process, control)
            if "refused" in answer:
                raise ContainersError(f"the fork server of containers: {answer['refused']}")

    async def _begin(self, files: Image, workdir: str, limits: Limits, network: bool, upper: str | None = None) -> Box:
        assert self._server is not None
        self._count += 1
        box = Box(self, f"{os.getpid()}-{self._count}", files, limits, workdir)
        spec = {
            "layers": files.layers,
            "visible": files.visible,
            "network": network,
            "upper": upper,
            "workdir": workdir,
            "bytes": limits.file_bytes,
            "memory": limits.memory_bytes,
        }
        self.boxes.add(box)
        async with ended_unless_started(box):
            await box.begin(self._server[1], spec)
        return box

    async def _image(self, name: str) -> Image:
        """Files of an image, unpacked by whoever first asks for it."""
        if name in self.snapshots:
            return self.snapshots[name]
        if name not in self._ready or (self._ready[name].done() and self._ready[name].exception()):
            self._ready[name] = asyncio.ensure_future(self._prepared(name))
        return await asyncio.shield(self._ready[name])

    async def _prepared(self, name: str) -> Image:
        source = await asyncio.to_thread(layers_of, name, self._images, self._run_directory)
        if source.directory is not None and os.stat(source.directory).st_uid == _user():
            return Image((str(source.directory),), {}, "/", None)
        root = self._directory / "images" if source.directory is None else self._run_directory
        place = root / source.key
        if not (place / "upper").is_dir():
            await self._unpack(source, place)
        return Image((str(place / "upper"),), source.env, source.workdir, None)

    async def _unpack(self, source: ImageFile, place: Path) -> None:
        """Unpack layers inside a container, so that nothing in them leads out of it; the result is put in its place."""
        _, part = self.new_layer()
        room = replace(LIMITS, file_bytes=1 << 40, wall_seconds=3600.0)
        box = await self._begin(Image((), {}, "/", None), "/", room, False, str(part))
        try:
            for number in range(source.count):
                with await asyncio.to_thread(source.layer, number) as file:
                    await box.put("layer", file)
        finally:
            await box.end()
        await asyncio.to_thread(_put, part, place)


def _put(part: Path, place: Path) -> None:
    """Put what was unpacked in its place."""
    shutil.rmtree(part / "work")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(part, place)
    except OSError:
        if not place.is_dir():  # another run may have had the same wish
            raise


def _memory_file(content: bytes) -> IO[bytes]:
    file = open(os.memfd_create("stdin"), "w+b", buffering=0)  # noqa: SIM115 - it is the caller's
    file.write(content)
    file.seek(0)
    return file


def _user() -> int:
    return confine.UNPRIVILEGED if os.geteuid() == 0 else os.geteuid()


def _private(path: Path) -> Path:
    path.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(path, confine.UNPRIVILEGED, confine.UNPRIVILEGED)
    return path


def _run_directory(directory: Path) -> Path:
    """Make a directory for this run, and remove those of runs that are gone."""
    runs = directory / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for other in runs.iterdir():
        if reaper.is_gone(other.name.rpartition("~")[0].replace("~", "/")):
            shutil.rmtree(other, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=reaper.owner(os.getpid()).replace("/", "~") + "~", dir=runs))


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End a fork server, which takes its directory with it."""
    control.close()
    process.wait()
