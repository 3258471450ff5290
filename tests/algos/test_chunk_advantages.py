"""Advantages of action chunks, against episodes worked out by hand and against a loop over single steps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos import algorithms, recipes
from rlinf.algos.chunk_advantages import (
    Chunks,
    advantages_of_chunks,
    episode_ids,
    first_episode,
    group_advantages,
    rows,
    without_lost,
)
from rlinf.algos.loss_sum import MicroBatch


def one_environment(rewards, *, terminated=(), truncated=(), invalid=(), **values):
    """Chunks of a single environment, from lists [T][C]; the rest names (chunk, action) pairs."""
    rewards = torch.tensor(rewards, dtype=torch.float64)[:, None]

    def flags(places):
        found = torch.zeros_like(rewards, dtype=torch.bool)
        for chunk, action in places:
            found[chunk, 0, action] = True
        return found

    given = {name: torch.tensor(value, dtype=torch.float64)[:, None] for name, value in values.items()}
    if "next_values" in given:
        given["next_values"] = given["next_values"][0]
    return Chunks(rewards, flags(terminated), flags(truncated), ~flags(invalid), **given)


def test_actions_of_two_chunks_by_hand():
    # gamma 1/2, lambda 1/2. Three steps earn 1, 2, 4; the critic says 8 each time, and 16 after the last chunk.
    chunks = one_environment([[1.0, 2.0]], values=[[8.0, 8.0]], next_values=[16.0])
    found = advantages_of_chunks(chunks, gamma=0.5, lam=0.5, whiten=False)
    # d_1 = 2 + 16/2 - 8 = 2, d_0 = 1 + 8/2 - 8 = -3; A_1 = 2, A_0 = -3 + 1/4 2 = -2.5
    assert found.values[0, 0].tolist() == [-2.5, 2.0]
    assert found.returns[0, 0].tolist() == [5.5, 10.0]
    assert found.mask.all()


def test_nothing_is_expected_behind_a_terminated_step():
    chunks = one_environment([[1.0, 2.0]], terminated=[(0, 1)], values=[[8.0, 8.0]], next_values=[float("nan")])
    found = advantages_of_chunks(chunks, gamma=0.5, lam=0.5, whiten=False)
    # d_1 = 2 - 8 = -6, d_0 = 1 + 4 - 8 = -3; A_0 = -3 - 6/4
    assert found.values[0, 0].tolist() == [-4.5, -6.0]


@pytest.mark.parametrize("per_chunk", [False, True])
def test_a_truncated_step_is_bootstrapped_with_the_value_of_its_last_observation(per_chunk):
    values = [8.0] if per_chunk else [[8.0, 8.0]]
    chunks = one_environment([[1.0, 2.0]], truncated=[(0, 1)], values=values, next_values=[99.0], final_values=[20.0])
    found = advantages_of_chunks(chunks, gamma=0.5, lam=0.5, whiten=False)
    if per_chunk:
        assert found.values.tolist() == [[1.0 + 2.0 + 10.0 - 8.0]]
    else:
        assert found.values[0, 0].tolist() == [-3.0 + 0.25 * 4.0, 2.0 + 10.0 - 8.0]


@pytest.mark.parametrize("per_chunk", [False, True])
def test_steps_behind_an_end_count_for_nothing_and_the_next_chunk_begins_anew(per_chunk):
    values = [8.0, 8.0] if per_chunk else [[8.0, float("nan")], [8.0, 8.0]]
    chunks = one_environment(
        [[1.0, float("nan")], [4.0, 8.0]], terminated=[(0, 0)], invalid=[(0, 1)], values=values, next_values=[16.0]
    )
    found = advantages_of_chunks(chunks, gamma=0.5, lam=0.5, whiten=False)
    if per_chunk:
        assert found.values[:, 0].tolist() == [1.0 - 8.0, 12.0 + 8.0 - 8.0]
        assert found.mask.all()
    else:
        assert found.values[:, 0].tolist() == [[-7.0, 0.0], [4.0 + 4.0 - 8.0 + 0.25 * 8.0, 8.0]]
        assert found.mask[:, 0].tolist() == [[True, False], [True, True]]
        assert found.returns[0, 0, 1] == 0.0


def test_nothing_passes_over_a_chunk_that_was_lost():
    chunks = one_environment(
        [[1.0], [50.0], [2.0]], invalid=[(1, 0)], values=[[8.0], [70.0], [8.0]], next_values=[16.0]
    )
    found = advantages_of_chunks(chunks, gamma=0.5, lam=0.5, whiten=False)
    assert found.values[:, 0, 0].tolist() == [1.0 - 8.0, 0.0, 2.0 + 8.0 - 8.0]


def test_missing_values_are_asked_for_by_name():
    with pytest.raises(ValueError, match="next_values"):
        advantages_of_chunks(one_environment([[1.0]]), gamma=1.0, lam=1.0)
    cut = one_environment([[1.0]], truncated=[(0, 0)], values=[[0.0]], next_values=[0.0])
    with pytest.raises(ValueError, match="final_values"):
        advantages_of_chunks(cut, gamma=1.0, lam=1.0)


def test_wrong_shapes_are_named():
    flags = torch.zeros(2, 3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values \[2, 4\].*\[2, 3\]"):
        Chunks(torch.zeros(2, 3, 4), flags, flags, flags, values=torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"next_values \[2\].*\[3\]"):
        Chunks(torch.zeros(2, 3, 4), flags, flags, flags, next_values=torch.zeros(2))


@st.composite
def rollouts(draw):
    """Chunks as environments make them: within a chunk nothing happens behind an end."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    time, count, chunk = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = (time, count, chunk)
    terminated, truncated = rng.random(shape) < 0.2, rng.random(shape) < 0.2
    truncated &= ~terminated
    behind = np.cumsum(terminated | truncated, axis=2) - (terminated | truncated) > 0
    per_chunk = draw(st.booleans())
    return {
        "rewards": np.where(behind, np.nan, rng.normal(size=shape)),
        "terminated": terminated & ~behind,
        "truncated": truncated & ~behind,
        "valid": ~behind,
        "values": rng.normal(size=shape[:2] if per_chunk else shape),
        "next_values": rng.normal(size=count),
        "final_values": rng.normal(size=shape[:2]),
    }


