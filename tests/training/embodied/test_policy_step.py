"""The learning of a policy that acts: one gradient, however a minibatch is cut, and steps that are not taken."""

import dataclasses
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import recipes
from rlinf.models.policy.build import build_policy_model
from rlinf.training.embodied.ppo import PolicyLearner, PolicySettings, cut
from rlinf.training.embodied.trajectories import TrajectoryBatch
from tests.actors.programs.control import MLP

PPO = recipes.get("ppo")
ROWS = 10


def made(seed=0, rows=ROWS):
    """A policy, and decisions of another one with all kinds of advantages, of which some do not count."""
    random = torch.Generator().manual_seed(seed)
    policy = build_policy_model({**MLP, "chunk": 2})
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
    stored = {
        "state": torch.randn(rows, 2, generator=random),
        "actions": torch.randn(rows, 2, 1, generator=random),
    }
    mask = torch.rand(rows, 2, generator=random) < 0.8
    mask[0, 0] = True
    with torch.no_grad():
        logprobs = policy.evaluate(stored).logprobs + 0.3 * torch.randn(rows, 2, generator=random)
    values, returns = torch.randn(rows, 1, generator=random), torch.randn(rows, 1, generator=random)
    advantages = torch.randn(rows, 2, generator=random)
    return policy, TrajectoryBatch(stored, logprobs, advantages, mask, None, values, returns, mask.any(1, keepdim=True))


def gradient_of(policy, learner):
    """What the optimizer is given at its next steps."""
    seen = []

    def look(*_):
        given = policy.named_parameters()
        seen.append({name: each.grad.clone() for name, each in given if each.grad is not None})

    learner.optimizer.register_step_pre_hook(look)
    return seen


@settings(max_examples=12)
@given(seed=st.integers(0, 99), owner=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_shares_of_a_minibatch_add_up_to_its_gradient(seed, owner):
    """What ranks do, one after the other: sums over shares, one division by the count of all."""
    policy, lesson = made(seed)
    learner = PolicyLearner(policy, PolicySettings(lr=1e-3, grad_clip=1e9))
    sums, counts = None, None
    owners = torch.tensor(owner)
    for rank in range(3):
        chosen = (owners == rank).nonzero().flatten()
        share = lesson.rows(chosen) if len(chosen) else lesson.rows(torch.tensor([0])).silent()
        losses = learner._losses(share, PPO)
        parts = [torch.autograd.grad(each.total, list(policy.parameters()), allow_unused=True) for each in losses]
        parts = [[torch.zeros(()) if g is None else g for g in part] for part in parts]
        sums = (
            parts
            if sums is None
            else [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(sums, parts, strict=True)]
        )
        weights = [float(each.weight) for each in losses]
        counts = weights if counts is None else [a + b for a, b in zip(counts, weights, strict=True)]
    seen = gradient_of(policy, learner)
    learner.learn(lesson, PPO)
    for (name, _), ours, theirs in zip(policy.named_parameters(), *sums, strict=True):
        expected = ours / counts[0] + 0.5 * theirs / counts[1]
        torch.testing.assert_close(seen[0][name], expected.expand_as(seen[0][name]), rtol=1e-4, atol=1e-6)


HOW = st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])


@settings(max_examples=15)
@given(seed=st.integers(0, 99), most=st.integers(1, ROWS + 1), how=HOW, critic_only=st.booleans())
def test_micro_batches_give_the_gradient_and_the_metrics_of_the_whole_minibatch(seed, most, how, critic_only):
    policy, lesson = made(seed)
    policy = policy.double()
    wide = {name: each.double() for name, each in lesson.stored.items()}
    episodes = torch.arange(ROWS) // 3 if how != "token-mean" else None
    lesson = dataclasses.replace(
        lesson, stored=wide, sequences=None if episodes is None else episodes[:, None].expand(ROWS, 2)
    )
    spec = dataclasses.replace(PPO, aggregation=dataclasses.replace(PPO.aggregation, how=how))
    learner = PolicyLearner(policy, PolicySettings(lr=0.0, grad_clip=1e9))
    seen, order = gradient_of(policy, learner), torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    shuffled = None if episodes is None else episodes[order]
    parts = [lesson.rows(rows) for rows in cut(order, most, shuffled)]
    whole, numbers = learner.learn(lesson, spec, critic_only=critic_only)
    found, again = learner.learn([*parts, lesson.rows(order[:1]).silent()], spec, critic_only=critic_only)
    assert seen[0].keys() == seen[1].keys()
    for name in seen[0]:
        torch.testing.assert_close(seen[1][name], seen[0][name], rtol=1e-6, atol=1e-9)
    assert again == pytest.approx(numbers, rel=1e-6)
    assert found.values() == pytest.approx(whole.values(), rel=1e-6, abs=1e-9)


@given(episodes=st.lists(st.integers(0, 5), max_size=30), most=st.none() | st.integers(1, 12), averaged=st.booleans())
def test_micro_batches_have_every_decision_once_and_whole_episodes_where_they_are_averaged(episodes, most, averaged):
    ids = torch.tensor(episodes, dtype=torch.int64)
    rows = torch.arange(len(ids)) + 7
    parts = cut(rows, most, ids if averaged else None)
    assert sorted(torch.cat([*parts, rows[:0]]).tolist()) == rows.tolist()
    assert all(len(part) for part in parts)
    of = [{episodes[row - 7] for row in part.tolist()} for part in parts]
    if averaged:
        assert sum(map(len, of)) == len(set(episodes))
    if most is not None:
        assert all(len(part) <= most or (averaged and len(inside) == 1) for part, inside in zip(parts, of, strict=True))


