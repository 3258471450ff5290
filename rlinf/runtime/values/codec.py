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
| rpc | the rest | torch RPC's tensor path |
"""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rlinf.runtime.base.calls import Key
from rlinf.runtime.base.tasks import together
from rlinf.runtime.base.tensor_bytes import flat_bytes
from rlinf.runtime.shm.arena import Arena
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
    """Moves a tensor between two hosts through a process group (see `p2p.py`)."""

    def send(self, tensor: torch.Tensor, host: int) -> GroupRef: ...
    async def receive(self, ref: GroupRef) -> torch.Tensor: ...


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
        except Exception as error:  # user code runs in it, so it may be any
            self.discard((b"", (), tuple(pickler.parts)), own=True, host=host)
            raise unpicklable(value, error) from error
        return (file.getvalue(), tuple(pickler.refs), tuple(pickler.parts))

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
        return not payload[1] and not any(type(part) is GroupRef for part in payload[2])

    def decode_now(self, payload: Payload) -> Any:
        """The value of a payload that is `ready`."""
        if len(payload) < 3:
            return payload[0]
        return self._load(payload[0], (), payload[2])

    async def decode(self, payload: Payload) -> Any:
        """The value of a payload, after fetching what it refers to."""
        if len(payload) < 3:
            try:
                return await resolve(payload[0], shared=True)
            finally:
                del payload  # promises in it lead to their error, and its traceback here
        blob, refs, parts = payload
        coming = self._receive(parts)  # before anything else waits: receives follow the order of the messages
        try:
            values = await together([self._fetch(ref) for ref in refs])
        except BaseException:
            self.discard((blob, refs, [part for part in parts if type(part) is SlotRef]))
            raise
        received = [await coming[i] if i in coming else part for i, part in enumerate(parts)]
        return self._load(blob, values, received)

    def _receive(self, parts: Iterable[Any]) -> dict[int, asyncio.Task[torch.Tensor]]:
        """Start receiving what process groups bring; tasks of the host, so they end even if nobody waits."""
        coming = {}
        for index, part in enumerate(parts):
            if type(part) is GroupRef:
                assert self.bulk is not None
                coming[index] = self.host.own(self.bulk.receive(part))
        return coming

    def discard(self, payload: Payload, *, own: bool = False, host: int = -1) -> None:
        """Let go of a payload that nobody will read, so that its arena slots return."""
        if len(payload) < 3:
            return
        for part in payload[2]:
            if type(part) is SlotRef:
                if own and self.arena is not None:
                    self.arena.release(host, [part.slot])
                elif self.reader is not None:
                    self.reader.open(part)
        if not own:
            self._receive(payload[2])

    def _load(self, blob: bytes, values: Iterable[Any], parts: Iterable[Any]) -> Any:
        previous = getattr(_reading, "now", None)
        _reading.now = now = _Reading(self, list(values), list(parts))
        try:
            return pickle.loads(blob)
        except BaseException:
            self.discard((blob, (), tuple(now.parts)))  # those that it had not come to
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
        tensor = tensor.detach().resolve_conj().resolve_neg()
        codec, host = self._codec, self._host
        if host == SEALED:
            self._sealed_bytes += tensor.nbytes
            if self._sealed_bytes > SEALED_BYTES:
                raise _TooBig
            route = "inline"
        else:
            route = codec.route(tensor, host)
        codec._record(route, tensor.nbytes)
        if route == "inline":
            raw = flat_bytes(tensor).cpu().numpy().tobytes()
            return _from_bytes, (raw, tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
        if route == "ipc":
            from torch.multiprocessing.reductions import reduce_tensor

            return reduce_tensor(tensor)
        if route == "arena":
            assert codec.arena is not None
            self.parts.append(codec.arena.export(tensor, host))
        elif route == "group":
            assert codec.bulk is not None
            self.parts.append(codec.bulk.send(tensor, host))
        else:
            self.parts.append(tensor.cpu())
        return _part, (len(self.parts) - 1, tensor.is_cuda)

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


def _part(index: int, to_device: bool) -> torch.Tensor:
    now: _Reading = _reading.now
    part = now.parts[index]
    if type(part) is SlotRef:
        assert now.codec.reader is not None
        part = now.parts[index] = now.codec.reader.open(part)
    return _on_device(part, to_device)


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], to_device: bool) -> torch.Tensor:
    if not raw:
        return _on_device(torch.empty(shape, dtype=dtype), to_device)
    return _on_device(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape), to_device)


def _on_device(tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
    return tensor.cuda() if to_device and torch.cuda.is_available() else tensor


def _to_array(dtype: np.dtype[Any], shape: tuple[int, ...], rebuild: Any, args: Any) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = rebuild(*args).numpy()
    return flat.view(dtype).reshape(shape)
