"""Whom DAgger asks."""

import pytest
import torch

from rlinf.actors.policy import expert_of
from rlinf.models.policy.build import build_policy_model, save_policy
from tests.actors.programs.control import MLP


def test_a_saved_policy_is_an_expert_unless_it_needs_what_came_before(tmp_path):
    saved = build_policy_model(MLP)
    save_policy(saved, tmp_path / "plain")
    save_policy(build_policy_model({**MLP, "memory": 2}), tmp_path / "recurrent")
    seen = {"state": torch.linspace(-1, 1, 6).view(3, 2)}
    found = expert_of(str(tmp_path / "plain"), torch.device("cpu"))(seen, None)
    assert torch.equal(found, saved.act(seen, greedy=True).actions)
    with pytest.raises(ValueError, match=r"dagger.expert: .*recurrent.*memory"):
        expert_of(str(tmp_path / "recurrent"), torch.device("cpu"))
