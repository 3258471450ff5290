"""A container as agents and environments see it, whoever provides it; how files go in and out, and connections out.

    async with Namespaces() as containers:
        box = await containers.start("python-3.12.tar", workdir="/repo")
        await box.upload("repos/17", "/repo")
        print((await box.run("python -m pytest -x", seconds=60)).stdout)

A command's outcome is a `Result`, whatever it did; its container lives on after it, but for `disk`. What is wrong with
the container itself is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import logging
import shutil
import socket
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, Self

from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.sandbox.inside.forwarder import carry
from rlinf.sandbox.limits import Limits, Result

logger = logging.getLogger(__name__)

LIMITS = Limits(
    cpu_seconds=3600.0,
    wall_seconds=300.0,
    memory_bytes=2 << 30,
    processes=256,
    open_files=1024,
    file_bytes=1 << 30,
    output_bytes=1 << 20,
)
"""Limits of a container for which nothing else is said; `file_bytes` is all that it may write, `wall_seconds` is what
a command may take, the rest is of each command or, for processes and memory, of all in the container."""


class ContainersError(UserError):
    """Containers cannot be had as asked: no daemon, no image, a kernel that refuses. The text says what to do."""


class ContainerEnded(RuntimeFault):
    """A container is gone; the text says why: it was ended, it wrote too much, its machine or daemon went away."""


class Container(Protocol):
    """A machine of an episode's own: commands run in it one after the other, or at once; files stay between them."""

    @property
    def name(self) -> str:
        """Its name in errors and at its provider's."""

    @property
    def workdir(self) -> str:
        """The directory in which commands run for which no other is named."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
    ) -> Result:
        """Run a command and wait for its end. Cancelling it kills the command.

        Args:
            command: a line for `/bin/sh -c`, or a program and its arguments. What it leaves in the background goes on
                when it has ended by itself; what ends it for a limit ends all that descends from it.
            seconds: that it may take; None takes the limit `wall_seconds`.
            cwd: where it runs; None takes `workdir`.
            env: variables besides those of the container.
            stdin: what it finds on standard input.

        Returns:
            How it ended. `timeout`, `output` and `memory` ended the command; `disk` ended the container.

        Raises:
            ContainerEnded: the container is gone.
        """

    async def upload(self, source: str | Path | bytes, target: str) -> None:
        """Copy a file's content, a file, or a directory's content to a path in the container.

        Args:
            source: a path on this machine, or the bytes of a file.
            target: an absolute path in the container; directories above it are made.

        Raises:
            ContainerEnded: the container is gone, or it holds no more (`disk`).
        """

    async def download(self, source: str, target: str | Path) -> None:
        """Copy a file, or a directory's content, from the container to a path on this machine.

        Raises:
            ContainerEnded: the container is gone.
            FileNotFoundError: there is no such file in it.
            ContainersError: what it holds cannot be unpacked safely here.
        """

    async def snapshot(self) -> str:
        """Keep the files of the container as they are now; `start` takes what is returned as an image.

        It lasts as long as the provider does. Processes are not kept.
        """

    async def forward(self, host: str, port: int) -> int:
        """Open a way to an address of this machine, which containers without a network have, too.

        Returns:
            A port: who connects to it at 127.0.0.1 in the container is connected to the address, until it ends.

        Raises:
            ContainersError: its provider has no such way.
            ContainerEnded: the container is gone.
        """

    async def end(self) -> None:
        """End the container with all its processes and files; again is harmless."""


class Containers(Protocol):
    """A provider of containers. Belongs to one event loop; leaving it as a context ends all that it started."""

    async def start(
        self,
        image: str | Path | None = None,
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits = LIMITS,
        network: bool = False,
    ) -> Container:
        """Start a container.

        Args:
            image: what its files are: a snapshot, an image's name, and what else the provider takes; None takes the
                provider's own base.
            workdir: where commands run; it is made if it is missing. None takes the image's, else `/`.
            env: variables of all its commands, besides the image's.
            limits: see `LIMITS`.
            network: it reaches the network of its machine; otherwise it has none but its own loopback.

        Raises:
            ContainersError: there is no such image, or no container can be started; one line says what to do.
        """

    async def close(self) -> None:
        """End all containers, and forget their snapshots."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@contextlib.asynccontextmanager
