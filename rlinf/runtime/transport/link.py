"""How batches of messages get from host to host, and in which order.

Flows in: messages posted to a `Link` during one tick of the loop. Flows out: one frame per tick and peer, delivered
in order at the other end. Who wakes whom: the first message posted schedules the flush at the end of the tick; an
arriving frame wakes the messages' receivers; whatever the receiver has to say to the sender once it has delivered a
frame rides back on that frame's own response.

A `Transport` only moves frames. Batching, sequence numbers and re-ordering live in `Link`, so every transport behaves
the same. `LocalTransport` is the in-process twin of the torch RPC transport in `torch_rpc.py`.

What goes over the wire: kinds of messages, the flags and outcomes in them, frames of them, and frames as bytes.

Messages are sequences whose first entry is their kind:
    [CALL, number, endpoint, payload, flags, parent, gang]    a reply is expected
    (REPLY, number, outcome, payload)
    (REPLIES, numbers, values)                                short values of calls that ended well
    (CAST, actor, method, args)                               no reply; the runtime's own, plain data only
    (CANCEL, number)
    (DROP, key)                                               a value that was kept is needed no more
    (FREE, slots)                                             of shared memory; below 0: CUDA handles

A call is a list, since its flags may change until it leaves. Its endpoint is (number, actor, method, name) the first
time, and that number from then on. Its payload is what `values/codec.py` makes of (args, kwargs), or, flagged PLAIN,
the arguments themselves.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from rlinf.runtime.base.tensors import flat_bytes

CALL, REPLY, CAST, CANCEL, DROP, FREE, REPLIES = range(7)

WANT, KEEP, PLAIN = 1, 2, 4
"""Flags of a call: send the value with the reply; keep it for whoever fetches it; the payload is its arguments."""
FLAGS = 4
"""Where in the message of a call they are."""

OK, ERROR, HELD, CANCELLED = range(4)
"""How a call ended: with a value, an error, a value that is kept where it was made, or cancelled."""

Message = Sequence[Any]
Frame = tuple[int, list[Message]]
"""An ordered batch of messages between two hosts, and its position among all frames from this sender to this receiver,
counted from 0."""
Endpoint = tuple[tuple[int, int], str, str]
"""Of an actor: (actor, method, name of the call)."""
Packed = tuple[bytes, list[torch.Tensor]]
"""A frame pickled, with its tensors beside it."""


def pack(frame: Frame) -> Packed:
    """A frame as bytes, with the tensors of its payloads beside them, unread."""
    if not any(message[0] <= REPLY and carries_tensors(message) for message in frame[1]):
        return pickle.dumps(frame, 5), []
    file = io.BytesIO()
    splitter = _TensorSplitter(file)
    splitter.dump(frame)
    return file.getvalue(), splitter.tensors


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Frame:
    """The frame that was packed."""
    frame: Frame = _TensorJoiner(io.BytesIO(data), tensors).load() if tensors else pickle.loads(data)
    return frame


def to_bytes(frame: Frame) -> bytes:
    """A frame as bytes alone, tensors included, for a transport that moves nothing else."""
    for message in frame[1]:
        if message[0] <= REPLY and len(message[3]) == 3 and carries_tensors(message):
            data, tensors = pack(frame)
            plain = [(flat_bytes(tensor.cpu()).numpy().tobytes(), tensor.dtype, (*tensor.shape,)) for tensor in tensors]
            return pickle.dumps((data, plain), 5)
    return pickle.dumps(frame, 5)


def from_bytes(data: bytes) -> Frame:
    """The frame that `to_bytes` made these of."""
    first, rest = pickle.loads(data)
    return (first, rest) if type(first) is int else unpack(first, [_tensor(*plain) for plain in rest])


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def carries_tensors(message: Message) -> bool:
    """True if the payload of a call or reply, which is (bytes, references, parts), has tensors beside it."""
    payload = message[3]
    if len(payload) < 3 or type(payload[0]) is not bytes or (message[0] == CALL and message[FLAGS] & PLAIN):
        return False
    return any(map(_is_tensor, payload[2]))


def _is_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor) or isinstance(getattr(part, "tensor", None), torch.Tensor)


class _TensorSplitter(pickle.Pickler):
    """Pickles a frame; tensors in it are collected beside the bytes."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return len(self.tensors) - 1
        return None


