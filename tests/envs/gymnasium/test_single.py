"""Environments of gymnasium, by their id."""

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlinf.envs.environment import Environment, Rules
from rlinf.envs.gymnasium import Gymnasium, actions_of, observations_of
from tests.envs.protocol import ProtocolSuite, begin, everyone


class TestPendulum(ProtocolSuite):
    def make(self, num_envs):
        return Gymnasium(num_envs, id="Pendulum-v1")


class TestCartPole(ProtocolSuite):
    def make(self, num_envs):
        return Gymnasium(num_envs, id="CartPole-v1")


class TestNoisyPixels(ProtocolSuite):
    """A task of one's own, with pictures, noise in every step, and a dictionary for an observation."""

    def make(self, num_envs):
        return Gymnasium(num_envs, id="tests.envs.gymnasium.test_single:Noisy-v0")


class Noisy(gymnasium.Env):
    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            "grey": spaces.Box(0, 255, (4, 5), np.uint8),
            "place": spaces.Discrete(3),
            "speed": spaces.Box(-1, 1, (2,), np.float64),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._picture = np.zeros((4, 5, 3), np.uint8)  # written again in every step: the adapter must copy it
        return self._look(), {}

    def step(self, action):
        self._picture += action.sum().astype(np.uint8)
        return self._look(), self.np_random.normal(), False, False, {"is_success": bool(action[0])}

    def _look(self):
        self._picture[:] = self.np_random.integers(0, 200, (4, 5, 3))
        return {
            "camera": self._picture,
            "grey": self._picture[:, :, 0],
            "place": self.np_random.integers(3),
            "speed": self.np_random.uniform(-1, 1, 2),
        }


if "Noisy-v0" not in gymnasium.registry:
    gymnasium.register("Noisy-v0", entry_point=Noisy, max_episode_steps=7)


def test_steps_are_those_of_gymnasium():
    simulator = Gymnasium(1, id="Pendulum-v1")
    theirs = gymnasium.make("Pendulum-v1")
    expected, _ = theirs.reset(seed=11)
    assert begin(simulator, [11])["state"][0].tolist() == expected.tolist()
    for number in (-1.0, 0.25, 2.0):
        expected, reward, *_ = theirs.step(np.array([2 * number], np.float32).clip(-2, 2))
        moved = simulator.step(simulator.action_spec.scaled(torch.tensor([[number]])), everyone(simulator))
        assert moved.observation["state"][0].tolist() == expected.tolist()
        assert moved.reward.item() == np.float32(reward)


def test_the_time_limit_is_that_of_the_registry_and_can_be_another():
    for rules, length in ((Rules(), 200), (Rules(max_steps=250), 250)):
        environment = Environment(Gymnasium(1, id="Pendulum-v1"), rules)
        environment.reset()
        (episode,) = environment.step(torch.zeros(1, 300, 1)).episodes
        assert (episode.length, episode.truncated) == (length, True)


def test_an_end_by_the_task_is_no_truncation():
    environment = Environment(Gymnasium(2, id="CartPole-v1"))
    environment.reset()
    chunk = environment.step(torch.ones(2, 30, 1))  # pushed to one side all the time it falls within about 10 steps
    assert [episode.truncated for episode in chunk.episodes] == [False, False]
    assert [episode.total for episode in chunk.episodes] == [float(episode.length) for episode in chunk.episodes]
    assert chunk.terminated.any(1).all()
    assert len(chunk.cut) == 0


def test_success_is_taken_from_info():
    simulator = Gymnasium(2, id="Noisy-v0")
    begin(simulator)
    moved = simulator.step(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), everyone(simulator))
    assert moved.success.tolist() == [True, False]
    other = Gymnasium(1, id="Noisy-v0", success="done_well")
    begin(other)
    assert other.step(torch.zeros(1, 2), everyone(other)).success is None


def test_pictures_and_numbers_of_a_dictionary_are_told_apart():
    spec, read = observations_of(Noisy.observation_space, "Noisy")
    assert (spec["rgb"].shape, spec["state"].shape) == ((4, 5, 6), (5,))
    camera = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    row = read({"camera": camera, "grey": camera[:, :, 1], "place": 2, "speed": np.array([0.5, -0.5])})
    assert row["state"].tolist() == [0, 0, 1, 0.5, -0.5]
    assert (row["rgb"][:, :, :3] == camera).all()
    assert (row["rgb"][:, :, 3:] == camera[:, :, 1:2]).all()


