"""What comes from a GPU is parked in one page-locked slab, by copies that are waited for once.

The GPU is a model of one: a stream keeps the copies that it was given and makes them when it is waited for, so that
memory that is given back too early, or read too early, shows.
"""

from __future__ import annotations

import contextlib
import gc
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from rlinf.models import offload
from rlinf.models.offload import Parking, bytes_of
from rlinf.runtime.base import tensors as pinned
from rlinf.runtime.base.tensors import PinnedSlab

PAGE = 4096


class Card:
    """See the module."""

    def __init__(self):
        self.locked = {}
        """Sizes of locked stretches, by address."""
        self.registered = 0
        self.code = 0
        self.waits = self.copied = 0
        self.waited_for = []

    # The driver
    def cudaHostRegister(self, address, size, flags):
        ends = [(start, start + length) for start, length in self.locked.items()]
        assert all(address + size <= start or end <= address for start, end in ends), "locked twice"
        if self.code == 0:
            self.locked[address] = size
            self.registered += size
        return self.code

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


class Stream(TorchFunctionMode):
    """A stream: in it, copies that need not be waited for are kept for later."""

    def __init__(self, card):
        super().__init__()
        self.card, self.begun = card, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.begun.append(args)
            return args[0]
        return func(*args, **(kwargs or {}))

    def wait_stream(self, other):
        self.card.waited_for.append(other)

    def synchronize(self):
        self.card.waits += 1
        for to, source in self.begun:
            assert source.untyped_storage().nbytes(), "its memory was given back before it was read"
            to.copy_(source)
            self.card.copied += source.nbytes
        self.begun.clear()


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: card)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(card))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(offload, "_on_gpu", lambda storage: True)
    monkeypatch.setattr(pinned, "PIECE", 16 * PAGE)
    yield card
    gc.collect()
    assert card.locked == {}, "memory of a parking that is gone stays locked"


