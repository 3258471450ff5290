"""The connection of a job and a process that joined it: messages, and tensors that let messages pass.

Flows in: messages, and at most one set of weights at a time. Flows out: the same at the other end, in order. Who wakes
whom: what is to be sent wakes the task that writes; bytes that come wake the task that reads, and a whole message wakes
whoever iterates `messages`.

Weights go in pieces, and a message waits for no more than the pieces that the socket has: a checkpoint that asks for
answers under way does not wait for gigabytes. Newer weights take the place of those that have not left.

Each end proves that it knows the token before the other one reads more than that from it: messages are pickles.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.tasks import cancel_all

if TYPE_CHECKING:
    import torch  # of which a joiner says hello without

    from rlinf.data.differences import Difference
    from rlinf.data.weights import Weights

HELLO_SECONDS = 10.0
"""For a stranger to prove that it knows the token."""
PIECE = 1 << 20
"""Bytes of weights between which messages pass: a millisecond on a network of 1 GB/s, and few enough calls of Python
to fill a faster one."""
_GREETING = b"rlinf join 1\n"
_NONCE, _PROOF = 16, 32
_HEAD = struct.Struct("<QB")
_MESSAGE, _PIECE = range(2)
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A machine that has lost power, or its network, counts as gone after half a minute, as with children of other kinds;
seconds, questions and milliseconds, as the kernel has them."""


class Refused(ConnectionError):
    """The other end does not know the token, or speaks something else."""


def _proof(token: str, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), who + b"".join(nonces), "sha256")


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Connection:
    """The job's end of a new connection, once the other one has proved that it knows the token.

    Raises:
        Refused: it does not.
        OSError, EOFError: it is gone, or silent.
    """
    async with asyncio.timeout(HELLO_SECONDS):
        mine = secrets.token_bytes(_NONCE)
        writer.write(_GREETING + mine)
        theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
        if not hmac.compare_digest(proof, _proof(token, b"join", mine, theirs)):
            raise Refused("it does not know the job's token")
        writer.write(_proof(token, b"welcome", theirs, mine))
    return Connection(reader, writer)


