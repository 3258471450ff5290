"""Stacked frames keep the protocol of simulators, and are the last observations of this episode alone."""

import dataclasses

import pytest
import torch

from rlinf.envs.environment import Environment, FrameStack, Rules
from rlinf.envs.toy import Reach
from tests.envs.protocol import ProtocolSuite


class TestStacked(ProtocolSuite):
    def make(self, num_envs):
        return FrameStack(Reach(num_envs, dims=2, pixels=12, wind=True, words=True), 3)

    steps = 2


def actions(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("chunk", [1, 2])
def test_what_is_seen_are_the_last_observations_of_the_episode_the_oldest_first(chunk):
    """Beside the same environments seen one observation at a time, over ends of episodes."""
    rules = Rules(max_steps=3)
    plain = Environment(Reach(3, pixels=6), rules)
    stacked = Environment(Reach(3, pixels=6), dataclasses.replace(rules, frame_stack=2))
    assert stacked.simulator.observation_spec["rgb"].shape == (6, 6, 6)
    assert stacked.simulator.observation_spec["state"].shape == (4,)
    assert torch.equal(stacked.reset().observation["state"][:, 2:], plain.reset().observation["state"])
    for act in actions(8, 3, chunk, 1):
        there = plain.step(act)
        found = stacked.step(act)
        assert torch.equal(found.rewards, there.rewards)
        for name, width in (("state", 2), ("rgb", 3)):
            assert torch.equal(found.observation[name][..., width:], there.observation[name])
            assert torch.equal(found.final[name][..., width:], there.final[name])
        began = found.next_episode != found.episode
        older, newer = found.observation["state"].split(2, -1)
        assert torch.equal(older[began], newer[began])
        assert bool(began.all()) or not torch.equal(older, newer)


def test_the_frame_before_is_the_observation_before():
    env = Environment(Reach(4, wind=True), Rules(frame_stack=3))
    seen = [env.reset().observation["state"]]
    for act in actions(2, 4, 1, 1):
        seen.append(env.step(0.1 * act).observation["state"])
    assert torch.equal(seen[2], torch.cat([seen[0][:, 4:], seen[1][:, 4:], seen[2][:, 4:]], 1))


def test_restored_environments_go_on_with_the_frames_that_they_had():
    rules = Rules(frame_stack=3, max_steps=4)
    env, other = Environment(Reach(3, wind=True), rules), Environment(Reach(3, wind=True), rules)
    env.reset()
    first, rest = actions(6, 3, 1, 1).split(3)
    for act in first:
        env.step(act)
    start = other.load_state_dict(env.state_dict())
    assert torch.equal(start.observation["state"], env._observation["state"])
    for act in rest:
        assert torch.equal(other.step(act).observation["state"], env.step(act).observation["state"])
    with pytest.raises(ValueError, match="frame_stack"):
        Environment(Reach(3, wind=True), Rules(max_steps=4)).load_state_dict(env.state_dict())
