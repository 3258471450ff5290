"""`python -m benchmarks.data_path`: what it counts is what passes, at the places where it passes."""

import pickle

import numpy as np

from benchmarks import data_path
from rlinf.data import packing, sample
from rlinf.runtime.streams import channel
from tests.actors import toys


def test_all_that_passes_is_counted_once_in_and_once_out(monkeypatch):
    for owner, name in (
        (sample.Group, "__reduce__"), (sample, "_group_arrived"), (packing.Parcel, "__reduce__"),
        (packing, "_unpack"), (channel.Sealed, "__init__"), (channel.Sealed, "__reduce__"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    data_path.watch_codecs()
    data_path.counts.clear()
    group = toys.group(0, np.random.default_rng(0))
    tokens = sum(len(answer.response_ids) for answer in group.samples)
    pickle.loads(pickle.dumps([group, channel.Sealed(None, b"abc", None)], 5))
    told = dict(data_path.counts)
    assert told["groups out"] == told["groups in"] >= 8 * tokens
    assert (told["sealed out"], told["sealed in"]) == (3, 6), "made, and made again where it arrives"