async def connect(host: str, port: int, token: str) -> Connection:
    """The joiner's end of a connection to a job.

    Raises:
        Refused: what listens there is no job that knows this token.
        OSError, EOFError: nobody is there, or nobody answers.
    """
    async with asyncio.timeout(HELLO_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            if await reader.readexactly(len(_GREETING)) != _GREETING:
                raise Refused("what listens there is no job of this version of rlinf that can be joined")
            theirs, mine = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
            writer.write(mine + _proof(token, b"join", theirs, mine))
            try:
                proof = await reader.readexactly(_PROOF)
            except EOFError:
                raise Refused("the job has another token") from None
            if not hmac.compare_digest(proof, _proof(token, b"welcome", mine, theirs)):
                raise Refused("what listens there does not know the job's token")
        except BaseException:
            writer.close()
            raise
    return Connection(reader, writer)


class Connection:
    """One end, both of which are alike.

    Args:
        reader, writer: of the socket, on which both have said hello.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._messages: deque[bytes] = deque()
        self._pieces: Iterator[bytes | memoryview] = iter(())  # of the weights that are leaving
        self._behind: deque[Iterator[bytes | memoryview]] = deque()  # of those that leave after them
        self._news = asyncio.Event()
        self._assembly: Assembly | None = None
        self._closing = False
        self._came: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        if (raw := writer.get_extra_info("socket")) is not None and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if (option := getattr(socket, name, None)) is not None:  # not every system has all
                    raw.setsockopt(socket.IPPROTO_TCP, option, value)
        self._writing, self._reading = asyncio.create_task(self._write()), asyncio.create_task(self._read_all())

    @property
    def peer(self) -> str:
        """Address of the other end."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else "?"

    def send(self, *message: Any) -> None:
        """Have a message leave, before any weights that are still to."""
        self._messages.append(pickle.dumps(message, 5))
        self._news.set()

    def send_weights(self, number: int, weights: Weights | Difference, *, behind: bool = False) -> None:
        """Have weights in host memory leave; the other end has a message `("weights", number, weights)` of them.

        Args:
            number: of the publication.
            weights: in host memory; or how they differ from those that the other end has.
            behind: after those that are still leaving, such as sums of which each counts. Otherwise those are dropped:
                nobody wants them any more.
        """
        if behind:
            self._behind.append(_pieces_of(number, weights))
        else:
            self._behind.clear()
            self._pieces = _pieces_of(number, weights)
        self._news.set()

    async def messages(self) -> AsyncIterator[tuple[Any, ...]]:
        """Messages that come, until the other end closes.

        Raises:
            Exception: the connection broke, or what came means nothing.
        """
        while (message := await self._came.get()) is not None:
            yield message
        await self._reading

    async def _read_all(self) -> None:
        try:
            while True:
                size, kind = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                message = self._read(kind, await self._reader.readexactly(size))
                if message is not None:
                    self._came.put_nowait(message)
        except EOFError:
            return
        finally:
            self._came.put_nowait(None)

    def _read(self, kind: int, data: bytes) -> tuple[Any, ...] | None:
        if kind == _PIECE:
            return None if self._assembly is None else self._assembly.add(data)
        message: tuple[Any, ...] = pickle.loads(data)
        if message[0] != "weights":
            return message
        self._assembly = Assembly(*message[1:])
        return None

    async def close(self, *last: Any) -> None:
        """End it, after a last message, which the other end gets if it still reads."""
        if last and not self._closing:
            self.send(*last)
        self._closing, self._pieces = True, iter(())
        self._behind.clear()
        self._news.set()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(HELLO_SECONDS):
                await asyncio.wait([self._writing])
                self._writer.write_eof()
                # To close while something that came is unread would take back what has just left.
                await asyncio.wait([self._reading])
        self.abandon()
        await cancel_all([self._writing, self._reading])

    def abandon(self) -> None:
        """End it at once; whoever iterates its messages is told by their end."""
        self._writer.transport.abort()
        self._writing.cancel()

    async def _write(self) -> None:
        try:
            while True:
                self._news.clear()
                while self._messages:
                    data = self._messages.popleft()
                    self._writer.writelines((_HEAD.pack(len(data), _MESSAGE), data))
                    await self._writer.drain()
                if self._closing:
                    return
                if (piece := next(self._pieces, None)) is None and self._behind:
                    self._pieces = self._behind.popleft()
                elif piece is None:
                    await self._news.wait()
                elif isinstance(piece, bytes):
                    self._writer.writelines((_HEAD.pack(len(piece), _MESSAGE), piece))
                else:
                    self._writer.writelines((_HEAD.pack(len(piece), _PIECE), piece))
                    await self._writer.drain()
        except OSError:  # whoever reads is told by the end of what comes
            self._writer.transport.abort()


def _pieces_of(number: int, weights: Weights | Difference) -> Iterator[bytes | memoryview]:
    """Weights as a message that announces them, and their bytes."""
    about, tensors = weights.taken_apart()
    shapes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
    yield pickle.dumps(("weights", number, about, shapes), 5)
    for bucket in tensors:
        octets = memoryview(_octets(bucket))
        for start in range(0, len(octets), PIECE):
            yield octets[start : start + PIECE]
    yield memoryview(b"")


def _octets(bucket: torch.Tensor) -> Any:
    import torch

    return bucket.detach().view(torch.uint8).numpy()


class Assembly:
    """Weights on their way in.

    Args:
        number: of the publication.
        about: the weights without their bytes.
        shapes: type and elements of each tensor that has these.
    """

    def __init__(self, number: int, about: Weights | Difference, shapes: list[tuple[torch.dtype, int]]):
        import torch

        self._number, self._about = number, about
        self._buckets = [torch.empty(count, dtype=dtype) for dtype, count in shapes]
        self._bucket = self._place = 0

    def add(self, data: bytes) -> tuple[str, int, Weights | Difference] | None:
        """Take a piece; an empty one is the last, and returns the message of the whole."""
        if not data:
            return "weights", self._number, self._about.put_together(self._buckets)
        while self._place == self._buckets[self._bucket].nbytes:
            self._bucket, self._place = self._bucket + 1, 0
        _octets(self._buckets[self._bucket])[self._place : self._place + len(data)] = memoryview(data)
        self._place += len(data)
        return None
