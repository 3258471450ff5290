"""A spec put to work on a batch: each part has its effect, and what is missing is named."""

import math

import pytest
import torch

from rlinf.algos import losses, recipes
from rlinf.algos.advantages import group_relative, reinforce_pp
from rlinf.algos.algorithms import advantages_of, loss_of, value_loss_of
from rlinf.algos.loss_sum import Answers, MicroBatch
from rlinf.algos.recipes import NAMES


def answers(**changes):
    """Two groups of three answers of up to four tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 2, 3, 1, 4, 4])
    given = {
        "rewards": torch.tensor([1.0, 0, 0, 1, 1, 0]),
        "groups": torch.tensor([0, 0, 0, 1, 1, 1]),
        "mask": torch.arange(4) < lengths[:, None],
        "truncated": lengths == 4,
        **{
            name: -torch.rand(6, 4, generator=generator)
            for name in ("logprobs", "ref_logprobs", "teacher_logprobs", "values")
        },
    }
    return Answers(**{**given, **changes})


def micro_batch(**changes):
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(6, 4, generator=generator)
    near = {
        name: old + 0.3 * torch.randn(6, 4, generator=generator)
        for name in ("logprobs", "ref_logprobs", "behavior_logprobs", "proximal_logprobs")
    }
    given = {
        **near,
        "old_logprobs": old,
        "mask": answers().mask,
        "advantages": torch.tensor([1.0, -0.5, -0.5, 0.5, 0.5, -1.0]),
        "entropy": torch.rand(6, 4, generator=generator).requires_grad_(),
        "versions": torch.full((6, 4), 3),
        "version": 3,
    }
    batch = MicroBatch(**{**given, **changes})
    batch.logprobs.requires_grad_()
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_turns_answers_into_a_gradient(name):
    recipe = recipes.get(name)
    found = advantages_of(recipe, answers())
    old = micro_batch().old_logprobs
    batch = micro_batch(advantages=found.values, logprobs=old.clone())  # as at a first step: no clip is reached
    loss = loss_of(recipe, batch)
    (gradient,) = torch.autograd.grad(loss.total, batch.logprobs)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
    assert (gradient[~batch.mask] == 0).all()
    assert (recipe.critic is not None) == (found.returns is not None)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3], [-1.1619, -0.3873, 0.3873, 1.1619]),
        ([1e6, 1e6 + 0.01, 1e6 + 0.02, 1e6 + 0.03], [-1.1619, -0.3873, 0.3873, 1.1619]),
        ([1e30, 1.0, 0.0, 1.0], [1.5, -0.5, -0.5, -0.5]),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"])
def test_large_rewards_that_differ_little_are_told_apart(name, rewards, expected):
    # of one token each, so that every advantage is that of its answer; whitening divides by n, not by n - 1
    given = Answers(
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(4), torch.ones(4, 1, dtype=torch.bool),
        logprobs=torch.zeros(4, 1), ref_logprobs=torch.zeros(4, 1), values=torch.zeros(4, 1),
    )  # fmt: skip
    found = advantages_of(recipes.get(name), given).values.reshape(4).double()
    found = found / found.std(correction=1)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-4)


def test_reinforce_pp_has_its_penalty_in_the_rewards_once():
    given = answers()
    kl = given.logprobs - given.ref_logprobs
    expected = reinforce_pp(given.rewards, given.mask, kl=kl, kl_beta=0.5, groups=given.groups)
    found = advantages_of(recipes.get("reinforce_pp_baseline", {"kl.beta": 0.5}), given)
    torch.testing.assert_close(found.values, expected)


def test_a_penalty_in_the_reward_of_an_answer_is_that_of_all_its_tokens():
    given = answers()
    found = advantages_of(recipes.get("grpo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.5}}), given)
    spent = ((given.logprobs - given.ref_logprobs) * given.mask).sum(1)
    torch.testing.assert_close(
        found.values, group_relative((given.rewards - 0.5 * spent).double(), given.groups).float()
    )


@pytest.mark.parametrize("kl", [1e-7, 0.1])
def test_a_penalty_in_the_reward_is_not_blown_up_in_a_group_of_equal_rewards(kl):
    given = answers(rewards=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    given = answers(rewards=given.rewards, ref_logprobs=given.logprobs + kl * given.ref_logprobs)
    found = advantages_of(recipes.get("grpo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.5}}), given)
    assert found.values[:3].tolist() == [0.0] * 3
    assert (found.values[3:].abs() > 0.1).any()


def test_overlong_shaping_really_shapes():
    given = answers()
    found = advantages_of(recipes.get("dapo", {"shaping": {"longest": 4, "cache": 2, "penalty": 1.0}}), given)
    assert found.rewards.tolist() == [0.0, 0.0, -0.5, 1.0, 0.0, -1.0]  # lengths 4, 2, 3, 1, 4, 4
    torch.testing.assert_close(found.values, group_relative(found.rewards, given.groups).float())


def test_answers_that_were_cut_give_no_gradient_if_so_chosen():
    given = answers()
    found = advantages_of(recipes.get("grpo", {"truncated": "mask"}), given)
    assert (found.mask.any(1) == ~given.truncated).all()
    assert advantages_of(recipes.get("grpo"), given).mask.equal(given.mask)


def test_ppo_whitens_once_and_its_returns_are_rewards_for_gamma_and_lambda_one():
    found = advantages_of(recipes.get("ppo"), answers())
    inside = found.values[found.mask]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.std(correction=0)) == pytest.approx(1, abs=1e-5)
    expected = answers().rewards[:, None].expand(6, 4) * found.mask
    torch.testing.assert_close(found.returns, expected)


@pytest.mark.parametrize("fallen", [None, 0.0, 1.0])
def test_ppo_moves_no_policy_by_the_critics_noise_where_all_rewards_are_equal(fallen):
    changed = {"rewards": torch.ones(6), "values": 1e-3 * answers().values}
    if fallen is not None:  # rewards of turns; where those are at different places, one token is better than another
        turns = torch.zeros(6, 4)
        turns[:, 0] = fallen * torch.tensor([1.0, 0, 1, 0, 0, 1])
        changed["token_rewards"] = turns
    found = advantages_of(recipes.get("ppo"), answers(**changed))
    assert bool((found.values == 0).all()) == (not fallen)
    assert found.returns[answers().mask].tolist() == pytest.approx([1.0] * 18, abs=1e-6) or fallen
    raw = advantages_of(recipes.get("ppo", {"advantage.whiten": False}), answers(**changed))
    assert (raw.values != 0).any()


def test_kl_and_entropy_in_the_loss_are_added_with_their_weights():
    batch = micro_batch()
    plain = loss_of(recipes.get("grpo"), batch)
    found = loss_of(recipes.get("grpo", {"kl": {"beta": 0.3}, "entropy_bonus": 0.2}), batch)
    kl = losses.kl(batch.logprobs, batch.ref_logprobs, batch.mask)
    entropy = batch.entropy[batch.mask].sum()
    torch.testing.assert_close(found.total, plain.total + 0.3 * kl.total - 0.2 * entropy)
    assert float(found.weight) == float(plain.weight)
    assert found.values()["kl"] == pytest.approx(kl.values()["kl"])
    assert torch.autograd.grad(found.total, batch.entropy)[0][batch.mask].unique().tolist() == [pytest.approx(-0.2)]


def test_a_correction_weighs_by_old_over_behavior():
    batch = micro_batch()
    ratio = (batch.old_logprobs - batch.behavior_logprobs).exp()
    found = loss_of(recipes.get("grpo_tis", {"correction.cap": 1.1}), batch)
    expected = losses.policy(
        batch.logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip_low=0.2,
        clip_high=0.2,
        weights=ratio.clamp(max=1.1),
        entropy=batch.entropy,
    )
    torch.testing.assert_close(found.total, expected.total)
    counted = ratio[batch.mask]
    weights = {"is/mean": counted.mean(), "is/max": counted.max(), "is/outside": (counted > 1.1).float().mean()}
    assert found.values() == pytest.approx({**expected.values(), **{k: float(v) for k, v in weights.items()}})


def test_bad_answers_that_drifted_away_are_left_out_but_counted():
    batch = micro_batch()
    far = batch.logprobs.detach().clone()
    far[1] -= 5.0  # advantage -0.5
    far[3] -= 5.0  # advantage 0.5: stays
    batch = micro_batch(logprobs=far)
    found = loss_of(recipes.get("grpo", {"max_drift": 2.0}), batch)
    (gradient,) = torch.autograd.grad(found.total, batch.logprobs)
    assert (gradient[1] == 0).all()
    assert gradient[3].abs().sum() > 0
    assert float(found.weight) == batch.mask.sum()
    assert found.values()["drifted"] == pytest.approx(2 / 18)


def test_the_interpolated_proximal_policy_of_fresh_tokens_is_the_one_that_drew_them():
    batch = micro_batch()
    found = loss_of(recipes.get("async_grpo_interpolated"), batch)
    batch = micro_batch(proximal_logprobs=batch.old_logprobs)
    torch.testing.assert_close(found.total, loss_of(recipes.get("async_grpo"), batch).total)


def test_the_critics_loss_is_aggregated_like_the_policys():
    values = torch.randn(6, 4, requires_grad=True)
    recipe = recipes.get(
        "ppo", {"aggregation.how": "seq-mean-token-mean", "critic.error": "square", "critic.clip": None}
    )
    found = value_loss_of(recipe, values, values.detach(), torch.zeros(6, 4), answers().mask)
    rows = [(row[kept] ** 2).mean() for row, kept in zip(values, answers().mask, strict=True)]
    torch.testing.assert_close(found.mean(), sum(rows) / 6)
    with pytest.raises(ValueError, match=r"'grpo'.*critic"):
        value_loss_of(recipes.get("grpo"), values, values, values, answers().mask)


def test_a_users_own_parts_are_called():
    def advantage(answers, penalty, reduce):
        return answers.rewards * 2

    def loss(batch, aggregation, weights):
        return losses.supervised(batch.logprobs, batch.mask, how=aggregation.how)

    recipe = recipes.get("grpo", {"advantage": advantage, "loss": loss})
    assert advantages_of(recipe, answers()).values.tolist() == (answers().rewards * 2).tolist()
    batch = micro_batch()
    torch.testing.assert_close(loss_of(recipe, batch).total, losses.supervised(batch.logprobs, batch.mask).total)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: advantages_of(recipes.get("ppo"), answers(values=None)), "Answers.values is missing"),
        (
            lambda: advantages_of(recipes.get("opd"), answers(teacher_logprobs=None)),
            "Answers.teacher_logprobs is missing",
        ),
        (lambda: advantages_of(recipes.get("reinforce_pp"), answers(ref_logprobs=None)), "Answers.ref_logprobs"),
        (
            lambda: advantages_of(recipes.get("grpo", {"truncated": "mask"}), answers(truncated=None)),
            "Answers.truncated",
        ),
        (lambda: advantages_of(recipes.get("grpo"), answers(groups=torch.zeros(3))), r"groups \[3\]"),
        (lambda: loss_of(recipes.get("grpo"), micro_batch(old_logprobs=None)), "MicroBatch.old_logprobs is missing"),
        (lambda: loss_of(recipes.get("grpo_tis"), micro_batch(behavior_logprobs=None)), "MicroBatch.behavior_logprobs"),
        (
            lambda: loss_of(recipes.get("async_grpo"), micro_batch(proximal_logprobs=None)),
            "MicroBatch.proximal_logprobs",
        ),
        (lambda: loss_of(recipes.get("async_grpo_interpolated"), micro_batch(version=None)), "MicroBatch.version is"),
        (lambda: loss_of(recipes.get("deepseek_grpo"), micro_batch(ref_logprobs=None)), "MicroBatch.ref_logprobs"),
        (lambda: loss_of(recipes.get("grpo", {"entropy_bonus": 0.1}), micro_batch(entropy=None)), "MicroBatch.entropy"),
    ],
)
def test_what_is_missing_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_loss_that_returns_a_tensor_is_told_what_to_return():
    def mine(batch, aggregation, weights):
        return -batch.logprobs.sum()

    with pytest.raises(TypeError, match=r"returned.*Tensor.*LossSum"):
        loss_of(recipes.get("grpo", {"loss": mine}), micro_batch())


def test_hidden_log_probs_cannot_hurt_a_penalty():
    given = answers()
    dirty = {
        name: torch.where(given.mask, getattr(given, name), math.nan)
        for name in ("logprobs", "ref_logprobs", "teacher_logprobs", "values")
    }
    for name in ("reinforce_pp", "ppo", "opd"):
        clean, found = advantages_of(recipes.get(name), given), advantages_of(recipes.get(name), answers(**dirty))
        torch.testing.assert_close(found.values, clean.values)
