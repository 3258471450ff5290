"""Values as bytes, with all that is big or lives elsewhere taken out; and back.

Flows in: a value, or bytes and what was beside them. Flows out: bytes; references that stand for what travels beside
them; and what is still to be done before they may leave: copies, sends, handles to be made. Or an error that says which
part of the value cannot be sent. Nobody waits here; user code runs (its `__reduce__`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rlinf.runtime.base.calls import Key
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tensors import flat_bytes
from rlinf.runtime.transport import copies
from rlinf.runtime.transport.arena import Arena, ArenaFull, ArenaReader, SlotRef

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host
    from rlinf.runtime.values.promise import Promise

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
    """A CUDA tensor of this GPU: what opens it. It must be opened or refused once, or its owner keeps the memory."""

    owner: int
    """Rank of the host whose memory it is."""
    number: int
    """Below 0; unique over the owner's life."""
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


def unpicklable(value: Any, error: Exception) -> Exception:
    """Return the error to raise when pickling `value` has raised `error`."""
    if isinstance(error, RuntimeFault):  # it says itself what to do
        return error
    where, culprit = _culprit(value)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    return UserError(
        f"cannot send {where}a {kind} ({str(culprit)[:80]}) to another process: {error}. "
        "Send plain data and tensors, or classes and functions defined at the top level of a module."
    )


def _culprit(value: Any, where: str = "") -> tuple[str, Any]:
    """The smallest part of `value` that does not pickle, and where it sits, as "[0]['fn'].hook: "."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"[{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"[{i}]", child) for i, child in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    for step, child in children:
        if where.count("[") + where.count(".") < 8 and not _pickles(child):
            return _culprit(child, where.removesuffix(": ") + step + ": ")
    return where, value


class _Trial(pickle.Pickler):
    """Pickles all but what the real one would replace, and what would be replaced is fine."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.Tensor, np.ndarray)) or hasattr(type(obj), "__lend__"):
            return str, ()
        return NotImplemented


def _pickles(value: Any) -> bool:
    try:
        _Trial(io.BytesIO(), protocol=5).dump(value)
    except Exception:  # any failure at all means "not this one"
        return False
    return True


INLINE_BYTES = 64 << 10
"""Below this a tensor rides in the pickled message: a slot's bookkeeping costs about as much as copying that much. So
does a CUDA handle: it takes events and a counter here, mapping memory there, and keeps a block of the allocator's, 2 MB
or more, from being used again until the receiver has let go."""
BULK_BYTES = 1 << 20
"""From this size on a process group's start-up cost per transfer is repaid by its bandwidth."""
COPY_BYTES = 1 << 20
"""More than this is not copied on the loop: that much takes it some tenths of a millisecond."""

SEALED_BYTES = 32 << 10
"""A queue item up to this size rides with its queue entry; a bigger one stays at its producer until it is consumed."""
SEALED, HERE = -1, -2
"""In place of a host number: encode for whoever will read it; for this host itself."""


class Store(Protocol):
    """Interface that a codec needs of its host's store of values; see `object_store.py`."""

    arena: Arena | None
    reader: ArenaReader | None
    """View of others' shared memory; None, as `arena`, where the platform has none."""
    handles: Any
    """Of CUDA memory, this host's and others'."""

    def lend(self, promise: Promise[Any]) -> ValueRef: ...
    def hold(self, stream: Any) -> bool: ...
    def fetch(self, ref: ValueRef) -> Any: ...


