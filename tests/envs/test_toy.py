"""The toy keeps the protocol, and its returns are those that can be worked out by hand."""

import pytest
import torch

from rlinf.envs.environment import Environment, Rules
from rlinf.envs.toy import NEAR, Reach, draw, start_of
from tests.envs.protocol import ProtocolSuite, everyone


class TestPlain(ProtocolSuite):
    def make(self, num_envs):
        return Reach(num_envs)

    steps = 1  # within two steps a random walk may be there


class TestPixelsWithWind(ProtocolSuite):
    def make(self, num_envs):
        return Reach(num_envs, dims=2, pixels=12, wind=True, words=True)

    steps = 2


def placed(point, target, **options) -> Reach:
    """One environment per pair."""
    simulator = Reach(len(point), **options)
    simulator.reset(torch.arange(len(point)), torch.arange(len(point)))
    simulator._point, simulator._target = torch.tensor(point)[:, None], torch.tensor(target)[:, None]
    return simulator


def test_rewards_are_minus_the_distance_that_is_left():
    simulator = placed([-0.5, 1.0, 0.0], [0.5, 0.0, 0.25])
    moved = simulator.step(torch.tensor([[0.25], [0.25], [0.125]]), everyone(simulator))
    assert moved.reward.tolist() == [-0.75, -1.0, -0.125]  # the wall holds the second
    assert moved.terminated.tolist() == moved.success.tolist() == [False, False, True]
    assert moved.observation["state"].tolist() == [[-0.25, 0.5], [1.0, 0.0], [0.125, 0.25]]


def test_sparse_rewards_are_one_for_the_step_that_solves_the_task_and_nothing_else():
    simulator = placed([-0.5, 1.0, 0.0], [0.5, 0.0, 0.25], sparse=True)
    moved = simulator.step(torch.tensor([[0.25], [0.25], [0.125]]), everyone(simulator))
    assert moved.reward.tolist() == [0.0, 0.0, 1.0]
    assert moved.success.tolist() == [False, False, True]
    environment = Environment(Reach(64, sparse=True), Rules(seed=3))
    environment.reset()
    steps = torch.rand(64, 12, 1, generator=torch.Generator().manual_seed(1)) * 2 - 1
    episodes = environment.step(steps).episodes
    assert {episode.total for episode in episodes} == {0.0, 1.0}
    assert all(episode.total == float(episode.success_once) for episode in episodes)


def test_going_straight_to_the_target_earns_the_sum_that_is_worked_out_by_hand():
    """From a distance of 1: after steps of 1/4 there remain 3/4, 1/2, 1/4 and 0, so the return is -3/2."""
    seed = next(seed for seed in range(1000) if abs(start_of(seed, 1)[0][0] - start_of(seed, 1)[1][0]) == 1.0)
    environment = Environment(Reach(1))
    environment.seed_of = lambda env, episode: seed
    state = environment.reset().observation["state"][0]
    chunk = environment.step(torch.sign(state[1] - state[0]).view(1, 1, 1).expand(1, 6, 1))
    assert chunk.rewards.tolist() == [[-0.75, -0.5, -0.25, 0.0, 0.0, 0.0]]
    assert [episode.total for episode in chunk.episodes] == [-1.5]
    assert [episode.length for episode in chunk.episodes] == [4]


def test_starts_are_on_the_grid_and_never_solved():
    for seed in range(200):
        for dims in (1, 2):
            point, target = start_of(seed, dims)
            assert all(float(8 * place).is_integer() and abs(place) <= 1 for place in (*point, *target))
            assert any(abs(a - b) > NEAR for a, b in zip(point, target, strict=True))


def test_wind_is_part_of_the_episode_and_not_of_the_place():
    """The same seed in another environment, and later, blows the same."""
    simulator = Reach(2, wind=True)
    runs = []
    for _ in range(2):
        simulator.reset(torch.tensor([5, 5]), torch.arange(2))
        runs.append([simulator.step(torch.zeros(2, 1), everyone(simulator)).reward.tolist() for _ in range(5)])
    assert runs[0] == runs[1]
    assert all(one == other for one, other in runs[0])
    assert len({tuple(each) for each in runs[0]}) > 1


def test_pictures_show_the_target_red_and_the_point_green():
    picture = draw(torch.tensor([[-0.5, -0.5]]), torch.tensor([[0.5, 0.5]]), 17)[0]
    assert picture[4, 4].tolist() == [0, 255, 0]
    assert picture[12, 12].tolist() == [255, 0, 0]
    assert picture[0, 0].tolist() == [0, 0, 0]


def test_other_numbers_of_dimensions_are_refused():
    with pytest.raises(ValueError, match="dims=3"):
        Reach(1, dims=3)


def test_rules_that_cannot_be_are_refused():
    for wrong in ({"group_size": 0}, {"max_steps": 0}, {"chunks": 0}):
        with pytest.raises(ValueError, match=r"least 1"):
            Rules(**wrong)
