"""From a list of directories to a page that can be opened, until somebody has seen enough.

In: directories, where to listen. Out: a printed address with its token. Who wakes whom: SIGINT and SIGTERM end it;
below a job, so does the job's end, some time later.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlinf.metrics.web import shelf
from rlinf.metrics.web.app import application
from rlinf.metrics.web.guard import Guard
from rlinf.metrics.web.life import job_of
from rlinf.metrics.web.shelf import Shelf

PORT = 8265
"""Where it listens unless told otherwise, or another watcher does."""
LINGER = 600.0
"""Seconds for which the page of a job stays after the job's end: whoever was looking looks on."""
_GOODBYE = 1.0
"""Seconds for requests that are under way at the end."""


class CannotListen(Exception):
    """The address is not to be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Where:
    """How a page is offered."""

    host: str = "127.0.0.1"
    """Name or address to listen at."""
    port: int | None = None
    """0 for any that is free; None for `PORT`, or any if that is taken."""
    browser: bool = False
    """Open it in a browser here."""
    until_ended: bool = False
    """End `LINGER` after the first directory's job."""


async def serve(named: Sequence[Path], where: Where, say: Callable[[str], None]) -> None:
    """Show runs until SIGINT or SIGTERM.

    Args:
        named: their directories, or directories of them.
        where: to listen.
        say: told what to print, a line at a time.

    Raises:
        CannotListen: the address is not to be had.
    """
    where = replace(where, host=where.host.strip("[]"))  # IPv6, as URLs have it
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    listening = _listen(where)
    port = listening.getsockname()[1]
    guard = Guard(where.host)
    runner = runner_of(Shelf(named), guard)
    try:
        await runner.setup()
        await web.SockSite(runner, listening).start()
        address = _address(where.host, port, guard.token)
        say(address)
        if not where.until_ended:
            for line in _advice(where.host, port):
                say(line)
        if where.browser and not await asyncio.to_thread(_open, address):
            say("no browser can be opened here: open the address above in one")
        await (_job_over(named[0], over) if where.until_ended else over.wait())
    finally:
        await runner.cleanup()
        listening.close()


def runner_of(shelf: Shelf, guard: Guard) -> web.AppRunner:
    """The server of a page, before it listens."""
    return web.AppRunner(
        application(shelf, guard),
        access_log=None, logger=_own_logger(), handler_cancellation=True, shutdown_timeout=_GOODBYE,
    )  # fmt: skip


def _own_logger() -> logging.Logger:
    """aiohttp's lines, but for requests that are no HTTP: a port scan or TLS on the port is nothing to tell a reader,
    and each would be a traceback in the terminal."""
    own = logging.getLogger(__name__)
    own.addFilter(_is_no_stranger)  # adding it again changes nothing
    return own


def _is_no_stranger(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _listen(where: Where) -> socket.socket:
    wanted = [PORT, 0] if where.port is None else [where.port]
    for port in wanted:
        try:
            return socket.create_server((where.host, port), family=_family(where.host))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != wanted[-1]:
                continue
            why = os.strerror(error.errno) if error.errno else str(error)
            raise CannotListen(f"--host {where.host} --port {port}: {why}") from None
    raise AssertionError("the last port is tried or refused")


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError):
        raise CannotListen(f"--host {host}: this is no name or address of a machine") from None


def _address(host: str, port: int, token: str) -> str:
    named = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{named}]' if ':' in named else named}:{port}/?token={token}"


def _advice(host: str, port: int) -> list[str]:
    if host not in ("127.0.0.1", "::1", "localhost"):
        return [f"--host {host}: whoever reads along on the network sees the token and all else; prefer ssh -L"]
    if "SSH_CONNECTION" in os.environ:
        return [
            f"from your own machine: ssh -L {port}:{host}:{port} {socket.gethostname()}, then open that address there"
        ]
    return []


def _open(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


async def _job_over(directory: Path, over: asyncio.Event) -> None:
    """Wait for the end of a run's job and as long as the page stays then; no longer than until told to end."""
    parent, began = os.getppid(), False
    while not over.is_set():
        job, lives = await asyncio.to_thread(_job, directory)
        began |= job
        if os.getppid() != parent or (began and not lives):
            break
        await _sleep(over, shelf.TICK)
    await _sleep(over, LINGER)


def _job(directory: Path) -> tuple[bool, bool]:
    """Whether a job says that it writes to a run directory, and whether it lives."""
    job = job_of(directory)
    return job is not None, job is not None and job.lives


async def _sleep(over: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
