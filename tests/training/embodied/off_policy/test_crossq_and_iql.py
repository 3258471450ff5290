"""Steps of CrossQ and of implicit Q-learning, on decisions whose best action is known."""

import copy

import pytest
import torch
from torch import nn

from rlinf.models.policy.base import uniforms
from rlinf.models.policy.build import build_policy_model
from rlinf.models.policy.sac import BatchRenorm
from rlinf.training.embodied.replay import IqlSettings, SacSettings
from rlinf.training.embodied.sac import CrossQLearner, IqlLearner, SacLearner

SOFT = {"type": "soft", "state_size": 1, "action_size": 1, "hidden": [32, 32]}


def decisions(count, seed):
    """Single decisions: an action a in a state is worth -4 (a - 1/2)^2, and the episode ends."""
    random = torch.Generator().manual_seed(seed)
    actions = torch.rand(count, 1, 1, generator=random) * 1.98 - 0.99
    return {
        "seen.state": torch.randn(count, 1, generator=random),
        "following.state": torch.randn(count, 1, generator=random),
        "actions": torch.atanh(actions),
        "rewards": -4 * (actions[:, 0] - 0.5).square(),
        "steps": torch.ones(count, dtype=torch.int64),
        "terminated": torch.ones(count, dtype=torch.bool),
    }


def chosen(policy):
    return policy.act({"state": torch.randn(200, 1, generator=torch.Generator().manual_seed(9))}, greedy=True).actions


def test_crossq_finds_the_best_action_without_target_critics():
    learner = CrossQLearner(
        build_policy_model({**SOFT, "batch_norm": True}), SacSettings(lr=4e-3, alpha=0.05, alpha_lr=0.0)
    )
    assert not any(name.startswith("target") for name in learner.module.state_dict())
    for seed in range(250):
        learner.learn(decisions(64, seed), seed=seed)
    assert chosen(learner.policy).mean().item() == pytest.approx(0.5, abs=0.1)


def test_crossq_judges_both_states_by_the_statistics_of_one_batch():
    policy = build_policy_model({**SOFT, "batch_norm": True})
    learner = CrossQLearner(policy, SacSettings(alpha=1e-9, gamma=0.9))
    batch = {**decisions(16, 3), "terminated": torch.zeros(16, dtype=torch.bool)}
    batch["following.state"] = batch["following.state"] * 5 + 7  # by its own statistics it would look like the other
    critic = copy.deepcopy(policy.critic)
    found = learner.learn(batch, seed=4, actor=False).values()

    noise = uniforms(torch.Generator().manual_seed(4), 16, 2, torch.device("cpu"))[:, 1:]
    made, _ = policy.proposed({"state": batch["following.state"]}, noise)
    rows = [
        torch.cat([batch[f"{when}.state"], torch.tanh(u)[:, 0]], 1)
        for when, u in (("seen", batch["actions"]), ("following", made))
    ]
    together = critic(torch.cat(rows), training=True)[:, 16:].min(0).values
    expected = (batch["rewards"][:, 0] + 0.9 * together).mean()
    assert found["target/mean"] == pytest.approx(expected.item(), rel=1e-4)


def test_batch_renormalisation_is_batch_normalisation_until_running_statistics_mean_something():
    norm, reference = BatchRenorm(2, 3), nn.BatchNorm1d(3, eps=1e-3, affine=False)
    x = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0)) * 4 + 2
    for member, found in enumerate(norm(x, training=True)):
        torch.testing.assert_close(found, reference(x[member]))
    norm.batches.fill_(10_000)
    # Now r and d bring rows to the running statistics, as long as neither is cut off: the same as without training.
    norm.mean.fill_(2.0)
    norm.variance.fill_(16.0)
    same = copy.deepcopy(norm)(x, training=False)
    torch.testing.assert_close(norm(x, training=True), same, rtol=1e-4, atol=1e-4)


def test_batch_statistics_stay_where_nothing_is_learned():
    policy = build_policy_model({**SOFT, "batch_norm": True})
    before = copy.deepcopy(policy.critic.state_dict())
    policy.critic(torch.randn(9, 2))
    assert all(torch.equal(rows, before[name]) for name, rows in policy.critic.state_dict().items())


def test_iql_takes_the_good_actions_of_data_and_none_that_nobody_took():
    learner = IqlLearner(build_policy_model(SOFT), IqlSettings(lr=4e-3, beta=10.0, expectile=0.8, tau=0.05))
    for seed in range(250):
        batch = decisions(128, seed)
        actions = torch.tanh(batch["actions"]).abs() * -1.0  # nobody ever went up, where it is best: 0 is what is left
        found = learner.learn(
            {**batch, "actions": torch.atanh(actions), "rewards": -4 * (actions[:, 0] - 0.5).square()}, seed=seed
        )
    assert -0.35 < chosen(learner.policy).mean().item() < 0.0  # their mean is -1/2
    assert found.values()["value/mean"] > -4.0  # above the mean worth of the data, -13/3


def test_without_weights_iql_imitates():
    learner = IqlLearner(build_policy_model(SOFT), IqlSettings(lr=4e-3, beta=0.0))
    for seed in range(100):
        learner.learn(decisions(128, seed), seed=seed)
    assert chosen(learner.policy).mean().item() == pytest.approx(0.0, abs=0.15)


def test_iql_bootstraps_with_the_value_of_a_state_alone():
    learner = IqlLearner(build_policy_model(SOFT), IqlSettings(gamma=0.5))
    for parameter in learner.module.value.parameters():
        parameter.data.zero_()
    learner.module.value[-1].bias.data.fill_(6.0)
    batch = {**decisions(4, 0), "rewards": torch.ones(4, 2), "steps": torch.tensor([2, 2, 1, 1])}
    batch["terminated"] = torch.tensor([False, True, False, True])
    batch["rewards"][2:, 1] = 0.0
    found = learner._target(batch, batch["following.state"])
    assert found.tolist() == [1 + 0.5 + 0.25 * 6, 1.5, 1 + 0.5 * 6, 1.0]


def test_an_algorithm_says_what_policy_it_needs():
    for learner, policy, settings, text in (
        (CrossQLearner, {}, SacSettings(), "set policy.settings.batch_norm"),
        (SacLearner, {"batch_norm": True}, SacSettings(), "crossq alone"),
        (IqlLearner, {"batch_norm": True}, IqlSettings(), "without batch_norm"),
    ):
        with pytest.raises(ValueError, match=text):
            learner(build_policy_model({**SOFT, **policy}), settings)
    with pytest.raises(ValueError, match=r"exclude.*other"):
        build_policy_model({**SOFT, "batch_norm": True, "layer_norm": True})