def step_by_step(r, gamma, lam):
    """Advantages by the definition: sum of (gamma lam)^k delta, over the steps of one episode of one environment."""
    time, count, chunk = r["rewards"].shape
    per_chunk = r["values"].ndim == 2
    out = np.zeros(r["values"].shape)
    for n in range(count):
        steps = []  # (where, reward, value, terminated, bootstrap or None)
        for t in range(time):
            done = [c for c in range(chunk) if r["valid"][t, n, c]]
            parts = [done] if per_chunk else [[c] for c in done]
            for part in parts:
                where = (t, n) if per_chunk else (t, n, part[0])
                cut = any(r["truncated"][t, n, c] for c in part)
                steps.append((
                    where,
                    sum(r["rewards"][t, n, c] for c in part),
                    r["values"][where],
                    any(r["terminated"][t, n, c] for c in part),
                    r["final_values"][t, n] if cut else None,
                ))  # fmt: skip
        for i in range(len(steps)):
            weight = 1.0
            for j in range(i, len(steps)):
                where, reward, value, over, final = steps[j]
                ahead = r["next_values"][n] if j + 1 == len(steps) else steps[j + 1][2]
                ahead = 0.0 if over else final if final is not None else ahead
                out[steps[i][0]] += weight * (reward + gamma * ahead - value)
                weight *= gamma * lam
                if over or final is not None:
                    break
    return out


@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_sum_over_the_rest_of_the_episode(rollout, gamma, lam):
    chunks = Chunks(**{name: torch.from_numpy(value) for name, value in rollout.items()})
    found = advantages_of_chunks(chunks, gamma=gamma, lam=lam, whiten=False)
    np.testing.assert_allclose(found.values.numpy(), step_by_step(rollout, gamma, lam), rtol=1e-9, atol=1e-9)
    kept = found.mask.numpy()
    np.testing.assert_allclose(found.returns.numpy()[kept], (found.values + chunks.values).numpy()[kept], rtol=1e-9)


