"""Weights on their way from a trainer to everybody who computes with them.

`publish` casts, gathers, merges and packs the trainer's weights, under the names of the plain model, into `Weights` on
rank 0. Every rank takes part, since gathering a sharded tensor is a collective. Beside its shard, and on rank 0 the
buckets that it hands out, a rank needs memory for a piece of a bucket at a time: see `publishing_bytes`. `Scattered` is
a tensor of which each rank has some rectangles, in whatever shapes a back end splits it: the first rank gathers it
piece by piece, so that nobody else receives anything. `Clock` times the phases, for the trace and the metrics.

`Receiver` is the other end: all ranks of a group switch to a new version, or none does, and an error names the rank,
its host and the phase. It is a two-phase commit, led by rank 0. First each rank verifies the checksums and checks that
the weights fit, which changes nothing; rank 0 asks every rank whether it has (`load_ready`), and a rank that has said
yes does what rank 0 decides, whatever becomes of its own call. Then rank 0 has all of them switch (`load_decided`), or
drops the round (`load_abandon`) because somebody refused, failed, was cancelled or did not answer in time; a round that
was dropped cannot switch any more. Every rank switches in the order of rank 0's decisions, so ranks that get two
versions at once end on the same.

Devices are needed for the switch alone, and each rank takes its own for it: `load(trainer.weights())` holds none while
the trainer still needs them, and a rank that generates shares its lease with the switch. A rank that is parked knows
when it is onloaded that the new weights are `coming`, so that it need not bring back the old ones first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rlinf.data.differences import Differences
from rlinf.data.weights import BUCKET_BYTES, Allocator, Export, Packer, Weights
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.observe.stalls import Lock
from rlinf.runtime.transport.process_groups import all_gather

_Mark = float | torch.cuda.Event


class Clock:
    """Adds up the seconds of phases, on the device that works."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, what: str, on: Tensor | Sequence[Tensor] = ()) -> Iterator[None]:
        """Time a phase: all that is done in it.

        Args:
            what: its name, one word.
            on: a tensor, or several, on the device that does it; without any the time is that of the wall.
        """
        like = on if isinstance(on, Tensor) else next(iter(on), None)
        start = _mark(like)
        yield
        self._phases.append((what, start, _mark(like)))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; blocking, on a GPU until the last has ended."""
        seconds: dict[str, float] = {}
        for what, start, ended in self._phases:
            seconds[what] = seconds.get(what, 0.0) + _between(start, ended)
        return seconds

    def tell(self, actor: Actor) -> None:
        """Have the trace of an actor's host know of the phases, one after the other up to now."""
        for what, seconds in self.seconds().items():
            actor.note(f"weights/{what}_seconds", seconds)


def tell_bytes(actor: Actor, tensors: Iterable[Tensor], *, through_host: bool = False) -> None:
    """Have the trace know of bytes that were written to buckets, or read from them.

    Args:
        actor: who wrote or read.
        tensors: the buckets.
        through_host: they went through host memory wherever they lie, as to an inference server.
    """
    sizes = {"host": 0, "device": 0}
    for tensor in tensors:
        sizes["host" if through_host or tensor.device.type == "cpu" else "device"] += tensor.nbytes
    for where, size in sizes.items():
        actor.note(f"weights/{where}_bytes", 0.0, size)


def _mark(on: Tensor | None) -> _Mark:
    if on is not None and on.is_cuda and torch.cuda.is_available():  # a fake tensor may say so without a GPU
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(on.device))
        return event
    return time.perf_counter()


def _between(start: _Mark, ended: _Mark) -> float:
    if isinstance(start, float) or isinstance(ended, float):
        return float(ended) - float(start)  # type: ignore[arg-type]  # both are of one kind
    ended.synchronize()
    return start.elapsed_time(ended) / 1e3


