"""Split tensors from structure, and move each by the cheapest route.

Flows in: any nesting of Python values with tensors, numpy arrays, promises and handles. Flows out: a payload, which is
either the value itself (same process) or `(blob, refs, parts)`: pickled structure, the promises whose values must be
fetched before it can be read, and the tensors that travel beside it. `Codec.route` alone decides how a tensor goes.

| route | when | cost |
|---|---|---|
| reference | same process | nothing |
| inline | below `INLINE_BYTES` | rides in the message |
| arena | same machine, CPU memory | one copy into shared memory, none if it already lies there |
| ipc | same machine and GPU | a CUDA IPC handle |
| group | other device or machine, `BULK_BYTES` and more | a process group's send and receive |
| rpc | the rest, and what does not fit in the arena | a copy, beside the message |

What arrives is what a tensor was at the moment of the call, even if it is written to before it has left. Two kinds are
shared instead: tensors in the arena (`Actor.empty_shared`), and CUDA tensors that go by ipc or group, of which there
may be no room for a second copy. Nobody writes to those while a receiver has them.

More than `COPY_BYTES` are copied by other threads (`shm/copies.py`). The message, and all later ones to that host, wait
until it is done (`Link.hold_back`), so that messages stay in their order and the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rlinf.runtime.base.calls import Key
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.base.tasks import together
from rlinf.runtime.base.tensor_bytes import flat_bytes
from rlinf.runtime.shm import copies
from rlinf.runtime.shm.arena import Arena, ArenaFull
from rlinf.runtime.shm.views import ArenaReader, SlotRef

from .dereference import holds_promise, resolve
from .pickle_errors import unpicklable

if TYPE_CHECKING:
    from rlinf.runtime.base.ports import Host

    from .promise import Promise

INLINE_BYTES = 64 << 10
"""Below this a tensor rides in the pickled message: a slot's bookkeeping costs about as much as copying that much."""
BULK_BYTES = 1 << 20
"""From this size on a process group's start-up cost per transfer is repaid by its bandwidth."""
COPY_BYTES = 1 << 20
"""More than this is not copied on the loop: that much takes it some tenths of a millisecond."""

SEALED_BYTES = 32 << 10
"""A queue item up to this size rides with its queue entry; a bigger one stays at its producer until it is consumed."""
SEALED = -1
"""In place of a host number: encode for whoever will read it."""

Payload = tuple[Any, ...]
"""(value,) by reference; (value, None) short atoms; (blob, refs, parts) anything else."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a promised value is kept: `key` on host `owner`."""

    owner: int
    key: Key


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A tensor that the sender hands to a process group: who sends, under which tag, and what to expect."""

    source: int
    tag: int
    device: str
    """The type of device it comes from and goes to."""
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IpcRef:
    """A CUDA tensor of this GPU: what opens it. It must be opened once, or its owner keeps the memory for ever."""

    rebuild: Callable[..., torch.Tensor]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """A CUDA tensor that travels as a copy in CPU memory."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Unsent:
    """In place of a part that could not be copied at the sender: why."""

    why: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host lives, as far as payload routes care."""

    host: int
    process: str
    """Equal for hosts that share an address space."""
    machine: str
    """Equal for hosts that can map each other's memory."""
    device: str = "cpu"
    """The GPU's unique id, or "cpu"."""
    node: str = "localhost"
    pid: int = 0


class Bulk(Protocol):
    """Moves a tensor between two hosts through a process group (see `p2p.py`).

    Sends to a host happen in the order of the calls of `send`, receives from a host in the order of `receive`.
    """

    def announce(self, tensor: torch.Tensor) -> GroupRef: ...
    def send(self, tensor: torch.Tensor, ref: GroupRef, host: int, after: asyncio.Future[None] | None) -> None: ...
    def receive(self, ref: GroupRef) -> asyncio.Future[torch.Tensor]: ...


