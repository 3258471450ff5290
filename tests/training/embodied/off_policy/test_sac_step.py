"""Soft actor-critic's steps, on transitions small enough to be worked out by hand."""

import math

import pytest
import torch

from rlinf.models.policy.build import build_policy_model
from rlinf.training.embodied.replay import SacSettings
from rlinf.training.embodied.sac import SacLearner

SOFT = {"type": "rlinf.models.policy.sac.SoftPolicy", "state_size": 1, "action_size": 1, "hidden": [16]}


def learner(policy=None, **settings):
    return SacLearner(build_policy_model({**SOFT, **(policy or {})}), SacSettings(**settings))


def transition(count=1, chunk=1, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "seen.state": torch.randn(count, 1, generator=random),
        "following.state": torch.randn(count, 1, generator=random),
        "actions": torch.randn(count, chunk, 1, generator=random),
        "rewards": torch.randn(count, chunk, generator=random),
        "steps": torch.full((count,), chunk),
        "terminated": torch.zeros(count, dtype=torch.bool),
    }


def constant(ensemble, *values):
    """Have each critic always say the same."""
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.zero_()
        ensemble.offsets[-1].copy_(torch.tensor(values)[:, None, None])


def test_the_target_of_hand_made_transitions_is_the_one_worked_out_by_hand():
    made = learner({"chunk": 2}, gamma=0.5, alpha=0.1)
    constant(made.module.target, 5.0, 3.0)
    for parameter in made.policy.actor.parameters():
        parameter.data.zero_()
    made.policy.actor[-1].bias.data[2:] = math.atanh(3 / 7)  # a standard deviation of 1: -5 + 7/2 (3/7 + 1) = 0
    batch = {
        **transition(4, chunk=2),
        "rewards": torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 0.0], [1.0, 0.0]]),
        "steps": torch.tensor([2, 2, 1, 1]),
        "terminated": torch.tensor([False, True, False, True]),
    }
    noise = torch.full((4, 2), 0.5, dtype=torch.float64)  # in the middle of the distribution, so u = 0 = tanh(u)
    logprob = -2 * 0.5 * math.log(2 * math.pi)  # of two numbers; tanh has slope 1 there
    ahead = 3.0 - 0.1 * logprob
    expected = torch.tensor([
        1.0 + 0.5 * 2.0 + 0.25 * ahead,  # the whole chunk was done, and the episode goes on (or was cut at its limit)
        1.0 + 0.5 * 2.0,  # the task ended with the second action
        1.0 + 0.5 * ahead,  # the episode was cut after the first action, which the discount must know
        1.0,  # the task ended with the first
    ])  # fmt: skip
    torch.testing.assert_close(made.target(batch, noise), expected)
    without = learner({"chunk": 2}, gamma=0.5, alpha=0.1, backup_entropy=False)
    without.module.load_state_dict(made.module.state_dict())
    left = expected + torch.tensor([0.25, 0.0, 0.5, 0.0]) * 0.1 * logprob  # without the entropy of what follows
    torch.testing.assert_close(without.target(batch, noise), left)


def test_a_subset_of_critics_is_drawn_for_the_target():
    made = learner({"critics": 3}, subset=2, gamma=1.0, alpha=1e-9)
    constant(made.module.target, 1.0, 2.0, 3.0)
    batch = {**transition(), "rewards": torch.zeros(1, 1)}
    found = {
        round(float(made.target(batch, torch.rand(1, 1).double(), torch.Generator().manual_seed(seed))), 4)
        for seed in range(20)
    }
    assert found == {1.0, 2.0}  # the smallest of two of them


def test_a_part_that_is_not_asked_for_stays_as_it_is():
    made = learner(lr=1e-2)
    before = {name: tensor.clone() for name, tensor in made.module.state_dict().items()}
    made.learn(transition(8), seed=0, actor=False)
    after = made.module.state_dict()
    changed = {".".join(name.split(".")[:2]) for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"policy.critic", "target.weights", "target.offsets"}


def test_targets_follow_by_their_share_of_the_way():
    made = learner(tau=0.25, critic_lr=1e-2)
    before = [parameter.clone() for parameter in made.module.target.parameters()]
    made.learn(transition(8), seed=0, actor=False)
    sources = made.policy.critic.parameters()
    for old, new, source in zip(before, made.module.target.parameters(), sources, strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * source)


