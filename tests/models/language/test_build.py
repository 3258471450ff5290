"""Building policies: whole, spread, and read from files slice by slice."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf import ActorSystem
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_module
from rlinf.models.language.fsdp import Layout
from rlinf.models.language.lora import merged_named_parameters
from rlinf.training.fsdp import Learner
from rlinf.training.policy import learn_policy
from tests.actors import toys

TOKENIZER = load_tokenizer(toys.ALPHABET)
ROWS = [Row.of(s, gain) for g in toys.groups(4) for s, gain in zip(g.scored, toys.advantages(g), strict=True)]


@pytest.fixture
async def mesh():
    """A device mesh of this process alone."""
    async with ActorSystem.local() as system:
        yield await system.collectives.mesh("alone", [0], "cpu")


def build(source, mesh=None, lora=None, dtype="float32"):
    spec = ModelSpec(source, lora=lora, compute=LearningSettings(dtype=dtype, logprob_chunk=16))
    return build_module(spec, TOKENIZER, layout=Layout(slices=mesh))


def whole(policy):
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
        for name, tensor in merged_named_parameters(policy.model)
    }


@pytest.fixture
def directory(tmp_path):
    net = toys.model("llama", seed=5, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
    net.generation_config.max_new_tokens = 7
    net.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


async def test_a_spread_model_learns_as_a_whole_one_does(mesh):
    found = []
    for where in (None, mesh):
        policy = build(toys.configuration(), where)
        learner = Learner(policy, LearningSettings(lr=0.01), Layout(slices=where))
        for _ in range(2):
            learn_policy(learner, pack(ROWS), **toys.CLIP)
            numbers = learner.step()[1]
        found.append((whole(policy), numbers))
    (one, expected), (other, numbers) = found
    assert toys.furthest(other, one) < 1e-6
    assert numbers == pytest.approx(expected, rel=1e-6)


async def test_a_saved_model_is_read_without_ever_being_whole(mesh, directory, monkeypatch):
    plain = AutoModelForCausalLM.from_pretrained(directory)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # would load it whole
    policy = build(str(directory), mesh)
    assert toys.furthest(whole(policy), dict(plain.named_parameters())) == 0.0
    for name, buffer in plain.named_buffers():  # which the files do not hold: rotary angles
        assert torch.equal(dict(policy.model.named_buffers())[name], buffer)
    assert policy.model.generation_config.max_new_tokens == 7
    logprobs, _ = policy(pack(ROWS))
    expected = []
    for row in ROWS:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        by_token = torch.log_softmax(plain(ids).logits[0, :-1] / row.temperature, -1).gather(1, ids[0, 1:, None])
        expected.append(by_token[len(row.prompt_ids) - 1 :, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=2e-6, rtol=1e-5)


async def test_what_the_files_do_not_hold_one_to_one_is_loaded_whole(mesh, directory):
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    shutil.move(directory / "model.safetensors", directory / "other.safetensors")
    torch.save({name: tensor.detach() for name, tensor in expected.items()}, directory / "pytorch_model.bin")
    assert toys.furthest(whole(build(str(directory), mesh)), expected) == 0.0


@pytest.mark.parametrize("spread", [False, True])
async def test_adapters_start_without_effect_and_the_same_however_they_are_spread(mesh, directory, spread):
    lora = {"r": 2, "alpha": 4, "target_modules": ["v_proj", "down_proj"]}
    plain = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    policy = build(str(directory), mesh if spread else None, lora)
    assert toys.furthest(whole(policy), plain) == 0.0
    drawn = torch.cat([
        (p.full_tensor() if hasattr(p, "full_tensor") else p).flatten()
        for name, p in policy.model.named_parameters()
        if "lora_A" in name
    ])  # fmt: skip
    assert drawn.abs().max() > 0.1
    assert float(drawn.double().sum()) == pytest.approx(adapter_sum(directory, lora))
    frozen = [name for name, p in policy.model.named_parameters() if p.requires_grad and ".lora_" not in name]
    assert frozen == []


def adapter_sum(directory, lora):
    policy = build(str(directory), None, lora)
    return sum(float(p.double().sum()) for name, p in policy.model.named_parameters() if "lora_A" in name)


async def test_merged_weights_are_those_that_the_adapters_compute_with(directory):
    lora = {"r": 2, "alpha": 4, "target_modules": "all-linear"}
    policy = build(str(directory), None, lora)
    learner = Learner(policy, LearningSettings(lr=0.05))
    for _ in range(3):
        learn_policy(learner, pack(ROWS), **toys.CLIP)
        learner.step()
    merged = AutoModelForCausalLM.from_pretrained(directory)
    before = {name: tensor.clone() for name, tensor in merged.named_parameters()}
    merged.load_state_dict(whole(policy), strict=False)
    assert any(not torch.equal(before[name], tensor) for name, tensor in merged.named_parameters())
    ids = torch.arange(2, 9)[None]
    policy.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(policy.model(ids).logits, merged(ids).logits, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ({"r": 2, "alpha": 4}, r"needs exactly"),
        ({"r": 2, "alpha": 4, "target_modules": ["q_proj"], "dropout": 0.1}, r"needs exactly"),
        ({"r": 2, "alpha": 4, "target_modules": ["no_such_module"]}, "no_such_module"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora, text):
    with pytest.raises(ValueError, match=text):
        build(toys.configuration(), None, lora)
