"""Port at which others join a job, and what both ends do from hello to goodbye.

Flows in: connections. Flows out: what each is to make, and its messages to the job's end of it. Who wakes whom: a
connection starts a task of its own, which ends with it; nobody else waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlinf.joining import address
from rlinf.joining.connection import Connection, Refused, welcome
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all, in_thread

logger = logging.getLogger(__name__)

Elsewhere = Callable[[str, int], Awaitable[str | None]]
"""Given the token, and how many have joined here, says at which "host:port" one more is to join; None: here."""

_ON_THE_WAY = 60.0
"""Seconds in which one that was sent is counted where it was sent to: far longer than its way, and not for good."""


def listens_at(join: str) -> str:
    """The "host:port" that a key such as `rollout.join` stands for on this machine."""
    from rlinf.runtime.transport.network import (
        outward_address,
    )  # comes with torch, of which a joiner says hello without

    host, _, port = join.rpartition(":")
    return f"{outward_address()}:{port}" if host == "auto" else join


async def listen_beside(listen: Callable[[str, str | None, str], Awaitable[str]], join: str, token: str) -> None:
    """Let others join a rank that is not the first, whom that one sends, at a free port of its machine.

    Args:
        listen: `Listener.open` or what calls it.
        join: key such as `rollout.join`, an address of the first rank's machine or auto.
        token: that they must know.

    Raises:
        UserError: it cannot listen.
    """
    from rlinf.runtime.transport.network import outward_address  # comes with torch, see above

    host = join.rpartition(":")[0]
    try:
        await listen(listens_at(f"{host}:0"), None, token)
    except UserError:  # the address is of another machine
        await listen(f"{outward_address()}:0", None, token)


async def fewest(ask: Callable[[int, bool], Awaitable[tuple[int, str]]], ranks: range, here: int) -> str | None:
    """Where the next one is to join; None: here, where there are so many.

    Args:
        ask: asks another rank how many have joined it or are about to, and where one more may; True: it is sent one.
        ranks: the others.
        here: how many have joined here.
    """
    answers = await asyncio.gather(*(ask(rank, False) for rank in ranks), return_exceptions=True)
    places = [  # one that cannot listen gets none
        (answer[0], rank) for rank, answer in zip(ranks, answers, strict=True) if isinstance(answer, tuple)
    ]
    count, rank = min(places, default=(here, 0))
    return (await ask(rank, True))[1] if count < here else None


class JobLost(ConnectionError):
    """The job has gone without a word."""


class Sent(Exception):
    """The job has others join elsewhere now: where fewer are. The text is "host:port"."""


class Joiner(Protocol):
    """The job's end of one that joined."""

    def take(self, kind: str, *rest: Any) -> str | None:
        """Take a message; returns why it leaves, if it says that."""
        ...


class Joinable(Protocol):
    """Whoever is joined."""

    def came(self, connection: Connection, about: dict[str, Any]) -> Joiner:
        """One has made what it was told, and says this about itself."""
        ...

    def left(self, joiner: Joiner | None, peer: str, reason: str) -> None:
        """One is gone, from that address; None: before it came."""
        ...


