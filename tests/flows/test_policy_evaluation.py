"""Trials: whole episodes by the likeliest actions, the same each time."""

from dataclasses import replace

import pytest

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.envs.environment import Episode
from rlinf.envs.video import Recording
from rlinf.flows.evaluate import failures_first, trials
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.system import ActorSystem
from tests.actors.programs.control import MLP, REACH

STILL = {"simulator": REACH, "workers": 0, "num_envs": 4, "max_steps": 5, "auto_reset": False}


async def roles(system, name="", **settings):
    env = await system.spawn(EnvActor, name=f"env{name}", **{**STILL, **settings})
    return env, await system.spawn(PolicyActor, name=f"policy{name}", policy=MLP)


@pytest.mark.parametrize("count", [1, 4, 6])
async def test_they_are_so_many_whole_episodes_in_the_order_of_rounds_and_environments(count):
    async with ActorSystem.local() as system:
        env, policy = await roles(system)
        found = await trials(env, policy, count)
    assert [(episode.epoch, episode.env) for episode in found] == [divmod(number, 4) for number in range(count)]
    assert all(episode.number == 0 and episode.length <= 5 for episode in found)
    assert all(episode.truncated == (episode.length == 5 and not episode.success_at_end) for episode in found)


async def test_the_same_policy_is_tried_on_the_same_starts_and_does_the_same():
    async with ActorSystem.local() as system:
        env, policy = await roles(system)
        first = await trials(env, policy, 6)
        assert await trials(env, policy, 6) == first
        other_env, _ = await roles(system, "other", seed=1)
        assert [episode.seed for episode in await trials(other_env, policy, 6)] != [each.seed for each in first]


async def test_the_ode_s_random_starts_are_the_same_each_time_and_each_of_its_own():
    """As authors of flows evaluate."""
    flow = {"type": "flow", **{key: MLP[key] for key in ("state_size", "action_size")}, "chunk": 2}
    async with ActorSystem.local() as system:
        env, _ = await roles(system)
        policy = await system.spawn(PolicyActor, name="flow", policy=flow)
        first = await trials(env, policy, 6, greedy="from_noise")
        assert await trials(env, policy, 6, greedy="from_noise") == first
        assert await trials(env, policy, 6) != first


async def test_they_leave_nothing_in_a_trajectory():
    async with ActorSystem.local() as system:
        env, policy = await roles(system)
        await trials(env, policy, 4)
        with pytest.raises(ValueError, match=r"nothing.*slice 0"):
            await policy[0].trajectory((0, 0), await env[0].reset(0, 0))


class Fated(Actor):
    """Rounds of one step each, in which these environments end their episodes."""

    async def setup(self, rounds):
        self.rounds, self.epoch = rounds, 0

    @endpoint
    async def reset(self, number, epoch):
        self.epoch = epoch
        return Shown(None)

    @endpoint
    async def step(self, number, actions):
        ended = self.rounds[min(self.epoch, len(self.rounds) - 1)]
        return Shown(Happened(tuple(Episode(env, self.epoch, 0, 0, 1, 0.0, None, None, False) for env in ended)))


class Shown:
    def __init__(self, chunk):
        self.chunk = chunk


class Happened:
    def __init__(self, episodes):
        self.episodes, self.running = episodes, _Nobody()


class _Nobody:
    def any(self):
        return False


class Indifferent(Actor):
    @endpoint
    async def act(self, key, seen, *, greedy, keep):
        assert greedy
        assert not keep
        return 0


async def tried(rounds, count):
    async with ActorSystem.local() as system:
        env = await system.spawn(Fated, name="env", rounds=rounds)
        return await trials(env, await system.spawn(Indifferent, name="policy"), count)


async def test_what_was_lost_is_made_up_for_by_another_round():
    found = await tried([[1, 0], [0], [0, 1]], 4)
    assert [(each.epoch, each.env) for each in found] == [(0, 0), (0, 1), (1, 0), (2, 0)]


async def test_simulators_that_lose_everything_end_the_trials():
    with pytest.raises(RuntimeError, match=r"simulators.*episode"):
        await tried([[0], []], 3)


# Videos --------------------------------------------------------------------------------------------------------------


async def test_failures_are_played_again_and_recorded_first(tmp_path):
    """Of two rounds of four those are recorded that went worst, as they were played, and nothing else is drawn."""
    recording = Recording(str(tmp_path), envs=(), name="again-")
    async with ActorSystem.local() as system:
        more = {"options": {"wind": True, "dims": 1}, "max_steps": 8, "recording": recording}
        env, policy = await roles(system, **more)
        found = await trials(env, policy, 8)
        assert not list(tmp_path.iterdir())
        assert await trials(env, policy, 8, videos=3) == found
    worst = sorted(found, key=lambda episode: (episode.success_once, episode.total))[:3]
    names = {f"again-epoch{each.epoch:04}-env{each.env:04}-episode0000" for each in worst}
    outcome = {path.stem.rpartition("-")[0]: path.stem.rpartition("-")[2] for path in tmp_path.iterdir()}
    assert outcome.keys() == names
    told = {f"again-epoch{each.epoch:04}-env{each.env:04}-episode0000": each.success_once for each in worst}
    assert all((outcome[name] == "success") == told[name] for name in names)


def test_where_nobody_tells_of_success_the_smallest_return_comes_first():
    made = [Episode(env, 0, 0, 0, 1, total, success, success, False) for env, (total, success) in enumerate(
        [(3.0, True), (1.0, False), (-2.0, True), (0.5, False)])]  # fmt: skip
    assert [episode.env for _, episode in failures_first([(None, each) for each in made])] == [3, 1, 2, 0]
    silent = [replace(each, success_once=None) for each in made]
    assert [episode.env for _, episode in failures_first([(None, each) for each in silent])] == [2, 3, 1, 0]
