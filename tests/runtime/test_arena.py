"""Tensors go between processes through shared memory: nothing overlaps, nothing leaks, nothing is copied twice."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.transport.arena import PAGE, Arena, ArenaFull, ArenaReader, Holes, SlotRef
from tests.runtime.worlds import DTYPES

pytestmark = pytest.mark.skipif(not Arena.available(), reason="needs memfd")

MB = 1 << 20


def export(arena: Arena, tensor: torch.Tensor, holder: int) -> SlotRef:
    """Let a host hold a tensor's memory, or else that of a copy, as a message does."""
    ref = arena.lend(tensor.detach(), holder)
    return ref or arena.lend(arena.empty(tensor.shape, tensor.dtype).copy_(tensor), holder)


class Pair:
    """An arena and a reader in one process; what the reader frees goes back when `deliver` is called."""

    def __init__(self, limit: int = 64 * MB, holder: int = 1):
        self.arena, self.holder = Arena(0, limit), holder
        self.freed: list[tuple[int, int]] = []
        self.reader = ArenaReader(lambda owner, slot: self.freed.append((owner, slot)))

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.reader.open(pickle.loads(pickle.dumps(export(self.arena, tensor, self.holder))))

    def deliver(self) -> None:
        freed, self.freed[:] = list(self.freed), []
        self.arena.release(self.holder, [slot for _, slot in freed])


@pytest.fixture
def pair() -> Pair:
    return Pair()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


# What arrives -----------------------------------------------------------------------------------------------------


SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5, 7)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_shape_arrives_bit_by_bit(pair: Pair) -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        check_arrival(pair, dtype, shape)


def check_arrival(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (max(count, 1) * dtype.itemsize,), dtype=torch.uint8)
    foreign = bits.view(dtype)[:count].reshape(shape)
    born = pair.arena.empty(shape, dtype)
    if count:
        born.reshape(-1).view(torch.uint8).copy_(bits)
    for sent in (foreign, born):
        got = pair.send(sent)
        assert (got.dtype, got.shape, got.stride()) == (dtype, sent.shape, sent.stride())
        assert got.data_ptr() % 64 == 0
        if count:
            assert raw(got) == raw(foreign)


def test_views_of_arena_tensors_are_handed_over_without_a_copy(pair: Pair) -> None:
    born = pair.arena.empty((6, 8, 10))
    torch.arange(480.0, out=born.view(-1))
    views = [
        born[2],
        born[:, 1:7:2, 3:],
        born.transpose(0, 2),
        born[1, 2, 3],
        born[:, :0],
        born.diagonal(),
        born[..., ::3],
    ]
    views.append(born[:1].expand(4, 8, 10))
    views.append(torch.from_numpy(born[3:].numpy()))
    for view in views:
        got = pair.send(view)
        assert got.stride() == view.stride()
        assert torch.equal(got, view)
    assert pair.arena.statistics().slots == 1
    got = pair.send(born)
    born.fill_(7)
    assert (got == 7).all()


def test_foreign_views_arrive_contiguous(pair: Pair) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    for view in (base.transpose(0, 2), base[:, ::2], base[:1].expand(7, 4, 5), base[1:, 1:, 1:]):
        got = pair.send(view)
        assert got.is_contiguous()
        assert torch.equal(got, view)


def test_conjugate_views_and_parameters_arrive_as_values(pair: Pair) -> None:
    born = pair.arena.empty(4, torch.complex64)
    born.copy_(torch.tensor([1 + 2j, 3 - 4j, 0j, 5j]))
    assert torch.equal(pair.send(born.conj()), torch.tensor([1 - 2j, 3 + 4j, 0j, -5j]))
    assert torch.equal(pair.send(born.conj().imag), torch.tensor([-2.0, 4.0, 0.0, -5.0]))
    weight = torch.nn.Parameter(torch.ones(3))
    assert not pair.send(weight).requires_grad


def test_large_slots_begin_on_pages_and_waste_little() -> None:
    arena = Arena(0, 256 * MB)
    for nbytes in (256 << 10, (256 << 10) + 1, 5 * MB + 3):
        tensor = arena.empty(nbytes, torch.uint8)
        assert tensor.data_ptr() % PAGE == 0
        assert arena.statistics().in_use <= 1.125 * nbytes
        del tensor


# How long a slot lives ----------------------------------------------------------------------------------------------


