"""The lane: frames between processes of one machine over a Unix-domain socket, about ten times quicker than torch RPC.

Flows in: frames from `Link`, for peers on this machine. Flows out: the same frames at the peer, each answered by one.
Who wakes whom: bytes on the socket wake the loop itself, with no thread between.

Torch RPC joins the hosts and carries what goes between machines. Once a host knows which others live on its machine
(`neighbours`), it asks each of them over torch RPC where it listens, and connects. Where that cannot be done, or where
`RLINF_TRANSPORT=rpc` says so, torch RPC goes on carrying these frames too: a `Link` orders frames by their numbers, so
they may change their way at any time.

The socket lies in a directory that only this user can enter, and whoever connects must know the token that went over
torch RPC. Once all neighbours are connected the directory is removed, so that nothing is left however a process ends.
The end of a lane without a farewell is the death of the peer.

Keeps a loop awake for a moment when an answer is likely to come at once: to fall asleep and be woken costs a quiet
core more than the answer does.
So the loop makes empty turns, for less than `MOMENT` after each frame that is sent or answered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Protocol, cast

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import OwnDirectory, cancel_all, computing, cores
from rlinf.runtime.transport.link import Frame, Receiver, Respond, Transport, from_bytes, to_bytes

MOMENT = 80e-6
"""Seconds. An awaited call between two hosts that stay awake took 30 us where one between hosts that sleep took 128 (a
virtual machine with two cores, nothing else running)."""
SOON = 3 * MOMENT
"""Seconds within which an answer comes to a host that sleeps, if the other one has only that answer to give."""
PREEMPTED = 5e-4
"""Seconds between two turns of a loop without work of its own, above which something else had the core: an empty turn
takes some microseconds, a slice of another process some milliseconds."""
BACK_OFF = 1.0, 16.0
"""Seconds for which nothing stays awake after that: the first time, and at most."""
HALF = 0.5
"""Share of frames from which on it is worth it."""
WEIGHT = 0.2
"""Of the newest frame in the share of frames that were worth staying awake for."""


class BusyPoll:
    """Decides after each frame whether to stay awake, by what came of the frames before.

    It is worth it while the other end speaks within the moment, or, to a host that slept, soon. On a core that others
    want it does harm: the turns use up the slice of time by the end of which the answer comes, and a sleeper would have
    been woken at once. So after a turn that something else came between, nothing stays awake for a second, and twice as
    long each time that is so again. A host with an actor that computes never stays awake, nor one on a machine with
    fewer cores than hosts: who has work gets the core.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.worth = 0.0
        """Share of the frames that came in time, the newest the most."""
        self.until = 0.0
        """Monotonic seconds until when it stays awake."""
        self._left = 0.0  # when the last frame has left
        self._turned = 0.0
        self._slept = 0.0  # monotonic seconds without processor time of this thread, up to the first turn
        self._awake = self._stayed = False
        self._off_until, self._off = 0.0, BACK_OFF[0]
        self._room = cores() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def left(self) -> None:
        """A frame has left: what comes of it may come at once."""
        self._left = now = time.monotonic()
        self._stayed = self.worth > HALF and self._room and now > self._off_until and not computing()
        if self._stayed:
            self.until = now + MOMENT
            if not self._awake:
                self._awake, self._turned, self._slept = True, now, now - time.thread_time()
                self._loop.call_soon(self._turn)

    def came(self, worth: bool = True) -> None:
        """A frame has come; `worth` if it is more than a receipt."""
        in_time = worth and time.monotonic() - self._left < (MOMENT if self._stayed else SOON)
        self.worth += WEIGHT * (in_time - self.worth)
        self.until = 0.0

    def _turn(self) -> None:
        now = time.monotonic()
        if now - self._turned > PREEMPTED and now - time.thread_time() - self._slept > PREEMPTED:
            self._off_until = now + self._off
            self._off = min(2 * self._off, BACK_OFF[1])
            self._awake = False
        elif now < self.until and not computing():
            self._turned = now
            self._loop.call_soon(self._turn)
        else:
            self._awake = False


Offer = tuple[str, bytes]
"""Where a host listens, and the token that it wants to hear."""

HELLO_SECONDS = 10.0
"""For a stranger or a neighbour to say its token."""
LARGEST = 1 << 30
"""Bytes of a frame; a larger one goes by torch RPC."""
_HEAD = struct.Struct("<QBI")
"""Bytes that follow; what they are; a number: of the frame that is sent or answered, or of the host that says hello."""
_HELLO, _WELCOME, _FRAME, _ANSWER, _FAREWELL = range(5)
_TOKEN = 32

logger = logging.getLogger(__name__)


def wanted() -> bool:
    """True if lanes are to be made, by `RLINF_TRANSPORT`.

    Raises:
        UserError: it is neither `lane` nor `rpc`.
    """
    choice = os.environ.get("RLINF_TRANSPORT", "lane")
    if choice not in ("lane", "rpc"):
        raise UserError(f"RLINF_TRANSPORT is {choice!r}; it can be lane (the default) or rpc")
    return choice == "lane" and hasattr(socket, "AF_UNIX")