def learner():
    net = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def held():
        for parameter in net.parameters():
            yield parameter
            # the counters of steps lie on the CPU where the rest is on a GPU
            yield from (each for each in optimizer.state.get(parameter, {}).values() if each.dim())

    def step(number):
        net(torch.full((2, 100), float(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return held, step


def test_twenty_times_away_and_back_leaves_every_bit_in_little_more_memory_than_that(card):
    (held, step), (same, same_step) = learner(), learner()
    with torch.no_grad():
        for one, other in zip(held(), same(), strict=True):
            other.copy_(one)
    parking = Parking(held)
    most = 0
    for number in range(20):
        before = card.registered
        parking.park()
        assert bytes_of(held()) == 0
        most = max(most, parking.parked)
        assert most <= parking.pinned <= 1.1 * most
        assert parking.pinned == sum(card.locked.values())
        assert (card.registered > before) is (number in (0, 5)), "only when there is more to park"
        parking.unpark()
        if number >= 4:  # from now on the optimizer has a state
            step(number)
            same_step(number)
        assert all(torch.equal(one, other) for one, other in zip(held(), same(), strict=True))
    assert most == 3 * 4 * 4 * (100 * 100 + 100)


def test_a_move_waits_once_and_begins_after_what_the_device_has_to_do(card):
    tensors = [torch.randn(3000) for _ in range(50)]
    parking = Parking(tensors)
    parking.park()
    assert (card.waits, card.waited_for) == (1, ["the current one"])
    parking.unpark()
    assert (card.waits, card.waited_for) == (2, ["the current one"] * 2)


def test_a_tensor_may_lie_in_several_pieces_of_the_slab(card):
    first, long = torch.arange(1000), torch.arange(100_000)  # 800,000 bytes over pieces of 65,536
    parking = Parking([first, long])
    parking.park()
    assert max(card.locked.values()) == 16 * PAGE
    parking.unpark()
    assert torch.equal(long, torch.arange(100_000))
    assert torch.equal(first, torch.arange(1000))


def test_what_is_about_to_be_overwritten_comes_back_without_its_bytes(card):
    kept, anew = torch.ones(1000), torch.ones(1000)
    part = anew[10:]
    parking = Parking([kept, anew])
    parking.park()
    card.copied = 0
    parking.unpark(without=[part])
    assert card.copied == 4000
    assert (parking.parked, anew.untyped_storage().nbytes()) == (0, 4000)
    assert bytes_of([kept, anew]) == 8000
    assert torch.equal(kept, torch.ones(1000))
    anew.fill_(7)
    parking.park()
    parking.unpark()
    assert torch.equal(anew, torch.full((1000,), 7.0)), "a full round knows nothing of the last"


def test_a_way_back_that_runs_out_of_memory_is_gone_on_with_in_either_direction_and_takes_no_more(card, monkeypatch):
    true_resize, left = torch.UntypedStorage.resize_, [0]

    def resize(storage, size):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory")
        return true_resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    tensors = [torch.full((3000 + number,), float(number)) for number in range(4)]
    parking = Parking(tensors)
    parking.park()
    size = parking.pinned
    for fails_at in (1, 3, 4):
        for then in ("park", "unpark"):
            left[0] = fails_at
            with pytest.raises(RuntimeError, match=r"out.*memory"):
                parking.unpark()
            assert [each.untyped_storage().nbytes() > 0 for each in tensors] == [n < fails_at - 1 for n in range(4)]
            getattr(parking, then)()
            parking.unpark()
            assert all(torch.equal(each, torch.full((3000 + n,), float(n))) for n, each in enumerate(tensors))
            parking.park()
    assert parking.pinned == size
    parking.unpark()


def test_what_comes_into_being_while_others_are_parked_is_not_put_on_top_of_them(card, monkeypatch):
    tensors = [torch.full((1000,), float(number)) for number in range(3)]
    parking = Parking(lambda: tensors)
    parking.park()
    true_resize = torch.UntypedStorage.resize_
    with monkeypatch.context() as patched:
        last = tensors[2].untyped_storage()._cdata

        def resize(storage, size):
            if storage._cdata == last:
                raise RuntimeError("out of memory")
            return true_resize(storage, size)

        patched.setattr(torch.UntypedStorage, "resize_", resize)
        with pytest.raises(RuntimeError, match=r"out.*memory"):
            parking.unpark()
    tensors[0] = torch.full((5000,), 7.0)
    parking.park()
    parking.unpark()
    assert [(len(each), float(each.min()), float(each.max())) for each in tensors] == [
        (5000, 7, 7), (1000, 1, 1), (1000, 2, 2)
    ]  # fmt: skip


def test_without_room_in_host_memory_nothing_moves_and_the_text_says_so(card, monkeypatch):
    tensor = torch.arange(10_000)
    parking = Parking([tensor])

    def full(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(pinned.mmap, "mmap", full)
        with pytest.raises(RuntimeError, match=r"80384 bytes.*memory.*allocate"):
            parking.park()
    assert (parking.parked, parking.pinned, bytes_of([tensor])) == (0, 0, 80_000)
    parking.park()
    parking.unpark()
    assert torch.equal(tensor, torch.arange(10_000))


def test_memory_that_cannot_be_locked_is_used_all_the_same_and_one_warning_says_that_it_is_slow(
    card, caplog, monkeypatch
):
    card.code, collected = 2, []
    monkeypatch.setattr(pinned, "_collect_error", lambda: collected.append(card.code))
    tensors = [torch.arange(10_000)]
    parking = Parking(lambda: tensors)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parking.park()
            parking.unpark()
            tensors.append(torch.arange(10_000))
    (record,) = caplog.records
    assert record.getMessage().startswith("80384 bytes ")
    assert collected == [2], "it is left for no kernel of others"
    assert (parking.pinned, [int(each[-1]) for each in tensors]) == (0, [9999] * 4)


@given(sizes=st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=8), first=st.floats(0, 1), last=st.floats(0, 1))
def test_a_part_of_a_slab_is_the_bytes_from_there_on(sizes, first, last):
    card = Card()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "cudart", lambda: card)
        patched.setattr(pinned, "PIECE", 2 * PAGE)
        slab, end = PinnedSlab(), 0
        for size in sizes:
            end += size
            slab.grow(end)
            assert slab.bytes == slab.pinned == end
    whole = torch.arange(end).to(torch.uint8)
    for part, piece in zip(slab.part(0, end), whole.split([each.size for each in slab._pieces]), strict=True):
        part.copy_(piece)
    start, stop = sorted((int(first * end), int(last * end)))
    found = slab.part(start, stop - start)
    assert torch.equal(torch.cat([whole[:0], *found]), whole[start:stop])