class Part(Tensor):
    """A rectangle of a tensor that is nowhere whole, to be filled from a checkpoint. It has the shape of the whole, and
    computes nothing."""

    local: Tensor
    offset: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Part:
        """The rectangle at `offset` in a tensor of this shape."""
        wrapper: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Part, tuple(shape), dtype=local.dtype, device=local.device
        )
        wrapper.local, wrapper.offset = local, tuple(offset)
        part: Part = wrapper
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func}: of this tensor there is a part only")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle that some rank has."""

    rank: int
    """Its position in the mesh."""
    offset: tuple[int, ...]
    """Where in the whole it begins."""
    shape: tuple[int, ...]
    """Its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """A tensor whose rectangles lie on the ranks of a mesh, each on one."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    pieces: Sequence[Held]
    """The rectangles and their ranks, in an order that is the same on all ranks."""
    write: Callable[[Held, int, Tensor], None]
    """Copies rows of a rectangle that this rank has, from one of them on, into a tensor that takes so many, and casts
    them to its dtype."""
    mesh: DeviceMesh | None
    """The ranks; None for one."""

    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    @property
    def device(self) -> torch.device:
        """Device that rectangles are sent from."""
        return torch.device(self.mesh.device_type if self.mesh is not None else "cpu")

    @torch.no_grad()
    def gather_into(self, place: Tensor | None, dtype: torch.dtype, piece_bytes: int, clock: Clock) -> None:
        """Write the whole into its place; every rank of the mesh calls it, in the same order of tensors.

        Args:
            place: flat [elements], of `dtype`; on the first rank, where it may be None to keep nothing. Others have
                none.
            dtype: in which pieces are sent.
            piece_bytes: bound on what is sent at once, unless a single row is more.
            clock: is told how long the phases took.
        """
        me = 0 if self.mesh is None else self.mesh.get_local_rank()
        whole = None if place is None else place.view(self.shape)
        for piece in self.pieces:
            if me not in (0, piece.rank):
                continue
            row = prod(piece.shape[1:]) * dtype.itemsize
            step = max(1, piece_bytes // max(1, row))
            for start in range(0, piece.shape[0], step):
                count = min(step, piece.shape[0] - start)
                place_of = None if whole is None else whole[_rows(piece, start, count)]
                if piece.rank:
                    self._moved(place_of, piece, start, count, dtype, clock)
                elif place_of is not None:
                    with clock.phase("copy", place_of):
                        self.write(piece, start, place_of)

    def _moved(
        self, place: Tensor | None, source: Held, start: int, count: int, dtype: torch.dtype, clock: Clock
    ) -> None:
        """Some rows of a rectangle of another rank: it sends them, and the first one puts them into their place."""
        assert self.mesh is not None
        group = self.mesh.get_group()
        piece = torch.empty((count, *source.shape[1:]), dtype=dtype, device=self.device)
        if self.mesh.get_local_rank():
            with clock.phase("cast", piece):
                self.write(source, start, piece)
            with clock.phase("gather", piece):
                dist.send(piece, group=group, group_dst=0)
            return
        with clock.phase("gather", piece):
            dist.recv(piece, group=group, group_src=source.rank)
        if place is not None:
            with clock.phase("copy", piece):
                place.copy_(piece)

    def whole(self, dtype: torch.dtype, piece_bytes: int) -> Tensor:
        """The tensor itself on the first rank; on others one of its shape without memory."""
        leads = self.mesh is None or self.mesh.get_local_rank() == 0
        whole = torch.empty(self.shape, dtype=dtype, device=self.device if leads else "meta")
        self.gather_into(whole.view(-1) if leads else None, dtype, piece_bytes, Clock())
        return whole


def _rows(piece: Held, start: int, count: int) -> tuple[slice, ...]:
    """Slices of the whole for some rows of a rectangle."""
    first, *others = (
        slice(first_row, first_row + size) for first_row, size in zip(piece.offset, piece.shape, strict=True)
    )
    return slice(first.start + start, first.start + start + count), *others


def scattered(tensor: DTensor, ranks: DeviceMesh) -> Scattered:
    """A tensor that is split over the second dimension of a mesh, and each part by rows over the first.

    Args:
        tensor: of FSDP2, such as one that `fully_shard` found split already.
        ranks: those of its mesh in one dimension, row by row.
    """
    rows, parts = tensor.device_mesh.shape
    split: int = tensor.placements[1].dim  # type: ignore[attr-defined]
    pieces = []
    for rank in range(rows * parts):
        row, part = divmod(rank, parts)
        shape, offset = [*tensor.shape], [0] * tensor.dim()
        shape[split] //= parts
        offset[split] = part * shape[split]
        slice_rows = -(-shape[0] // rows)
        first_row = min(row * slice_rows, shape[0])
        shape[0] = min(slice_rows, shape[0] - first_row)
        offset[0] += first_row
        if prod(shape):
            pieces.append(Held(rank, tuple(offset), tuple(shape)))

    def write(_: Held, start: int, into: Tensor) -> None:
        into.copy_(tensor.to_local().narrow(0, start, len(into)))

    return Scattered(tuple(tensor.shape), pieces, write, ranks)


PIECE_BYTES = 32 << 20
"""Bytes that are gathered at once: so much more does not cost less to send, and a rank has a few of them at a time."""

Exports = Callable[[torch.dtype | None], Iterable[tuple[str, Tensor | Export]]]
"""Gives names and tensors, whole or sharded, to be published in a dtype; None leaves them as they are."""


async def publish(
    actor: Actor,
    export: Exports,
    version: int,
    *,
    dtype: torch.dtype | None = None,
    in_host_memory: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    differences: Differences | None = None,
) -> Weights | None:
    """The weights that an actor exports, as a copy that receivers may read while training goes on.

    Called on every rank of the actor's group, in the same order as all else that communicates over the model's mesh; it
    runs in the compute thread. Buckets in CPU memory lie in the host's shared-memory arena, so that they reach other
    processes of the machine without another copy. What it took is told to the trace, phase by phase.

    Args:
        actor: the trainer.
        export: gives, for `dtype`, names and tensors, such as `BackEnd.export`; a collective.
        version: counts the batches it has learned from.
        dtype: what floating-point tensors are published as, such as bfloat16 under float32 masters; None: as they are.
        in_host_memory: collect the buckets there, where a whole model may fit that the trainer's device cannot hold
            twice; else on the device where the tensors are.
        bucket_bytes: bound on a bucket.
        differences: makes what other machines get, where buckets are in host memory; None: they get the whole.

    Returns:
        On rank 0 the weights, on other ranks None.

    Raises:
        ArenaFull: the shared memory's limit is reached.
    """
    empty: Allocator | None = actor.empty_shared if in_host_memory else None
    if empty is not None and differences is not None:
        empty = differences.making_room(empty)
    clock = Clock()
    weights = await actor.compute(
        pack, export, version, lead=actor.rank == 0, dtype=dtype, bucket_bytes=bucket_bytes, empty=empty, clock=clock
    )
    if weights is not None:
        if differences is not None:
            with clock.phase("difference"):
                weights = await actor.compute(differences.placed, weights)
        clock.tell(actor)
        tell_bytes(actor, weights.buckets)
    return weights


def pack(
    export: Exports,
    version: int,
    *,
    lead: bool,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    empty: Allocator | None = None,
    clock: Clock | None = None,
) -> Weights | None:
    """Pack weights, blocking: every rank calls it, and the lead gets the weights.

    Args:
        lead: this rank gets the weights; the others only take part in gathering.
        empty: allocates the buckets; the rest is as for `publish`.
        clock: is told how long the phases took.
    """
    timed = clock or Clock()
    packer = Packer(bucket_bytes, dtype, empty, partial(gather_into, clock=timed), keeps=lead)
    for name, tensor in export(dtype):
        packer.add(name, tensor if isinstance(tensor, Export) else tensor.detach())
    packer.close()
    with timed.phase("checksum", packer.buckets):
        weights = packer.done(version)
    return weights if lead else None


def has_room(device: torch.device, whole_bytes: int) -> bool:
    """Tell whether a device has room for a copy of the weights now, and for as many bytes more, which a receiver may
    have parked.

    Args:
        device: the trainer's.
        whole_bytes: of the model in the dtype in which it is published.
    """
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * whole_bytes + publishing_bytes(0, on_device=True, ranks=2) <= free + cached


def publishing_bytes(whole_bytes: int, *, on_device: bool, ranks: int = 1) -> int:
    """Bytes that publishing takes at most on the lead's device, beside the model's own shard.

    Args:
        whole_bytes: of the model in the dtype in which it is published.
        on_device: the buckets lie there too.
        ranks: over which the model is sharded.

    Returns:
        The buckets, and the pieces of the tensor that is just being gathered: what this rank sends, and what all send.
        Merging adapters takes besides two copies of the largest shard that has one.
    """
    pieces = 2 if ranks > 1 else 1
    return pieces * PIECE_BYTES + (whole_bytes if on_device else 0)


def reshard(model: nn.Module) -> None:
    """Have every parameter show its shard: after a forward without backward FSDP2 shows some of them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def exported(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    ranks: DeviceMesh | None = None,
    adapter: str | None = "default",
) -> Iterator[tuple[str, Export]]:
    """The model's tensors under their plain names, to be made and gathered one after the other.

    Args:
        model: whole or sharded, with or without adapters, which are merged; tied weights come once.
        dtype: of floating-point tensors; None: float32 where they are not wider. What the model's class keeps in
            float32 stays so, since engines keep it so.
        ranks: of the model, in one dimension, for parameters that are split and in slices: they are sent rectangle by
            rectangle.
        adapter: name of the adapters that are merged; None: none.
    """
    reshard(model)
    in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter, make in _parameters(model, adapter):
        own = parameter.dtype
        if parameter.is_floating_point():  # frozen weights may be in half precision
            narrow = dtype is not None and not any(part in name for part in in_float32)
            own = dtype if narrow and dtype is not None else torch.promote_types(own, torch.float32)
        give: Callable[[], Any] = partial(_rectangles, make, ranks) if ranks is not None and _split(parameter) else make
        yield name, Export(tuple(parameter.shape), own, give)


def _parameters(model: nn.Module, adapter: str | None) -> Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]:
    """Name and parameter as in a model without adapters, and what makes its value."""
    if getattr(model, "peft_config", None) is None:
        return ((name, parameter, parameter.detach) for name, parameter in model.named_parameters())
    from rlinf.models.language.lora import plain_parameters  # takes seconds to import

    return plain_parameters(model, adapter)


def _split(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2


def _rectangles(make: Callable[[], Tensor], ranks: DeviceMesh) -> Scattered:
    tensor = make()
    assert isinstance(tensor, DTensor)
    return scattered(tensor, ranks)


@torch.no_grad()
def gather_into(
    place: Tensor | None, tensor: Tensor | Scattered, dtype: torch.dtype, clock: Clock | None = None
) -> None:
    """Write a tensor, whole or sharded, into its place. Every rank of its mesh calls it, in the same order.

    Shards are cast before they are sent, piece by piece. One collective at a time: under gloo several at once were seen
    to corrupt the heap within a thousand (torch 2.13), and under NCCL, which queues them on a stream, starting them
    early would win nothing.

    Args:
        place: flat [elements], of `dtype`; None on a rank that keeps nothing.
        tensor: whole ones are only copied; of those that lie scattered the first rank alone gets anything.
        dtype: in which it is sent.
        clock: is told how long the phases took.
    """
    timed = clock or Clock()
    if isinstance(tensor, Scattered):
        tensor.gather_into(place, dtype, PIECE_BYTES, timed)
    elif not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        _copy(place, tensor.to_local() if isinstance(tensor, DTensor) else tensor, timed)
    elif len(tensor.placements) == 1 and type(tensor.placements[0]) is Shard and tensor.placements[0].dim == 0:
        _gather_rows(place, tensor, dtype, timed)
    else:
        with timed.phase("gather", tensor):
            whole = _whole(tensor, dtype)
        _copy(place, whole, timed)


def _gather_rows(place: Tensor | None, tensor: DTensor, dtype: torch.dtype, timed: Clock) -> None:
    """`gather_into` for a tensor whose rows are shared out among the ranks of a mesh, each a stretch of it."""
    mesh = tensor.device_mesh
    ranks, mine = mesh.size(), tensor.to_local().detach().reshape(-1)
    most = -(-tensor.shape[0] // ranks) * (tensor.numel() // max(1, tensor.shape[0]))  # elements that a rank has
    step = max(1, PIECE_BYTES // (ranks * dtype.itemsize))
    gathered_pieces = torch.empty((ranks, min(step, most)), dtype=dtype, device=mine.device)
    for start in range(0, most, step):
        count = min(step, most - start)
        with timed.phase("cast", mine):
            part = own = mine.narrow(0, skipped := min(start, len(mine)), min(count, len(mine) - skipped))
            if own.dtype != dtype or len(own) < count:  # of fewer rows a rank sends besides whatever lies there
                part = torch.empty(count, dtype=dtype, device=mine.device)
                part.narrow(0, 0, len(own)).copy_(own)
        with timed.phase("gather", mine):
            flat = gathered_pieces.view(-1).narrow(0, 0, ranks * count)
            all_gather(flat, part, group=mesh.get_group())
        with timed.phase("copy", mine):
            if place is not None:
                for rank, each in enumerate(flat.split(count)):
                    first = min(rank * most + start, len(place))
                    room = place.narrow(0, first, min(count, len(place) - first))
                    room.copy_(each.narrow(0, 0, len(room)))


def _copy(place: Tensor | None, tensor: Tensor, timed: Clock) -> None:
    """Copy a whole tensor; to another device by pieces, since torch casts all that it copies there beforehand."""
    if place is None:
        return
    with timed.phase("copy", tensor):
        if place.device == tensor.device:
            place.view(tensor.shape).copy_(tensor)
            return
        flat, step = tensor.reshape(-1), PIECE_BYTES // place.dtype.itemsize
        for target, source in zip(place.split(step), flat.split(step), strict=True):
            target.copy_(source)


def gathered(
    named: Iterable[tuple[str, Tensor | Export]], *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors from sharded ones, in their order, one at a time.

    Every rank of the mesh must run it to its end.

    Args:
        named: names and tensors; those that are not sharded are only cast, and those that lie scattered have memory on
            the first rank alone.
        dtype: floating-point tensors are cast before they are sent, so that fewer bytes are; None: as they are, or as
            an `Export` says.
    """
    for name, tensor in named:
        if isinstance(tensor, Export):
            whole = tensor.make()
            wanted = dtype or tensor.dtype
            yield name, whole.whole(wanted, PIECE_BYTES) if isinstance(whole, Scattered) else _whole(whole, wanted)
        else:
            yield name, _whole(tensor.detach(), dtype)


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast: Any = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    whole: Tensor = cast.full_tensor() if isinstance(cast, DTensor) else cast
    return whole


DEADLINE = 300.0
"""Seconds for all ranks to be ready, and again for all to switch: a slow network moves a large model in that time, and
other roles end what they do on shared devices."""
GRACE = 5.0
"""Seconds that a late rank has to say how far it is: an answer takes milliseconds unless its host is in trouble."""

Key = tuple[int, tuple[int, ...]]
"""`Weights.key`: by this, ranks know that they mean the same weights."""


class LoadError(RuntimeFault):
    """Weights were not loaded; the text names ranks, hosts and phase."""


class LoadRefused(LoadError, ValueError):
    """A rank found the weights damaged or not fitting, so no rank switched."""


class LoadTimeout(LoadError, TimeoutError):
    """Not all ranks were ready by the deadline, so no rank switched."""


class LoadTorn(LoadError):
    """Every rank was ready, but not all could switch: the group has more than one version."""


@dataclass(slots=True, eq=False)
class Offer:
    """Weights that one `load` call has brought to one rank."""

    weights: Weights
    """The weights."""
    phase: str = "verifying the checksums"
    """The phase that the rank is in."""
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when they were found whole and fitting, or not."""
    outcome: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The version in use after rank 0's decision, or why there is none."""
    awaited: bool = False
    """A round waits for it."""
    round: int | None = None
    """The round that counts on it: rank 0 alone decides from then on."""


class Receiver(Actor):
    """Base class of actors that take over published weights. Subclasses say what fits, and how to switch.

    `load` is called on the whole group: a rank that is not called keeps the others from switching.
    """

    through_host = False
    """It hands weights on through host memory, wherever they come from."""

    def __init__(self) -> None:
        super().__init__()
        self._offers: list[Offer] = []
        self._arrival = asyncio.Condition()
        self._switching = Lock("switching weights")
        self._numbers = itertools.count()
        self.coming: Weights | None = None
        """The version that this rank will switch to as soon as it has its devices."""
        self.early: Weights | None = None
        """Those of them that it took over when it was onloaded."""
        self._base: Weights | None = None  # the next ones will be made of these, where they come from another machine

    async def check_weights(self, weights: Weights) -> None:
        """See whether the weights fit, and change nothing.

        Raises:
            ValueError: they do not; the text says what differs.
        """
        raise NotImplementedError

    async def switch_weights(self, weights: Weights) -> None:
        """Use these weights from now on. They were verified and checked, every other rank is ready too, and this rank
        has its devices."""
        raise NotImplementedError

    @endpoint(joint=True)
    async def load(self, weights: Weights, *, deadline: float = DEADLINE) -> int:
        """Switch to other weights, on all ranks or, with an error, on none.

        An older version, or the one in use, is as good as any. Cancelled before the decision, no rank switches;
        cancelled after it, all do, and then it takes effect.

        Args:
            weights: what to use; the same on every rank.
            deadline: seconds for all ranks to be ready, and again for all to switch.

        Returns:
            The version now in use.

        Raises:
            LoadRefused: (a ValueError) the weights are damaged, or do not fit.
            LoadTimeout: a rank was not ready in time.
            LoadTorn: a rank failed while it switched, or was too slow: the error says which rank has which version.
        """
        if not isinstance(weights, Weights):
            raise TypeError(f"load wants Weights, as trainer.weights() gives on rank 0, not {type(weights).__name__}")
        until = asyncio.get_running_loop().time() + deadline
        self.note("weights/arrived")
        offer = Offer(weights)
        async with self._arrival:
            self._offers.append(offer)
            self._arrival.notify_all()
        try:
            await self._prepare(offer, until, deadline)
            if self.rank == 0:
                return await self._lead(offer, until, deadline)
            return await self._follow(offer, until, deadline)
        finally:
            if offer.round is None:
                self._offers.remove(offer)
                if not offer.ready.done():
                    offer.ready.set_exception(LoadRefused(f"{self._here(offer)}: its call was cancelled"))
                    offer.ready.exception()  # seen: there may be nobody who asks

    # What every rank does ----------------------------------------------------------------------------------------

    async def _prepare(self, offer: Offer, until: float, deadline: float) -> None:
        """Verify and check; nothing changes."""
        clock = Clock()
        try:
            async with asyncio.timeout_at(until):
                in_thread = any(bucket.is_cuda for bucket in offer.weights.buckets)  # which is waited for
                await (self.compute if in_thread else self.compute_briefly)(_verify, offer.weights, clock)
                if offer.weights.lineage is not None:
                    self._base = offer.weights if self.use_version(offer.weights) else None
                clock.tell(self)
                offer.phase = "checking that they fit"
                await self.check_weights(offer.weights)
        except Exception as error:
            here = f"{self._here(offer)}, {offer.phase}"
            if isinstance(error, TimeoutError):
                failure: LoadError = LoadTimeout(f"{here}, was not done after {deadline:g} s. No rank has switched")
            else:
                failure = LoadRefused(f"{here}: {type(error).__name__}: {error}. No rank has switched")
            offer.ready.set_exception(failure)
            offer.ready.exception()  # seen: there may be nobody who asks
            raise failure from error
        offer.phase = "ready"
        offer.ready.set_result(None)

    async def _follow(self, offer: Offer, until: float, deadline: float) -> int:
        """Wait for rank 0's decision: with a deadline until it counts on this rank, then for as long as it takes."""

        def expire() -> None:
            if offer.round is None and not offer.outcome.done():
                offer.outcome.set_exception(
                    LoadTimeout(
                        f"{self._here(offer)} was ready, but rank 0 (host {self.group.hosts[0]}) did not lead the "
                        f"switch within {deadline:g} s: was load() called on the whole group? No rank has switched"
                    )
                )

        timer = asyncio.get_running_loop().call_at(until, expire)
        try:
            return await asyncio.shield(offer.outcome)
        finally:
            timer.cancel()

    @endpoint
    async def load_ready(self, number: int, key: Key) -> None:
        """Rank 0 asks: returns once this rank has these weights, whole and fitting, and leaves the decision to rank 0.

        Args:
            number: of the round.
            key: `Weights.key`.

        Raises:
            LoadError: the weights are damaged, do not fit, or the call that brought them has ended.
        """
        async with self._arrival:
            await self._arrival.wait_for(lambda: self._unasked(key) is not None)
            offer = self._unasked(key)
            assert offer is not None
            offer.awaited = True
        try:
            await asyncio.shield(offer.ready)
        finally:
            offer.awaited = False
        if offer not in self._offers or offer.outcome.done():
            raise LoadRefused(f"{self._here(offer)}: its call has ended before all ranks were ready")
        offer.round = number

    @endpoint
    async def load_decided(self, number: int) -> int:
        """Rank 0 has decided: switch. Returns the version now in use."""
        offer = self._bound(number)
        if offer is None:
            raise LoadError(f"rank {self.rank} (host {self.host}) knows of no round {number} of load")
        if self.through_host:  # what it keeps of them takes no memory of the device
            offer.weights = await self.compute(offer.weights.in_host_memory)
        self.coming = offer.weights
        try:
            version: int = await self.group[self.rank].load_switch(number)
            return version
        finally:
            if self.coming is offer.weights:
                self.coming = None

    @endpoint(device=True)
    async def load_switch(self, number: int) -> int:
        """Switch, on this rank's devices: what `load_decided` waits for. Returns the version now in use."""
        offer = self._bound(number)
        if offer is None:
            raise LoadError(f"rank {self.rank} (host {self.host}) knows of no round {number} of load")
        offer.phase, clock = "switching", Clock()
        async with self._switching:
            early, self.early = self.early, None
            with clock.phase("load"):
                if early is not offer.weights:  # if it fails, rank 0 tells this rank's `load` what became of all
                    await self.switch_weights(offer.weights)
                if any(bucket.is_cuda for bucket in offer.weights.buckets):
                    await self.compute(_copied, offer.weights)
        clock.tell(self)
        if offer.weights.version_now is None:
            tell_bytes(self, offer.weights.buckets, through_host=self.through_host)
        self._offers.remove(offer)
        if not offer.outcome.done():
            offer.outcome.set_result(offer.weights.version)
        return offer.weights.version

    @endpoint
    async def load_abandon(self, number: int, key: Key, torn: str | None = None) -> str:
        """Rank 0 has given the round up. Returns how far this rank is.

        Args:
            number, key: see `load_ready`.
            torn: why, if ranks had begun to switch.
        """
        offer = self._bound(number)
        if offer is not None:
            self._offers.remove(offer)
            given_up = LoadError(f"{self._here(offer)} was ready, but rank 0 gave up. No rank has switched")
            if not offer.outcome.done():
                offer.outcome.set_exception(given_up if torn is None else LoadTorn(torn))
                offer.outcome.exception()  # seen: there may be nobody who asks
            return offer.phase
        return next((offer.phase for offer in self._offers if offer.weights.key == key), "the weights have not arrived")

    def _unasked(self, key: Key) -> Offer | None:
        # The newest: an older one of these weights may belong to a call that has failed and is just being cancelled.
        free = (offer for offer in reversed(self._offers) if not offer.awaited and offer.round is None)
        return next((offer for offer in free if offer.weights.key == key), None)

    def _bound(self, number: int) -> Offer | None:
        return next((offer for offer in self._offers if offer.round == number), None)

    def _here(self, offer: Offer) -> str:
        return f"weights of version {offer.weights.version}: rank {self.rank} (host {self.host})"

    # What rank 0 does --------------------------------------------------------------------------------------------

    async def _lead(self, offer: Offer, until: float, deadline: float) -> int:
        """Run one round: all ready, then all switch."""
        number = next(self._numbers)
        await self._all_ready(number, offer, until, deadline)
        await self._all_switch(number, offer, deadline)
        return offer.weights.version

    async def _all_ready(self, number: int, offer: Offer, until: float, deadline: float) -> None:
        key = offer.weights.key
        calls = [rank.load_ready(number, key) for rank in self.group]
        seconds_left = max(0.0, until - asyncio.get_running_loop().time())
        try:
            done, late = await asyncio.wait(calls, timeout=seconds_left, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for question in calls:
                question.cancel()
            self.group.load_abandon(number, key)  # a message each; nobody has to wait for its arrival
            raise
        failed = [question for question in calls if question in done and (question.cancelled() or question.exception())]
        if not failed and not late:
            return
        waiting = [rank for rank, question in enumerate(calls) if question in late]
        for question in late:
            question.cancel()
        phases = await self._abandon(number, key)
        if failed and not failed[0].cancelled():
            await failed[0]  # raises what that rank did
        whose = "; ".join(f"{self._name(rank)}: {phases[rank]}" for rank in waiting)
        raise LoadTimeout(
            f"weights of version {offer.weights.version}: {len(waiting)} of {self.world_size} ranks were not ready "
            f"after {deadline:g} s ({whose}). No rank has switched"
        )

    async def _abandon(self, number: int, key: Key) -> list[str]:
        """Have every rank drop a round; how far each of them was."""
        answers = [rank.load_abandon(number, key) for rank in self.group]
        await asyncio.wait(answers, timeout=GRACE)
        phases = []
        for answer in answers:
            if not answer.done():
                answer.cancel()
                phases.append(f"does not answer within {GRACE:g} s")
            else:
                settled = answer.cancelled() or answer.exception() is not None
                phases.append("is gone" if settled else answer.result())
        return phases

    async def _all_switch(self, number: int, offer: Offer, deadline: float) -> None:
        """Have every rank switch. The decision has been made: a cancellation waits for its end."""
        answers = [rank.load_decided(number) for rank in self.group]
        ended = asyncio.ensure_future(asyncio.wait(answers, timeout=deadline))
        cancelled = False
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                cancelled = True
        states = [_ended(answer, offer.weights.version, deadline) for answer in answers]
        if any(states):
            each = "; ".join(f"{self._name(rank)} {state or 'has them'}" for rank, state in enumerate(states))
            torn = (
                f"weights of version {offer.weights.version}: not every rank has switched, so load weights again or "
                f"resume from a checkpoint: {each}"
            )
            self.group.load_abandon(number, offer.weights.key, torn)  # a message each, as above
            raise LoadTorn(torn)
        if cancelled:
            raise asyncio.CancelledError

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self.group.hosts[rank]})"


def _verify(weights: Weights, clock: Clock) -> None:
    with clock.phase("verify", weights.buckets):
        weights.verify()


def _copied(weights: Weights) -> None:
    """Wait until a GPU has read the buckets: their owner may use their memory for something else then."""
    for device in {bucket.device for bucket in weights.buckets if bucket.is_cuda}:
        torch.cuda.synchronize(device)


def _ended(answer: asyncio.Future[int], version: int, deadline: float) -> str:
    """Why a rank has not switched; nothing if it has."""
    if not answer.done():
        answer.cancel()
        return f"was still switching after {deadline:g} s"
    if answer.cancelled():
        return "was cancelled"
    error = answer.exception()
    if error is None:
        return ""
    return (
        f"failed while it switched, so neither the old version nor {version} is sure ({type(error).__name__}: {error})"
    )
