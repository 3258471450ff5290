"""Policies from configurations: what is wrong is said, and a policy of one's own is named by its path."""

import pytest
import torch

from rlinf.models.policy.actor_critic import MlpPolicy
from rlinf.models.policy.base import Stored
from rlinf.models.policy.build import build_policy_model, described, fitted, load_policy
from tests.models.policy.cases import CNN, MLP, VLA, observed


class Doubled(MlpPolicy):
    """A policy of a user's own."""

    def features(self, inputs: Stored) -> torch.Tensor:
        return 2.0 * super().features(inputs)


@pytest.mark.parametrize(("config", "says"), [
    ({}, r"type=None.*mlp, cnn"),
    ({**MLP, "type": "mpl"}, r"did.*mean"),
    ({**MLP, "type": "rlinf.models.policy.actor_critic.MlpConfig"}, r"class derived"),
    ({**MLP, "hiden": [3]}, r"'hiden'.*hidden"),
    ({"type": "mlp", "state_size": 3}, r"policy.*needs action_size"),
    ({**MLP, "hidden": 64}, "hidden=64 must be"),
    ({**MLP, "hidden": []}, r"least.*layer"),
    ({**MLP, "hidden": ["a"]}, r"hidden='a'.*int"),
    ({**MLP, "shared": 1}, r"shared=1.*bool"),
    ({**MLP, "activation": "gelu"}, r"activation='gelu'"),
    ({**MLP, "level": "chunk", "chunk": 2, "value_level": "action"}, r"advantage.*own"),
    ({**MLP, "chunk": 0}, r"least 1"),
    ({**MLP, "log_std": 9}, r"log_std=9.0.*between"),
    ({**CNN, "image": [16, 16]}, "image="),
    ({**CNN, "image": [2, 16, 3]}, r"least 4 pixels"),
])  # fmt: skip
def test_what_is_wrong_with_a_configuration_is_said(config, says):
    with pytest.raises(ValueError, match=says):
        build_policy_model(config)


def test_a_policy_of_ones_own_is_named_by_its_path_and_saved_like_others(monkeypatch):
    import rlinf.models.policy.actor_critic

    monkeypatch.setattr(rlinf.models.policy.actor_critic, "Doubled", Doubled, raising=False)
    monkeypatch.setattr(Doubled, "__module__", "rlinf.models.policy.actor_critic")
    config = {**MLP, "type": "rlinf.models.policy.actor_critic.Doubled", "normalise": False}
    policy = build_policy_model(config)
    assert type(policy) is Doubled
    plain = build_policy_model({**MLP, "normalise": False})
    halved = {"state": observed(MLP)["state"] / 2}
    assert torch.equal(policy.act(halved, greedy=True).actions, plain.act(observed(MLP), greedy=True).actions)
    assert described(policy)["type"] == "rlinf.models.policy.actor_critic.Doubled"


def test_a_configuration_is_completed_by_the_environment_but_not_overruled():
    shapes = {"state": (5,), "rgb": (16, 16, 3)}
    assert fitted({"type": "mlp"}, shapes, 3) == {"type": "mlp", "action_size": 3, "state_size": 5}
    both = {"type": "cnn", "action_size": 3, "state_size": 5, "image": (16, 16, 3)}
    assert fitted({"type": "cnn"}, shapes, 3) == both
    assert fitted({"type": "vla", "state_size": 0}, shapes, 3)["state_size"] == 0
    build_policy_model(fitted({**VLA}, shapes, 2))


def test_a_directory_without_a_policy_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds.*policy\.json"):
        load_policy(tmp_path)
