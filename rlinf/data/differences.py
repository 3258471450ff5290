"""Differences between versions of weights, for machines that have the older one.

Flows in: weights as they are published, and word of which version other machines were sent. Flows out: with the next
version what changed since then, bit by bit: which elements, and their new values. Nobody waits here.

The publisher keeps the newest version that went to another machine (`Differences`), and its receivers there keep it
once they have verified it (`Actor.use_version`). Whoever asks for weights says which versions it has: it gets the
difference if that is from one of them and smaller than the whole (`Lineage.since`), and the whole otherwise: after a
restart of either end, a version missed, or a step that changed too much. Receivers compare the checksums of the whole
in both cases.

Tensors are compared in stretches. Of each go, whichever is smallest: all elements; or those that changed, after a bit
per element, or after the gaps between them in one or two bytes each, where the largest number stands for so many
elements that did not change and none that did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlinf.data.weights import Allocator, Slot, Weights
from rlinf.runtime.transport.arena import ArenaFull
from rlinf.runtime.values.relay import Change

STRETCH = 1 << 22
"""Elements that are compared at once: a processor's cache holds a part of them, a thread takes some milliseconds."""
LEAST_BYTES = 1 << 20
"""Weights of fewer go whole: they are there before a thread has begun to compare them."""
_MOST_RESTS = 64
"""Publishes in a row that make no difference at most, after several differences that were larger than the whole."""
_Array = np.ndarray[Any, Any]
_ALL, _BITS = 0, 1
_GAPS: dict[int, Any] = {2: np.dtype(np.uint8), 3: np.dtype(np.uint16)}


@dataclass(slots=True, eq=False)
class Lineage:
    """The place of weights among the versions of one publisher."""

    name: str
    """The publisher's."""
    stays: bool
    """Other machines keep this version, for a difference to the next."""
    far: bool = False
    """Its publisher is on another machine."""
    change: Difference | None = None
    """The difference that made it of the version before; it isn't sent along with the whole."""
    publisher: Differences | None = None
    """Only where it was published."""
    number: int = 0
    """Counts what was published, there."""

    def __reduce__(self) -> Any:
        return Lineage, (self.name, self.stays, self.far)

    def since(self, weights: Weights, key: Any) -> Weights | Difference:
        """Return what is sent to another machine: the difference from the version of that key if it is known.

        Args:
            weights: whose lineage this is.
            key: of the version that is there; None for none.
        """
        sent: Weights | Difference = weights
        if self.change is not None and self.change.base == key:
            sent = replace(self.change, weights=replace(weights, layout=(), buckets=()))
        if self.publisher is not None:
            self.publisher.crossed(weights, self, sent)
        return sent


class Differences:
    """Differences between the weights that one actor publishes.

    Args:
        name: the actor's.
        note: tells the trace of bytes, as `Actor.note` does.
    """

    def __init__(self, name: str, note: Callable[..., None]):
        self._name, self._note = name, note
        self.base: Weights | None = None
        """The newest version that another machine was sent."""
        self._number = self._base_number = self._rests = self._misses = 0

    def making_room(self, empty: Allocator) -> Allocator:
        """Allocate by `empty`, in place of the base where there is no room beside it."""

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            try:
                return empty(shape, dtype)
            except ArenaFull:
                if self.base is None:
                    raise
                self.base = None
            return empty(shape, dtype)

        return allocate

    def placed(self, weights: Weights) -> Weights:
        """The weights with what changed since other machines were sent some; blocking.

        If that is no smaller, as in float32, the next few publishes don't try, and nobody keeps anything meanwhile.
        """
        if weights.nbytes < LEAST_BYTES or any(bucket.device.type != "cpu" for bucket in weights.buckets):
            return weights
        change, self._number = None, self._number + 1
        if self._rests:
            self._rests -= 1
        elif self.base is not None:
            change = difference(self._name, self.base, weights)
            self._misses = 0 if change is not None else self._misses + 1
            self._rests = min((1 << self._misses) - 1, _MOST_RESTS)
        if change is None:
            self.base = None
        lineage = Lineage(self._name, not self._rests, change=change, publisher=self, number=self._number)
        return replace(weights, lineage=lineage)

    def crossed(self, weights: Weights, lineage: Lineage, sent: Weights | Difference) -> None:
        """Weights were sent to another machine, whole or as a difference."""
        self._note("weights/link_bytes", bytes=sent.nbytes)
        self._note("weights/link_whole_bytes", bytes=weights.nbytes)
        if lineage.stays and lineage.number > self._base_number:
            self.base, self._base_number = replace(weights, lineage=None), lineage.number