@given(rollouts())
def test_with_chunks_of_one_action_both_levels_agree(rollout):
    single = {k: v[..., :1] if v.ndim == 3 else v for k, v in rollout.items()}
    single["values"] = single["values"] if single["values"].ndim == 3 else single["values"][..., None]
    by_action = Chunks(**{name: torch.from_numpy(value) for name, value in single.items()})
    single["values"] = single["values"][..., 0]
    by_chunk = Chunks(**{name: torch.from_numpy(value) for name, value in single.items()})
    first, second = (advantages_of_chunks(x, gamma=0.9, lam=0.8, whiten=False) for x in (by_action, by_chunk))
    torch.testing.assert_close(first.values[..., 0], second.values)


def test_whitening_is_over_the_valid_steps_of_all_ranks():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    over = torch.zeros(3, 4, 2, dtype=torch.bool)
    over[1, :, 0] = True
    valid = torch.ones_like(over)
    valid[1, :, 1] = False

    def part(which):
        return Chunks(rewards[:, which], over[:, which], over[:, which] & False, valid[:, which], values[:, which],
                      torch.zeros(4)[which])  # fmt: skip

    whole = advantages_of_chunks(part(slice(0, 4)), gamma=0.9, lam=0.9)
    kept = whole.values[whole.mask]
    assert kept.mean().abs() < 1e-6
    assert abs(kept.std(correction=0) - 1) < 1e-5

    halves = [part(slice(0, 2)), part(slice(2, 4))]
    raw = [advantages_of_chunks(half, gamma=0.9, lam=0.9, whiten=False) for half in halves]
    mine, others = (each.values[each.mask].double() for each in raw)
    mean = torch.cat([mine, others]).mean()
    told = [torch.stack([others.sum(), torch.tensor(float(len(others)))]), (others - mean).square().sum().reshape(1)]
    found = advantages_of_chunks(halves[0], gamma=0.9, lam=0.9, reduce=lambda sums: sums + told.pop(0))
    torch.testing.assert_close(found.values, whole.values[:, :2])


# Groups --------------------------------------------------------------------------------------------------------------


def two_groups():
    """Four environments, two chunks of two actions; environments 0 and 1 began alike, and so did 2 and 3."""
    rewards = torch.tensor([[[0.0, 1], [0, 0], [1, 5], [0, 1]], [[7.0, 7], [0, 0], [5, 5], [7, 7]]])
    over = torch.zeros(2, 4, 2, dtype=torch.bool)
    over[0, 0, 1] = over[0, 2, 0] = over[0, 3, 1] = True  # environment 1 goes on to the end
    valid = torch.ones_like(over)
    valid[0, 2, 1] = False
    return Chunks(rewards, over, over & False, valid)


def test_an_episode_is_compared_with_its_group_by_its_own_return():
    found = group_advantages(two_groups(), torch.tensor([3, 3, 9, 9]), scale="none")
    assert found.values[0].tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]
    assert found.mask[0].tolist() == [[True, True], [True, True], [True, False], [True, True]]
    assert found.values[1].tolist() == [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]
    assert found.mask[1].tolist() == [[False, False], [True, True], [False, False], [False, False]]


def test_groups_in_which_all_or_none_succeeded_are_left_out():
    success = torch.tensor([True, False, True, True])
    found = group_advantages(two_groups(), torch.tensor([3, 3, 9, 9]), success=success, scale="none", level="chunk")
    assert found.mask.tolist() == [[True, True, False, False], [False, True, False, False]]
    assert found.values.tolist() == [[0.5, -0.5, 0.0, 0.0], [0.0, -0.5, 0.0, 0.0]]


def test_groups_whose_mean_lies_outside_of_the_bounds_are_left_out():
    groups, success = torch.tensor([3, 3, 9, 9]), torch.tensor([True, False, True, False])
    for bounds, kept in (((0.5, 1.0), [0, 1, 2, 3]), ((0.6, 1.0), [2, 3]), ((0.0, 0.9), [0, 1]), ((2.0, 3.0), [])):
        found = group_advantages(two_groups(), groups, success=success, returns_within=bounds)  # they earned 0.5 and 1
        assert found.mask.any(-1).any(0).nonzero().flatten().tolist() == kept
    success = torch.tensor([True, False, True, True])
    chunks, groups = two_groups(), torch.tensor([3, 3, 3, 3])
    for bounds, some in (((0.1, 0.9), True), ((0.75, 0.75), True), ((0.1, 0.7), False)):
        found = group_advantages(chunks, groups, success=success, success_within=bounds)
        assert bool(found.mask.any()) == some
        assert bool(found.values.any()) == some


