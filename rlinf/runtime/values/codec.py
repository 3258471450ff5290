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
| rpc | the rest, what does not fit in the arena, and from a GPU to a host without one | a copy, beside the message |

What arrives is what a tensor was at the moment of the call, even if it is written to before it has left. Two kinds are
shared instead: tensors in the arena (`Actor.empty_shared`), and CUDA tensors that go by ipc or group, of which there
may be no room for a second copy. Nobody writes to those while a receiver has them.

More than `COPY_BYTES` are copied by other threads (`transport/copies.py`). The message, and all later ones to that
host, wait until it is done (`Link.hold_back`), so that messages stay in their order and the loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlinf.runtime.base.clock import external
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.base.tasks import mark_seen, together
from rlinf.runtime.transport import copies
from rlinf.runtime.transport.arena import ArenaFull, SlotRef
from rlinf.runtime.values.p2p import unshareable
from rlinf.runtime.values.pickler import (
    BULK_BYTES,
    COPY_BYTES,
    HERE,
    INLINE_BYTES,
    SEALED,
    SEALED_BYTES,
    Bulk,
    GroupRef,
    IpcRef,
    Payload,
    Pickler,
    Place,
    Staged,
    Store,
    TooBig,
    Unsent,
    ValueRef,
    is_plain,
    load,
    reading_codec,
    unpicklable,
)
from rlinf.runtime.values.promise import holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

__all__ = ["SEALED_BYTES", "Codec", "Payload", "Place", "ValueRef", "is_plain", "reading_codec"]