class Encoder(Protocol):
    """Interface that a pickler needs of its host's codec; see `codec.py`."""

    host: Host
    store: Store
    bulk: Bulk | None
    copied: dict[Any, torch.Tensor] | None

    def route(self, tensor: torch.Tensor, host: int) -> str: ...
    def as_it_is(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def open_part(self, part: Any) -> Any: ...
    def discard(self, payload: Any) -> None: ...
    def record(self, route: str, size: int) -> None: ...


@dataclass(slots=True)
class _Reading:
    codec: Encoder
    values: list[Any]
    parts: list[Any]


_reading = threading.local()


def reading_codec() -> Encoder | None:
    """The codec that is decoding right now on this thread, for handles that bind to their host when they arrive."""
    now = getattr(_reading, "now", None)
    return None if now is None else now.codec


def load(codec: Encoder, blob: bytes, values: Iterable[Any], parts: Iterable[Any]) -> Any:
    """The value that was pickled into `blob`, with the fetched values and the parts that belong to it."""
    previous = getattr(_reading, "now", None)
    _reading.now = now = _Reading(codec, list(values), list(parts))
    try:
        return pickle.loads(blob)
    except BaseException:
        codec.discard((blob, (), now.parts))  # those that it had not come to
        now.parts.clear()  # the traceback leads here
        raise
    finally:
        _reading.now = previous


class Pickler(pickle.Pickler):
    """Pickles structure; tensors, arrays and promises are replaced by what fetches them at the other end."""

    def __init__(self, file: io.BytesIO, codec: Encoder, host: int):
        super().__init__(file, protocol=5)
        self.refs: list[ValueRef] = []
        self.parts: list[Any] = []
        self.copies: list[copies.Copy] = []
        """To be made, now or in other threads, once everything has been pickled."""
        self.sends: list[tuple[torch.Tensor, GroupRef]] = []
        """To be started after that: what is sent must be received."""
        self.exports: list[int] = []
        """Which parts are CUDA tensors whose handles are made after that: what has a handle must be opened."""
        self.shares = False
        """Some of its parts are copies that were made for another rank of the same call."""
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
        self.refs.append(self._codec.store.lend(promise))
        return _value, (len(self.refs) - 1,)

    def hold(self, stream: Any) -> bool:
        """Keep a stream alive as long as the receiver may use it; whether the receiver's handle does that itself."""
        return self._codec.store.hold(stream)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return NotImplemented
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.nbytes >= INLINE_BYTES:
            tensor = tensor.detach()  # else there is nothing to detach, and small tensors have to be quick
        codec, host = self._codec, self._host
        if host == SEALED:
            self._sealed_bytes += tensor.nbytes
            if self._sealed_bytes > SEALED_BYTES:
                raise TooBig
            route = "inline"
        elif host == HERE:
            self.parts.append(tensor)
            return _part, (len(self.parts) - 1,)
        else:
            route = codec.route(tensor, host)
        if route == "inline":
            codec.record(route, tensor.nbytes)
            return _from_bytes, (_to_bytes(tensor), tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
        part: Any = self._in_arena(tensor) if route == "arena" else None
        if part is None and route == "arena":
            codec.record("arena full", tensor.nbytes)
            route = "group" if codec.bulk is not None and tensor.nbytes >= BULK_BYTES else "rpc"
        codec.record(route, tensor.nbytes)
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
        arena = self._codec.store.arena
        assert arena is not None
        ref = arena.lend(tensor, self._host)
        if ref is not None:
            return ref
        copied = self._codec.copied
        # not its address: to ask for that would end the sharing that `copies.snapshot` has begun
        storage = tensor.untyped_storage()._cdata
        memory = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
        fresh = None if copied is None else copied.get(memory)
        self.shares |= fresh is not None
        if fresh is None:
            try:
                fresh = arena.empty(tensor.shape, tensor.dtype)
            except ArenaFull:
                return None
            self.copies.append((fresh, tensor))
            if copied is not None:
                copied[memory] = fresh
        return arena.lend(fresh, self._host)

    def _by_group(self, tensor: torch.Tensor) -> GroupRef:
        codec, bulk = self._codec, self._codec.bulk
        assert bulk is not None
        if tensor.is_cuda:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            lazy = codec.as_it_is(tensor)
            tensor = tensor.clone() if lazy is None else lazy
        else:
            strided, tensor = tensor, torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copies.append((tensor, strided))
        ref: GroupRef = bulk.announce(tensor)
        self.sends.append((tensor, ref))
        return ref

    def export_devices(self) -> None:
        """Make the handles of CUDA tensors."""
        for index in self.exports:
            self.parts[index] = self._codec.store.handles.export(self.parts[index], self._host)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if type(array) is not np.ndarray or array.nbytes < INLINE_BYTES or array.dtype.kind not in "biufc":
            return NotImplemented
        plain = np.require(array, requirements=["C", "W"]).reshape(-1).view(np.uint8)
        rebuild, args = self._tensor(torch.from_numpy(plain))
        return _to_array, (array.dtype, array.shape, rebuild, args)


class TooBig(Exception):
    """Raised where a value that is being sealed is too big to ride along."""


NUMBERS = frozenset({int, float, bool, type(None)})
"""Types whose values need no encoding of their own, however many there are."""


def is_plain(value: Any) -> bool:
    """True if a call's (args, kwargs) or result is nothing but short atoms, which need no encoding of their own."""
    kind = type(value)
    if kind in NUMBERS:
        return True
    if kind is str or kind is bytes:
        return len(value) <= INLINE_BYTES
    if kind is tuple and len(value) <= 8:
        return all(type(each) in NUMBERS or is_plain(each) for each in value)
    return kind is dict and not value


def _value(index: int) -> Any:
    return _reading.now.values[index]


def _part(index: int) -> torch.Tensor:
    now: _Reading = _reading.now
    part: torch.Tensor = now.parts[index]
    now.parts[index] = part = now.codec.open_part(part)
    return part


_OF_NUMPY = frozenset({torch.float32, torch.int64, torch.float64, torch.int32, torch.uint8, torch.bool, torch.float16})
"""Types that numpy has and that are neither conjugated nor complex: what small tensors nearly always are of."""


def _to_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.dtype in _OF_NUMPY and not tensor.is_cuda and not tensor.is_neg():
        return tensor.numpy().tobytes()  # in order, whatever its strides
    return flat_bytes(tensor.resolve_conj().resolve_neg()).cpu().numpy().tobytes()


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], to_device: bool) -> torch.Tensor:
    if not raw:
        return _on_device(torch.empty(shape, dtype=dtype), to_device)
    return _on_device(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape), to_device)


def _on_device(tensor: torch.Tensor, to_device: bool) -> torch.Tensor:
    return tensor.cuda() if to_device and torch.cuda.is_available() else tensor


def _to_array(dtype: np.dtype[Any], shape: tuple[int, ...], rebuild: Any, args: Any) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = rebuild(*args).numpy()
    return flat.view(dtype).reshape(shape)
