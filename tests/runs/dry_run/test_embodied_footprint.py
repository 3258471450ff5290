"""The memory of policies that act, by their parameters and by how they learn, and what is refused for it."""

import pytest
import torch

from rlinf.cli.main import describe
from rlinf.config.load import ConfigError
from rlinf.models.policy.build import build_policy_model
from rlinf.runs.dry_run.footprint import control_footprints
from rlinf.runs.rules import load_embodied
from rlinf.training.embodied.ppo import Preparation
from tests.launching import ROOT
from tests.models.policy.authored import AUTHORED
from tests.models.policy.cases import MLP


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_policy_that_acts_is_counted_by_its_parameters():
    policy = build_policy_model(MLP)
    found = control_footprints(policy)
    weights = bytes_of([*policy.parameters(), *policy.buffers()])
    learned = bytes_of(policy.parameters())
    assert found["policy"].active_bytes == weights
    assert found["trainer"].active_bytes == weights + 3 * learned
    with torch.device("meta"):
        assert control_footprints(build_policy_model(MLP)) == found
    critics = bytes_of(policy.of_critic())
    assert control_footprints(policy, targets=True)["trainer"].active_bytes == weights + 3 * learned + critics


def authored(how, ranks=1):
    """Footprints of a policy whose blocks are nearly all of it, and how many numbers it has."""
    with torch.device("meta"):
        policy = build_policy_model({**AUTHORED, "width": 64, "layers": 4})
        count = sum(parameter.numel() for parameter in policy.parameters())
        return control_footprints(policy, Preparation(**how), ranks=ranks), count


def test_slices_frozen_parts_adapters_and_bfloat16_take_less():
    plain, count = authored({})
    assert plain["trainer"].active_bytes == 16 * count
    both, _ = authored({}, ranks=2)
    assert both["trainer"].optimizer == 4 * count
    assert both["trainer"].gathered > 0
    assert authored({"sharding": "replicate"}, ranks=2)[0] == plain
    half, _ = authored({"dtype": "bfloat16"})
    assert half["policy"].weights < 0.6 * plain["policy"].weights
    assert half["trainer"] == plain["trainer"]  # what learns is kept in float32
    last, _ = authored({"dtype": "bfloat16", "train": ("exit.*", "critic.*")})
    assert last["trainer"].active_bytes < 0.2 * plain["trainer"].active_bytes
    adapted, _ = authored({"dtype": "bfloat16", "lora": {"r": 2, "alpha": 2, "target_modules": "auto"}})
    assert last["trainer"].weights < adapted["trainer"].weights < 0.8 * plain["trainer"].weights
    assert 0 < adapted["trainer"].optimizer < 0.2 * plain["trainer"].optimizer


def refused(*changes):
    with pytest.raises(ConfigError) as caught:
        describe(load_embodied(ROOT / "configs/embodied/toy.yaml", list(changes)), 1)
    return str(caught.value)


@pytest.mark.parametrize(("changes", "says"), [
    (["placement.device_memory_gb=0.0001"], "policy.dtype=bfloat16, or"),
    (["policy.train=[actr.*]"], "policy.train = ['actr.*']: "),
    (["policy.train=['!*']"], "policy.train = ['!*']: "),
    (["policy.lora.r=2", "policy.lora.target_modules=[nothing]"], "policy.lora = "),
    (["policy.gradient_checkpointing=true"], "policy.gradient_checkpointing = True: "),
])  # fmt: skip
def test_a_policy_that_cannot_learn_so_is_refused_by_its_key(changes, says):
    assert says in refused(*changes)
