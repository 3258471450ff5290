"""Learned models are simulators as others are."""

import math

import numpy as np
import pytest
import torch

from rlinf.envs.base import CannotRender
from rlinf.envs.learned import Learned, make_world, read_world, write_world
from rlinf.envs.toy import Reach
from tests.envs.protocol import ProtocolSuite, begin, everyone

SIZES = {"state_size": 3, "action_size": 2, "hidden": [16], "members": 3, "places": 64}


def recorded(rows=200):
    """Transitions of nothing in particular."""
    generator = torch.Generator().manual_seed(0)
    state, change = (torch.randn(rows, 3, generator=generator) for _ in range(2))
    reward = torch.randn(rows, generator=generator)
    return {"state": state, "following.state": state + change / 8, "reward": reward}


def taught(num_envs, **settings) -> Learned:
    """Episodes in a model that has seen some transitions and learned nothing of them."""
    learned = Learned(num_envs, settings={**SIZES, **settings}, max_steps=9)
    learned._world.measure(recorded())
    learned._world.biases[-1].data[..., -1] = -9.0  # no end
    return learned


class TestLearned(ProtocolSuite):
    def make(self, num_envs):
        return taught(num_envs)


def test_episodes_begin_in_recorded_states_and_stay_within_their_range():
    learned, rows = taught(8), recorded()
    start = begin(learned, [*range(8)])["state"]
    places = rows["state"].tolist()
    assert all(each in places for each in start.tolist())
    learned._world.weights[-1].data *= 100.0  # predictions that run away
    for _ in range(5):
        moved = learned.step(torch.ones(8, 2), everyone(learned))
    seen = torch.cat([rows["state"], rows["following.state"]])
    low, high = seen.amin(0), seen.amax(0)
    margin = 0.1 * (high - low) + 1e-5
    assert bool(((moved.observation["state"] >= low - margin) & (moved.observation["state"] <= high + margin)).all())


def test_a_step_is_the_prediction_of_one_member_by_numbers_worked_out_apart():
    learned = taught(1)
    state = begin(learned, [3])["state"]
    action = torch.tensor([[0.5, -0.25]])
    moved = learned.step(action, everyone(learned))
    rows = {name: value.double().numpy() for name, value in recorded().items()}
    seen = np.concatenate([rows["state"], rows["following.state"]])
    change = rows["following.state"] - rows["state"]
    inputs = np.concatenate([(state.double().numpy() - seen.mean(0)) / seen.std(0), action.double().numpy()], 1)
    weights, biases = (
        [each.detach().double().numpy() for each in part] for part in (learned._world.weights, learned._world.biases)
    )
    found = []
    for member in range(3):
        hidden = inputs @ weights[0][member] + biases[0][member]
        hidden = hidden / (1 + np.exp(-hidden))
        out = (hidden @ weights[1][member] + biases[1][member])[0]
        there = state.double().numpy()[0] + out[:3] * change.std(0) + change.mean(0)
        found.append([*there, out[3] * rows["reward"].std() + rows["reward"].mean()])
    told = [*moved.observation["state"][0].tolist(), moved.reward.item()]
    assert min(math.dist(told, each) for each in found) < 1e-5


def test_disagreement_costs_reward_and_changes_nothing_else():
    plain, careful = taught(4), taught(4, penalty=2.0)
    for each in (plain, careful):
        begin(each, [1, 2, 3, 4])
    actions = torch.full((4, 2), 0.5)
    mine, theirs = plain.step(actions, everyone(plain)), careful.step(actions, everyone(careful))
    assert torch.equal(mine.observation["state"], theirs.observation["state"])
    assert bool((mine.reward > theirs.reward).all())
    alike = careful._world  # members that say the same
    for part in (*alike.weights, *alike.biases):
        part.data[:] = part.data[:1]
    begin(careful, [1, 2, 3, 4])
    _, _, reward, _, _ = alike.advance(careful._latent, actions, torch.arange(4))
    alike.penalty = 0.0
    assert torch.allclose(reward, alike.advance(careful._latent, actions, torch.arange(4))[2], atol=1e-6)


def test_other_weights_count_from_the_next_step_on():
    one, other = taught(2), taught(2, seed=5)
    for each in (one, other):
        begin(each)
    one.load(other._world.state_dict())
    actions = torch.full((2, 2), -0.5)
    mine, theirs = (each.step(actions, everyone(each)) for each in (one, other))
    assert torch.equal(mine.reward, theirs.reward)
    with pytest.raises(NotImplementedError, match="Reach"):
        Reach(1).load({})


def test_a_saved_world_is_the_same_one_elsewhere(tmp_path):
    learned = taught(2)
    about = {"model": "rlinf.models.world.EnsembleWorld", "settings": SIZES}
    write_world(tmp_path, about, learned._world.state_dict())
    elsewhere = Learned(2, path=str(tmp_path))
    assert torch.equal(begin(learned)["state"], begin(elsewhere)["state"])
    with pytest.raises(FileNotFoundError, match=r"world\.json"):
        read_world(tmp_path / "nothing")
    with pytest.raises(ValueError, match="memberz"):
        make_world(about["model"], {**SIZES, "memberz": 2})


def test_a_world_without_pictures_says_so():
    learned = taught(1)
    begin(learned, [1])
    with pytest.raises(CannotRender, match=r"trials\.videos"):
        learned.render(torch.arange(1))


class Frames(torch.nn.Module):
    """A world of pictures, as a video model is one: the last two frames are known, and the next gets brighter."""

    action_size = 1

    def __init__(self, side=4):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(8.0))
        self.side, self.shows = side, {"rgb": ((side, side, 3), torch.uint8)}

    def begin(self, seeds):
        frame = (seeds % 100).to(torch.uint8)[:, None, None, None].expand(-1, self.side, self.side, 3)
        return {"frames": torch.stack([frame, frame], 1)}, {"rgb": frame}

    def advance(self, latent, actions, seeds):
        frame = (latent["frames"][:, -1].float() + self.gain * actions[:, :, None, None]).clamp(0, 255).to(torch.uint8)
        frames = torch.stack([latent["frames"][:, -1], frame], 1)
        bright = frame.float().mean((1, 2, 3))
        return {"frames": frames}, {"rgb": frame}, bright / 255, bright > 250, bright > 250


class TestFrames(ProtocolSuite):
    def make(self, num_envs):
        return Learned(num_envs, model="tests.envs.test_learned.Frames", max_steps=9)


def test_a_world_of_pictures_draws_what_it_shows():
    learned = Learned(2, model="tests.envs.test_learned.Frames")
    begin(learned, [1, 2])
    moved = learned.step(torch.ones(2, 1), everyone(learned))
    assert torch.equal(learned.render(torch.tensor([1])), moved.observation["rgb"][1:])
