"""Weights on their way: what is packed comes out, in bounded buckets, and damage shows."""

import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.weights import BLOCK, Weights, WeightsDamaged, _hashed, checksum

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def filled(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 400),
    st.sampled_from([None, torch.bfloat16, torch.float64]),
)
def test_what_was_packed_comes_out_in_bounded_buckets(kinds, bucket_bytes, dtype):
    named = {f"t{i}": filled(shape, kind, i) for i, (shape, kind) in enumerate(kinds)}
    weights = Weights.pack(named.items(), 7, bucket_bytes=bucket_bytes, dtype=dtype)
    weights.verify()
    assert weights.version == 7
    assert [slot.name for slot in weights.layout] == list(named)
    assert weights.nbytes == sum(bucket.nbytes for bucket in weights.buckets)
    for name, tensor in weights.named():
        expected = named[name].to(dtype) if dtype is not None and named[name].is_floating_point() else named[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    for number, bucket in enumerate(weights.buckets):
        alone = sum(slot.bucket == number for slot in weights.layout) == 1
        assert bucket.nbytes <= bucket_bytes or alone


def test_tensors_of_one_dtype_share_a_bucket():
    named = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.randn(()), "d": torch.randn(0, 5)}
    weights = Weights.pack(named.items(), 7)
    assert [bucket.dtype for bucket in weights.buckets] == [torch.float32, torch.bfloat16]
    assert [slot.bucket for slot in weights.layout] == [0, 1, 0, 0]


def test_they_are_a_copy():
    original = torch.nn.Parameter(torch.ones(3))
    weights = Weights.pack([("a", original)], 0)
    with torch.no_grad():
        original.zero_()
    assert dict(weights.named())["a"].tolist() == [1, 1, 1]
    assert not weights.buckets[0].requires_grad


def test_tensors_that_do_not_lie_in_order_are_packed_by_value():
    tensor = torch.arange(12).view(3, 4).t()
    assert torch.equal(dict(Weights.pack([("a", tensor)], 0).named())["a"], tensor)


def test_no_more_than_a_bucket_of_tensors_is_alive_at_a_time():
    alive = weakref.WeakSet()
    most = 0

    def made():
        nonlocal most
        for i in range(40):
            tensor = torch.full((100,), float(i))  # 400 bytes
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"t{i}", tensor
            del tensor

    weights = Weights.pack(made(), 0, bucket_bytes=2000)
    assert len(weights.buckets) == 8
    assert most <= 2000 // 400 + 1


def test_buckets_lie_where_the_allocator_puts_them():
    made = []

    def empty(shape, dtype):
        made.append(torch.empty(tuple(shape), dtype=dtype))
        return made[-1]

    weights = Weights.pack([("a", torch.ones(3)), ("b", torch.ones(3).half())], 0, empty=empty)
    assert all(bucket is mine for bucket, mine in zip(weights.buckets, made, strict=True))


def test_they_travel():
    weights = pickle.loads(pickle.dumps(Weights.pack([("a", torch.ones(2, 2))], 3)))
    assert dict(weights.named())["a"].tolist() == [[1, 1], [1, 1]]
    weights.verify()


def test_no_tensors_are_no_buckets():
    assert Weights.pack([], 0).buckets == ()


def test_a_name_twice_is_an_error():
    with pytest.raises(ValueError, match=r"comes twice"):
        Weights.pack([("a", torch.ones(1)), ("a", torch.ones(1))], 0)


def test_a_bucket_must_hold_something():
    with pytest.raises(ValueError, match=r"bucket_bytes.*least 1"):
        Weights.pack([], 0, bucket_bytes=0)


@given(st.integers(1, 5000), st.data())
def test_one_changed_byte_is_found(size, data):
    packed = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before = checksum(packed)
    where = data.draw(st.integers(0, size - 1))
    packed[where] ^= data.draw(st.integers(1, 255))
    assert checksum(packed) != before


@given(st.integers(2, 6), st.data())
def test_blocks_that_change_places_are_found(count, data):
    packed = torch.randint(-(2**60), 2**60, (count, BLOCK))
    first = data.draw(st.integers(0, count - 1))
    second = data.draw(st.integers(0, count - 1).filter(lambda i: i != first))
    moved = packed.clone()
    moved[first], moved[second] = packed[second], packed[first]
    assert checksum(moved.reshape(-1)) != checksum(packed.reshape(-1))


@pytest.mark.parametrize("size", [0, 1, 1024, 12_288, 33 * 1024, 70_001, (1 << 23) - 1, (1 << 23) + 5000, 17 << 20])
@pytest.mark.parametrize("begin", [0, 3, 8])
def test_a_checksum_is_the_same_number_in_host_memory_as_on_a_device(size, begin):
    data = torch.randint(0, 256, (begin + size,), dtype=torch.uint8)[begin:]
    assert checksum(data) == int(_hashed(data)) % (1 << 64)


def test_a_shorter_or_zeroed_bucket_is_found():
    packed = torch.zeros(4096)
    assert len({checksum(packed), checksum(packed[:-1]), checksum(packed[:1024]), checksum(packed[:0])}) == 4
    filled = torch.ones(4096)
    assert checksum(filled) != checksum(packed)


def test_a_checksum_does_not_depend_on_where_the_bucket_lies():
    whole = torch.randint(0, 256, (3001,), dtype=torch.uint8)
    assert checksum(whole[1:]) == checksum(whole[1:].clone())


def test_damage_names_bucket_and_version_and_tensors():
    weights = Weights.pack([(name, torch.randn(50)) for name in "abcd"], 12, bucket_bytes=400)
    weights.buckets[1][7] += 1
    with pytest.raises(WeightsDamaged, match=r"1.*2.*weights.*version 12.*400"):
        weights.verify()
