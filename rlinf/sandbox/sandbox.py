"""A sandbox: programs in Python go in, what became of them comes out.

In: code, its input and files, limits. Out: a `Result`. Who wakes whom: a run waits for a place among `at_once`, then
for the answer of its supervisor, which comes when the program ends or exceeds a limit; hanging up kills the program, so
a cancelled run leaves nothing behind. A fork server (`inside/warden.py`) starts with the first run and ends with this
process, or with `close`.

    async with Sandbox() as sandbox:
        result = await sandbox.run_python("print(input()[::-1])", stdin="abc")

docs/sandbox.md says what holds and what does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from rlinf.sandbox.inside.supervise import LENGTH
from rlinf.sandbox.limits import Isolation, Limits, Result, SandboxError
from rlinf.sandbox.running import Channel, Program
from rlinf.sandbox.server import Warden, start_warden

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 4 << 20
"""Bytes of the longest message that is taken from a program."""


class Sandbox:
    """Runs programs, a bounded number at once. Belongs to one event loop.

    Args:
        limits: of programs for which nothing else is said.
        at_once: most programs that run at the same time; None takes the number of cores. Others wait.
        allow_weak: run programs, too, where the kernel has no namespaces for us (see `Isolation`).
        preload: modules that programs are started with, such as numpy: importing them then costs nothing. They must not
            start threads.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        at_once: int | None = None,
        allow_weak: bool = False,
        preload: Sequence[str] = (),
    ):
        self.limits = limits or Limits()
        self._allow_weak, self._preload = allow_weak, tuple(preload)
        self._places = asyncio.Semaphore(at_once or len(os.sched_getaffinity(0)))
        self._starting: asyncio.Future[Warden] | None = None
        self._finalizer: weakref.finalize[[], Any] | None = None

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        args: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result:
        """Run a program as `python main.py` does, in an empty private directory.

        Args:
            code: the program.
            stdin: what it finds on standard input.
            files: what it finds in its directory: relative paths to contents.
            args: of its command line.
            limits: instead of the sandbox's.

        Returns:
            What became of it, whatever it did.

        Raises:
            SandboxError: programs cannot be kept apart here, or the sandbox failed.
            ValueError: a file's path leads out of the directory.
        """
        async with self._places, self.program(code, stdin=stdin, files=files, args=args, limits=limits) as program:
            return await program.result()

    @contextlib.asynccontextmanager
    async def program(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        args: Sequence[str] = (),
        limits: Limits | None = None,
        channel: bool = False,
    ) -> AsyncIterator[Program]:
        """A program while it runs; it is killed, with all that descends from it, at the end of the block.

        Takes no place among `at_once`: `place` does, for whoever wants one.

        Args:
            code, stdin, files, args, limits: as for `run_python`.
            channel: give it a socket to us.

        Raises:
            SandboxError, ValueError: as for `run_python`.
        """
        limits = limits or self.limits
        request = {
            "code": code,
            "files": {_inside(name): _bytes(content) for name, content in (files or {}).items()},
            "args": list(args),
            "limits": asdict(limits),
        }
        message = pickle.dumps(request)
        warden = await self._warden()
        with contextlib.ExitStack() as ours:
            link, end = self._linked(warden, _bytes(stdin), channel, ours)
            reader, writer = await asyncio.open_unix_connection(sock=link)
            ours.callback(writer.transport.abort)
            writer.write(len(message).to_bytes(LENGTH, "big") + message)
            yield Program(reader, limits, end)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the places for programs that run at once; waits for it."""
        async with self._places:
            yield

    async def isolation(self) -> Isolation:
        """How far programs are kept apart here.

        Raises:
            SandboxError: not far enough.
        """
        return (await self._warden()).isolation

    async def close(self) -> None:
        """End the fork server; the next run would start another."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(starting)
        self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def _linked(
        self, warden: Warden, stdin: bytes, channel: bool, ours: contextlib.ExitStack
    ) -> tuple[socket.socket, Channel | None]:
        """Ask for a supervisor; returns our ends of the link and of the channel, which `ours` closes."""
        link, theirs = socket.socketpair()
        ours.enter_context(link)
        with contextlib.ExitStack() as given:
            file = given.enter_context(open(os.memfd_create("stdin"), "w+b", buffering=0))
            file.write(stdin)
            file.seek(0)
            descriptors = [given.enter_context(theirs).fileno(), file.fileno()]
            talk = None
            if channel:
                end, other = socket.socketpair()
                end.setblocking(False)
                talk = Channel(end, _LONGEST_MESSAGE)
                ours.callback(talk.close)
                descriptors.append(given.enter_context(other).fileno())
            link.setblocking(False)
            try:
                socket.send_fds(warden.control, [b"!"], descriptors)
            except OSError as error:
                self._starting = None
                raise SandboxError("the sandbox's fork server is gone; the next run starts another") from error
        return link, talk

    async def _warden(self) -> Warden:
        if self._starting is not None and self._starting.done():
            dead = self._starting.exception() or self._starting.result().process.poll() is not None
            self._starting = None if dead else self._starting
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Warden:
        warden = await asyncio.to_thread(start_warden, self._allow_weak, self._preload)
        self._end()  # the one before, which is dead
        self._finalizer = weakref.finalize(self, warden.end)
        logger.log(logging.WARNING if warden.isolation.level == "weak" else logging.INFO, "%s", warden.isolation)
        return warden


_shared: dict[asyncio.AbstractEventLoop, dict[bool, Sandbox]] = {}


def shared(*, allow_weak: bool = False) -> Sandbox:
    """The sandbox of the running event loop, which tools and rewards share.

    Its fork server ends with the process, or when another loop asks for one after this loop was closed.
    """
    for loop in [loop for loop in _shared if loop.is_closed()]:
        for sandbox in _shared.pop(loop).values():
            sandbox._end()
    mine = _shared.setdefault(asyncio.get_running_loop(), {})
    if allow_weak not in mine:
        mine[allow_weak] = Sandbox(allow_weak=allow_weak)
    return mine[allow_weak]


async def run_python(
    code: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
    allow_weak: bool = False,
) -> Result:
    """Run a program in the sandbox that this event loop shares; see `Sandbox.run_python`."""
    return await shared(allow_weak=allow_weak).run_python(code, stdin=stdin, files=files, limits=limits)


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"file {name!r} of a sandboxed program must be a relative path without `..`")
    return str(path)
