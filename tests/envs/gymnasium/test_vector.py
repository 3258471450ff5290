"""Vector environments of gymnasium: those made by id, one's own, and those that cannot keep the protocol."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlinf.envs.environment import Environment, Rules
from rlinf.envs.gymnasium import Gymnasium, GymnasiumVector
from tests.envs.gymnasium import test_single as test_gymnasium  # registers Noisy-v0
from tests.envs.protocol import ProtocolSuite, actions_for, begin, everyone, same, scaled

NOISY = f"{test_gymnasium.__name__}:Noisy-v0"


class TestCartPole(ProtocolSuite):
    def make(self, num_envs):
        return GymnasiumVector(num_envs, id="CartPole-v1")


class TestNoisyPixels(ProtocolSuite):
    def make(self, num_envs):
        return GymnasiumVector(num_envs, id=NOISY)


class Drift(VectorEnv):
    """One's own, in numpy: a point drifts at random, and the episode ends when it has gone too far.

    As many do, it writes its observations again in every step, and resets by itself in the step after an end.
    """

    def __init__(self, num_envs, far=1.0):
        self.num_envs, self.render_mode, self._far = num_envs, None, far
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._place = np.zeros((num_envs, 1), np.float32)
        self._random = [np.random.default_rng(env) for env in range(num_envs)]
        self._over = np.zeros(num_envs, np.bool_)
        self.resets_by_itself = 0

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for env in np.flatnonzero(mask):
            self._random[env] = np.random.default_rng(seed[env])
            self._place[env] = self._random[env].uniform(-0.1, 0.1)
        self._over[mask] = False
        return self._place, {}

    def step(self, actions):
        for env, action in enumerate(actions):
            if self._over[env]:
                self.resets_by_itself += 1
            self._place[env] += 0.1 * action + self._random[env].normal(0, 0.01)
        self._over = np.abs(self._place[:, 0]) > self._far
        return self._place, -np.abs(self._place[:, 0]), self._over, np.zeros(self.num_envs, np.bool_), {}


class TestOnesOwn(ProtocolSuite):
    def make(self, num_envs):
        return GymnasiumVector(num_envs, env=Drift, max_steps=50)


def test_episodes_are_those_of_the_single_environments_bit_for_bit():
    vector, single = GymnasiumVector(3, id="CartPole-v1"), Gymnasium(3, id="CartPole-v1")
    assert (vector.max_steps, vector.observation_spec) == (single.max_steps, single.observation_spec)
    one, other = (Environment(simulator, Rules(seed=4, max_steps=15)) for simulator in (vector, single))
    assert same(one.reset().observation, other.reset().observation)
    ended = 0
    for chunk in range(6):
        actions = actions_for(vector, 3, 8, seed=chunk)
        here, there = one.step(actions), other.step(actions)
        ended += len(here.episodes)
        for name in ("rewards", "terminated", "truncated", "valid", "observation", "final", "episodes"):
            assert same(getattr(here, name), getattr(there, name)), name
    assert ended >= 6


def test_processes_of_its_own_do_the_same():
    vector, single = GymnasiumVector(2, id="Pendulum-v1", asynchronous=True), Gymnasium(2, id="Pendulum-v1")
    try:
        assert same(begin(vector), begin(single))
        actions = scaled(single, actions_for(single, 2))
        assert same(
            vector.step(actions, everyone(vector)).observation, single.step(actions, everyone(single)).observation
        )
    finally:
        vector.close()


def test_it_never_comes_to_a_reset_of_its_own_and_the_last_observation_is_seen():
    simulator = GymnasiumVector(2, env=Drift, make={"far": 0.3})
    environment = Environment(simulator, Rules(max_steps=40, auto_reset=False))
    environment.reset()
    away = torch.stack([torch.ones(20, 1), torch.zeros(20, 1)])
    chunk = environment.step(away)
    assert chunk.ended.tolist() == [0]
    assert chunk.final["state"].item() > 0.3
    assert chunk.observation["state"][0] == chunk.final["state"]  # it waits, while the other one goes on
    assert chunk.valid.sum(1).tolist()[1] == 20
    assert environment.step(away).valid.any(1).tolist() == [False, True]
    assert simulator._envs.resets_by_itself == 0


def test_states_of_episodes_of_different_length_are_restored_together():
    simulator, elsewhere = (GymnasiumVector(3, env=Drift) for _ in range(2))
    begin(simulator)
    for step in range(5):
        simulator.step(scaled(simulator, actions_for(simulator, 3, seed=step)), everyone(simulator))
        if step in (1, 4):
            simulator.reset(torch.tensor([step]), torch.tensor([step // 2]))
    assert [len(state["actions"]) for state in simulator.save()] == [3, 5, 0]
    elsewhere.restore(simulator.save(), torch.arange(3))
    actions = scaled(simulator, actions_for(simulator, 3, seed=9))
    assert same(
        simulator.step(actions, everyone(simulator)).observation,
        elsewhere.step(actions, everyone(elsewhere)).observation,
    )


def test_success_is_taken_from_info():
    simulator = GymnasiumVector(2, id=NOISY)
    begin(simulator)
    assert simulator.step(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), everyone(simulator)).success.tolist() == [
        True,
        False,
    ]


def test_going_on_behind_an_end_is_refused():
    environment = Environment(
        GymnasiumVector(1, env=Drift, make={"far": 0.2}), Rules(max_steps=9, ignore_terminations=True)
    )
    environment.reset()
    with pytest.raises(ValueError, match=r"behind.*end:.*ignore_terminations=false"):
        environment.step(torch.ones(1, 9, 1))


class OneSeed(Drift):
    def reset(self, *, seed=None, options=None):
        gymnasium.utils.seeding.np_random(seed)
        return super().reset(seed=[seed] * self.num_envs, options=options)


class SeedsByPlace(Drift):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=[each + env for env, each in enumerate(seed)], options=options)


class AllAtOnce(Drift):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class AtOnce(Drift):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (OneSeed, r"OneSeed.*reset.*integer.*take"),
        (SeedsByPlace, r"SeedsByPlace.*differently.*environments"),
        (AllAtOnce, r"AllAtOnce resets environments"),
        (AtOnce, "AtOnce says.*SAME_STEP"),
    ],
)
def test_those_whose_episodes_do_not_follow_from_their_seeds_are_refused(env, told):
    with pytest.raises(ValueError, match=told):
        GymnasiumVector(3, env=env)


def test_one_of_both_must_be_named():
    for wrong in ({}, {"id": "CartPole-v1", "env": Drift}):
        with pytest.raises(ValueError, match=r"either.*`id`"):
            GymnasiumVector(2, **wrong)


def test_environments_made_without_pictures_say_how_to_get_them():
    simulator = GymnasiumVector(1, id="CartPole-v1")
    with pytest.raises(NotImplementedError, match="pictures: true"):
        simulator.render(torch.arange(1))