class Codec:
    """Encodes and decodes payloads for one host.

    Args:
        host: this one.
        places: where every host lives, filled as hosts become known.
        store: of this host's values and memory.
    """

    def __init__(self, host: Host, places: dict[int, Place], store: Store):
        self.host = host
        self.place = places[host.rank]
        self.places = places
        self.store = store
        self.arena = store.arena
        self.handles = store.handles
        self.bulk: Bulk | None = None
        """Once all hosts are known, and some are on other machines or GPUs."""
        self.copied: dict[Any, torch.Tensor] | None = None
        """During a call of several ranks: tensors that lie in shared memory for one of them already."""
        self._copying: list[asyncio.Future[None]] = []  # these, as far as they are not yet there
        self._unshareable = unshareable()
        self._complained = False
        self._coming: dict[GroupRef, asyncio.Future[torch.Tensor]] = {}

    def record(self, route: str, size: int) -> None:
        """Record in the trace that so many bytes leave by this route."""
        now = self.host.now()
        self.host.tracer.span("payload", "", "", route, now, now, size)

    def route(self, tensor: torch.Tensor, host: int) -> str:
        """The cheapest way for a tensor to another process: inline, arena, ipc, group or rpc."""
        there = self.places[host]
        size = tensor.nbytes
        same_machine = there.machine == self.place.machine
        if size < INLINE_BYTES:
            return "inline"
        if tensor.is_cuda and same_machine and there.device == self.place.device != "cpu" and self._shares():
            return "ipc"
        if not tensor.is_cuda and same_machine and self.arena is not None:
            return "arena"
        if self.bulk is not None and size >= BULK_BYTES and not (tensor.is_cuda and there.device == "cpu"):
            return "group"
        return "rpc"

    def _shares(self) -> bool:
        """True if CUDA memory of this process can be opened by others; it says why not, once."""
        if self._unshareable is not None and not self._complained:
            self._complained = True
            self.host.complain(
                f"{self._unshareable} keeps CUDA tensors from being shared by the processes of one GPU: here they are "
                "copied through host memory. Take it out, or give each process a GPU of its own"
            )
        return self._unshareable is None

    def by_reference(self, host: int) -> bool:
        """True if `host` lives in this process, so that values need not be encoded at all."""
        return self.places[host].process == self.place.process

    @contextlib.contextmanager
    def one_copy(self) -> Iterator[None]:
        """In it a tensor that goes to several hosts of this machine is copied into shared memory once."""
        self.copied = {}
        try:
            yield
        finally:
            self.copied = None
            self._copying = []

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
        pickler = Pickler(file, self, host)
        try:
            pickler.dump(value)
            pickler.export_devices()
        except Exception as error:  # user code runs in it, so it may be any
            self._take_back(pickler.parts, host)
            raise unpicklable(value, error) from error
        if pickler.copies or pickler.sends or pickler.shares:
            self._begin(pickler, host)
        return (file.getvalue(), tuple(pickler.refs), pickler.parts)

    def _begin(self, pickler: Pickler, host: int) -> None:
        """Copy and send what was found, now that the whole value has been pickled."""
        filled = None
        copying = list(self._copying) if pickler.shares else []
        if sum(source.nbytes for _, source in pickler.copies) <= COPY_BYTES:
            copies.copy(pickler.copies)
        else:
            later = [(to, source, self.as_it_is(source)) for to, source in pickler.copies]
            copies.copy([(to, source) for to, source, lazy in later if lazy is None])
            started = copies.start((to, lazy) for to, _, lazy in later if lazy is not None)
            own = [asyncio.wrap_future(each) for each in started]
            copying += own
            if self.copied is not None:
                self._copying += own
        if copying:
            filled = self.host.own(self._filled(copying, pickler.parts, host))
            self.host.link(host).hold_back(filled)
        for tensor, ref in pickler.sends:
            assert self.bulk is not None
            self.bulk.send(tensor, ref, host, filled)

    def as_it_is(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what may be read later in the place of a tensor; None if only a copy will do."""
        return tensor if self.is_shared(tensor) else copies.snapshot(tensor)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies in shared memory, of whichever host."""
        return any(memory is not None and memory.holds(tensor) for memory in (self.arena, self.store.reader))

    async def _filled(self, copying: list[asyncio.Future[None]], parts: list[Any], host: int) -> None:
        """Wait until a message's tensors have been copied; it says why, if they could not be."""
        with external():  # holds virtual time still meanwhile
            await asyncio.wait(copying)
        failed = next((error for each in copying if (error := each.exception()) is not None), None)
        if failed is not None:
            self._take_back(parts, host)
            parts[:] = [part if type(part) is GroupRef else Unsent(repr(failed)) for part in parts]

    def _take_back(self, parts: Iterable[Any], host: int) -> None:
        """Nobody will open these slots and handles."""
        for part in parts:
            if type(part) is SlotRef and self.arena is not None:
                self.arena.release(host, [part.slot])
            elif type(part) is IpcRef:
                self.handles.take_back(host, [part.number])

    def seal(self, value: Any) -> bytes | None:
        """`value` as bytes that any host can read and nobody on the way needs to; None if it is too big for that.

        Raises:
            UserError: something in it cannot be pickled.
        """
        file = io.BytesIO()
        try:
            Pickler(file, self, SEALED).dump(value)
        except TooBig:
            return None
        except Exception as error:  # user code runs in it, so it may be any
            raise unpicklable(value, error) from error
        return file.getvalue() if file.tell() <= SEALED_BYTES else None

    def unseal(self, blob: bytes) -> Any:
        """The value that was sealed."""
        return load(self, blob, (), ())

    def duplicate(self, value: Any) -> Any:
        """Return the same value in containers of its own, over the same tensors."""
        file = io.BytesIO()
        pickler = Pickler(file, self, HERE)
        pickler.dump(value)
        return load(self, file.getvalue(), (), pickler.parts)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor, in shared memory as far as that has room."""
        with contextlib.suppress(ArenaFull):
            if self.arena is not None:
                return self.arena.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype)

    async def into_arena(self, value: Any) -> Any:
        """Return the same value with its big CPU tensors in shared memory, as far as that has room."""
        file = io.BytesIO()
        pickler = Pickler(file, self, HERE)
        pickler.dump(value)
        moves: list[copies.Copy] = []
        for index, part in enumerate(pickler.parts):
            if part.is_cuda or part.nbytes < INLINE_BYTES or self.arena is None or self.arena.holds(part):
                continue
            with contextlib.suppress(ArenaFull):
                pickler.parts[index] = fresh = self.arena.empty(part.shape, part.dtype)
                moves.append((fresh, part))
        with external():
            await asyncio.gather(*map(asyncio.wrap_future, copies.start(moves)))
        return load(self, file.getvalue(), (), pickler.parts)

    def ready(self, payload: Payload) -> bool:
        """True if `decode_now` can read it: nothing to wait for."""
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
                    coming.add_done_callback(mark_seen)  # it may be that nobody reads the payload

    def decode_now(self, payload: Payload) -> Any:
        """The value of a payload that is `ready`."""
        if len(payload) < 3:
            return payload[0]
        return load(self, payload[0], (), payload[2])

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
            values = await together([self.store.fetch(ref) for ref in refs])
            for index, part in enumerate(parts):
                if type(part) is GroupRef:  # its end, whatever becomes of it here, keeps the order of receives
                    parts[index] = await asyncio.shield(self._coming[part])
                    del self._coming[part]
                elif _comes_later(part):
                    parts[index] = await asyncio.wrap_future(copies.start_onto_device(part.tensor))
        except BaseException:
            self.discard((blob, refs, parts))
            raise
        return load(self, blob, values, parts)

    def discard(self, payload: Payload) -> None:
        """Let go of a payload that has `arrived` and nobody will read, so that the sender gets its memory back."""
        if len(payload) < 3:
            return
        for part in payload[2]:
            if type(part) is GroupRef:
                self._coming.pop(part, None)
            elif type(part) is SlotRef:
                self.open_part(part)
            elif type(part) is IpcRef:
                self.handles.refuse(part)

    def open_part(self, part: Any) -> Any:
        """Return what a part of a payload stands for; a tensor, unless reading it must wait."""
        if type(part) is IpcRef:
            return self.handles.open(part)
        if type(part) is SlotRef:
            assert self.store.reader is not None
            return self.store.reader.open(part)
        if type(part) is Staged:
            return part.tensor.cuda() if torch.cuda.is_available() else part.tensor
        if type(part) is Unsent:
            raise RuntimeFault(f"a tensor could not be copied where it was sent from: {part.why}")
        return part


def _comes_later(part: Any) -> bool:
    """True if reading it must wait: for a process group, or for a copy that is too big for the loop."""
    return type(part) is GroupRef or (
        type(part) is Staged and part.tensor.nbytes > COPY_BYTES and torch.cuda.is_available()
    )
