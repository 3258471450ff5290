"""One life of a child process: its keeper, its output, its end, and the channel to it if it is Python.

Flows in: a command line. Flows out: lines of output, an exit status, messages. Who wakes whom: the keeper's report, and
the end of file when it exits, resolve `started` and `exited`; arriving output only fills a ring.

`supervisor.py` decides when a life begins and ends; `keeper.py` is what runs on the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import keeper as far_side

logger = logging.getLogger(__name__)

CHANNEL = "{channel}"
"""Word of a command line that stands for the descriptor of the child's channel."""

_KILL_DEADLINE = 10.0
"""Seconds that the kernel gets to end processes after SIGKILL; longer means that they hang in a driver."""

_LONGEST_LINE = 8192
"""Bytes of one line that are kept, so that a child that prints no newline cannot fill our memory."""


class TooLong(Exception):
    """A child announced a message that is longer than any that it should send."""


class Process:
    """One life of a child: its keeper, its output and its end. Made and owned by `Child`; needs a running loop.

    Args:
        argv: command line.
        channel: whether the child gets a socket to us, whose descriptor replaces the word `CHANNEL` in `argv`.
        env: its whole environment.
        cwd: its working directory, or None for ours.
        log: file to append its output to, or None to keep the last lines in memory.
        lines: how many lines to keep.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        channel: bool,
        env: Mapping[str, str],
        cwd: Path | None,
        log: Path | None,
        lines: int,
    ):
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.channel: socket.socket | None = None
        self._lines: deque[str] = deque(maxlen=lines)
        self._partial = b""
        self._report = b""
        self._log = log
        self._log_start = log.stat().st_size if log is not None and log.exists() else 0
        with contextlib.ExitStack() as theirs:  # closes the child's ends on our side
            self._control, control = socket.socketpair()
            passed = [theirs.enter_context(control).fileno()]
            if channel:
                self.channel, end = socket.socketpair()
                passed.append(theirs.enter_context(end).fileno())
                self.channel.setblocking(False)
            if log is None:
                self._output, stdout = os.pipe()
                theirs.callback(os.close, stdout)
            else:
                self._output, stdout = -1, theirs.enter_context(log.open("ab")).fileno()
            words = [str(passed[-1]) if word == CHANNEL else word for word in argv]
            keeper = [sys.executable, "-I", "-S", far_side.__file__, "keep", str(os.getpid()), str(passed[0])]
            try:
                self._popen = subprocess.Popen(
                    [*keeper, str(passed[1] if channel else -1), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.STDOUT,
                    pass_fds=passed,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=True,  # a group of its own: signals reach all of it, and Ctrl-C none of it
                )
            except BaseException:
                self._close_descriptors()
                raise
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        if log is None:
            os.set_blocking(self._output, False)
            self._loop.add_reader(self._output, self._on_output)

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines that this life printed, oldest first."""
        if self._log is None:
            return (*self._lines, self._partial.decode(errors="replace")) if self._partial else tuple(self._lines)
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 4 * _LONGEST_LINE))
            return tuple(deque(file.read().decode(errors="replace").splitlines(), self._lines.maxlen))

    async def end(self, grace: float = 0.0) -> None:
        """End the child and all its descendants: SIGTERM if there is `grace` (seconds), then SIGKILL."""
        try:
            if grace > 0 and not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait([self.exited], timeout=grace)
            self.kill()
            await asyncio.wait([self.exited], timeout=_KILL_DEADLINE)
            if not self.exited.done():
                logger.error("process %s does not end %g s after SIGKILL; left behind", self._popen.pid, _KILL_DEADLINE)
                self._signal(signal.SIGKILL)
            else:
                await asyncio.to_thread(self._popen.wait)  # buries the keeper, which has just closed its last socket
        finally:
            self._close_descriptors()

    def kill(self) -> None:
        """Have the keeper SIGKILL everything, now; who reads the channel sees its end."""
        for end, how in ((self._control, socket.SHUT_WR), (self.channel, socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.shutdown(how)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)  # not buried yet, so the id cannot belong to anybody else

    def _on_control(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._report += data
        facts = dict(line.split() for line in self._report.decode().splitlines(keepends=True) if line.endswith("\n"))
        if "pid" in facts and not self.started.done():
            self.started.set_result(int(facts["pid"]))
        if data:
            return
        self._loop.remove_reader(self._control)
        self.kill()
        if "exit" not in facts:
            self._signal(signal.SIGKILL)  # the keeper was killed: nobody else ends what it left
        if self._output >= 0:
            self._on_output()
        self.exited.set_result(int(facts.get("exit", -signal.SIGKILL)))

    def _on_output(self) -> None:
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            *lines, rest = (self._partial + data).split(b"\n")
            self._lines.extend(line[:_LONGEST_LINE].decode(errors="replace") for line in lines)
            self._partial = rest[:_LONGEST_LINE]
            if len(data) < 1 << 16:
                return

    def _close_descriptors(self) -> None:
        self._loop.remove_reader(self._control)
        self._control.close()
        if self.channel is not None:
            self.channel.close()
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1


async def send(channel: socket.socket, message: bytes) -> None:
    """Send one length-prefixed message to a Python child."""
    for part in far_side.framed(message):
        await asyncio.get_running_loop().sock_sendall(channel, part)


async def receive(channel: socket.socket, most: int | None = None) -> bytearray:
    """Receive one message from a Python child.

    Raises:
        EOFError: its end is closed.
        TooLong: the message has more than `most` bytes.
    """
    loop = asyncio.get_running_loop()
    size = int.from_bytes(await _exactly(loop, channel, far_side.HEADER), "big")
    if most is not None and size > most:
        raise TooLong(f"a message of {size} bytes, where at most {most} are taken")
    return await _exactly(loop, channel, size)


async def _exactly(loop: asyncio.AbstractEventLoop, channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await loop.sock_recv_into(channel, view)
        if count == 0:
            raise EOFError("the child closed its channel")
        view = view[count:]
    return data