class Inner(Transport, Protocol):
    """The transport that joins all hosts, and by which lanes are agreed on."""

    offer: Offer | None
    """The answer to neighbours that ask."""

    def ask_offer(self, host: int) -> Awaitable[Offer | None]: ...


def _deaf(source: int, frame: Frame, respond: Respond) -> None:
    """Nobody listens yet, or any more."""


class LaneTransport:
    """Torch RPC to all hosts, and lanes to those of this machine.

    Args:
        inner: torch RPC's end of the mesh.
    """

    def __init__(self, inner: Inner):
        self._inner = inner
        self.host = inner.host
        self.loop: asyncio.AbstractEventLoop
        self._receiver: Receiver | None = None
        self.deliver: Callable[[int, Frame, Respond], None] = _deaf
        """Takes a frame that a host has sent."""
        self._lanes: dict[int, Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None
        self._directory: OwnDirectory | None = None
        self._callers: set[int] = set()  # neighbours that have not connected yet, once these are known
        self._late: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def hosts(self) -> int:
        return self._inner.hosts

    def bind(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.deliver = receiver.receive
        self.loop = asyncio.get_running_loop()
        self._listen()
        self._inner.bind(self)

    def send(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        lane = self._lanes.get(host)
        if lane is None:
            return self._inner.send(host, frame, answered)
        try:
            data = to_bytes(frame)
        except Exception as error:  # without this frame nothing behind it could be delivered
            self.loop.call_soon(self.lost, host, f"a frame for it could not be pickled: {error!r}")
            return
        if len(data) > LARGEST:
            return self._inner.send(host, frame, answered)
        lane.answered[frame[0]] = answered
        lane.write(_FRAME, frame[0], data)
        lane.asking.left()

    def watch(self, host: int) -> None:
        self._inner.watch(host)

    def probe(self, host: int, answered: Callable[[], None]) -> None:
        self._inner.probe(host, answered)

    # Making lanes ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Have neighbours connect, before any of them can know that this host is there."""
        token = secrets.token_bytes(_TOKEN)
        try:
            self._directory = OwnDirectory("lane", os.environ.get("XDG_RUNTIME_DIR"))
            listening = socket.socket(socket.AF_UNIX)
            listening.setblocking(False)
            listening.bind(str(self._directory.path / "lane"))
            listening.listen(socket.SOMAXCONN)
        except OSError as error:  # a read-only or full disk, a path that is too long for a socket
            logger.info("no lane for processes of this machine, torch RPC carries all: %s", error)
            self._stop_listening()
        else:
            self._own(self._serve(listening, token))
            self._inner.offer = (listening.getsockname(), token)

    async def _serve(self, listening: socket.socket, token: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Lane(self, token=token), sock=listening)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def neighbours(self, hosts: Collection[int]) -> None:
        """These hosts are on this machine: make lanes to them. The higher number of two connects."""
        if self._directory is None:
            return
        self._callers = {host for host in hosts if host > self.host and host not in self._lanes}
        for host in hosts:
            if host < self.host and host not in self._lanes:
                self._own(self._connect(host))
        if self._callers:
            self._late = asyncio.get_running_loop().call_later(2 * HELLO_SECONDS, self._stop_listening)
        else:
            self._stop_listening()

    async def _connect(self, host: int) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                offer = await self._inner.ask_offer(host)
                if offer is not None:
                    path, token = offer
                    lane = Lane(self, peer=host)
                    await asyncio.get_running_loop().create_unix_connection(lambda: lane, path)
                    lane.say_hello(self.host, token)
        except (OSError, TimeoutError) as error:
            logger.info("no lane to host %d, torch RPC carries its frames: %s", host, error)

    def made(self, lane: Lane) -> None:
        """Both ends of a lane know each other: frames go by it from now on."""
        if self._closing:
            lane.leave()
            return
        self._lanes[lane.peer] = lane
        self._callers.discard(lane.peer)
        if self._late is not None and not self._callers:
            self._stop_listening()

    def _stop_listening(self) -> None:
        self._inner.offer = None
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._server is not None:
            self._server.close()
        self._server = None
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    # What comes in -----------------------------------------------------------------------------------------------

    def receive(self, source: int, frame: Frame, respond: Respond) -> None:
        self.deliver(source, frame, respond)

    def lost(self, host: int, reason: str) -> None:
        lane = self._lanes.pop(host, None)
        if lane is not None:
            lane.leave()
        if self._receiver is not None and not self._closing:
            self._receiver.lost(host, reason)

    def ended(self, lane: Lane, farewell: bool, reason: str) -> None:
        """A lane has ended; without a farewell its peer has died."""
        if self._lanes.get(lane.peer) is lane:
            del self._lanes[lane.peer]
            if not farewell:
                self.lost(lane.peer, reason)

    async def close(self, graceful: bool) -> None:
        self._closing = True
        await cancel_all(list(self._tasks))
        self._stop_listening()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.leave(farewell=graceful)
        await self._inner.close(graceful)
        self._receiver, self.deliver = None, _deaf


class Lane(asyncio.Protocol):
    """One connection: this host's end of the lane to one neighbour.

    Args:
        owner: told when the lane is made, when frames come, and when it ends.
        peer: the host at the other end; -1 where it has yet to say who it is.
        token: what it must say first; None at the end that connects.
    """

    def __init__(self, owner: LaneTransport, *, peer: int = -1, token: bytes | None = None):
        self.peer = peer
        self._owner = owner
        self._token = token
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()  # of a message that has not come whole
        self.answered: dict[int, Callable[[Frame | None], None]] = {}
        """Whom to give the answers of frames, by their numbers."""
        self.asking = BusyPoll(owner.loop)
        """After a frame: its answer brings replies."""
        self._asked = BusyPoll(owner.loop)  # after an answer: the next frame comes at once
        self._made = self._farewell = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        transport.set_write_buffer_limits(high=LARGEST)  # `Link` bounds what is under way
        if self._token is not None:  # maybe a stranger; who called may read the welcome late
            self._late = asyncio.get_running_loop().call_later(HELLO_SECONDS, transport.abort)

    def say_hello(self, host: int, token: bytes) -> None:
        """Tell the other end who connects."""
        self.write(_HELLO, host, token)

    def leave(self, *, farewell: bool = False) -> None:
        """End the lane; with a farewell the peer does not take it for a death."""
        if self._transport is not None:
            if farewell:
                self.write(_FAREWELL, 0, b"")
            self._farewell = True
            self._transport.close()

    def write(self, kind: int, number: int, data: bytes) -> None:
        """Send a message of the lane's own: its kind, a number, and bytes."""
        assert self._transport is not None
        head = _HEAD.pack(len(data), kind, number)
        if len(data) < 1 << 16:
            self._transport.write(head + data)
        else:
            self._transport.writelines((head, data))

    # What comes in -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < _HEAD.size + _HEAD.unpack_from(self._rest)[0]:
                return
            data, self._rest = bytes(self._rest), bytearray()
        start, end = 0, len(data)
        while end - start >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(data, start)
            if not self._made and (size > _TOKEN or kind not in (_HELLO, _WELCOME)):
                return self._refuse()
            body = start + _HEAD.size
            if end - body < size or self._farewell:
                break
            start = body + size
            if kind not in (_FRAME, _ANSWER):
                self._take(kind, number, data[body:start])
                continue
            try:
                frame = from_bytes(data[body:start]) if size else None
            except Exception as error:  # nothing behind this frame can be delivered any more
                return self._owner.ended(self, False, f"it sent a frame that cannot be read here: {error!r}")
            if kind == _ANSWER:
                self.asking.came(frame is not None)
                if (answered := self.answered.pop(number, None)) is not None:
                    answered(frame)
            elif frame is not None:
                self._asked.came()
                self._owner.deliver(self.peer, frame, partial(self._respond, number))
        if start < end:
            self._rest = bytearray(data[start:] if start else data)

    def _take(self, kind: int, number: int, data: bytes) -> None:
        if kind == _FAREWELL:
            self._farewell = True
        elif kind == _HELLO and self._token is not None and hmac.compare_digest(data, self._token):
            self.peer = number
            self.write(_WELCOME, number, b"")
            self._begin()
        elif kind == _WELCOME and self._token is None:
            self._begin()
        else:
            self._refuse()

    def _begin(self) -> None:
        self._made = True
        if self._late is not None:
            self._late.cancel()
        self._owner.made(self)

    def _refuse(self) -> None:
        """A stranger, or somebody who does not speak as we do: it is not heard any more."""
        assert self._transport is not None
        self._farewell = True
        self._transport.abort()

    def _respond(self, number: int, answer: Frame | None) -> None:
        if self._farewell or self._transport is None or self._transport.is_closing():
            return
        data = b""
        if answer is not None:
            try:
                data = to_bytes(answer)
            except Exception as error:  # as in `send`
                self._owner.ended(self, False, f"an answer for it could not be pickled: {error!r}")
                return
        self.write(_ANSWER, number, data)
        self._asked.left()

    def connection_lost(self, error: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        for answered in self.answered.values() if self._farewell else ():
            answered(None)  # it left in order, and so it had what was sent
        self.answered.clear()
        if self._made:
            self._owner.ended(self, self._farewell, str(error) if error else "its process has ended")


def lanes_over(inner: Inner) -> Transport:
    """Torch RPC with lanes beside it, where they are wanted."""
    return LaneTransport(inner) if wanted() else inner


__all__ = ["Lane", "LaneTransport", "Offer", "lanes_over", "wanted"]
