"""A program that runs in a sandbox, seen from outside: its limits, its result, and a channel to talk to it.

In: a stream from its supervisor. Out: a `Result`. Who wakes whom: the supervisor's answer, and the program's messages,
wake who waits for them.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, fields
from typing import Literal, cast

from rlinf.sandbox.inside.supervise import LENGTH

Outcome = Literal["ok", "error", "timeout", "memory", "output", "killed", "disk"]
"""It ended with status 0; with another one; it exceeded its seconds; its memory; its output; a signal ended it; its
container wrote more than it may."""


class SandboxError(RuntimeError):
    """No program can be run: the kernel refuses isolation, or the sandbox itself failed. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what one program may use, all of its processes together unless said otherwise.

    Raises:
        ValueError: a limit is not above 0.
    """

    cpu_seconds: float = 10.0
    """Seconds of processor time."""
    wall_seconds: float = 10.0
    """Seconds from start to end; then it is killed with all descendants."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all. A bare interpreter has some 40 MB of the first."""
    processes: int = 16
    """Processes and threads at once."""
    open_files: int = 64
    """Descriptors of each process."""
    file_bytes: int = 64 << 20
    """Size of the private directory /tmp, and of each file. What is written there lies in memory."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and standard error together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ValueError(f"limit {each.name} is {getattr(self, each.name)}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one program, with its output."""

    outcome: Outcome
    """How it ended."""
    stdout: str
    """Its standard output, up to the limit; bytes that are no UTF-8 are replaced."""
    stderr: str
    """Its standard error: the traceback, if an exception ended it."""
    exit_code: int | None
    """Its status; minus the signal's number if one ended it; None if it was killed for a limit."""
    seconds: float
    """From its start to its end."""

    @property
    def ok(self) -> bool:
        """It ended by itself with status 0. Says nothing about what it did: a program can exit early."""
        return self.outcome == "ok"


@dataclass(frozen=True, slots=True)
class Isolation:
    """How far programs are kept apart from this machine."""

    level: Literal["namespaces", "weak"]
    """`namespaces`: everything that docs/sandbox.md promises. `weak`: limits, a filter of system calls, and walls
    around files where the kernel has Landlock; other processes can be seen, or killed where it is old."""
    reason: str
    """Why it is weak; empty for namespaces."""
    guards: tuple[str, ...]
    """The guards in force, in words."""

    def __str__(self) -> str:
        weak = f" ({self.reason})" if self.reason else ""
        return f"sandbox: {self.level}{weak}: {', '.join(self.guards)}"


_GRACE = 10.0
"""Seconds beyond a program's deadline in which its supervisor must answer: it only has to kill and to write."""


class ChannelError(Exception):
    """A program closed its channel, or sent a message that is too long."""


class Channel:
    """Messages to and from a program: each a length of 8 bytes, big-endian, and as many bytes.

    What comes out of it is the program's own, and as untrusted as it is.

    Args:
        end: our end of the socket.
        longest: bytes of the longest message that is taken.
    """

    def __init__(self, end: socket.socket, longest: int):
        self._end, self._longest = end, longest
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            ChannelError: the program is gone.
        """
        try:
            _, writer = await self._open()
            writer.write(len(message).to_bytes(LENGTH, "big") + message)
            await writer.drain()
        except ConnectionError as error:
            raise ChannelError("the program closed its channel") from error

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ChannelError: there is none.
        """
        reader, _ = await self._open()
        try:
            size = int.from_bytes(await reader.readexactly(LENGTH), "big")
            if size > self._longest:
                raise ChannelError(f"the program sent a message of {size} bytes; {self._longest} are taken")
            return await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelError("the program closed its channel") from error

    def close(self) -> None:
        """Close our end."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._end.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._end)
        return self._streams


class Program:
    """A program that runs. Made by `Sandbox.program`."""

    def __init__(self, reader: asyncio.StreamReader, limits: Limits, channel: Channel | None):
        self._reader, self._limits = reader, limits
        self._channel = channel

    @property
    def channel(self) -> Channel:
        """Messages to and from the program, which has the other end as descriptor 3.

        Raises:
            ValueError: it was not given one.
        """
        if self._channel is None:
            raise ValueError("the program was started without a channel; say channel=True")
        return self._channel

    async def result(self) -> Result:
        """Return the program's result, once it has ended.

        Raises:
            SandboxError: it could not be started, or its supervisor is gone.
        """
        try:
            async with asyncio.timeout(self._limits.wall_seconds + _GRACE):
                head, stdout, stderr = [await self._part() for _ in range(3)]
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            what = "does not answer" if isinstance(error, TimeoutError) else "is gone"
            raise SandboxError(f"the supervisor of a sandboxed program {what}; was it killed for memory?") from error
        outcome, status, seconds = head.decode().split("\n")
        if outcome == "failed":
            raise SandboxError(f"a sandboxed program could not be started: {status}")
        out, err = stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
        code = int(status) if status else None
        return Result(_outcome(outcome, code, err), out, err, code, float(seconds))

    async def _part(self) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
        return await self._reader.readexactly(size)


def _outcome(exceeded: str, code: int | None, stderr: str) -> Outcome:
    if exceeded:
        return cast(Outcome, exceeded)
    if code is None or code < 0:
        return "timeout" if code == -24 else "killed"  # SIGXCPU: its processor time
    if code and "MemoryError" in stderr.rstrip().rpartition("\n")[2]:
        return "memory"
    return "error" if code else "ok"