def test_steps_repeat_bit_for_bit():
    def run():
        made = learner({"critics": 3}, subset=2)
        for seed in range(5):
            made.learn(transition(16, seed=seed), seed=seed)
        return made.module.state_dict()

    first, again = run(), run()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_it_finds_the_best_action_and_keeps_the_entropy_that_was_asked_for():
    # One decision, worth -4 (a - 1/2)^2; episodes end with it.
    made = learner({"hidden": [32, 32]}, lr=4e-3, alpha_lr=0.02, alpha=0.5, target_entropy=-0.5)
    random = torch.Generator().manual_seed(0)
    for seed in range(400):
        actions = torch.rand(64, 1, 1, generator=random) * 1.98 - 0.99
        batch = transition(64, seed=seed)
        batch |= {"actions": torch.atanh(actions), "rewards": -4 * (actions[:, 0] - 0.5).square()}
        found = made.learn({**batch, "terminated": torch.ones(64, dtype=torch.bool)}, seed=seed)
    act = made.policy.act({"state": torch.randn(200, 1, generator=random)}, greedy=True)
    assert act.actions.mean().item() == pytest.approx(0.5, abs=0.1)
    assert found.values()["entropy"] == pytest.approx(-0.5, abs=0.25)
    # The best density is exp(-4 (a - 1/2)^2 / alpha): of entropy -1/2 if its variance, alpha / 8, is 0.147^2.
    assert float(made.alpha) == pytest.approx(8 * 0.147**2, rel=0.3)


def test_a_temperature_that_is_not_learned_stays():
    made = learner(alpha=0.3, alpha_lr=0.0)
    made.learn(transition(8), seed=0)
    assert float(made.alpha) == pytest.approx(0.3)


def test_a_loss_that_is_no_number_changes_nothing():
    made = learner()
    before = {name: tensor.clone() for name, tensor in made.module.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"both finite"):
        made.learn({**transition(4), "rewards": torch.full((4, 1), math.inf)}, seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.module.state_dict().items())


GRIPPER = {"gripper": True, "action_size": 2}


def with_gripper(count, *, steps=1, seed=0):
    """Transitions in which a gripper closed, stayed or opened."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, 2, (count, 1, 1), generator=random)
    moves = torch.randn(count, 1, 1, generator=random)
    rewards = torch.randn(count, steps, generator=random)
    batch = {**transition(count, seed=seed), "actions": torch.cat([moves, chosen], -1), "rewards": rewards}
    return {**batch, "steps": torch.randint(1, steps + 1, (count,), generator=random)}


def written_down(learner, batch, gamma, penalty, returns):
    """The loss of a gripper's values, transition by transition, in float64."""

    def value(critic, member, state, choice):
        x, layers = state.double(), list(zip(critic.gripper.weights, critic.gripper.offsets, strict=True))
        for number, (weight, offset) in enumerate(layers):
            x = torch.clamp(x, min=0.0) if number else x
            x = x @ weight.detach()[3 * member + choice].double() + offset.detach()[3 * member + choice, 0].double()
        return float(x)

    members = range(learner.policy.config.critics)
    online, target, errors = learner.policy.critic, learner.module.target, []
    for row in range(len(batch["steps"])):
        steps, choice = int(batch["steps"][row]), int(batch["actions"][row, 0, -1])
        following = batch["following.state"][row]
        best = max(range(3), key=lambda other, at=following: sum(value(online, each, at, other) for each in members))
        y = sum(gamma**step * float(reward) for step, reward in enumerate(batch["rewards"][row]))
        y -= penalty if choice else 0.0
        ahead = min(value(target, each, following, best) for each in members)
        y += 0.0 if batch["terminated"][row] else gamma**steps * ahead
        y = min(max(y, returns[0]), returns[1])
        for each in members:
            errors.append((value(online, each, batch["seen.state"][row], choice + 1) - y) ** 2)
    return sum(errors) / len(errors)