class Passed(torch.autograd.Function):
    """A number as it is; its node in the graph, unlike torch's own, can be referred to weakly."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_only_one_micro_batch_is_in_memory_at_a_time():
    policy, lesson = made()
    alive = []

    def loss(part):
        found = policy.imitate(part.stored)
        found = replace(found, total=Passed.apply(found.total))
        weakref.finalize(found.total.grad_fn, alive.remove, part)
        alive.append(part)
        assert len(alive) == 1
        return found

    parts = [lesson.rows(rows) for rows in cut(torch.arange(ROWS), 3, None)]
    gathered, norm = PolicyLearner(policy, PolicySettings()).step(partial(loss, part) for part in parts)
    assert float(gathered.weight) == 2 * ROWS
    assert norm > 0


def test_a_critic_that_warms_up_leaves_the_policy_bit_for_bit():
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=0.1, weight_decay=0.1))
    learner.learn(lesson, PPO)  # which leaves momentum
    before = {name: each.detach().clone() for name, each in policy.named_parameters()}
    learner.learn(lesson, PPO, critic_only=True)
    moved = {name for name, each in policy.named_parameters() if not torch.equal(each.detach(), before[name])}
    assert moved == {name for name in before if name.startswith("critic.")}


def test_what_does_not_count_may_be_anything():
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=0.0, grad_clip=1e9))
    seen = gradient_of(policy, learner)
    learner.learn(lesson, PPO)
    noise = {
        name: torch.where(lesson.mask, getattr(lesson, name), torch.full_like(getattr(lesson, name), 7.0))
        for name in ("advantages", "logprobs")
    }
    learner.learn(dataclasses.replace(lesson, **noise), PPO)
    for name in seen[0]:
        assert torch.equal(seen[0][name], seen[1][name])


def test_a_minibatch_in_which_nothing_counts_takes_no_step():
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=0.1, weight_decay=0.1))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    gathered, numbers = learner.learn(lesson.silent(), PPO)
    assert numbers == {}
    assert float(gathered.weight) == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_a_gradient_is_scaled_down_to_its_bound_and_its_length_is_told_before():
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=0.0, grad_clip=0.01))
    seen = gradient_of(policy, learner)
    _, numbers = learner.learn(lesson, PPO)
    assert numbers["grad_norm"] > 0.1
    length = torch.cat([each.flatten() for each in seen[0].values()]).norm()
    assert float(length) == pytest.approx(0.01, rel=1e-3)


def test_the_critic_has_a_learning_rate_of_its_own():
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=1e-9, critic_lr=0.1))
    before = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    learner.learn(lesson, PPO)
    for name, parameter in policy.named_parameters():
        moved = float((parameter.detach() - before[name]).abs().max())
        assert moved > 1e-2 if name.startswith("critic.") else moved < 1e-6, name


@pytest.mark.parametrize("place", ["advantages", "returns"])
def test_a_loss_that_is_no_number_takes_no_step(place):
    policy, lesson = made()
    learner = PolicyLearner(policy, PolicySettings(lr=0.1))
    learner.learn(lesson, PPO)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    broken = getattr(lesson, place).clone()
    broken[0, 0] = torch.inf if place == "returns" else torch.nan
    with pytest.raises(FloatingPointError, match=r"step.*taken"):
        learner.learn(dataclasses.replace(lesson, **{place: broken}), PPO)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    learner.learn(lesson, PPO)  # and goes on


def test_the_loss_of_normalised_values_does_not_depend_on_the_scale_of_returns():
    """Rewards 1,000 times as large give values 1,000 times as large, and the same step of everything else."""
    norms = []
    for factor in (1.0, 1000.0):
        policy, lesson = made()
        learned = build_policy_model({**MLP, "chunk": 2, "normalise_values": True})
        learned.load_state_dict(policy.state_dict(), strict=False)
        lesson = dataclasses.replace(lesson, returns=factor * lesson.returns, values=0.0 * lesson.values)
        with torch.no_grad():
            for parameter in learned.critic[-1].parameters():
                parameter.zero_()  # what is predicted is the mean
        learned.adapt_values(lesson.returns[lesson.value_mask])
        with torch.no_grad():
            learned.critic[-1].bias.zero_()
        spec = recipes.get("ppo", acting=True)
        norms.append(PolicyLearner(learned, PolicySettings(lr=1e-3)).learn(lesson, spec)[1]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_schedules_set_every_learning_rate_and_the_weight_of_the_entropy():
    policy, _ = made()
    settings = PolicySettings(
        lr=1.0, critic_lr=0.1, schedule="linear", warmup_steps=2, min_lr_ratio=0.2, entropy_schedule="cosine",
        total_steps=10,
    )  # fmt: skip
    learner = PolicyLearner(policy, settings)
    spec = recipes.get("ppo", {"entropy_bonus": 0.4}, acting=True)
    rates, bonuses = [], []
    for done in (0, 1, 5, 9, 20):
        bonuses.append(learner.begin(done, spec).entropy_bonus)
        rates.append([group["lr"] for group in learner.optimizer.param_groups])
    # nine steps fall from the second on: the last one is a ninth of the way above the end, and later ones stay there
    expected = [0.5, 1.0, 0.2 + 0.8 * 5 / 9, 0.2 + 0.8 / 9, 0.2 + 0.8 / 9]
    assert [rate for rate, _ in rates] == pytest.approx(expected)
    assert [rate for _, rate in rates] == pytest.approx([0.1 * rate for rate in expected])
    ways = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.9])
    assert bonuses == pytest.approx((0.4 * 0.5 * (1 + torch.cos(ways * torch.pi))).tolist(), rel=1e-5)
