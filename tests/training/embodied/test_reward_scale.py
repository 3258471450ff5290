"""The scale of rewards beside gymnasium's, and over resets, losses and checkpoints."""

import json

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos.chunk_advantages import Chunks
from rlinf.training.embodied.trajectories import RewardScale


def chunks(rewards, ended=None, valid=None):
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    rewards = rewards if rewards.ndim == 3 else rewards[..., None]
    no = torch.zeros_like(rewards, dtype=torch.bool)
    ended = no if ended is None else torch.as_tensor(ended).view_as(no)
    return Chunks(rewards, ended, no, ~no if valid is None else torch.as_tensor(valid).view_as(no))


def returns_of(rewards, ended, gamma):
    """Discounted sums since each episode began, one environment after the other."""
    found = []
    for env in range(rewards.shape[1]):
        running = 0.0
        for reward, over in zip(rewards[:, env].tolist(), ended[:, env].tolist(), strict=True):
            running = gamma * running + reward
            found.append(running)
            running = 0.0 if over else running
    return found


@settings(max_examples=20)
@given(seed=st.integers(0, 999), gamma=st.sampled_from([0.0, 0.9, 1.0]), steps=st.integers(1, 3))
def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns_so_far(seed, gamma, steps):
    random = np.random.default_rng(seed)
    rewards = random.normal(1.0, 30.0, (4 * steps, 3)).astype(np.float32)
    ended = random.random((4 * steps, 3)) < 0.3
    scale = RewardScale(gamma, goes_on=True)
    for step in range(steps):
        part = slice(4 * step, 4 * step + 4)
        found = scale.scaled(chunks(rewards[part], ended[part])).rewards[..., 0]
    wanted = np.std(returns_of(rewards, ended, gamma))
    np.testing.assert_allclose(scale.deviation, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, rewards[part] / wanted, rtol=1e-5)


def test_steps_that_begin_new_episodes_leave_nothing_over_from_the_last():
    ones = torch.ones(3, 2)
    fresh, going = (RewardScale(0.9, goes_on=goes_on) for goes_on in (False, True))
    for scale in (fresh, going):
        scale.scaled(chunks(ones))
        scale.scaled(chunks(ones))
    np.testing.assert_allclose(fresh.deviation, np.std([1.0, 1.9, 2.71]), rtol=1e-6)
    np.testing.assert_allclose(going.deviation, np.std([1.0, 1.9, 2.71, 3.439, 4.0951, 4.68559]), rtol=1e-6)


def test_actions_of_a_chunk_are_one_reward_and_what_was_not_done_counts_for_nothing():
    rewards = torch.tensor([[[1.0, 2.0], [7.0, 100.0]], [[4.0, 0.0], [50.0, 50.0]]])  # [T, N, C]
    valid = [[[True, True], [True, False]], [[True, True], [False, False]]]
    scale = RewardScale(0.5, goes_on=True)
    scale.scaled(chunks(rewards, valid=valid))
    np.testing.assert_allclose(scale.deviation, np.std([3.0, 5.5, 7.0]), rtol=1e-6)


def test_rewards_that_are_all_alike_stay_as_they_are():
    scale = RewardScale(0.0, goes_on=False)
    assert torch.equal(scale.scaled(chunks(torch.full((3, 2), 5.0))).rewards, torch.full((3, 2, 1), 5.0))


def test_a_saved_scale_goes_on_as_if_nothing_had_been():
    rewards = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    whole, halved = RewardScale(0.9, goes_on=True), RewardScale(0.9, goes_on=True)
    for scale in (whole, halved):
        scale.scaled(chunks(rewards[:5]))
    other = RewardScale(0.9, goes_on=True)
    other.restore(json.loads(json.dumps(halved.state())))
    assert torch.equal(other.scaled(chunks(rewards[5:])).rewards, whole.scaled(chunks(rewards[5:])).rewards)
