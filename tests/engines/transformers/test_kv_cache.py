"""Bands: every row keeps its own columns, and masks lie where CUDA's attention takes them, whatever joins or leaves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor

from rlinf.engines.transformers import cache
from rlinf.engines.transformers.cache import Band, Layers
from tests.fake_cuda import fake_cuda

HEADS, SIZE = 1, 8

changes = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
        st.tuples(st.just("merge"), st.lists(st.integers(1, 30), min_size=1, max_size=3)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=25,
)


def texts(numbers, device):
    """What a prefill gives for texts of these lengths: token t of a text is told by its key."""
    longest = max(length for _, length in numbers)
    keys = torch.zeros((len(numbers), HEADS, longest, SIZE), dtype=torch.float32, device=device)
    for row, (number, length) in enumerate(numbers):
        keys[row, :, longest - length :] = (1000.0 * number + torch.arange(length, device=device))[None, :, None]
    return Layers([(keys, -keys)])


class Written:
    """A band, and what each of its rows should hold."""

    def __init__(self, device):
        self.device, self.made = device, 0
        self.lengths: dict[int, int] = {}
        self.band: Band | None = None

    def joined(self, lengths, band):
        numbers = [(self.made + number, length) for number, length in enumerate(lengths)]
        self.made += len(lengths)
        read = texts(numbers, self.device)
        band = band or Band(read, 5)
        slots, sizes = np.array([number for number, _ in numbers]), np.array(lengths)
        band.place(slots, sizes, read, torch.arange(len(lengths), device=self.device))
        self.lengths.update(numbers)
        return band

    def apply(self, change, argument):
        if change == "join" or self.band is None:
            self.band = self.joined(argument if isinstance(argument, list) else [3, 5], self.band)
        elif change == "merge":
            self.band.absorb(self.joined(argument, None))
        elif change == "leave" and len(self.band):
            row = argument % len(self.band)
            self.lengths.pop(int(self.band.slots[row]), None)
            self.band.end(np.array([row]))
        elif change == "compact" and self.band.live:
            self.band.compact()
        elif change == "step" and self.band.live:
            for _ in range(argument):
                self.step()

    def step(self):
        self.band.reserve()
        slots = self.band.slots.tolist()
        keys = torch.tensor([1000.0 * slot + self.lengths.get(slot, 0) for slot in slots], device=self.device)
        keys = keys[:, None, None].expand(-1, HEADS, SIZE)
        window, _ = self.band.write(0, keys, -keys)
        for last in (None, 3):
            check_mask(self.band, last)
        mask = self.band.mask()
        if self.device.type == "cpu":
            for row, slot in enumerate(slots):
                if slot >= 0:
                    seen = window[row, 0, :, 0] if mask is None else window[row, 0, mask[row, 0, 0] == 0, 0]
                    expected = 1000.0 * slot + np.arange(self.lengths[slot] + 1)
                    assert seen.tolist() == expected.tolist()
        self.band.advance()
        self.lengths = {slot: length + 1 for slot, length in self.lengths.items()}


def check_mask(band, last):
    """A mask is aligned, and of the window that it goes with."""
    mask = band.mask(last)
    if mask is None:
        return
    assert mask.storage_offset() % 8 == 0
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
    assert mask.stride(-1) == 1
    assert mask.shape[-1] == band.write(0, *no_keys(band), last)[0].shape[2]
    if last is not None and not isinstance(mask, FakeTensor):
        assert torch.equal(mask, band.mask()[..., -mask.shape[-1] :])


def no_keys(band):
    column = band._pairs[0][0][: len(band), :, band.filled]
    return column.clone(), -column


@pytest.fixture
def tight(monkeypatch):
    monkeypatch.setattr(cache, "_AHEAD", 3)


def test_masks_are_aligned_and_rows_keep_their_columns_whatever_joins_and_leaves(tight, monkeypatch):
    monkeypatch.setattr(cache, "_alignment", lambda device: 8)

    @given(changes)
    @settings(max_examples=80, deadline=None)
    def check(changed):
        written = Written(torch.device("cpu"))
        for change, argument in changed:
            written.apply(change, argument)

    check()


def test_cuda_tensors_are_laid_out_so(tight):
    @given(changes)
    @settings(max_examples=5, deadline=None)
    def check(changed):
        with fake_cuda() as device:
            written = Written(device)
            for change, argument in changed:
                written.apply(change, argument)

    check()


def test_cpus_keep_the_columns_that_they_have():
    assert cache._alignment(torch.device("cpu")) == 1
