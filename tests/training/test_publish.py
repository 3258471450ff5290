"""Publishing: what a trainer hands out is its model, under plain names, once, whole, and a copy."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.served.far_side.rlinf_weights import load_bucket
from rlinf.engines.served.shared_memory import SharedMemory
from rlinf.engines.transformers.model import ModelForward
from rlinf.metrics.timing import parts
from rlinf.models.language.build import build_model
from rlinf.models.language.lora import add_adapters, start_adapters
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.weight_sync import Receiver, exported, gathered, pack, publish

PROGRAMS = Path(__file__).parent / "programs"
TINY = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24,
}  # fmt: skip


def tiny(**more):
    return build_model({**TINY, **more}, load_tokenizer({"characters": "0123456789"}), seed=3)


@pytest.mark.parametrize("tied", [False, True])
def test_the_models_own_names_and_values_come_out_tied_ones_once(tied):
    model = tiny(tie_word_embeddings=tied)
    weights = pack(partial(exported, model), 4, lead=True)
    assert weights.version == 4
    found = dict(weights.named())
    assert ("lm_head.weight" in found) is not tied
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter)
    model.load_state_dict(found, strict=False)  # so they fit where they came from


def test_training_goes_on_without_changing_what_was_published():
    model = tiny()
    weights = pack(partial(exported, model), 0, lead=True)
    before = {name: tensor.clone() for name, tensor in weights.named()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    weights.verify()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.named())


def test_another_dtype_may_be_published():
    model = tiny()
    weights = pack(partial(exported, model), 0, lead=True, dtype=torch.bfloat16)
    assert {bucket.dtype for bucket in weights.buckets} == {torch.bfloat16}
    for (_, found), parameter in zip(weights.named(), model.parameters(), strict=True):
        assert torch.equal(found, parameter.bfloat16())


def masters(model):
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def test_an_engine_in_this_process_gets_the_masters_cast_to_its_dtype():
    model, engine = tiny(), tiny().bfloat16()
    ModelForward(engine, 0).load(pack(partial(exported, model), 1, lead=True, dtype=torch.bfloat16))
    assert all(torch.equal(parameter, masters(model)[name]) for name, parameter in engine.named_parameters())


def test_a_server_gets_the_masters_cast_to_its_dtype():
    model, memory, found = tiny(), SharedMemory(), {}

    def load_weights(named):
        found.update({name: tensor.clone() for name, tensor in named})

    weights = pack(partial(exported, model), 1, lead=True, dtype=torch.bfloat16, bucket_bytes=500)
    for number in range(len(weights.buckets)):
        load_bucket(load_weights, json.loads(memory.copy(weights, number)))
        assert memory.word(number) == "ok"
    memory.close()
    assert found.keys() == masters(model).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in masters(model).items())


def test_what_a_models_class_keeps_in_float32_is_published_so():
    model = tiny()
    model._keep_in_fp32_modules_strict = {"input_layernorm"}
    weights = pack(partial(exported, model), 1, lead=True, dtype=torch.bfloat16)
    for name, tensor in weights.named():
        assert tensor.dtype == (torch.float32 if "input_layernorm" in name else torch.bfloat16), name


def test_adapters_are_merged_and_leave_no_trace():
    plain, adapted = tiny(), tiny()
    add_adapters(adapted, {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]})
    with torch.no_grad():
        for parameter, value in start_adapters(adapted, 0):
            parameter.copy_(torch.rand_like(value))
    plain.load_state_dict(dict(pack(partial(exported, adapted), 0, lead=True).named()), strict=False)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(plain(input_ids=tokens).logits, adapted(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain(input_ids=tokens).logits, tiny()(input_ids=tokens).logits, atol=1e-2)


def test_other_ranks_get_nothing():
    assert pack(partial(exported, tiny()), 0, lead=False) is None


def test_gathering_keeps_order_and_passes_whole_tensors_through():
    named = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(30)}
    out = list(gathered(named.items()))
    assert [name for name, _ in out] == list(named)
    assert all(torch.equal(tensor, named[name]) for name, tensor in out)


def test_a_rank_that_fails_to_pack_still_takes_part_for_the_others(monkeypatch):
    model = tiny()
    seen = []

    def watched(place, tensor, dtype, clock=None):
        seen.append((place, tuple(tensor.shape)))

    def full(shape, dtype):
        raise MemoryError("full")

    monkeypatch.setattr("rlinf.training.weight_sync.gather_into", watched)
    with pytest.raises(MemoryError):
        pack(partial(exported, model), 0, lead=True, bucket_bytes=100, empty=full)
    assert seen == [(None, tuple(parameter.shape)) for parameter in model.parameters()]


class Publisher(Actor):
    async def setup(self, dtype=None) -> None:
        self.dtype = dtype
        self.model = tiny(vocab_size=9000)  # so that there is something worth sharing

    @endpoint(joint=True)
    async def weights(self):
        return await publish(self, partial(exported, self.model), 2, dtype=self.dtype)


class Copies(Receiver):
    """Keeps a model in bfloat16."""

    async def setup(self) -> None:
        self.model = tiny(vocab_size=9000).bfloat16()

    async def check_weights(self, weights):
        pass

    async def switch_weights(self, weights):
        for name, tensor in weights.named():
            self.model.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_a_step_tells_how_many_bytes_passed_through_host_memory_and_how_long_each_phase_took(dtype, size):
    async def main():
        async with ActorSystem.local(2, serialize=True) as system:
            publisher = await system.spawn(Publisher, hosts=[0], name="trainer", dtype=dtype)
            receivers = await system.spawn(Copies, hosts=[0, 1], name="rollout")
            watch = await Watch.start(system)
            watch.begins()
            await receivers.load(publisher.weights())
            found = parts(await watch.ends("step 1"))
            elements = sum(parameter.numel() for parameter in tiny(vocab_size=9000).parameters())
            assert found["weights/host_bytes"] == 3 * size * elements  # into the bucket, and twice out of it
            assert found["weights/device_bytes"] == 0
            phases = ("copy", "checksum", "send", "verify", "load")
            assert {f"weights/{phase}_seconds" for phase in phases} <= found.keys()
            assert all(seconds >= 0 for seconds in found.values())

    asyncio.run(main())


class Reader(Actor):
    @endpoint
    async def total(self, weights) -> float:
        weights.verify()
        return sum(float(bucket.double().sum()) for bucket in weights.buckets)


def test_buckets_go_through_shared_memory_without_a_copy():
    async def main():
        async with ActorSystem.local(3, serialize=True) as system:
            publisher = await system.spawn(Publisher, hosts=[1], name="publisher")
            readers = await system.spawn(Reader, hosts=[0, 2], name="readers")
            weights = publisher.weights()
            assert len(set(await readers.total(weights))) == 1
            there = system._network.system(1)._host
            assert {span.what for span in there.tracer.dump() if span.kind == "payload"} == {"arena"}
            assert there.values.arena.statistics().slots == 1  # the bucket; an export would copy into another

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize(("program", "processes"), [("remote.py", 2), ("relayed.py", 4), ("sharded.py", 3)])
def test_over_processes_weights_arrive_whole_and_states_are_restored_on_any_number_of_them(
    program, processes, zygote, tmp_path
):
    ranks = zygote.run(PROGRAMS / program, processes, tmp_path)
    assert ranks.codes(110.0) == [0] * processes, ranks.everything()
    assert "".join(map(ranks.printed, range(processes))) == "all as expected\n"