def test_any_view_of_what_was_opened_keeps_the_slot(pair: Pair) -> None:
    tensor = pair.send(torch.arange(100.0))
    tail = tensor[1:]
    del tensor
    assert not pair.freed
    array = tail.numpy()
    del tail
    assert not pair.freed
    part = array[3:].reshape(8, 12)[2]
    del array
    assert not pair.freed
    again = torch.from_numpy(part)
    del part
    assert not pair.freed
    storage = again.untyped_storage()
    del again
    assert not pair.freed
    del storage
    assert pair.freed == [(0, 0)]
    gc.collect()
    assert pair.freed == [(0, 0)]
    pair.deliver()
    assert pair.arena.statistics().slots == 0


def test_each_opening_is_freed_once(pair: Pair) -> None:
    ref = export(pair.arena, torch.ones(3), 1)
    export(pair.arena, pair.arena.empty(1), 1)
    first, second = pair.reader.open(ref), pair.reader.open(ref)
    del first
    assert pair.freed == [(0, ref.slot)]
    assert second.sum() == 3
    del second
    assert pair.freed == [(0, ref.slot)] * 2


def test_a_dead_holder_gives_everything_back_and_late_word_from_it_is_harmless() -> None:
    arena = Arena(0, MB)
    slots = [export(arena, torch.ones(10), holder).slot for holder in (1, 1, 2)]
    arena.forget(1)
    assert arena.statistics().holders == {2: 64}
    fresh = export(arena, torch.ones(10), 2)
    arena.release(1, slots)
    assert arena.statistics().holders == {2: 128}
    arena.release(2, [slots[2], fresh.slot])
    assert arena.statistics().slots == 0


