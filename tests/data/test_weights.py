"""Weights on their way."""

import pickle

import torch

from rlinf.data.weights import Weights


def test_what_was_packed_comes_out():
    named = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.randn(()), "d": torch.randn(0, 5)}
    weights = Weights.pack(named.items(), 7)
    assert weights.version == 7
    assert [bucket.dtype for bucket in weights.buckets] == [torch.float32, torch.bfloat16]
    for name, tensor in weights.named():
        assert torch.equal(tensor, named[name])
        assert tensor.dtype == named[name].dtype


def test_they_are_a_copy():
    original = torch.nn.Parameter(torch.ones(3))
    weights = Weights.pack([("a", original)], 0)
    with torch.no_grad():
        original.zero_()
    assert dict(weights.named())["a"].tolist() == [1, 1, 1]
    assert not weights.buckets[0].requires_grad


def test_they_travel():
    weights = pickle.loads(pickle.dumps(Weights.pack([("a", torch.ones(2, 2))], 3)))
    assert dict(weights.named())["a"].tolist() == [[1, 1], [1, 1]]


def test_no_tensors_are_no_buckets():
    assert Weights.pack([], 0).buckets == ()