@dataclass(frozen=True, slots=True, eq=False)
class Difference(Change):
    """Changes that make one version of weights of an older one."""

    name: str
    """The lineage's."""
    base: tuple[int, tuple[int, ...]]
    """`Weights.key` of the version that it is made of."""
    weights: Weights | None
    """The version that is made, without layout, which stays, and buckets."""
    stretches: _Array
    """Way of writing, bytes of `places` and bytes of `values` of each, int64 [stretches, 3]."""
    places: torch.Tensor
    """Which elements changed, uint8 [bytes]."""
    values: torch.Tensor
    """Their new values, uint8 [bytes]."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return int(self.stretches.nbytes) + self.places.nbytes + self.values.nbytes

    def taken_apart(self) -> tuple[Difference, tuple[torch.Tensor, ...]]:
        """See `Weights.taken_apart`."""
        nothing = torch.empty(0, dtype=torch.uint8)
        table = torch.from_numpy(self.stretches.reshape(-1))
        about = replace(self, stretches=_NOTHING, places=nothing, values=nothing)
        return about, (table, self.places, self.values)

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Difference:
        """See `Weights.put_together`."""
        table, places, values = tensors
        return replace(self, stretches=table.numpy().reshape(-1, 3), places=places, values=values)

    def made_of(self, base: Weights | None) -> Weights:
        """The new version, in host memory, of the one that a receiver has. Blocking."""
        assert base is not None
        assert base.key == self.base
        return self.applied(base, lambda shape, dtype: torch.empty(shape, dtype=dtype), False)

    def applied(self, base: Weights, empty: Allocator, passes_on: bool) -> Weights:
        """See `Change.applied`."""
        assert self.weights is not None
        buckets = tuple(empty(bucket.shape, bucket.dtype) for bucket in base.buckets)
        olds, news = [list(map(_words, each)) for each in (base.buckets, buckets)]
        places, values = self.places.numpy(), self.values.numpy()
        ends = np.cumsum(self.stretches, axis=0)

        def write(number: int, bucket: int, start: int, stop: int) -> None:
            way, *sizes = map(int, self.stretches[number])
            own = [
                whole[end - size : end]
                for whole, end, size in zip((places, values), map(int, ends[number, 1:]), sizes, strict=True)
            ]
            _write(way, own[0], own[1], olds[bucket][start:stop], news[bucket][start:stop])

        _each(write, enumerate(_cut(base)))
        lineage = Lineage(self.name, bool(self.weights.lineage and self.weights.lineage.stays))
        lineage.change = self if passes_on else None
        return replace(self.weights, layout=base.layout, buckets=buckets, lineage=lineage)


def difference(name: str, base: Weights, weights: Weights) -> Difference | None:
    """Changes that make weights of others; None if they are more than the whole, or shapes differ. Blocking.

    Args:
        name: of the lineage.
        base, weights: the older and the newer, in host memory.
    """
    kinds = [[(bucket.dtype, bucket.shape) for bucket in each.buckets] for each in (base, weights)]
    if base.layout != weights.layout or kinds[0] != kinds[1] or any(dtype.itemsize > 8 for dtype, _ in kinds[0]):
        return None
    olds, news = [list(map(_words, each.buckets)) for each in (base, weights)]

    def compare(_: int, bucket: int, start: int, stop: int) -> tuple[int, _Array, _Array]:
        return _compared(olds[bucket][start:stop], news[bucket][start:stop])

    parts = _each(compare, enumerate(_cut(weights)))
    table = np.array([(way, places.nbytes, values.nbytes) for way, places, values in parts], np.int64).reshape(-1, 3)
    if int(table[:, 1:].sum()) + table.nbytes >= weights.nbytes:
        return None
    places, values = (_joined([part[column] for part in parts]) for column in (1, 2))
    return Difference(name, base.key, None, table, places, values)


def _words(bucket: torch.Tensor) -> _Array:
    """Elements of a tensor as unsigned numbers: what counts is their bits, also of NaN and -0."""
    words: _Array = bucket.detach().view(torch.uint8).numpy().view(f"u{bucket.dtype.itemsize}")
    return words


def _cut(weights: Weights) -> Iterator[tuple[int, int, int]]:
    """Bucket, start and stop of every stretch."""
    for slot in weights.layout:
        yield from _cut_slot(slot)


def _cut_slot(slot: Slot) -> Iterator[tuple[int, int, int]]:
    end = slot.offset + int(np.prod(slot.shape))
    for start in range(slot.offset, end, STRETCH):
        yield slot.bucket, start, min(start + STRETCH, end)


def _each(work: Callable[..., Any], stretches: Iterable[tuple[int, tuple[int, int, int]]]) -> list[Any]:
    """Results of work on all stretches, by as many threads as torch computes with: numpy lets go of the interpreter."""
    if (count := torch.get_num_threads()) == 1:
        return [work(number, *stretch) for number, stretch in stretches]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda each: work(each[0], *each[1]), stretches))


def _compared(old: _Array, new: _Array) -> tuple[int, _Array, _Array]:
    """The way of writing a stretch, which elements changed, and their values."""
    changed = old != new
    count, bits = int(np.count_nonzero(changed)), -(-len(new) // 8)
    if not count:
        return _BITS, _NOTHING, _NOTHING
    if count * new.itemsize + min(count, bits) >= new.nbytes:
        return _ALL, _NOTHING, new
    places = np.flatnonzero(changed)  # also for what needs none: numpy takes four times as long by a mask
    if count < bits:
        gaps = np.diff(places, prepend=-1) - 1
        sizes = {way: kind.itemsize * (count + _more(gaps, _top(kind))) for way, kind in _GAPS.items()}
        way = min(sizes, key=lambda each: sizes[each])
        if sizes[way] < bits:
            return way, _as_gaps(gaps, _GAPS[way]), new[places]
    return _BITS, np.packbits(changed), new[places]


_NOTHING: _Array = np.empty(0, np.uint8)


def _top(kind: Any) -> int:
    return int(np.iinfo(kind).max)


def _more(gaps: _Array, top: int) -> int:
    """Numbers besides one per gap."""
    return int((gaps[gaps >= top] // top).sum())


def _as_gaps(gaps: _Array, kind: Any) -> _Array:
    """Gaps in one number each, and one more for every so many elements that no number can say."""
    more, rest = np.divmod(gaps, _top(kind))
    ends = np.cumsum(more + 1) - 1
    numbers = np.full(int(ends[-1]) + 1, _top(kind), kind)
    numbers[ends] = rest
    return numbers


def _write(way: int, places: _Array, values: _Array, old: _Array, new: _Array) -> None:
    """Write a stretch: the old elements, and the changed ones over them."""
    values = _as_words(values, old.dtype)
    if way == _ALL:
        new[:] = values
        return
    new[:] = old
    if not len(places):
        return
    if way == _BITS:
        new[np.flatnonzero(np.unpackbits(places, count=len(new)).view(bool))] = values
        return
    numbers = _as_words(places, _GAPS[way])
    last = numbers != _top(_GAPS[way])
    new[np.cumsum(numbers, dtype=np.int64)[last] + np.arange(len(values))] = values


def _as_words(octets: _Array, kind: Any) -> _Array:
    """Bytes as numbers, wherever they lie."""
    return np.frombuffer(octets.tobytes() if octets.ctypes.data % kind.itemsize else octets, kind)


def _joined(parts: Sequence[_Array]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([_NOTHING, *(part.view(np.uint8) for part in parts)]))