class _TensorJoiner(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


Respond = Callable[["Frame | None"], None]

FRAMES_IN_FLIGHT = 4
"""Unanswered frames per peer. A response comes as soon as the frame is delivered, so a small number keeps the lane
full; what is posted meanwhile gathers into the next frame, which is what makes a crowded lane efficient."""
MESSAGES = 64
"""In one frame at most: the peer works on the first part of a long tick while the rest is being written."""
ALL = 1 << 60
LAZY_SECONDS = 5e-3
"""How long a message without haste waits for company: much longer than a call, too short to hold memory back."""


class Receiver(Protocol):
    """Interface that a transport delivers to."""

    def receive(self, source: int, frame: Frame, respond: Respond) -> None:
        """Take a frame from host `source`; call `respond` exactly once, soon, with a frame to send back or None."""

    def lost(self, host: int, reason: str) -> None:
        """Host `host` is gone for good."""


class Transport(Protocol):
    """Moves frames between hosts. All methods are called on the loop's thread."""

    @property
    def host(self) -> int:
        """The host that this end is on."""

    @property
    def hosts(self) -> int:
        """How many there are."""

    def bind(self, receiver: Receiver) -> None:
        """Deliver arriving frames to `receiver` from now on."""

    def send(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        """Send without blocking; `answered` runs on the loop with the response, unless the host is lost."""

    def watch(self, host: int) -> None:
        """Report the loss of `host` through `Receiver.lost` from now on, whether or not anything is in flight."""

    def probe(self, host: int, answered: Callable[[], None]) -> None:
        """Ask whether a host's process lives; `answered` runs on the loop."""

    def neighbours(self, hosts: Collection[int]) -> None:
        """These other hosts live on this machine, so there may be a quicker way to them."""

    async def close(self, graceful: bool) -> None:
        """Stop moving frames and free all that the transport holds."""


class Deliver(Protocol):
    """A host as its links see it."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, link: Link, message: Message) -> None:
        """Take a message from the peer."""

    def leaves_unawaited(self, message: list[Any]) -> None:
        """The message of a call is about to leave, and nobody awaits the call's value: settle what becomes of it."""


class Link:
    """One ordered lane from this host to a peer, and back.

    Posted entries are messages, those of calls as lists, or objects with a `message()` method that is called when the
    frame leaves.
    """

    def __init__(self, peer: int, transport: Transport, host: Deliver):
        self.peer = peer
        self.numbers: dict[Endpoint, int] = {}
        """Endpoints that the peer has been told of."""
        self.endpoints: dict[int, Endpoint] = {}
        """Endpoints that the peer has told of."""
        self._transport = transport
        self._loop = host.loop
        self._host = host
        self._outbox: list[Any] = []
        self._scheduled = False
        self._unanswered = 0
        self._next_out = 0
        self._next_in = 0
        self._early: dict[int, tuple[Frame, Respond | None]] = {}
        self._unconfirmed = False
        self._dead = False
        self._quiet: asyncio.Future[None] | None = None
        self._held: deque[tuple[asyncio.Future[None], list[Any]]] = deque()

    def post(self, message: Any) -> None:
        """Queue a message; it leaves at the end of this tick together with all others to the same peer."""
        if self._dead:
            return
        if self._held:
            self._held[-1][1].append(message)
            return
        self._outbox.append(message)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def reply(self, number: int, value: Any) -> None:
        """Queue the short value of a call that has ended well; it shares a message with those queued just before."""
        entries = self._held[-1][1] if self._held else self._outbox
        last = entries[-1] if entries else None
        if type(last) is tuple and last[0] == REPLIES:
            last[1].append(number)
            last[2].append(value)
        else:
            self.post((REPLIES, [number], [value]))

    def introduce(self, endpoint: Endpoint) -> tuple[Any, ...]:
        """An endpoint and its number from now on, as the first call of it says them."""
        self.numbers[endpoint] = number = len(self.numbers)
        return (number, *endpoint)

    def post_lazily(self, message: Any) -> None:
        """Queue a message that need not hurry: it rides with the next one that does, or leaves after `LAZY_SECONDS`."""
        if self._held:
            self.post(message)
        elif not self._dead:
            self._outbox.append(message)
            if not self._scheduled:
                self._loop.call_later(LAZY_SECONDS, self._flush)

    def hold_back(self, ready: asyncio.Future[None]) -> None:
        """Let what is posted from now on leave once `ready` is done: memory that the next message speaks of is being
        filled. If it is cancelled, nothing leaves any more."""
        if not self._dead:
            self._held.append((ready, []))
            ready.add_done_callback(self._let_go)

    def _let_go(self, _: asyncio.Future[None]) -> None:
        while self._held and self._held[0][0].done() and not self._held[0][0].cancelled():
            self._outbox += self._held.popleft()[1]
        if self._outbox and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        self._moved()

    def _flush(self) -> None:
        """Send a frame, if there is something to say and room for it."""
        self._scheduled = False
        if not self._outbox or self._unanswered >= FRAMES_IN_FLIGHT or self._dead:
            return
        self._unanswered += 1
        self._transport.send(self.peer, self._take(MESSAGES), self._answered)
        if self._outbox:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _take(self, most: int) -> Frame:
        """The next frame, of so many messages."""
        messages, self._outbox = self._outbox, []
        if len(messages) > most:
            messages, self._outbox = messages[:most], messages[most:]
        for index, message in enumerate(messages):
            if type(message) is list:
                if not message[FLAGS] & WANT:
                    self._host.leaves_unawaited(message)
            elif type(message) is not tuple:
                messages[index] = message.message()
        self._next_out += 1
        return self._next_out - 1, messages

    def _answered(self, frame: Frame | None) -> None:
        self._unanswered -= 1
        if frame is not None:
            self.receive(frame)
        if self._outbox and not self._scheduled:
            self._flush()
        if self._quiet is not None:
            self._moved()

    def receive(self, frame: Frame, respond: Respond | None = None) -> None:
        """Deliver a frame that the peer sent, and answer it with whatever there is to say by then.

        Calls that end without ever waiting are finished by then, so that their replies ride in the answer. A frame that
        overtook another waits for it, and so does its answer: an answered frame has been delivered.

        Args:
            frame: that has arrived.
            respond: answers it; None for a frame that is an answer itself.
        """
        if frame[0] != self._next_in:
            self._early[frame[0]] = (frame, respond)
            return
        scheduled, self._scheduled = self._scheduled, True  # what is said meanwhile rides in the answer
        arrived: Frame | None = frame
        try:
            while arrived is not None:
                self._next_in += 1
                for message in arrived[1]:
                    try:
                        self._host.deliver(self, message)
                    except Exception as error:  # it must not take the messages behind it along, or the lane
                        what = f"a message from host {self.peer} could not be delivered"
                        self._loop.call_exception_handler({"message": what, "exception": error})
                if respond is not None:
                    answer = self._take(ALL) if self._outbox and not self._dead else None
                    self._unconfirmed |= answer is not None
                    respond(answer)
                    if self._quiet is not None:  # what left so is not confirmed: whoever drains has to ask
                        self._moved()
                arrived, respond = self._early.pop(self._next_in, (None, None)) if self._early else (None, None)
        finally:
            self._scheduled = scheduled
            if self._outbox and not scheduled:
                self._scheduled = True
                self._loop.call_soon(self._flush)

    async def drained(self) -> None:
        """Wait until all that was posted so far has been delivered, or the peer is gone."""
        while (self._outbox or self._held or self._unanswered or self._unconfirmed) and not self._dead:
            if self._unconfirmed and not self._outbox and not self._held and self._unanswered < FRAMES_IN_FLIGHT:
                self._unconfirmed = False  # responses are not answered: an empty frame behind them is
                self._unanswered += 1
                self._transport.send(self.peer, self._take(MESSAGES), self._answered)
            if self._quiet is None or self._quiet.done():
                self._quiet = self._loop.create_future()
            await self._quiet

    def _moved(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def kill(self) -> None:
        """The peer is gone: drop what was queued and send nothing any more."""
        self._dead = True
        self._outbox.clear()
        self._held.clear()
        self._early.clear()
        self._moved()


class LocalTransport:
    """The in-process twin: several hosts on one loop, frames handed over by reference.

    `copy` is applied to every frame on its way; tests pass a pickling round trip to see on one laptop process what
    would break between processes.
    """

    def __init__(self, host: int, network: dict[int, LocalTransport], copy: Callable[[Frame], Frame] | None = None):
        self.host = host
        self._network = network
        self._copy = copy
        self._receiver: Receiver | None = None
        self._early: list[Callable[[], None]] = []
        self._watched: set[int] = set()
        network[host] = self

    @property
    def hosts(self) -> int:
        return len(self._network)

    def bind(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for arrive in self._early:
            asyncio.get_running_loop().call_soon(arrive)
        self._early.clear()

    def send(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._hand_over, host, self._copied(frame), answered)

    def _copied(self, frame: Frame) -> Frame:
        return frame if self._copy is None else self._copy(frame)

    def _hand_over(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        peer = self._network.get(host)
        if peer is None:
            self._tell_lost(host)
            return
        if peer._receiver is None:
            peer._early.append(lambda: self._hand_over(host, frame, answered))
            return

        def respond(answer: Frame | None) -> None:
            copied = None if answer is None else self._copied(answer)
            asyncio.get_running_loop().call_soon(self._take_answer, answered, copied)

        peer._receiver.receive(self.host, frame, respond)

    def _take_answer(self, answered: Callable[[Frame | None], None], answer: Frame | None) -> None:
        if self._receiver is not None:
            answered(answer)

    def watch(self, host: int) -> None:
        self._watched.add(host)

    def probe(self, host: int, answered: Callable[[], None]) -> None:
        if host in self._network:
            asyncio.get_running_loop().call_soon(answered)

    def neighbours(self, hosts: Collection[int]) -> None:
        """Frames are handed over as it is."""

    def _tell_lost(self, host: int) -> None:
        if self._receiver is not None:
            self._receiver.lost(host, "its host was closed")

    async def close(self, graceful: bool) -> None:
        self._receiver = None
        self._network.pop(self.host, None)
        for peer in list(self._network.values()):
            if not graceful and self.host in peer._watched:
                asyncio.get_running_loop().call_soon(peer._tell_lost, self.host)


def check_hosts(hosts: Sequence[int], count: int) -> str | None:
    """The complaint about host numbers outside 0 … known-1, or None."""
    wrong = sorted({h for h in hosts if not 0 <= h < count})
    if not wrong:
        return None
    have = "host 0 only" if count == 1 else f"hosts 0 to {count - 1}"
    return f"unknown host {', '.join(map(str, wrong))}: this system has {have}"