def test_the_loss_of_a_gripper_is_double_q_learnings_written_down():
    # So narrow that targets are cut at either end: the least return is lower by a penalty in every step, for ever.
    made, returns = learner(GRIPPER, gamma=0.7, gripper_penalty=0.3, returns=(0.0, 0.5)), (-0.3 / (1 - 0.7), 0.5)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():  # otherwise the trained and the target critics think the same best
        for parameter in made.module.target.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random))
    batch = with_gripper(24, steps=3)
    batch["terminated"] = torch.arange(24) % 4 == 0
    found = made._gripper_loss(batch, torch.ones(24), torch.Generator())
    expected = written_down(made, batch, 0.7, 0.3, returns)
    assert float(found.mean().detach()) == pytest.approx(expected, rel=1e-5)
    for other in ((-math.inf, 0.5), (returns[0], math.inf)):
        assert written_down(made, batch, 0.7, 0.3, other) > 1.01 * expected


def test_critics_and_actor_do_not_depend_on_what_the_gripper_does():
    def learned(choice):
        made, batch = learner(GRIPPER), with_gripper(8)
        batch["actions"][..., -1] = choice
        made.learn(batch, seed=0)
        state = made.module.state_dict()
        return {name: tensor for name, tensor in state.items() if ".gripper." not in name}

    closed, opened = learned(-1.0), learned(1.0)
    assert all(torch.equal(tensor, opened[name]) for name, tensor in closed.items())


def test_the_actor_goes_where_others_went_and_where_nobody_did_the_critics_alone_lead_it():
    def learned(imitation, others):
        made = learner({"chunk": 2}, lr=1e-2, alpha=1e-6, alpha_lr=0.0, imitation=imitation)
        constant(made.policy.critic, 0.0, 0.0)  # which say nothing of where to go
        batch = {**transition(64, chunk=2), "others": torch.full((64,), others)}
        batch["actions"][:, 0], batch["actions"][:, 1] = math.atanh(0.6), math.atanh(-0.2)
        batch["steps"][::2] = 1  # the second action was not done there: it says nothing
        batch["actions"][::2, 1] = 3.0
        for _ in range(150):
            made._actor_step(batch, torch.full((64, 2), 0.5, dtype=torch.float64), torch.ones(64, dtype=torch.bool))
        return torch.tanh(made.policy.proposed({"state": batch["seen.state"]}, None)[0]).detach()

    led = learned(1.0, True)
    torch.testing.assert_close(led[:, :, 0], torch.tensor([[0.6, -0.2]]).expand(64, 2), rtol=0.0, atol=0.05)
    assert torch.equal(learned(1.0, False), learned(0.0, True))


@pytest.mark.parametrize("penalty", [0.1, 0.5])
def test_a_gripper_learns_when_to_close_and_when_to_open(penalty):
    # In state 0 closing takes hold, state 1, where opening earns 1 and is the end; all else changes nothing.
    gamma, worth = 0.8, torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(60):  # of value iteration
        grip, hold = worth.max(1).values.tolist()
        ahead = [[hold, grip, grip], [hold, hold, 1.0 / gamma]]
        cost = [[penalty, 0.0, penalty]] * 2
        worth = gamma * torch.tensor(ahead, dtype=torch.float64) - torch.tensor(cost, dtype=torch.float64)
    made = learner({**GRIPPER, "hidden": [32]}, lr=1e-2, gamma=gamma, tau=0.1, gripper_penalty=penalty)
    for seed in range(250):
        batch = with_gripper(64, seed=seed)
        held, chosen = torch.rand(64, generator=torch.Generator().manual_seed(seed)) < 0.5, batch["actions"][:, 0, -1]
        over = held & (chosen == 1)
        batch |= {"seen.state": held[:, None].float(), "following.state": (held | (chosen == -1))[:, None].float()}
        made.learn({**batch, "rewards": over[:, None].float(), "terminated": over}, seed, actor=False)
    states = torch.tensor([[0.0], [1.0]])
    found = made.policy.critic.choices({"state": states}).detach().mean(0).T
    torch.testing.assert_close(found.double(), worth, rtol=0.0, atol=0.05)
    acted = made.policy.act({"state": states}, generator=torch.Generator().manual_seed(0)).actions[:, 0, -1]
    assert acted.tolist() == (worth.argmax(1) - 1).tolist() == [-1 if penalty < 0.4 else 0, 1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"alpha": 0.0}, "alpha=0"),
        ({"subset": 3}, "subset=3"),
        ({"gripper_penalty": 0.1}, "gripper=true"),
        ({"returns": (1.0, 0.0)}, r"returns=\[1.0, 0.0\]"),
    ],
)
def test_a_bad_setting_is_named(settings, text):
    with pytest.raises(ValueError, match=text):
        learner(**settings)
