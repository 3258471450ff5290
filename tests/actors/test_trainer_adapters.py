"""A trainer whose reference policy or teacher is other adapters of its own base model, and what it saves."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlinf.actors.trainer import Trainer
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.language.lora import adapter_values, add_adapters, merged_named_parameters
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.export import copy_adapter
from tests.actors import toys

LORA = {"r": 2, "alpha": 4, "target_modules": "auto"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model, adapters of it, and the two merged."""
    directory = tmp_path_factory.mktemp("adapters")
    base = build_model(toys.configuration(), load_tokenizer(toys.ALPHABET))
    base.save_pretrained(directory / "base")
    net = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    add_adapters(net, {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]})
    for parameter, _ in adapter_values(net, 0, {}):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    copy_adapter(net, None, lead=True).write(directory / "other")
    base.load_state_dict(dict(merged_named_parameters(net)), strict=False)
    return directory, base


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "role", "column"),
    [
        ({"name": "grpo", "overrides": {"kl": {"place": "loss", "beta": 0.5}}}, "reference", "ref_logprobs"),
        ({"name": "grpo", "overrides": {"kl": {"place": "reward", "beta": 0.5}}}, "reference", "ref_logprobs"),
        ("opd", "teacher", "teacher_logprobs"),
    ],
)
async def test_other_adapters_of_the_base_say_what_the_merged_model_says(saved, algorithm, role, column, minibatches):
    directory, merged = saved
    groups = toys.groups(7)
    told = [group.with_column(column, toys.logprobs_of(merged, group)) for group in groups]
    found = []
    for settings, batch in (({role: str(directory / "other")}, groups), ({}, told)):
        async with ActorSystem.local() as system:
            trainer = await system.spawn(
                Trainer, model=str(directory / "base"), tokenizer=toys.ALPHABET, algorithm=algorithm, lora=LORA,
                minibatches=minibatches, lr=0.01, **settings,
            )  # fmt: skip
            for _ in range(2):
                await trainer.train(batch)
            found.append({name: tensor.clone() for name, tensor in (await trainer.weights()).named()})
    plain = dict(AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32).named_parameters())
    assert toys.furthest(found[0], found[1]) < 1e-4
    assert toys.furthest(found[0], plain) > 0.005  # it learned


async def test_a_checkpoint_has_the_adapters_alone_and_training_goes_on_from_them(saved, tmp_path):
    directory, _ = saved
    base = str(directory / "base")
    async with ActorSystem.local() as system:
        trainer = await system.spawn(
            Trainer, model=base, tokenizer=toys.ALPHABET, lora=LORA, lr=0.05, reference=str(directory / "other"),
            algorithm="deepseek_grpo",
        )  # fmt: skip
        await trainer.train(toys.groups(7))
        await trainer.save(str(tmp_path))
        await trainer.train(toys.groups(7))
        expected = {name: tensor.clone() for name, tensor in (await trainer.weights()).named()}
        await trainer.restore(str(tmp_path / "state"))
        await trainer.train(toys.groups(7))
        again = {name: tensor.clone() for name, tensor in (await trainer.weights()).named()}
        assert toys.furthest(again, expected) == 0.0
        begun = await system.spawn(
            Trainer, name="begun", model=base, tokenizer=toys.ALPHABET, lora={"path": str(tmp_path / "adapter")}
        )
        begun_weights = {name: tensor.clone() for name, tensor in (await begun.weights()).named()}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert toys.furthest(begun_weights, dict(whole.named_parameters())) < 1e-6
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, whole(ids).logits, atol=2e-6, rtol=1e-5)
    assert theirs.peft_config["default"].base_model_name_or_path == base
