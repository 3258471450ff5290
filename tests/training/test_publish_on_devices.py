"""Publishing as a GPU sees it, with tensors that only say that they are on one: bytes through the host, and at most."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

import rlinf.data.weights as weights_module
import rlinf.training.weight_sync as publish_module
from rlinf.data.weights import BUCKET_BYTES, Weights
from rlinf.engines.transformers.model import ModelForward
from rlinf.training.weight_sync import exported, has_room, pack, publishing_bytes
from tests.training.device_watch import pretended

SHAPES = [(151_936, 1536), (1536, 8960), (1536,), (8960, 1536), (7, 3), *[(8960, 1536)] * 24]
"""Of Qwen2.5-1.5B: its embedding is larger than a bucket; and rows that no number of ranks divides."""
WHOLE = sum(torch.Size(shape).numel() for shape in SHAPES)
LARGEST = 2 * 151_936 * 1536


@pytest.fixture
def mesh(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh=torch.arange(request.param))
    dist.destroy_process_group()


@pytest.fixture
def reads(monkeypatch):
    """How many numbers were read from a device, each time that some were."""
    found = []

    def read(numbers):
        found.append(len(numbers))
        return [0] * len(numbers)

    monkeypatch.setattr(weights_module, "_read", read)
    return found


def sharded(mesh):
    """Rank 0's shards, float32."""
    for number, shape in enumerate(SHAPES):
        local = torch.empty((-(-shape[0] // mesh.size()), *shape[1:]), device="cuda")
        stride = torch.empty(shape, device="meta").stride()
        yield f"t{number}", DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def allocator(where):
    return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=where)


@pytest.mark.parametrize("mesh", [2, 8], indirect=True)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("lead", [True, False])
def test_beside_its_shard_and_the_buckets_a_rank_needs_less_than_one_bucket(mesh, where, lead, reads):
    with pretended() as watch:
        named = list(sharded(mesh))
        before, watch.peak["cuda"] = watch.alive["cuda"], 0
        pack(lambda _: named, 1, lead=lead, dtype=torch.bfloat16, empty=allocator(where))
        peak = max(watch.peak["cuda"], before) - before
    on_device = lead and where == "cuda"
    assert peak <= publishing_bytes(2 * WHOLE, on_device=on_device, ranks=mesh.size())
    assert peak - (2 * WHOLE if on_device else 0) <= 0.3 * BUCKET_BYTES
    assert watch.copied["cuda", "cpu"] == (2 * WHOLE if lead and where == "cpu" else 0)


@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_shards_are_cast_before_they_are_sent(mesh, reads, monkeypatch):
    sent = []
    gather = publish_module.all_gather

    def watched(into, part, group=None):
        sent.append((part.dtype, part.nbytes))
        return gather(into, part, group=group)

    monkeypatch.setattr(publish_module, "all_gather", watched)
    with pretended():
        named = list(sharded(mesh))
        pack(lambda _: named, 1, lead=False, dtype=torch.bfloat16)
    assert {dtype for dtype, _ in sent} == {torch.bfloat16}
    shards = sum(2 * tensor.to_local().numel() for _, tensor in named)
    assert sum(size for _, size in sent) == shards


def tiny(dtype=torch.float32):
    """A model on the GPU."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():  # `to` asks for the driver
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="cuda")))
    return model


def test_on_one_device_nothing_but_checksums_passes_through_the_host(reads):
    with pretended() as watch:
        trained, forward = tiny(), ModelForward(tiny(torch.bfloat16), 0)
        watch.copied.clear()
        weights = pack(partial(exported, trained), 1, lead=True, dtype=torch.bfloat16, bucket_bytes=8192)
        weights.verify()
        forward.load(weights)
        assert watch.copied["cuda", "cpu"] == watch.copied["cpu", "cuda"] == 0
        assert watch.copied["cuda", "cuda"] >= 2 * weights.nbytes  # into the buckets, and out of them
    assert forward.version == 1
    assert reads == [len(weights.buckets)] * 2  # one look at the device each, by the trainer and by the receiver
    assert {bucket.dtype for bucket in weights.buckets} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_through_the_host_go_the_bytes_of_the_engines_dtype(reads, dtype):
    with pretended() as watch:
        trained = tiny()
        elements = sum(parameter.numel() for parameter in trained.parameters())
        watch.copied.clear()
        pack(partial(exported, trained), 1, lead=True, dtype=dtype, empty=allocator("cpu"))
    assert watch.copied["cuda", "cpu"] == elements * (4 if dtype is None else 2)


def test_what_goes_through_the_host_is_copied_there_once():
    with pretended() as watch:
        named = [
            ("one", torch.empty(100, device="cuda")),
            ("two", torch.empty(10, device="cuda", dtype=torch.bfloat16)),
        ]
        weights = Weights(1, (), tuple(tensor for _, tensor in named), (0, 0))
        there = weights.in_host_memory()
        assert there.in_host_memory() is there
    assert watch.copied["cuda", "cpu"] == weights.nbytes == 420
    assert {bucket.device.type for bucket in there.buckets} == {"cpu"}
    assert there.key == weights.key


def test_a_device_has_room_if_a_receiver_may_need_as_much_again(monkeypatch):
    free, cached = 10 << 30, 2 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cached + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    card, beside = torch.device("cuda", 0), publishing_bytes(0, on_device=True, ranks=2)
    most = (free + cached - beside) // 2
    assert has_room(card, most)
    assert not has_room(card, most + 1)
    assert not has_room(torch.device("cpu"), 1)


def test_a_checksum_is_of_the_bytes_wherever_they_lie():
    """The reference: 64-bit words in Python, block by block."""
    data = torch.randint(0, 256, (3000,), dtype=torch.uint8)
    step, odd, mask = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1
    padded = bytes(data.tolist()) + bytes(-len(data) % 1024)
    found = (len(data) * (step - (1 << 64))) % (1 << 62)
    for number in range(len(padded) // 1024):
        block = padded[1024 * number : 1024 * (number + 1)]
        words = (int.from_bytes(block[8 * i : 8 * i + 8], "little") for i in range(128))
        each = (sum(words) + (number + 1) * step) & mask
        for shift in (32, 29):
            each = ((each ^ (each >> shift)) * odd) & mask
        found += each
    assert weights_module.checksum(data) == found & mask


def test_weights_of_several_kinds_of_device_are_verified_where_they_are(reads):
    with pretended():
        named = [("here", torch.ones(9)), ("there", torch.ones(9, device="cuda", dtype=torch.bfloat16))]
        Weights.pack(named, 1).verify()
    assert reads == [1, 1] * 2