class Listener:
    """A port at which others join.

    Args:
        joinable: is joined.
        role: that they have there, as in `rlinf join`.
        name: of who is joined, for messages.
        made_of: what they make; it may change.
        elsewhere: asked of each one that wants to join; None: it joins here.
    """

    def __init__(
        self, joinable: Joinable, role: str, name: str, made_of: Mapping[str, Any], elsewhere: Elsewhere | None = None
    ) -> None:
        self._joinable, self._role, self._name = joinable, role, name
        self.made_of, self._elsewhere = dict(made_of), elsewhere
        self.how = ""
        """Command by which one joins."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._file: Path | None = None
        self._here = 0
        """How many joined here, of those who were asked about elsewhere."""
        self._sending = asyncio.Lock()  # those who come together would all be sent to one place
        self._expected: deque[float] = deque()
        """Until when each of those who were sent here is counted."""

    def coming(self, *, one_more: bool = False) -> int:
        """How many have joined, or are about to.

        Args:
            one_more: another one was sent here, and is counted from now on.
        """
        now = asyncio.get_running_loop().time()
        while self._expected and self._expected[0] < now:
            self._expected.popleft()
        if one_more:
            self._expected.append(now + _ON_THE_WAY)
        return len(self._tasks) + len(self._expected)

    async def open(self, place: str, directory: str | None, token: str | None = None) -> str:
        """Let others join at "host:port"; returns where it listens.

        Args:
            place: to listen on; port 0 takes any free one.
            directory: of the run, where a file of `address.FILES` is left for those who join.
            token: that they must know. Default: that of the environment, or a new one.

        Raises:
            UserError: it cannot listen there.
        """
        secret = token or os.environ.get(address.TOKEN) or secrets.token_urlsafe(24)
        host, _, port = place.rpartition(":")

        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer, secret))
            self._tasks.add(task)
            if self._expected:
                self._expected.popleft()
            task.add_done_callback(self._tasks.discard)

        try:
            self._server = await asyncio.start_server(came, host.strip("[]"), int(port))
        except OSError as error:
            advice = "name an address of this machine and a port that is free, or 0 for any"
            text = f"{self._role}.join={place}: {self._name} cannot listen there: {error}; {advice}"
            raise UserError(text) from None
        where = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        if directory is not None:
            self._file = await in_thread(lambda: address.leave(Path(directory), where, secret, self._role))
        self.how = f"rlinf join {directory or where} --role {self._role}"
        return where

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        try:
            connection = await welcome(reader, writer, token)
        except (OSError, EOFError, TimeoutError) as error:
            writer.transport.abort()
            if isinstance(error, Refused):
                logger.warning("%s: somebody who wanted to join was turned away: %s", self._name, error)
            return
        joiner: Joiner | None = None
        there: str | None = None
        here = 0
        reason = "its process has ended, or the network to it"
        try:
            if self._elsewhere is not None:
                async with self._sending:
                    there = await self._elsewhere(token, self._here)
                    here = int(there is None)
                    self._here += here
            if there is not None:
                await connection.close("go", there)
                return
            connection.send("make", self.made_of)
            async for message in connection.messages():
                if joiner is not None:
                    if (leaves := joiner.take(*message)) is not None:
                        reason = leaves
                        break
                elif message[0] == "ready":
                    joiner = self._joinable.came(connection, message[1])
                else:
                    reason = f"it could not make what it was told: {message[1]}"
                    break
        except Exception as error:  # whatever it sends, it is no reason to end the job
            reason = f"{type(error).__name__}: {error}"
        finally:
            connection.abandon()
            self._here -= here
            if there is None:
                self._joinable.left(joiner, connection.peer, reason)

    def shut(self) -> None:
        """Let nobody in any more."""
        if self._server is not None:
            self._server.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    async def close(self) -> None:
        """Let nobody in any more, and end with those who are there."""
        self.shut()
        await cancel_all([*self._tasks])


# Of those who join ----------------------------------------------------------------------------------------------------


async def told_to_make(connection: Connection, messages: AsyncIterator[tuple[Any, ...]]) -> dict[str, Any]:
    """Hear from the job what is to be made here.

    Raises:
        JobLost: the job is gone.
        Sent: this process is to join elsewhere.
    """
    if (first := await anext(messages, None)) is None or first[0] not in ("make", "go"):
        raise JobLost("the job ended before it said what to make")
    if first[0] == "go":
        await connection.close()
        raise Sent(first[1])
    made_of: dict[str, Any] = first[1]
    return made_of


async def work_until_over(
    work: Coroutine[Any, Any, None],
    hear: Coroutine[Any, Any, bool],
    leave: asyncio.Event,
    hand_over: Callable[[], Awaitable[None]],
) -> str:
    """Work for a job until it ends, or until this process is to leave it; returns why it is over, in words.

    Args:
        work: goes on until it fails.
        hear: reads what the job sends until the connection ends; True: the job has said that it does.
        leave: set by whoever wants this process to leave.
        hand_over: tells the job that it does.

    Raises:
        JobLost: the job is gone.
        Exception: what failed in the work.
    """
    working, hearing, leaving = (asyncio.create_task(each) for each in (work, hear, _wait(leave)))
    try:
        await asyncio.wait((working, hearing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        if hearing.done():
            try:
                ended = hearing.result()
            except ExceptionGroup as several:  # of a load or a question: the first is why the others ended
                raise several.exceptions[0] from None
            if not ended:
                raise JobLost("the job is gone")
            return "the job has ended"
        await hand_over()
        return "it was told to leave, and has handed on what it had begun"
    finally:
        await cancel_all([working, hearing, leaving])


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