def test_a_lost_episode_is_no_member_of_its_group():
    chunks = two_groups()
    chunks.valid[:, 1] = False
    found = group_advantages(chunks, torch.tensor([3, 3, 3, 3]), scale="none")
    assert found.values[0, :, 0].tolist() == [0.0, 0.0, 0.0, 0.0]  # the other three all earned 1
    assert not found.mask[:, 1].any()


def test_the_loss_of_a_group_weighs_episodes_alike_whatever_their_length():
    chunks = two_groups()
    found = group_advantages(chunks, torch.tensor([3, 3, 9, 9]), scale="none")
    logprobs = torch.randn(2, 4, 2, 3, requires_grad=True)
    laid = rows(found.values, logprobs, found.mask, episode_ids(chunks.ended))
    algorithm = recipes.get("grpo", {"aggregation.how": "seq-mean-token-mean"})
    loss = algorithms.loss_of(algorithm, MicroBatch(old_logprobs=laid["logprobs"].detach(), **laid))
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    each = gradient.sum((0, 2, 3))  # at ratio 1: minus the advantage, for the whole episode
    torch.testing.assert_close(each, torch.tensor([-0.5, 0.5, 0.0, 0.0]))
    assert loss.weight == 4


# Episodes ------------------------------------------------------------------------------------------------------------


def test_the_first_episode_includes_the_step_that_ends_it():
    ended = torch.tensor([[[False, False]], [[True, False]], [[False, True]]])
    assert first_episode(ended)[:, 0].tolist() == [[True, True], [True, False], [False, False]]


def test_episodes_are_numbered_from_chunk_to_chunk_and_never_shared_by_environments():
    ended = torch.zeros(3, 2, 2, dtype=torch.bool)
    ended[0, 0, 1] = ended[2, 0, 0] = ended[1, 1, 0] = True
    assert episode_ids(ended).T.tolist() == [[0, 1, 1], [2, 2, 3]]


def test_all_chunks_of_a_lost_episode_are_invalid_and_no_others():
    ended = torch.zeros(4, 2, 2, dtype=torch.bool)
    ended[0, 0, 1] = True
    lost = torch.zeros(4, 2, dtype=torch.bool)
    lost[2, 0] = True
    found = without_lost(torch.ones(4, 2, 2, dtype=torch.bool), ended, lost)
    assert found[:, 0, 0].tolist() == [True, False, False, True]
    assert found[:, 1].all()


# Layout --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("advantage", "logprobs", "tokens"), [
    ((2, 3), (2, 3), 1), ((2, 3), (2, 3, 4), 4), ((2, 3), (2, 3, 4, 5), 20),
    ((2, 3, 4), (2, 3, 4), 4), ((2, 3, 4), (2, 3, 4, 5), 20),
])  # fmt: skip
def test_rows_give_every_log_prob_the_advantage_of_its_action_or_chunk(advantage, logprobs, tokens):
    gained = torch.arange(float(np.prod(advantage))).view(advantage)
    laid = rows(gained, torch.randn(logprobs), gained % 2 == 0)
    assert all(x.shape == (6, tokens) for x in laid.values())
    # An independent way: by index.
    for t, n in np.ndindex(2, 3):
        spread = gained[t, n].reshape(-1).repeat_interleave(tokens // gained[t, n].numel())
        assert laid["advantages"][t * 3 + n].tolist() == spread.tolist()
        assert laid["mask"][t * 3 + n].tolist() == (spread % 2 == 0).tolist()


def test_one_log_prob_for_a_chunk_cannot_take_advantages_of_its_actions():
    with pytest.raises(ValueError, match="per action"):
        rows(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(2, 3, 4, dtype=torch.bool))