@pytest.mark.parametrize(
    ("space", "choices", "numbers", "action"),
    [
        (spaces.Discrete(3), (3,), [-1.0], 0),
        (spaces.Discrete(3), (3,), [-0.3], 1),
        (spaces.Discrete(3, start=5), (3,), [1.0], 7),
        (spaces.MultiDiscrete([2, 4]), (2, 4), [-0.1, 0.6], [0, 3]),
        (spaces.MultiBinary(2), (2, 2), [0.1, -0.1], [1, 0]),
        (spaces.Box(-1, 1, (2, 2)), None, [1, 2, 3, 4], [[1, 2], [3, 4]]),
    ],
)
def test_numbers_become_elements_of_the_action_space(space, choices, numbers, action):
    spec, write = actions_of(space, "it")
    assert spec.size == len(numbers)
    assert spec.choices == choices
    made = write(np.array(numbers, np.float32))
    assert np.array(made).tolist() == action
    assert space.contains(made) or isinstance(space, spaces.Box)


def test_spaces_that_no_policy_can_use_are_refused_by_name():
    with pytest.raises(ValueError, match=r"observes.*Text.*`wrappers`"):
        observations_of(spaces.Dict({"words": spaces.Text(5)}), "Odd")
    boxes = [spaces.Box(0, 255, (side, side, 3), np.uint8) for side in (4, 5)]
    with pytest.raises(ValueError, match="sizes"):
        observations_of(spaces.Tuple(boxes), "Odd")
    with pytest.raises(ValueError, match=r"acts.*Text"):
        actions_of(spaces.Text(5), "Odd")


def test_wrappers_are_applied_in_order():
    def seven(env):
        return gymnasium.wrappers.TransformReward(env, lambda reward: 7.0)

    simulator = Gymnasium(1, id="Pendulum-v1", wrappers=[seven, "tests.envs.gymnasium.test_single.add"])
    begin(simulator, [1])
    assert simulator.step(torch.zeros(1, 1), everyone(simulator)).reward.item() == 8.0


def add(env):
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward + 1)


def test_environments_made_without_pictures_say_how_to_get_them():
    simulator = Gymnasium(1, id="CartPole-v1")
    begin(simulator, [1])
    with pytest.raises(NotImplementedError, match="pictures: true"):
        simulator.render(torch.arange(1))


@pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="CartPole draws with pygame, which is not here")
def test_environments_made_with_pictures_draw():
    simulator = Gymnasium(2, id="CartPole-v1", pictures=True)
    begin(simulator)
    assert simulator.render(torch.arange(2)).shape == (2, 400, 600, 3)


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (spaces.Box(0, 255, (96, 96, 3), np.uint8), (96, 96, 3)),
        (spaces.Box(0, 255, (3, 96, 96), np.uint8), (96, 96, 3)),
        (spaces.Box(0, 255, (1, 20, 30), np.uint8), (20, 30, 3)),
        (spaces.Box(0, 255, (12, 84, 84), np.uint8), (84, 84, 12)),
        (spaces.Box(0, 255, (20, 30), np.uint8), (20, 30, 3)),
        (spaces.Box(0.0, 1.0, (64, 48, 3), np.float32), (64, 48, 3)),
        (spaces.Box(0.0, 1.0, (3, 64, 48), np.float64), (64, 48, 3)),
        (spaces.Box(0.0, 255.0, (64, 48, 1), np.float32), (64, 48, 3)),
    ],
    ids=str,
)
def test_pictures_are_read_whichever_way_round_and_in_whatever_numbers_they_come(space, shape):
    spec, read = observations_of(space, "task")
    assert (spec.keys(), tuple(spec["rgb"].shape)) == ({"rgb"}, shape)
    brightness = np.random.default_rng(0).integers(0, 256, space.shape, np.uint8)
    most = 255 if space.dtype == np.uint8 else float(space.high.max())
    element = (brightness * (most / 255)).astype(space.dtype)
    first = brightness.ndim == 3 and brightness.shape[-1] not in (1, 3)
    wanted = np.moveaxis(brightness, 0, -1) if first else brightness.reshape(*brightness.shape[:2], -1)
    wanted = np.repeat(wanted, 3, axis=2) if wanted.shape[2] == 1 else wanted
    assert (read(element)["rgb"] == wanted).all()


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 4), (2, 84, 84)])
def test_channels_that_are_neither_grey_nor_colours_are_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"^task .*`wrappers`"):
        observations_of(spaces.Box(0, 255, shape, np.uint8), "task")


@pytest.mark.parametrize(
    "space", [spaces.Box(0.0, 1.0, (4, 3, 3)), spaces.Box(-1.0, 1.0, (64, 64, 3)), spaces.Box(0, 1, (9,))]
)
def test_numbers_from_0_to_1_that_have_no_shape_of_a_picture_are_numbers(space):
    assert observations_of(space, "task")[0].keys() == {"state"}
