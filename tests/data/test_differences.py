"""Differences between versions of weights: exact to the bit, small, and never larger than the whole."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data import differences
from rlinf.data.differences import Difference, Differences, difference
from rlinf.data.weights import Weights
from rlinf.runtime.transport.arena import ArenaFull

WORDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}
SPECIAL = {
    torch.float32: [0x80000000, 0x7FC00001, 0xFFC00000, 0x7F800000, 1],
    torch.bfloat16: [0x8000, 0x7FC1, 0xFFC0, 0x7F80, 1],
    torch.float16: [0x8000, 0x7E01, 0xFE00, 0x7C00, 1],
}
"""-0, NaN with payloads, infinity and the smallest number."""


def packed(named, version=1):
    return Weights.pack(named, version, bucket_bytes=1 << 12)


def changed(weights, share, seed):
    """The weights with other bits, any at all and special ones, in this share of elements."""
    rng = np.random.default_rng(seed)
    named = []
    for name, tensor in weights.named():
        words = tensor.reshape(-1).view(torch.uint8).numpy().copy().view(WORDS[tensor.dtype])
        here = np.flatnonzero(rng.random(len(words)) < share)
        drawn = rng.integers(0, np.iinfo(words.dtype).max, len(here), dtype=words.dtype, endpoint=True)
        special = rng.random(len(here)) < 0.5
        drawn[special] = rng.choice(np.array(SPECIAL[tensor.dtype], words.dtype), int(special.sum()))
        words[here] = drawn
        named.append((name, torch.from_numpy(words.view(np.uint8)).view(tensor.dtype).view(tensor.shape)))
    return packed(named, weights.version + 1)


def sent(change, weights):
    """A difference as it arrives."""
    header = dataclasses.replace(weights, layout=(), buckets=())
    return pickle.loads(pickle.dumps(dataclasses.replace(change, weights=header)))


def applied(change, base, weights):
    about, tensors = sent(change, weights).taken_apart()
    return about.put_together(tensors).made_of(base)


def bits(weights):
    return [bucket.view(torch.uint8).numpy().tobytes() for bucket in weights.buckets]


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=4)
SHARES = st.sampled_from([0.0, 1e-3, 1e-2, 0.1, 0.3, 0.6, 1.0])


@settings(deadline=None, max_examples=300)
@given(
    SHAPES,
    st.lists(st.sampled_from(list(WORDS)), min_size=4, max_size=4),
    SHARES,
    st.sampled_from([200, 1000, 1 << 22]),
    st.data(),
)
def test_a_difference_makes_the_new_version_to_the_bit(shapes, dtypes, share, stretch, data):
    seed = data.draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    named = [
        (str(index), torch.randn(shape, generator=generator).to(dtype))
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    ]
    base = packed(named)
    new = changed(base, share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "STRETCH", stretch)
        change = difference("trainer", base, new)
        if change is None:
            return  # the whole is smaller
        made = applied(change, base, new)
    assert change.nbytes < new.nbytes
    assert bits(made) == bits(new)
    assert (made.key, made.layout) == (new.key, new.layout)
    made.verify()


def sparse(elements, places):
    base = torch.zeros(elements, dtype=torch.bfloat16)
    new = base.clone()
    new[places] = 1.0
    return packed([("all", base)]), packed([("all", new)], 2)


@pytest.mark.parametrize(
    ("places", "at_most"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([0], 2 + 32, id="the first"),
        pytest.param([999_999], 2 + 32, id="the last"),
        pytest.param([0, 254, 510, 65_000, 65_001, 999_999], 6 * 4 + 32, id="gaps at the edges of a byte"),
        pytest.param(list(range(0, 1_000_000, 1000)), 1000 * 4 + 0, id="few"),
        pytest.param(list(range(0, 1_000_000, 50)), 20_000 * 3, id="one in fifty"),
        pytest.param(list(range(0, 1_000_000, 4)), 250_000 * 2 + 125_000, id="one in four"),
    ],
)
def test_what_changed_is_written_in_the_fewest_bytes(places, at_most):
    base, new = sparse(1_000_000, places)
    change = difference("trainer", base, new)
    assert change.places.nbytes + change.values.nbytes <= at_most
    assert bits(applied(change, base, new)) == bits(new)


def test_two_in_a_hundred_changed_elements_of_bfloat16_are_a_thirtieth_of_the_whole():
    base = packed([("all", torch.randn(1_000_000, dtype=torch.bfloat16))])
    new = changed(base, 0.02, 5)
    assert difference("trainer", base, new).nbytes < new.nbytes / 30


def test_where_everything_changed_or_the_shapes_did_there_is_no_difference():
    base = packed([("all", torch.randn(10_000))])
    assert difference("trainer", base, packed([("all", base.buckets[0] + 1)])) is None
    assert difference("trainer", base, packed([("all", base.buckets[0].view(100, 100))])) is None
    assert difference("trainer", base, packed([("all", base.buckets[0].half())])) is None


@pytest.fixture
def _of_any_size(monkeypatch):
    monkeypatch.setattr(differences, "LEAST_BYTES", 0)


def of(publisher, elements, crossing=True):
    """Publish; to another machine if asked."""
    weights = publisher.placed(packed([("all", elements)]))
    if crossing:
        weights.lineage.since(weights, None)
    return weights


def test_small_weights_go_whole():
    weights = packed([("all", torch.zeros(1000))])
    assert Differences("trainer", lambda *_, **__: None).placed(weights) is weights


@pytest.mark.usefixtures("_of_any_size")
def test_a_publisher_keeps_nothing_until_weights_have_gone_to_another_machine():
    publisher = Differences("trainer", lambda *_, **__: None)
    weights = of(publisher, torch.zeros(1000), crossing=False)
    assert publisher.base is None
    assert of(publisher, torch.zeros(1000)).lineage.change is None
    assert of(publisher, torch.zeros(1000), crossing=False).lineage.change is not None
    weights.lineage.since(weights, None)  # an old one is asked for, late
    assert publisher.base.version == 1
    assert of(publisher, torch.zeros(1000)).lineage.change is not None


@pytest.mark.usefixtures("_of_any_size")
def test_only_who_has_the_very_version_before_gets_the_difference():
    notes = []
    publisher = Differences("trainer", lambda what, bytes: notes.append((what, bytes)))
    first, second = of(publisher, torch.zeros(1000)), of(publisher, torch.zeros(1000), crossing=False)
    assert second.lineage.since(second, None) is second
    assert second.lineage.since(second, (first.version, (1,))) is second
    small = second.lineage.since(second, first.key)
    assert isinstance(small, Difference)
    assert notes[-2:] == [("weights/link_bytes", small.nbytes), ("weights/link_whole_bytes", 4000)]


@pytest.mark.usefixtures("_of_any_size")
def test_where_differences_are_no_smaller_nobody_keeps_anything_most_of_the_time():
    publisher = Differences("trainer", lambda *_, **__: None)
    kept = [of(publisher, torch.randn(1000)).lineage.stays for _ in range(200)]
    assert kept[:8] == [True, False, True, False, False, False, True, False]
    assert sum(kept) < 10
    assert [of(publisher, torch.zeros(1000)).lineage.stays for _ in range(130)][-1], "it never tries again"


@pytest.mark.usefixtures("_of_any_size")
def test_where_shared_memory_has_no_room_beside_the_version_before_that_is_given_up():
    publisher = Differences("trainer", lambda *_, **__: None)
    of(publisher, torch.zeros(10))

    def empty(shape, dtype):
        if publisher.base is not None:
            raise ArenaFull("full")
        return torch.empty(shape, dtype=dtype)

    assert publisher.making_room(empty)((3,), torch.float32).shape == (3,)
    assert publisher.base is None