class Codec:
    """Encodes and decodes payloads for one host.

    Args:
        place: where this host lives.
        places: where every host lives, filled as hosts become known.
        arena, reader: shared memory of this host, and its view of others'; None where the platform has none.
        lend: registers a promise whose value a peer will fetch, and says where from.
        hold: keeps a stream alive as long as the receiver of what is being encoded may use it.
        fetch: brings a promised value from another host.
        record: told (route, bytes) for the trace.
    """

    def __init__(
        self,
        place: Place,
        places: dict[int, Place],
        arena: Arena | None,
        reader: ArenaReader | None,
        lend: Callable[[Promise[Any]], ValueRef],
        hold: Callable[[Any], bool],
        fetch: Callable[[ValueRef], Awaitable[Any]],
        record: Callable[[str, int], None],
        bulk: Bulk | None = None,
    ):
        self.host: Host
        self.place = place
        self.places = places
        self.arena = arena
        self.reader = reader
        self.bulk = bulk
        self._lend = lend
        self._hold = hold
        self._fetch = fetch
        self._record = record
        self._coming: dict[GroupRef, asyncio.Future[torch.Tensor]] = {}

    def route(self, tensor: torch.Tensor, host: int) -> str:
        """The cheapest way for a tensor to another process: inline, arena, ipc, group or rpc."""
        there = self.places[host]
        size = tensor.nbytes
        same_machine = there.machine == self.place.machine
        if tensor.is_cuda and same_machine and there.device == self.place.device != "cpu":
            return "ipc"
        if size < INLINE_BYTES:
            return "inline"
        if not tensor.is_cuda and same_machine and self.arena is not None:
            return "arena"
        if self.bulk is not None and size >= BULK_BYTES:
            return "group"
        return "rpc"

    def by_reference(self, host: int) -> bool:
        """Whether `host` lives in this process, so that values need not be encoded at all."""
        return self.places[host].process == self.place.process

    def encode(self, value: Any, host: int) -> Payload:
        """Make a payload of `value` for `host`.

        Raises:
            UserError: something in it cannot be pickled; the text names the type and where it sits.
        """
        if self.by_reference(host):
            return (value,)
        if is_plain(value):
            return (value, None)  # the frame pickles it with all others, which is cheapest
        file = io.BytesIO()
        pickler = _Pickler(file, self, host)
        try:
            pickler.dump(value)
            pickler.export_devices()
        except Exception as error:  # user code runs in it, so it may be any
            self._take_back(pickler.parts, host)
            raise unpicklable(value, error) from error
        self._begin(pickler, host)
        return (file.getvalue(), tuple(pickler.refs), pickler.parts)

    def _begin(self, pickler: _Pickler, host: int) -> None:
        """Copy and send what was found, now that the whole value has been pickled."""
        filled = None
        if sum(source.nbytes for _, source in pickler.copies) <= COPY_BYTES:
            copies.copy(pickler.copies)
        else:
            later = [(to, source, copies.snapshot(source)) for to, source in pickler.copies]
            copies.copy([(to, source) for to, source, lazy in later if lazy is None])
            begun = copies.start((to, lazy) for to, _, lazy in later if lazy is not None)
            if begun:
                filled = self.host.own(self._filled([asyncio.wrap_future(each) for each in begun], pickler.parts, host))
                self.host.link(host).hold_back(filled)
        for tensor, ref in pickler.sends:
            assert self.bulk is not None
            self.bulk.send(tensor, ref, host, filled)

    async def _filled(self, begun: list[asyncio.Future[None]], parts: list[Any], host: int) -> None:
        """Wait until a message's tensors have been copied; it says why, if they could not be."""
        with getattr(self.host.loop, "external", contextlib.nullcontext)():  # holds virtual time still meanwhile
            await asyncio.wait(begun)
        failed = next((error for each in begun if (error := each.exception()) is not None), None)
        if failed is not None:
            self._take_back(parts, host)
            parts[:] = [part if type(part) is GroupRef else Unsent(repr(failed)) for part in parts]

    def _take_back(self, parts: Iterable[Any], host: int) -> None:
        """Nobody will open these slots."""
        for part in parts:
            if type(part) is SlotRef and self.arena is not None:
                self.arena.release(host, [part.slot])

    def seal(self, value: Any) -> bytes | None:
        """`value` as bytes that any host can read and nobody on the way needs to; None if it is too big for that.

        Raises:
            UserError: something in it cannot be pickled.
        """
        file = io.BytesIO()
        try:
            _Pickler(file, self, SEALED).dump(value)
        except _TooBig:
            return None
        except Exception as error:  # user code runs in it, so it may be any
            raise unpicklable(value, error) from error
        return file.getvalue() if file.tell() <= SEALED_BYTES else None

    def unseal(self, blob: bytes) -> Any:
        """The value that was sealed."""
        return self._load(blob, (), ())

    def ready(self, payload: Payload) -> bool:
        """Whether `decode_now` can read it: nothing to wait for."""
        if len(payload) < 3:
            return len(payload) == 2 or not holds_promise(payload[0])
        return not payload[1] and not any(map(_comes_later, payload[2]))

    def arrived(self, payload: Payload) -> None:
        """Post the receives for what process groups bring; called for each message in order, when it is delivered.

        They are the host's tasks, so they end even if nobody wants the payload.
        """
        if len(payload) == 3:
            for part in payload[2]:
                if type(part) is GroupRef:
                    assert self.bulk is not None
                    self._coming[part] = coming = self.bulk.receive(part)
                    coming.add_done_callback(_seen)

    def decode_now(self, payload: Payload) -> Any:
        """The value of a payload that is `ready`."""
        if len(payload) < 3:
            return payload[0]
        return self._load(payload[0], (), payload[2])

    async def decode(self, payload: Payload) -> Any:
        """The value of a payload that has `arrived`, after fetching what it refers to."""
        if len(payload) < 3:
            try:
                return await resolve(payload[0], shared=True)
            finally:
                del payload  # promises in it lead to their error, and its traceback here
        blob, refs, parts = payload
        parts = list(parts)
        try:
            values = await together([self._fetch(ref) for ref in refs])
            for index, part in enumerate(parts):
                if type(part) is GroupRef:  # its end, whatever becomes of it here, keeps the order of receives
                    parts[index] = await asyncio.shield(self._coming[part])
                    del self._coming[part]
                elif _comes_later(part):
                    parts[index] = await asyncio.wrap_future(copies.submit(copies.onto_device, part.tensor))
        except BaseException:
            self.discard((blob, refs, parts))
            raise
        return self._load(blob, values, parts)

    def discard(self, payload: Payload) -> None:
        """Let go of a payload that has `arrived` and nobody will read, so that the sender gets its memory back."""
        if len(payload) < 3:
            return
        for part in payload[2]:
            if type(part) is GroupRef:
                self._coming.pop(part, None)
            elif type(part) is SlotRef or type(part) is IpcRef:
                self._open(part)

    def _open(self, part: Any) -> Any:
        if type(part) is IpcRef:
            return part.rebuild(*part.args)
        if type(part) is SlotRef:
            assert self.reader is not None
            return self.reader.open(part)
        if type(part) is Staged:
            return part.tensor.cuda() if torch.cuda.is_available() else part.tensor
        if type(part) is Unsent:
            raise RuntimeFault(f"a tensor could not be copied where it was sent from: {part.why}")
        return part

    def _load(self, blob: bytes, values: Iterable[Any], parts: Iterable[Any]) -> Any:
        previous = getattr(_reading, "now", None)
        _reading.now = now = _Reading(self, list(values), list(parts))
        try:
            return pickle.loads(blob)
        except BaseException:
            self.discard((blob, (), now.parts))  # those that it had not come to
            now.parts.clear()  # the traceback leads here
            raise
        finally:
            _reading.now = previous


