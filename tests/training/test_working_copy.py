"""A whole model in bfloat16: plain modules with float32 weights, computed with by a copy in bfloat16."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.checks.parts import OneRank, policy_gradient
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec
from rlinf.models.offload import Parking, bytes_of
from rlinf.training.fsdp import FsdpBackEnd
from rlinf.training.weight_sync import gathered
from tests.actors import toys

ROWS = [Row.of(s, gain) for g in toys.groups(4) for s, gain in zip(g.scored, toys.advantages(g), strict=True)]
PACKED = pack(ROWS)
PARTS = [pack(ROWS[start::3]) for start in range(3)]


async def made(lora=None, head="logprobs", source=None, **compute):
    spec = ModelSpec(
        source or toys.configuration(),
        head=head,
        lora=lora,
        compute=LearningSettings(**{"dtype": "bfloat16"} | compute),
    )
    return await FsdpBackEnd.make(OneRank(torch.device("cpu")), spec, load_tokenizer(toys.ALPHABET))


def dtypes(module):
    return {parameter.dtype for parameter in module.parameters()}


async def test_between_passes_weights_are_float32_and_no_hook_stands_before_any_module():
    back = await made()
    assert dtypes(back.module) == {torch.float32}
    assert not any(isinstance(part, FSDPModule) or part._forward_pre_hooks for part in back.module.modules())
    with back.module.computing():
        assert dtypes(back.module) == {torch.bfloat16}
        assert back.model.lm_head(torch.ones(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert dtypes(back.module) == {torch.float32}


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_gradients_of_micro_batches_are_those_of_bfloat16_weights_added_up_in_float32(checkpointed):
    back = await made(gradient_checkpointing=checkpointed)
    optimization = back.optimization(LearningSettings(lr=0.0))
    optimization.accumulate(PARTS, policy_gradient)
    plain = await made(dtype="float32")
    for parameter in plain.module.parameters():
        parameter.data = parameter.data.bfloat16()
    plain.module.computes_in = torch.bfloat16
    expected = {name: torch.zeros(parameter.shape) for name, parameter in plain.module.named_parameters()}
    for part in PARTS:
        plain.module.zero_grad()
        policy_gradient(part, plain.module(part)).total.backward()
        for name, parameter in plain.module.named_parameters():
            expected[name] += parameter.grad.float()
    for name, parameter in back.module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, expected[name]), name


async def scores(back):
    return back.outputs(PACKED)[0]


async def fresh(back, tmp_path):
    """Outputs of a model that is made of what another publishes."""
    net = toys.model()
    net.load_state_dict({name: tensor.clone() for name, tensor in gathered(back.export())}, strict=False)
    net.save_pretrained(tmp_path / "published")
    return await scores(await made(source=str(tmp_path / "published")))


async def test_after_a_step_the_next_pass_computes_with_the_new_weights(tmp_path):
    back = await made()
    before, optimization = await scores(back), back.optimization(LearningSettings(lr=0.1))
    optimization.accumulate(PARTS, policy_gradient)
    assert torch.equal(await scores(back), before), "nothing has changed yet"
    optimization.step()
    after = await scores(back)
    assert not torch.equal(after, before)
    assert torch.equal(after, await fresh(back, tmp_path))


@pytest.mark.parametrize("way", ["take", "restore"])
async def test_weights_that_come_from_elsewhere_are_computed_with(way, tmp_path):
    back, other = await made(), await made()
    learned = other.optimization(LearningSettings(lr=0.1))
    learned.accumulate(PARTS, policy_gradient)
    learned.step()
    assert not torch.equal(await scores(back), await scores(other))
    if way == "take":
        back.take(dict(gathered(other.export())))
    else:
        other.state(learned, 1, {}).write(tmp_path)
        back.restore(back.optimization(LearningSettings(lr=0.1)), tmp_path)
    assert torch.equal(await scores(back), await scores(other))


async def test_a_parked_model_keeps_no_copy_and_makes_it_again():
    back = await made()
    before, parking = await scores(back), Parking(back.held)
    copies = [*back.module._working._copies.values()]
    assert bytes_of(copies) == bytes_of(back.module.parameters()) / 2
    parking.park()
    assert bytes_of(copies) == bytes_of(back.module.parameters()) == 0
    parking.unpark()
    assert torch.equal(await scores(back), before)


async def test_a_weight_of_two_places_has_one_copy():
    back = await made(source=toys.configuration(tie_word_embeddings=True))
    assert len(back.module._working._copies) == len(list(back.module.parameters()))
    with back.module.computing():
        assert back.model.lm_head.weight is back.model.get_input_embeddings().weight


async def test_a_pass_that_fails_leaves_float32_weights():
    back = await made()
    optimization = back.optimization(LearningSettings(lr=0.1))

    def fails(batch, outputs):
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        optimization.accumulate(PARTS, fails)
    assert dtypes(back.module) == {torch.float32}


async def test_adapters_are_added_in_as_they_were_learned_in_float32():
    back = await made(lora={"r": 2, "alpha": 4, "target_modules": "auto"})
    optimization = back.optimization(LearningSettings(lr=0.05))
    for _ in range(2):
        optimization.accumulate(PARTS, policy_gradient)
        optimization.step()
    layer = back.model.model.layers[0].self_attn.q_proj
    expected = layer.base_layer.weight + 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    published = dict(gathered(back.export()))["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(published, expected.detach(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
async def test_a_frozen_base_that_was_saved_in_bfloat16_is_in_it_alone_and_nothing_else_changes(tied, tmp_path):
    net, learned = toys.model(tie_word_embeddings=tied).bfloat16(), []
    for name, dtype in (("half", torch.bfloat16), ("whole", torch.float32)):  # the same numbers
        net.to(dtype).save_pretrained(tmp_path / name)
        back = await made(lora={"r": 2, "alpha": 4, "target_modules": "auto"}, source=str(tmp_path / name))
        frozen = {each.dtype for each in back.module.parameters() if not each.requires_grad}
        assert frozen == {dtype}
        assert {each.dtype for each in back.module.parameters() if each.requires_grad} == {torch.float32}
        optimization = back.optimization(LearningSettings(lr=0.05))
        for _ in range(2):
            optimization.accumulate(PARTS, policy_gradient)
            optimization.step()
        exported = {key: each.clone() for key, each in gathered(back.export())}
        assert {each.dtype for each in exported.values()} == {torch.float32}
        back.state(optimization, 2, {}).write(tmp_path / f"{name}-state")
        learned.append((await scores(back), exported))
    for other in ("half", "whole"):  # a run goes on from a checkpoint of either kind
        again = await made(lora={"r": 2, "alpha": 4, "target_modules": "auto"}, source=str(tmp_path / "half"))
        again.restore(again.optimization(LearningSettings(lr=0.05)), tmp_path / f"{other}-state")
        learned.append((await scores(again), {key: each.clone() for key, each in gathered(again.export())}))
    for outputs, weights in learned[1:]:
        assert torch.equal(outputs, learned[0][0])
        assert all(torch.equal(each, learned[0][1][key]) for key, each in weights.items())


async def test_the_head_of_values_stays_float32():
    back = await made(head="values")
    with back.module.computing():
        assert dtypes(back.module.head) == {torch.float32}
        assert dtypes(back.module.model.base_model) == {torch.bfloat16}
    values, hidden = back.outputs(PACKED)
    assert (values.dtype, hidden.dtype) == (torch.float32, torch.bfloat16)
