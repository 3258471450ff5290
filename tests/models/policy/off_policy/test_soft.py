"""The policy of soft actor-critic: its density, its entropy, and critics side by side."""

import pytest
import torch
from torch.nn import functional

from rlinf.models.policy.build import build_policy_model, described, load_policy, save_policy
from rlinf.models.policy.sac import Ensemble

SOFT = {
    "type": "rlinf.models.policy.sac.SoftPolicy",
    "state_size": 3,
    "action_size": 2,
    "chunk": 2,
    "hidden": [8, 8],
}


@pytest.fixture
def policy():
    found = build_policy_model(SOFT)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return found


def states(rows):
    return {"state": torch.randn(rows, 3, generator=torch.Generator().manual_seed(2))}


def test_scoring_what_was_stored_gives_the_log_prob_of_drawing_to_the_last_bit(policy):
    act = policy.act(states(5), generator=torch.arange(5))
    assert act.values is None
    assert act.logprobs.shape == (5,)
    assert torch.equal(policy.evaluate(act.stored).logprobs, act.logprobs)
    assert torch.equal(torch.tanh(act.stored["actions"]), act.actions)


def test_the_density_of_squashed_actions_integrates_to_one(policy):
    one = {name: array[:1] for name, array in states(1).items()}
    middles = (torch.arange(-4000, 4000) + 0.5) / 4000.0
    made = torch.atanh(middles)[:, None, None].expand(-1, 2, 2)
    stored = {"state": one["state"].expand(len(middles), -1), "actions": made}
    density = policy.evaluate(stored, level="token").logprobs.exp()
    torch.testing.assert_close(density.sum(0) / 4000.0, torch.ones(2, 2), rtol=2e-3, atol=0.0)


def test_the_entropy_is_the_mean_of_minus_log_pi(policy):
    seen = {"state": states(3)["state"].repeat_interleave(40_000, 0)}
    act = policy.act(seen, generator=torch.Generator().manual_seed(0))
    scored = policy.evaluate(act.stored)
    drawn = -scored.logprobs.view(3, -1).mean(1)
    torch.testing.assert_close(scored.entropy.view(3, -1)[:, 0], drawn, rtol=0.0, atol=0.03)


def test_first_actions_are_spread_over_all_that_can_be_done():
    actions = build_policy_model(SOFT).act(states(4000), generator=torch.Generator().manual_seed(0)).actions
    counts = torch.histc(actions, bins=10, min=-1.0, max=1.0) / actions.numel()
    assert counts.min() > 0.05
    assert counts.max() < 0.2


def test_log_probs_stay_finite_where_tanh_is_flat(policy):
    stored = {**states(1), "actions": torch.full((1, 2, 2), 40.0)}
    assert policy.evaluate(stored).logprobs.isfinite().all()


def test_demonstrated_actions_come_back_as_they_were_but_for_the_walls(policy):
    actions = torch.tensor([[[-1.0, 0.25], [0.5, 1.0]]])
    made = policy.demonstrated(states(1), actions)["actions"]
    torch.testing.assert_close(torch.tanh(made), actions.clamp(-0.999, 0.999))


def test_gradients_reach_the_actor_by_way_of_its_actions(policy):
    drawn = policy.draw(policy.inputs(states(4)), torch.rand(4, policy.randomness, dtype=torch.float64))
    policy.critic(policy.judged(policy.inputs(states(4)), drawn.made)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in policy.actor.parameters())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_an_ensemble_is_so_many_perceptrons(layer_norm):
    ensemble = Ensemble(3, 4, [5, 6], layer_norm=layer_norm)
    x = torch.randn(7, 4)
    for member, found in enumerate(ensemble(x)):
        alone = x
        for number, (weight, offset) in enumerate(zip(ensemble.weights, ensemble.offsets, strict=True)):
            alone = alone @ weight[member] + offset[member]
            if number < 2:
                alone = functional.relu(functional.layer_norm(alone, alone.shape[-1:]) if layer_norm else alone)
        torch.testing.assert_close(found, alone[:, 0])
    assert not torch.equal(ensemble.weights[0][0], ensemble.weights[0][1])


def test_it_is_saved_and_made_again(policy, tmp_path):
    save_policy(policy, tmp_path)
    again = load_policy(tmp_path)
    assert described(again) == described(policy)
    assert all(torch.equal(mine, again.state_dict()[name]) for name, mine in policy.state_dict().items())


def test_a_gripper_does_what_is_worth_most_and_all_else_is_drawn_without_it():
    made = build_policy_model({**SOFT, "chunk": 1, "gripper": True})
    act = made.act(states(40), generator=torch.arange(40))
    best = made.critic.choices(states(40)).mean(0).argmax(0) - 1
    assert torch.equal(act.actions[:, 0, -1], best.float())
    assert len(best.unique()) > 1  # or it would say little
    assert torch.equal(act.stored["actions"][:, 0, -1], best.float())
    alone = build_policy_model({**SOFT, "chunk": 1, "action_size": 1})
    alone.actor.load_state_dict(made.actor.state_dict())
    drawn = alone.act(states(40), generator=torch.arange(40))
    assert torch.equal(act.actions[..., :1], drawn.actions)
    assert torch.equal(act.logprobs, drawn.logprobs)


def test_what_somebody_did_with_a_gripper_is_the_nearest_of_its_choices():
    made = build_policy_model({**SOFT, "chunk": 1, "gripper": True})
    actions = torch.tensor([[[0.5, number]] for number in (-1.0, -0.6, -0.4, 0.0, 0.4, 0.6, 1.0)])
    encoded = made.demonstrated(states(7), actions)["actions"]
    assert encoded[:, 0, 1].tolist() == [-1, -1, 0, 0, 0, 1, 1]
    torch.testing.assert_close(torch.tanh(encoded[..., :1]), actions[..., :1])
    with pytest.raises(ValueError, match="no likelihood"):
        made.imitate({**states(7), "actions": encoded})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gripper": True}, "chunk=2"),
        ({"gripper": True, "chunk": 1, "action_size": 1}, "action_size=1"),
        ({"gripper": True, "chunk": 1, "batch_norm": True}, "batch_norm=True"),
        ({"gripper": True, "chunk": 1, "type": "steered", "base": "x"}, "steered: gripper=true"),
        ({"value_level": "chunk"}, r"value_level.*null"),
        ({"critics": 0}, "critics=0"),
        ({"log_std": 3.0}, "-5 and 2"),
    ],
)
def test_a_bad_setting_is_named(changes, text):
    with pytest.raises(ValueError, match=text):
        build_policy_model({**SOFT, **changes})


def test_it_has_no_value_of_a_state_alone(policy):
    with pytest.raises(ValueError, match="judge actions"):
        policy.value(states(1))
