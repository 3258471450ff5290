"""A process in a Python environment of its own that plays episodes, one for each connection to its socket.

In: the words of a command, which gets the path of a socket as its last word, and the line that begins an episode. Out:
lines of JSON from there until the episode has ended. Hanging up ends it there, too, whatever it does.

The process is supervised: whatever it started ends with it, and it ends with the run, however that ends. If it dies,
the episodes that it played fail, and another one is started.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from rlinf.agents.environments import last_words
from rlinf.config.load import RunFailure
from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.runtime.processes.supervisor import Child, ChildDied

_LONGEST = 1 << 26
"""Bytes of a line from there."""
_DEATHS = 3
"""Deaths in a row that end the run; a process that has lived for a minute begins a new count."""


class Lines:
    """Lines of JSON to and from an episode.

    Args:
        worker: whose.
        reader, writer: its connection.
    """

    def __init__(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._worker, self._reader, self._writer = worker, reader, writer

    def write(self, **line: Any) -> None:
        """Write a line; one that nobody reads any more is lost, as the next `read` tells."""
        with suppress(ConnectionError):
            self._writer.write(json.dumps(line).encode() + b"\n")

    async def read(self) -> dict[str, Any]:
        """Wait for a line.

        Raises:
            RuntimeError: there is none: its process died, or wrote something else.
        """
        line = b""
        try:
            with suppress(ConnectionError):
                line = await self._reader.readline()
            if line:
                return dict(json.loads(line))
        except ValueError as error:  # a line without end, or one that is no JSON
            raise RuntimeError(f"{self._worker.name}: it wrote what is no result: {error}") from error
        raise RuntimeError(f"{self._worker.name}: its process died: {await self._worker.words_of_death()}")


class Worker:
    """Plays episodes; `async with` starts it.

    Args:
        name: for errors.
        command: its words.
        starting: seconds that it has until it listens.
        env: variables to add to ours, or to remove if None.
        forks: each episode has a process of its own there, which may die alone.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        starting: float,
        *,
        env: Mapping[str, str | None] | None = None,
        forks: bool = False,
    ) -> None:
        self.name = name
        self._command, self._starting, self._env, self._forks = command, starting, env, forks

    async def __aenter__(self) -> Self:
        self._room = OwnDirectory("worker")
        self._socket = str(self._room.path / "episodes")
        how: dict[str, Any] = {"max_restarts": _DEATHS - 1, "backoff": (0.0, 1.0, 0.0), "env": self._env}
        how |= {"health": self._listens, "start_deadline": self._starting}
        self._child = Child([*self._command, self._socket], name=self.name, **how)
        try:
            await self._child.start()
        except ChildDied as died:
            await self.__aexit__()
            why = f"{last_words(self._child)} (it has starting={self._starting:g} s)"
            raise RunFailure(f"{self.name}: its process could not be started: {why}") from died
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._child.stop()
        self._room.remove()

    async def _listens(self, child: Child) -> bool:
        _, writer = await asyncio.open_unix_connection(self._socket)
        writer.close()
        return True

    @property
    def pid(self) -> int | None:
        """Number of its process, None between lives."""
        return self._child.pid

    @asynccontextmanager
    async def episode(self, **first: Any) -> AsyncIterator[Lines]:
        """An episode that begins with a line, and is over there as well when the block is left.

        Raises:
            RunFailure: the process died again and again.
        """
        try:
            reader, writer = await self._connected()
        except ChildDied as died:
            often = f"its process died {_DEATHS} times in a row"
            raise RunFailure(f"{self.name}: {often}: {last_words(self._child)}") from died
        lines = Lines(self, reader, writer)
        try:
            lines.write(**first)
            yield lines
        finally:
            writer.transport.abort()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await self._child.ready()
        while True:
            try:
                return await asyncio.open_unix_connection(self._socket, limit=_LONGEST)
            except OSError:  # it is dying
                await self._child.after_fault()

    async def words_of_death(self) -> str:
        """The last line that it wrote; of its whole life, where that is over when an episode's connection is."""
        if not self._forks:
            await self._child.ended()
        return last_words(self._child)