def test_collection_on_another_thread_and_inside_cycles_frees(pair: Pair) -> None:
    def drop(count: int) -> None:
        for _ in range(count):
            cycle: list[Any] = [pair.send(torch.ones(100)), pair.arena.empty(100)]
            cycle.append(cycle)

    threads = [threading.Thread(target=drop, args=(200,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(pair.freed) == 800
    pair.deliver()
    assert pair.arena.statistics().slots == 0


def test_a_finalizer_may_release_while_the_arena_is_at_work() -> None:
    arena = Arena(0, MB)
    reader = ArenaReader(lambda owner, slot: arena.release(1, [slot]))
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # collects at nearly every allocation, also within the arena's lock
    try:
        for _ in range(200):
            cycle: list[Any] = [reader.open(export(arena, torch.ones(10), 1)), arena.empty(10)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert arena.statistics().slots == 0


def test_threads_share_an_arena_without_mixing_contents(pair: Pair) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        kept: list[tuple[float, torch.Tensor]] = []
        for step in range(150):
            mark = float(seed * 1000 + step)
            size = chance.choice((10, 1000, 80_000))
            if chance.random() < 0.5:
                kept.append((mark, pair.send(torch.full((size,), mark))))
            else:
                kept.append((mark, pair.arena.empty(size).fill_(mark)))
            if len(kept) > 10:
                mark, tensor = kept.pop(chance.randrange(10))
                wrong.extend([1] * int(not (tensor == mark).all()))
                del tensor
            if pair.freed:
                pair.arena.release(1, [pair.freed.pop()[1]])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pair.deliver()
    assert pair.arena.statistics().slots == 0


# How much memory ----------------------------------------------------------------------------------------------------


def test_thousands_of_messages_reuse_the_same_pages(pair: Pair) -> None:
    big, small = torch.ones(200_000), torch.ones(500)
    held: list[torch.Tensor] = []
    mapped = 0
    for step in range(3000):
        held.append(pair.send(big if step % 3 == 0 else small))
        if len(held) > 8:
            held.pop(0)
        pair.deliver()
        if step == 100:
            mapped = pair.arena.statistics().mapped
    assert pair.arena.statistics().mapped == mapped <= 9 * big.nbytes + MB


@pytest.mark.parametrize("seed", range(3))
def test_fragmentation_stays_bounded(seed: int) -> None:
    chance = random.Random(seed)
    holes, live, used, peak = Holes(0, 1 << 40), [], 0, 0
    for _ in range(6000):
        while used > 400 * MB or (live and chance.random() < 0.3):
            start, size = live.pop(chance.randrange(len(live)))
            holes.give(start, size)
            used -= size
        size = -(-int(chance.lognormvariate(14, 1.5)) // PAGE) * PAGE
        place = holes.take(size)
        assert place is not None
        live.append((place[0], size))
        used += size
        peak = max(peak, used)
    assert holes.touched < 1.5 * peak
    for start, size in live:
        holes.give(start, size)
    assert holes.take(1 << 40) is not None


def test_past_the_limit_the_error_says_who_holds_how_much() -> None:
    arena = Arena(3, 4 * MB)
    mine = arena.empty(MB // 4)
    export(arena, torch.ones(MB // 2), 5)
    with pytest.raises(ArenaFull, match=r"3.*2.1 MB.*3.1.*4.2 MB.*host 5 2.1 MB.*process 1.0 MB"):
        export(arena, torch.ones(MB // 2), 6)
    del mine
    assert export(arena, torch.ones(MB // 2), 6)


def test_what_fits_the_limit_is_never_refused_for_fragmentation_and_pages_stay_within_it() -> None:
    arena = Arena(0, 16 * MB)
    blocks = [arena.empty(MB, torch.uint8).fill_(1) for _ in range(16)]
    del blocks[::2]  # 8 MB free, in holes of 1
    five = arena.empty(5 * MB, torch.uint8).fill_(2)
    statistics = arena.statistics()
    assert statistics.in_use == 13 * MB
    assert statistics.mapped <= 16 * MB
    assert all((block == 1).all() for block in blocks)
    assert (five == 2).all()


def test_a_small_tensor_does_not_take_the_place_of_a_large_one(pair: Pair) -> None:
    guard = [pair.arena.empty(MB), pair.arena.empty(MB)]
    place = guard.pop(0).data_ptr()
    small = pair.arena.empty(10)
    assert pair.arena.empty(MB).data_ptr() == place != small.data_ptr()


def test_nothing_is_named_and_nothing_is_left(pair: Pair) -> None:
    before = set(os.listdir("/dev/shm"))
    tensor = pair.send(torch.ones(MB))
    assert set(os.listdir("/dev/shm")) == before
    pair.arena.close()
    assert (tensor == 1).all()
    with pytest.raises(RuntimeFault, match="closed"):
        export(pair.arena, torch.ones(1), 1)
    pair.arena.close()
    maps = Path("/proc/self/maps")
    assert "rlinf-arena-0" in maps.read_text()
    pair.reader.close()
    del tensor
    assert not pair.freed
    gc.collect()


def test_a_descriptor_that_became_something_else_is_not_mapped(pair: Pair) -> None:
    ref = export(pair.arena, torch.ones(1), 1)
    other = Arena(1, MB)
    keep = other.empty(1)
    wrong = export(other, keep, 1).segment
    mixed = type(wrong)(wrong.owner, wrong.pid, wrong.fd, ref.segment.inode, wrong.size)
    bad = SlotRef(mixed, ref.slot, ref.offset, ref.nbytes, ref.dtype, ref.shape, ref.stride)
    with pytest.raises(RuntimeFault, match="other memory"):
        pair.reader.open(bad)


# Between processes --------------------------------------------------------------------------------------------------


def peer(pipe: Connection) -> None:
    """Lends two tensors; then adds 1 to whatever it gets, answers with the sum, and keeps it until told."""
    arena = Arena(7, 8 * MB)
    pipe.send((export(arena, torch.arange(1000.0), 0), export(arena, torch.ones(5), 0)))
    kept: list[torch.Tensor] = []
    freed: list[int] = []
    reader = ArenaReader(lambda owner, slot: freed.append(slot))
    while (ref := pipe.recv()) is not None:
        if ref == "drop":
            kept.clear()
            pipe.send(list(freed))
            freed.clear()
            continue
        kept.append(reader.open(ref))
        kept[-1].add_(1)
        pipe.send(kept[-1].sum().item())


def test_two_processes_share_memory_and_each_outlives_the_other() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=peer, args=(there,), daemon=True)
    process.start()
    first, second = pipe.recv()

    arena = Arena(0, 64 * MB)
    born = arena.empty((100, 50)).fill_(1)
    pipe.send(export(arena, born.t(), 7))
    assert pipe.recv() == 10_000
    assert (born == 2).all()
    pipe.send(export(arena, torch.ones(3, dtype=torch.bfloat16), 7))
    assert pipe.recv() == 6
    pipe.send("drop")
    freed = pipe.recv()
    assert sorted(freed) == [0, 1]
    arena.release(7, freed)
    assert arena.statistics().holders == {}
    pipe.send(export(arena, torch.ones(MB), 7))
    assert pipe.recv() == 2 * MB

    gone: list[tuple[int, int]] = []
    reader, late = ArenaReader(lambda owner, slot: gone.append((owner, slot))), ArenaReader(lambda owner, slot: None)
    tensor = reader.open(first)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()

    arena.forget(7)
    assert (arena.statistics().slots, arena.statistics().holders) == (1, {})
    assert torch.equal(reader.open(second), torch.ones(5))
    assert gone == [(7, second.slot)]
    reader.forget(7)
    assert torch.equal(tensor, torch.arange(1000.0))
    maps = Path("/proc/self/maps")
    assert "rlinf-arena-7" in maps.read_text()
    del tensor
    assert gone == [(7, second.slot), (7, first.slot)]
    assert "rlinf-arena-7" not in maps.read_text()
    with pytest.raises(RuntimeFault, match="host 7"):
        late.open(first)


# Any program --------------------------------------------------------------------------------------------------------

HOLDERS = st.integers(1, 3)
SIZES = st.sampled_from([0, 1, 7, 16, 100, 5000, 65_536, 65_537, 200_000, 600_000])


class Program(RuleBasedStateMachine):
    """Random programs against a model: which slot has which mark, and how often each holder holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(0, 24 * MB)
        self.freed: dict[int, list[int]] = {holder: [] for holder in (1, 2, 3)}
        self.readers = {
            holder: ArenaReader(lambda _, slot, freed=freed: freed.append(slot)) for holder, freed in self.freed.items()
        }
        self.local: list[tuple[torch.Tensor, int]] = []
        self.sent: list[tuple[int, SlotRef, int]] = []
        self.open: list[tuple[int, torch.Tensor, int, int]] = []
        self.held: dict[tuple[int, int], int] = {}
        self.marks = 0

    def _mark(self) -> int:
        self.marks += 1
        return self.marks

    def _hold(self, slot: int, holder: int, by: int) -> None:
        count = self.held.pop((slot, holder), 0) + by
        if count:
            self.held[slot, holder] = count

    @rule(size=SIZES)
    def empty(self, size: int) -> None:
        mark = self._mark()
        try:
            self.local.append((self.arena.empty(size, torch.int32).fill_(mark), mark))
        except ArenaFull:
            assert self.arena.statistics().in_use + size * 4 + PAGE > self.arena.limit

    @rule(size=SIZES, holder=HOLDERS)
    def export_foreign(self, size: int, holder: int) -> None:
        mark = self._mark()
        try:
            ref = export(self.arena, torch.full((size,), mark, dtype=torch.int32), holder)
        except ArenaFull:
            return
        self._hold(ref.slot, holder, 1)
        self.sent.append((holder, ref, mark))

    @precondition(lambda self: self.local)
    @rule(data=st.data(), holder=HOLDERS, skip=st.integers(0, 3), step=st.integers(1, 3))
    def export_local(self, data: Any, holder: int, skip: int, step: int) -> None:
        tensor, mark = self.local[data.draw(st.integers(0, len(self.local) - 1))]  # what is drawn is kept alive
        ref = export(self.arena, tensor[skip::step], holder)
        self._hold(ref.slot, holder, 1)
        self.sent.append((holder, ref, mark))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def open_one(self, data: Any) -> None:
        holder, ref, mark = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.open.append((holder, self.readers[holder].open(ref), mark, ref.slot))

    @precondition(lambda self: self.local)
    @rule(data=st.data())
    def drop_local(self, data: Any) -> None:
        del self.local[data.draw(st.integers(0, len(self.local) - 1))]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def drop_open(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        holder, _, _, slot = self.open[index]
        before = len(self.freed[holder])
        del self.open[index]
        assert self.freed[holder][before:] == [slot]

    @rule(holder=HOLDERS)
    def release(self, holder: int) -> None:
        freed = self.freed[holder]
        self.arena.release(holder, freed)
        for slot in freed:
            self._hold(slot, holder, -1)
        freed.clear()

    @rule(holder=HOLDERS)
    def forget(self, holder: int) -> None:
        self.sent = [item for item in self.sent if item[0] != holder]
        self.open = [item for item in self.open if item[0] != holder]
        self.freed[holder].clear()
        self.arena.forget(holder)
        self.held = {key: count for key, count in self.held.items() if key[1] != holder}

    @invariant()
    def contents_are_intact_and_the_books_agree(self) -> None:
        for tensor, mark in self.local:
            assert (tensor == mark).all()
        for _, tensor, mark, _ in self.open:
            assert (tensor == mark).all()
        statistics = self.arena.statistics()
        assert set(statistics.holders) == {holder for _, holder in self.held}
        assert max(statistics.in_use, statistics.mapped) <= self.arena.limit
        assert statistics.slots >= len({slot for slot, _ in self.held})
        assert statistics.slots <= len({slot for slot, _ in self.held}) + len(self.local)

    def teardown(self) -> None:
        for holder in (1, 2, 3):
            self.forget(holder)
        self.local.clear()
        statistics = self.arena.statistics()
        assert (statistics.slots, statistics.in_use, statistics.holders) == (0, 0, {})
        self.arena.close()


TestProgram = Program.TestCase
TestProgram.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
