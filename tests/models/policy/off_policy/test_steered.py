"""Steering a frozen policy by its noise, or by what is added to its actions."""

import pytest
import torch

from rlinf.models.policy.build import build_policy_model, described, load_policy, save_policy
from rlinf.training.embodied.replay import SacSettings
from rlinf.training.embodied.sac import SacLearner

FLOW = {"type": "flow", "state_size": 2, "action_size": 1, "chunk": 2, "hidden": [16], "value_level": None}
MLP = {"type": "mlp", "state_size": 2, "action_size": 1, "chunk": 2, "hidden": [8]}


@pytest.fixture
def bases(tmp_path):
    for config in (FLOW, MLP):
        save_policy(build_policy_model({**config, "seed": 3}), tmp_path / config["type"])
    return tmp_path


def steered(base, **settings):
    return build_policy_model(
        {
            "type": "steered",
            "state_size": 2,
            "action_size": 1,
            "chunk": 2,
            "hidden": [16],
            "base": str(base),
            **settings,
        }
    )


def seen(rows=5):
    return {"state": torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))}


def test_its_actions_are_what_the_flow_makes_of_the_noise_that_it_chose(bases):
    policy = steered(bases / "flow", reach=1.5)
    act = policy.act(seen(), generator=torch.arange(5))
    start = 1.5 * torch.tanh(act.stored["actions"])
    torch.testing.assert_close(act.actions, load_policy(bases / "flow").steered(seen(), start))
    assert torch.equal(policy.evaluate(act.stored).logprobs, act.logprobs)
    assert set(act.stored) == {"state", "actions"}  # the state that both look at is kept once


def test_a_residual_is_added_to_the_likeliest_action_of_any_policy(bases):
    policy = steered(bases / "mlp", how="residual", reach=0.2)
    act = policy.act(seen(), generator=torch.arange(5))
    base = load_policy(bases / "mlp").act(seen(), greedy=True).actions
    torch.testing.assert_close(act.actions, (base + 0.2 * torch.tanh(act.stored["actions"])).clamp(-1, 1))


def test_the_frozen_policy_is_neither_trained_nor_published_nor_saved(bases, tmp_path):
    policy = steered(bases / "flow")
    before = policy.act(seen(), greedy=True)
    assert not any("trunk" in name or "frozen" in name for name in policy.state_dict())
    learner = SacLearner(policy, SacSettings(lr=1e-2))
    rows = {f"{when}.state": seen(8)["state"] for when in ("seen", "following")}
    learner.learn(
        {**rows, "actions": torch.zeros(8, 2, 1), "rewards": torch.ones(8, 2), "steps": torch.full((8,), 2),
         "terminated": torch.zeros(8, dtype=torch.bool)}, seed=0,
    )  # fmt: skip
    frozen = load_policy(bases / "flow")
    assert all(torch.equal(a, b) for a, b in zip(policy.base.parameters(), frozen.parameters(), strict=True))
    save_policy(policy, tmp_path / "steered")
    again = load_policy(tmp_path / "steered")
    assert described(again) == described(policy)
    assert torch.equal(again.act(seen(), greedy=True).actions, policy.act(seen(), greedy=True).actions)
    assert not torch.equal(before.actions, policy.act(seen(), greedy=True).actions)


def test_sac_steers_a_flow_to_what_is_rewarded(bases):
    # One decision, worth minus the squared distance of its first action from where the flow can take it.
    policy = steered(bases / "flow", reach=2.0)
    base = load_policy(bases / "flow")
    random = torch.Generator().manual_seed(0)
    state = torch.zeros(64, 2)
    reached = base.steered({"state": state}, 4 * torch.rand(64, 2, 1, generator=random) - 2)[:, 0, 0]
    target = reached.quantile(0.9)
    learner = SacLearner(policy, SacSettings(lr=4e-3, alpha=1e-3, alpha_lr=0.0))
    for seed in range(150):
        made = torch.atanh(torch.rand(64, 2, 1, generator=random) * 1.9 - 0.95)
        done = base.steered({"state": state}, 2.0 * torch.tanh(made))[:, 0, 0]
        learner.learn(
            {"seen.state": state, "following.state": state, "actions": made, "steps": torch.full((64,), 2),
             "rewards": torch.stack([-20 * (done - target).square(), torch.zeros(64)], 1),
             "terminated": torch.ones(64, dtype=torch.bool)}, seed=seed,
        )  # fmt: skip
    found = policy.act({"state": state[:1]}, greedy=True).actions[0, 0, 0]
    assert abs(found - target) < 0.25 * reached.std()


def test_what_cannot_be_steered_is_said(bases, tmp_path):
    with pytest.raises(ValueError, match="denoises nothing"):
        steered(bases / "mlp").act(seen())
    with pytest.raises(ValueError, match="set chunk=2"):
        steered(bases / "flow", chunk=1).act(seen())
    with pytest.raises(FileNotFoundError):
        steered(tmp_path / "nothing").act(seen())
    with pytest.raises(ValueError, match=r"learn.*demonstrations"):
        steered(bases / "flow").demonstrated(seen(), torch.zeros(5, 2, 1))
    with pytest.raises(ValueError, match="reach=0"):
        steered(bases / "flow", reach=0.0)
