"""A frozen base of 4 bits: its numbers, its gradients beside peft's and bitsandbytes' own, and who reads it."""

import bitsandbytes
import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlinf.actors.trainer import Trainer
from rlinf.config.learning import LearningSettings
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_model, build_module
from rlinf.models.language.four_bits import Nf4
from rlinf.models.language.lora import POLICY, merged_named_parameters
from rlinf.runtime.system.system import ActorSystem
from tests.actors import toys

LORA = {"r": 4, "alpha": 8, "target_modules": ["all-linear"], "base": "nf4"}
CODES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""The numbers of nf4, from the paper's appendix E."""


@pytest.mark.parametrize("shape", [(64, 32), (24, 40), (5, 7)])
def test_it_stands_for_the_nearest_of_sixteen_numbers_and_writing_what_it_stands_for_changes_nothing(shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape) * torch.rand(shape).exp()
    rounded = Nf4.of(tensor, torch.float32)
    flat = np.resize(tensor.double().numpy().ravel(), -(-tensor.numel() // 64) * 64)
    flat[tensor.numel() :] = 0.0
    scales = np.abs(flat.reshape(-1, 64)).max(1, keepdims=True)
    nearest = np.abs(flat.reshape(-1, 64) / scales - CODES[:, None, None]).argmin(0)
    expected = (CODES[nearest] * scales).ravel()[: tensor.numel()].reshape(shape)
    assert rounded.shape == tensor.shape
    assert rounded.plain().numpy() == pytest.approx(expected, abs=1e-6)
    again = Nf4.of(torch.zeros(shape), torch.float32)
    again.copy_(rounded.plain())
    assert all(torch.equal(again.parts[name], part) for name, part in rounded.parts.items())
    with pytest.raises(RuntimeError, match="4 bits"):
        again.add_(1.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    # of rows as long as 64 and 128: bitsandbytes' own layers, the reference, read those of 32 wrongly on CPUs
    config = {**toys.configuration(), "hidden_size": 64, "intermediate_size": 128}
    build_model(config, load_tokenizer(toys.ALPHABET)).save_pretrained(directory)
    return str(directory)


def built(base, dtype="float32"):
    compute = LearningSettings(dtype=dtype, gradient_checkpointing=True, attention="padded")
    module = build_module(ModelSpec(base, lora=LORA, compute=compute), load_tokenizer(toys.ALPHABET))
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.model


def theirs(base, ours):
    """The same by bitsandbytes' layers, and by peft's around them."""
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    names = [name.removesuffix(".base_layer") for name, layer in ours.named_modules() if name.endswith(".base_layer")]
    for name in names:
        plain = net.get_submodule(name)
        layer = bitsandbytes.nn.Linear4bit(
            plain.in_features, plain.out_features, plain.bias is not None,
            compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4",
        )  # fmt: skip
        layer.weight = bitsandbytes.nn.Params4bit(
            plain.weight.detach(), requires_grad=False, compress_statistics=False, quant_type="nf4"
        )
        layer.bias = plain.bias
        net.set_submodule(name, layer.to("cpu"))
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=names), net)
    mine = dict(ours.named_parameters())
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_" in name:
            parameter.data.copy_(mine[name].data)
    return net


def test_gradients_of_the_adapters_are_those_of_a_plain_loop_with_peft_and_bitsandbytes(base):
    ours = built(base)
    reference = theirs(base, ours)
    ids = torch.randint(0, 12, (3, 11), generator=torch.Generator().manual_seed(0))
    losses = []
    for net in (ours, reference):
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    found = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    assert all(POLICY in name for name in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_rounded_base_with_the_adapters_merged(base, dtype):
    ours = built(base, dtype)
    ids = torch.randint(0, 12, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = plain(input_ids=ids).logits
    merged = {name: tensor.float() for name, tensor in merged_named_parameters(ours)}
    assert all(type(tensor) is torch.Tensor for tensor in merged.values())
    plain.load_state_dict(merged, strict=False)
    after = plain(input_ids=ids).logits
    held = sum(isinstance(parameter, Nf4) for parameter in ours.parameters())
    assert held == sum(type(layer) is nn.Linear for name, layer in plain.named_modules() if name != "lm_head")
    if dtype == "float32":
        assert (ours(input_ids=ids).logits - after).abs().max() < 1e-5
    assert (before - after).abs().max() > 1e-3


async def test_it_learns_is_saved_in_four_bits_and_goes_on_bit_for_bit(base, tmp_path):
    async with ActorSystem.local() as system:
        trainer = await system.spawn(Trainer, model=base, tokenizer=toys.ALPHABET, lora=LORA, lr=0.05)
        await trainer.train(toys.groups(7))
        await trainer.save(str(tmp_path))
        await trainer.train(toys.groups(7))
        expected = {name: tensor.clone() for name, tensor in (await trainer.weights()).named()}
        other = await system.spawn(Trainer, name="other", model=base, tokenizer=toys.ALPHABET, lora=LORA, lr=0.05)
        await other.restore(str(tmp_path / "state"))
        await other.train(toys.groups(7))
        again = {name: tensor.clone() for name, tensor in (await other.weights()).named()}
    assert toys.furthest(again, expected) == 0.0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert {name: p.shape for name, p in saved.named_parameters()} == {name: t.shape for name, t in expected.items()}


@pytest.mark.parametrize("settings", [{"compile": True}])
def test_what_cannot_be_says_so_by_its_key(base, settings):
    spec = ModelSpec(base, lora=LORA, compute=LearningSettings(**settings))
    with pytest.raises(ValueError, match=r"trainer\.compile=true.*model\.lora\.base=nf4"):
        build_module(spec, load_tokenizer(toys.ALPHABET))
