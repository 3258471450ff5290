"""Settings by keyword: a section's keys as arguments of a role, with its defaults, limits and choices."""

from dataclasses import asdict

import pytest

from rlinf.config.learning import (
    AlgorithmConfig,
    CriticConfig,
    CriticSettings,
    ForwardConfig,
    OptimizerConfig,
    ReferenceSettings,
    TrainerConfig,
    TrainerSettings,
    combine,
)
from rlinf.config.schema import settings


def test_what_is_not_given_is_as_in_a_configuration():
    taken = asdict(settings(TrainerSettings, {"lr": 0.5}, "trainer"))
    configured = {**asdict(OptimizerConfig()), **asdict(TrainerConfig()), "lr": 0.5}
    # `auto` is a run's to resolve
    configured |= {"sharding": "shard", "gradient_checkpointing": False, "micro_batch_tokens": 2048, "dtype": "float32"}
    assert taken.items() >= configured.items()
    critic, section = settings(CriticSettings, {}, "critic"), CriticConfig()
    for name in ("lr", "warmup_steps", "grad_clip", "weight_decay"):
        assert getattr(critic, name) == getattr(section, name)


def test_a_role_gets_what_sections_have_under_the_names_of_its_settings_and_nothing_else():
    optimizer, trainer, algorithm = OptimizerConfig(lr=0.5), TrainerConfig(dtype="bfloat16"), AlgorithmConfig(epochs=3)
    by_hand = {"sharding": "hybrid", "gradient_checkpointing": True, "micro_batch_tokens": 7}
    found = combine(CriticSettings, algorithm, optimizer, trainer, CriticConfig(lr=0.25), **by_hand)
    assert (found.lr, found.dtype, found.epochs, found.sharding) == (0.25, "bfloat16", 3, "hybrid")
    assert found.parallel is trainer.parallel, "a section goes on as it is"
    frozen = combine(ReferenceSettings, OptimizerConfig(), ForwardConfig(dtype="bfloat16"), column="x")
    assert frozen == ReferenceSettings(2048, "bfloat16", column="x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"warmup": 3}, "did you mean warmup_steps?"),
        ({"xyzzy": 3}, "xyzzy: "),
        ({"betas": (0.9, 1.0)}, "betas.1=1.0: "),
        ({"order": "random"}, "order='random': "),
    ],
)
def test_what_cannot_be_is_named_with_what_can(given, said):
    with pytest.raises(ValueError) as caught:
        settings(TrainerSettings, {**given, "minibatches": -1}, "trainer")
    assert str(caught.value).startswith("trainer: ")
    assert said in str(caught.value)
    assert "minibatches=-1: expected" in str(caught.value), "every mistake at once"