async def ended_unless_started(box: Container) -> AsyncIterator[None]:
    """A container while it is started; if that fails, or is cancelled, nothing of it is left."""
    try:
        yield
    except BaseException:
        await asyncio.shield(box.end())
        raise


# Connections ---------------------------------------------------------------------------------------------------------

_CONNECTIONS = 64
"""Connections of a container to an address at once; further ones wait, so that it takes a bounded number of files."""
BACKLOG = 64


class Forwarding:
    """Connections of a container that are carried on to addresses of this machine, until it is closed."""

    def __init__(self) -> None:
        self._accepting: list[asyncio.Task[None]] = []
        self._closed = False

    def add(self, listening: socket.socket, host: str, port: int) -> None:
        """Carry on what connects to a socket, which is taken over."""
        if self._closed:
            listening.close()
            return
        listening.setblocking(False)
        self._accepting.append(asyncio.create_task(_accept(listening, host, port), name="forwarding of a container"))

    async def close(self) -> None:
        """End all connections, and take no more."""
        self._closed = True
        await cancel_all(self._accepting)
        for task in self._accepting:
            if not task.cancelled():
                task.result()  # raises what ended it


async def _accept(listening: socket.socket, host: str, port: int) -> None:
    places = asyncio.Semaphore(_CONNECTIONS)
    with listening:
        try:
            async with asyncio.TaskGroup() as carrying:
                while True:
                    await places.acquire()
                    end, _ = await asyncio.get_running_loop().sock_accept(listening)
                    carrying.create_task(_carried(end, host, port)).add_done_callback(lambda _: places.release())
        except* OSError as errors:
            logger.warning("a container is not connected to %s:%d any more: %s", host, port, errors.exceptions[0])


async def _carried(end: socket.socket, host: str, port: int) -> None:
    await carry(await asyncio.open_connection(sock=end), asyncio.open_connection(host, port))


# Files ---------------------------------------------------------------------------------------------------------------


def pack(source: str | Path | bytes, target: str) -> IO[bytes]:
    """Pack what is uploaded as a tar file whose paths begin at the container's root. Blocks.

    Raises:
        ContainersError: the target is no absolute path, or the source is missing.
    """
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts:
        raise ContainersError(f"upload to {target!r}: the target must be an absolute path without `..`")
    name = str(path).lstrip("/") or "."
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it is the caller's
    with tarfile.open(fileobj=file, mode="w") as tar:
        if isinstance(source, bytes):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(source), 0o644, int(time.time())
            tar.addfile(entry, io.BytesIO(source))
        elif Path(source).exists():
            tar.add(Path(source).resolve(), name, filter=_of_nobody)
        else:
            raise ContainersError(f"upload of {source}: there is no such file or directory here")
    file.seek(0)
    return file


def unpack(tar_file: IO[bytes], target: str | Path, *, links: bool = False) -> None:
    """Put what was downloaded, a tar file with one root, at a path here; nothing in it leads out of there. Blocks.

    Args:
        tar_file: what came.
        target: where it goes.
        links: take links that lead anywhere, of somebody who is trusted.

    Raises:
        ContainersError: it is no tar file, or an entry leads out of the directory.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ContainersError("files of a container are unpacked by Python 3.11.4 or newer: older ones do it unsafely")
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as scratch:
        try:
            with tarfile.open(fileobj=tar_file, mode="r|*") as tar:
                tar.extractall(scratch, filter=functools.partial(_unpacked, links))
            root = next(Path(scratch).iterdir())
        except (tarfile.TarError, StopIteration) as error:
            raise ContainersError(f"what a container sent for {target} was not unpacked: {error}") from error
        if root.is_dir() and not root.is_symlink():
            shutil.copytree(root, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(root, target / root.name if target.is_dir() else target, follow_symlinks=False)


def _unpacked(links: bool, entry: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """An entry as it is unpacked; pipes and devices, which some daemons send, are left out."""
    if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    return tarfile.tar_filter(entry, path) if links else tarfile.data_filter(entry, path)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whose a file is here says nothing there."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
