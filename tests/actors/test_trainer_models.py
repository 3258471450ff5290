"""Several models on one frozen base: each learns as if it were alone, by its own adapters and optimizer."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlinf.actors.trainer import Trainer
from rlinf.algos.token_losses import TokenLoss
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.optimizer import Adam
from tests.actors import toys
from tests.runs.library.test_token_steps import data, plain_logprobs, plain_loss

LORA = {"r": 4, "alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OTHER = {"r": 2, "alpha": 32, "target_modules": "auto"}
ADAM = Adam(5e-3, weight_decay=0.1)
PPO = TokenLoss.of("ppo")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    toys.model().save_pretrained(directory)
    return str(directory)


async def spawned(system, base, lora=None, **more):
    own = lora or {"r": 1, "alpha": 1, "target_modules": "auto"}
    return await system.spawn(Trainer, model=base, tokenizer=toys.ALPHABET, lora=own, micro_batch_tokens=12, **more)


async def steps(trainer, model, count=3, adam=ADAM, seed=0):
    """Log-probs before each step."""
    seen = []
    for step in range(seed, seed + count):
        seen += await trainer.forward_backward(data(step), PPO, model)
        await trainer.optim_step(adam, model)
    return seen


async def adapters(trainer, model, tmp_path, name="saved"):
    await trainer.save_model(model, str(tmp_path / name))
    return load_file(tmp_path / name / "adapter_model.safetensors")


async def test_gradients_and_three_steps_are_those_of_our_trainer_and_of_a_loop_with_peft(base, tmp_path):
    raw = Adam(1e8, eps=1e8)  # a first step of it moves weights by the gradient
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base)
        await trainer.open_model("a", LORA, 7)
        await trainer.open_model("grad", LORA, 7)
        start = await adapters(trainer, "a", tmp_path, "start")
        await steps(trainer, "grad", 1, raw)
        gradient = await adapters(trainer, "grad", tmp_path, "grad")
        ours = await steps(trainer, "a")
        found = await adapters(trainer, "a", tmp_path)
        alone = await spawned(system, base, lora=LORA, seed=7, name="alone")
        told = await steps(alone, "default")
        merged = {name: tensor.clone() for name, tensor in (await trainer.model_weights("a", 1)).named()}
        own = {name: tensor.clone() for name, tensor in (await alone.weights()).named()}
    for one, other in zip(ours, told, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert toys.furthest(merged, own) < 1e-6
    net = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=32, target_modules=LORA["target_modules"]),
    )
    names = {name.replace(".default", ""): parameter for name, parameter in net.named_parameters() if "lora" in name}
    for name, parameter in names.items():
        parameter.data.copy_(start[name])
    optimizer = torch.optim.AdamW(names.values(), lr=5e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(3):
        plain_loss(net, data(step), "ppo").backward()
        if not step:
            for name, parameter in names.items():
                torch.testing.assert_close(start[name] - gradient[name], parameter.grad, atol=1e-5, rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert toys.furthest(found, {name: parameter.detach() for name, parameter in names.items()}) < 1e-5


async def test_a_model_learns_bit_for_bit_the_same_whether_others_are_there_or_not(base, tmp_path):
    results = []
    for crowded in (False, True):
        async with ActorSystem.local() as system:
            trainer = await spawned(system, base)
            if crowded:
                await trainer.open_model("before", OTHER, 1)
                await steps(trainer, "before", 1)
            await trainer.open_model("a", LORA, 7)
            seen = await trainer.forward_backward(data(0), PPO, "a")
            if crowded:  # between the gradient and the step
                await trainer.open_model("after", {**LORA, "r": 8}, 2)
                await steps(trainer, "after", 2)
                await trainer.forward_backward(data(5), PPO, "before")
            await trainer.optim_step(ADAM, "a")
            if crowded:
                await trainer.close_model("before")
            seen += await steps(trainer, "a", 2, seed=1)
            results.append((seen, await adapters(trainer, "a", tmp_path, str(crowded))))
    (alone, weights), (beside, others) = results
    assert all((one == other).all() for one, other in zip(alone, beside, strict=True))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("optimizer", [True, False])
async def test_saved_models_go_on_bit_for_bit_and_are_peft_s(base, tmp_path, optimizer):
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base)
        await trainer.open_model("a", LORA, 7)
        await steps(trainer, "a", 2)
        saved = str(tmp_path / "two")
        await trainer.save_model("a", saved, optimizer)
        await trainer.open_model("b", LORA, 1)
        await steps(trainer, "b", 1, seed=20)
        await trainer.forward_backward(data(3), PPO, "b")
        if not optimizer:
            with pytest.raises(ValueError, match="without its optimizer"):
                await trainer.load_model("b", saved, True)
        await trainer.load_model("b", saved, optimizer)
        with pytest.raises(ValueError, match="forward_backward"):  # gradients of other weights
            await trainer.optim_step(ADAM, "b")
        (theirs,) = await trainer.forward(data(1)[:1], "b")
        await steps(trainer, "a", 1, seed=2)
        await steps(trainer, "b", 1, seed=2)
        one, other = await adapters(trainer, "a", tmp_path, "one"), await adapters(trainer, "b", tmp_path, "other")
        await trainer.open_model("c", OTHER, 1)
        with pytest.raises(ValueError, match="another model"):
            await trainer.load_model("c", saved, False)
        await trainer.open_model("d", {"path": saved}, 0)
        np.testing.assert_array_equal((await trainer.forward(data(1)[:1], "d"))[0], theirs)
    assert optimizer == all(torch.equal(one[name], other[name]) for name in one)
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), saved)
    np.testing.assert_allclose(plain_logprobs(net, data(1)[0]).detach().numpy(), theirs, atol=1e-5)


async def test_what_cannot_be_is_refused_and_leaves_the_others_as_they_are(base):
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base)
        await trainer.open_model("a", LORA, 7)
        await trainer.forward_backward(data(0), PPO, "a")
        for name, lora, named in [
            ("a", LORA, "'a'"),
            ("x.y", LORA, "'x.y'"),
            ("b", {**LORA, "target_modules": "no"}, "no"),
        ]:
            with pytest.raises(ValueError, match=named):
                await trainer.open_model(name, lora, 0)
        with pytest.raises(ValueError, match="'b'"):
            await trainer.forward(data(0), "b")
        await trainer.optim_step(ADAM, "a")
