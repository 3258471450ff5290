"""A server of an environment: reached by its URL, or started beside the run and kept up.

In: a URL, or the words of a command line. Out: the URL at which it answers. One that is started here is supervised: it
is started again when it dies, and it and all that it started end with the run, however that ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import aiohttp
from pydantic.dataclasses import dataclass

from rlinf.agents.environments import Seconds, last_words
from rlinf.config.load import RunFailure
from rlinf.config.schema import CLOSED
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import Child, ChildDied, free_address

R = TypeVar("R")
_DYING = 5.0
"""Seconds after a refused connection within which a server that was started here is known to have died."""


@dataclass(frozen=True, config=CLOSED)
class Command:
    """A command that starts a server."""

    command: list[str]
    """Its words, in which `{port}` stands for the server's port and `{host}` for its address."""
    starting: Seconds = 120.0
    """Seconds that it has until it answers: large packages are imported for minutes on a busy machine."""

    @staticmethod
    def of(server: str | Sequence[str] | Command) -> Command:
        """The command that a user named; that of a URL has no words."""
        return server if isinstance(server, Command) else Command([] if isinstance(server, str) else list(server))


class Server:
    """A server; `async with` starts it where it is started here.

    Args:
        name: of the environment, for errors.
        server: its URL; or the words of a command that starts it; or those with the time that it has for it.
        path: what is asked for to see that it is up; any answer will do.

    Raises:
        UserError: `server` is neither.
    """

    def __init__(self, name: str, server: str | Sequence[str] | Command, path: str = "/") -> None:
        self._command = Command.of(server)
        if "://" not in server if isinstance(server, str) else not self._command.command:
            raise UserError(f"{name}: server={server!r} is no URL such as http://127.0.0.1:8000, and no list of words")
        self._name, self._path, self.starting = name, path, self._command.starting
        self.url = server.rstrip("/") if isinstance(server, str) else ""
        """Where it answers."""
        self._child: Child | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, connect=self.starting)
        connector = aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        try:
            if self._command.command:
                await self._start(self._command.command)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, command: Sequence[str]) -> None:
        host, port = free_address(hidden=any("{host}" in word for word in command))
        self.url = f"http://{host}:{port}"
        words = [word.replace("{port}", str(port)).replace("{host}", host) for word in command]
        how: dict[str, Any] = {"start_deadline": self.starting}
        self._child = Child(words, name=self._name, health=self._healthy, **how)
        try:
            await self._child.start()
        except ChildDied as died:
            failure = f"{words[0]} could not be started: {last_words(self._child)}"
            wanted = f"it has server.starting={self.starting:g} s to answer at {self.url}{self._path}"
            raise RunFailure(f"{self._name}: {failure} ({wanted})") from died

    async def __aexit__(self, *error: Any) -> None:
        await self.http.close()
        if self._child is not None:
            await self._child.stop()

    async def reach(self, connect: Callable[[], Awaitable[R]]) -> R:
        """Connect to the server once it is up; if it has just died, to its next life.

        Raises:
            RunFailure: it died again and again.
        """
        if self._child is None:
            return await connect()
        try:
            await self._child.ready()
            try:
                return await connect()
            except (aiohttp.ClientConnectionError, ConnectionError):
                await self._child.after_fault(_DYING)
                return await connect()
        except ChildDied as died:
            raise RunFailure(f"{self._name}: its server died too often: {last_words(self._child)}") from died

    async def _healthy(self, child: Child) -> bool:
        async with self.http.get(f"{self.url}{self._path}") as answer:
            return answer.status < 500