@dataclass(slots=True)
class _Reading:
    codec: Codec
    values: list[Any]
    parts: list[Any]


_reading = threading.local()


def reading_codec() -> Codec | None:
    """The codec that is decoding right now on this thread, for handles that bind to their host when they arrive."""
    now = getattr(_reading, "now", None)
    return None if now is None else now.codec


class _Pickler(pickle.Pickler):
    """Pickles structure; tensors, arrays and promises are replaced by what fetches them at the other end."""

    def __init__(self, file: io.BytesIO, codec: Codec, host: int):
        super().__init__(file, protocol=5)
        self.refs: list[ValueRef] = []
        self.parts: list[Any] = []
        self.copies: list[copies.Copy] = []
        """To be made, now or in other threads, once everything has been pickled."""
        self.sends: list[tuple[torch.Tensor, GroupRef]] = []
        """To be started after that: what is sent must be received."""
        self.exports: list[int] = []
        """Which parts are CUDA tensors whose handles are made after that: what has a handle must be opened."""
        self._codec = codec
        self._host = host
        self._sealed_bytes = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        lent = getattr(type(obj), "__lend__", None)
        if lent is not None:
            return lent(obj, self)
        return NotImplemented

    def lend(self, promise: Promise[Any]) -> Any:
        """Replace a promise by the place its value will be fetched from."""
        self.refs.append(self._codec._lend(promise))
        return _value, (len(self.refs) - 1,)

    def hold(self, stream: Any) -> bool:
        """Keep a stream alive as long as the receiver may use it; whether the receiver's handle does that itself."""
        return self._codec._hold(stream)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return NotImplemented
        tensor = tensor.detach()
        codec, host = self._codec, self._host
        if host == SEALED:
            self._sealed_bytes += tensor.nbytes
            if self._sealed_bytes > SEALED_BYTES:
                raise _TooBig
            route = "inline"
        else:
            route = codec.route(tensor, host)
        if route == "inline":
            codec._record(route, tensor.nbytes)
            raw = flat_bytes(tensor.resolve_conj().resolve_neg()).cpu().numpy().tobytes()
            return _from_bytes, (raw, tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
        part: Any = self._in_arena(tensor) if route == "arena" else None
        if part is None and route == "arena":
            codec._record("arena full", tensor.nbytes)
            route = "group" if codec.bulk is not None and tensor.nbytes >= BULK_BYTES else "rpc"
        codec._record(route, tensor.nbytes)
        if route == "ipc":
            part = tensor.resolve_conj().resolve_neg()
            self.exports.append(len(self.parts))
        elif route == "group":
            part = self._by_group(tensor)
        elif route == "rpc":
            part = copied = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copies.append((copied, tensor))
            if tensor.is_cuda:
                part = Staged(copied)
        self.parts.append(part)
        return _part, (len(self.parts) - 1,)

    def _in_arena(self, tensor: torch.Tensor) -> SlotRef | None:
        """The tensor, or the place of its copy, in shared memory; None if that is full."""
        arena = self._codec.arena
        assert arena is not None
        ref = arena.lend(tensor, self._host)
        if ref is None:
            try:
                fresh = arena.empty(tensor.shape, tensor.dtype)
            except ArenaFull:
                return None
            self.copies.append((fresh, tensor))
            ref = arena.lend(fresh, self._host)
        return ref

    def _by_group(self, tensor: torch.Tensor) -> GroupRef:
        bulk = self._codec.bulk
        assert bulk is not None
        if tensor.is_cuda:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            tensor = copies.frozen(tensor)
        else:
            strided, tensor = tensor, torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copies.append((tensor, strided))
        ref = bulk.announce(tensor)
        self.sends.append((tensor, ref))
        return ref

    def export_devices(self) -> None:
        """Make the handles of CUDA tensors."""
        for index in self.exports:
            from torch.multiprocessing.reductions import reduce_tensor

            self.parts[index] = IpcRef(*reduce_tensor(self.parts[index]))

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if type(array) is not np.ndarray or array.nbytes < INLINE_BYTES or array.dtype.kind not in "biufc":
            return NotImplemented
        plain = np.require(array, requirements=["C", "W"]).reshape(-1).view(np.uint8)
        rebuild, args = self._tensor(torch.from_numpy(plain))
        return _to_array, (array.dtype, array.shape, rebuild, args)


class _TooBig(Exception):
    """What is being sealed is too big to ride along."""


_PLAIN = frozenset({int, float, bool, type(None)})


def is_plain(value: Any) -> bool:
    """Whether a call's (args, kwargs) or result is nothing but short atoms, which need no encoding of their own."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is str or kind is bytes:
        return len(value) <= INLINE_BYTES
    if kind is tuple and len(value) <= 8:
        return all(type(each) in _PLAIN or is_plain(each) for each in value)
    return kind is dict and not value


def _value(index: int) -> Any:
    return _reading.now.values[index]


def _part(index: int) -> torch.Tensor:
    now: _Reading = _reading.now
    part: torch.Tensor = now.parts[index]
    now.parts[index] = part = now.codec._open(part)
    return part


def _comes_later(part: Any) -> bool:
    """Whether reading it must wait: for a process group, or for a copy that is too big for the loop."""
    return type(part) is GroupRef or (
        type(part) is Staged and part.tensor.nbytes > COPY_BYTES and torch.cuda.is_available()
    )


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # whoever reads the payload hears of it; it may be nobody


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], to_device: bool) -> torch.Tensor:
    if not raw:
        return _on_device(torch.empty(shape, dtype=dtype), to_device)
    return _on_device(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape), to_device)


def _on_device(tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
    return tensor.cuda() if to_device and torch.cuda.is_available() else tensor


def _to_array(dtype: np.dtype[Any], shape: tuple[int, ...], rebuild: Any, args: Any) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = rebuild(*args).numpy()
    return flat.view(dtype).reshape(shape)
