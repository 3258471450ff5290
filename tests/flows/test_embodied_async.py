"""The flow that acts ahead: as long as the slower of acting and learning, never staler than allowed, nothing left."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import EmbodiedStep
from rlinf.flows.embodied import embodied
from rlinf.flows.embodied_async import embodied_async
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from tests.flows.test_embodied import equal, roles, weights_of

# Modelled roles ------------------------------------------------------------------------------------------------------


class Simulated(Actor):
    """One decision a step, simulated for as long as `seconds` says of the step."""

    async def setup(self, seconds, fails=None):
        self.seconds, self.fails, self.epoch, self.turn = seconds, fails, 0, asyncio.Lock()

    @endpoint
    async def reset(self, number, epoch):
        async with self.turn:
            self.epoch = epoch

    @endpoint
    async def step(self, number, actions):
        async with self.turn:
            await asyncio.sleep(self.seconds[self.epoch])
            if self.epoch == self.fails:
                raise RuntimeError(f"no step {self.epoch} in this simulator")
        return actions


class Deciding(Actor):
    """Its actions are the version that decided."""

    async def setup(self, loading=0.0):
        self.version, self.began, self.loading = 0, 0, loading

    @endpoint
    async def act(self, key, seen):
        self.began = self.version
        return self.version

    @endpoint
    async def trajectory(self, key, seen):
        assert seen == self.began == self.version, "weights were switched while a step was acted"
        return seen

    @endpoint
    async def load(self, version):
        await asyncio.sleep(self.loading)
        self.version = version

    @endpoint
    async def loaded(self):
        return self.version


class Learning(Actor):
    """Learns for as long as `seconds` says of the step."""

    async def setup(self, seconds, fails=None):
        self.seconds, self.fails, self.version = seconds, fails, 0

    @endpoint(joint=True)
    async def train(self, trajectories):
        await asyncio.sleep(self.seconds[self.version])
        if self.version == self.fails:
            raise RuntimeError(f"no lesson {self.version} in this trainer")
        self.version += 1
        return {"staleness": self.version - 1 - min(trajectories)}

    @endpoint(joint=True)
    async def weights(self):
        return self.version


async def modelled(system, simulating, learning, *, loading=0.0, env_fails=None, trainer_fails=None):
    return (
        await system.spawn(Simulated, name="env", seconds=simulating, fails=env_fails),
        await system.spawn(Deciding, name="policy", loading=loading),
        await system.spawn(Learning, name="trainer", seconds=learning, fails=trainer_fails),
    )


def took(simulating, learning, staleness, until=None, loading=0.0, horizon=1):
    """Staleness of each step, version loaded after the last one, virtual seconds."""

    async def main():
        async with ActorSystem.local() as system:
            group = await modelled(system, simulating, learning, loading=loading)
            in_flight, count, told = InFlight(Rules(staleness, between=True)), len(simulating), []
            for index in range(count):
                end = until(index) if until is not None else count
                metrics = await embodied_async(EmbodiedStep(index, horizon, until=end, in_flight=in_flight), *group)
                told.append(metrics["staleness"])
            loaded = await group[1][0].loaded()
            await in_flight.close()
            return told, loaded

    (told, loaded), seconds = run_virtual(main())
    return told, loaded, seconds


# Time ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("acting", "learning"), [(3.0, 2.0), (2.0, 3.0), (2.0, 2.0)])
def test_a_step_takes_as_long_as_the_longer_of_acting_and_learning(acting, learning):
    steps = 6
    told, loaded, seconds = took([acting] * steps, [learning] * steps, 1)
    assert seconds == acting + (steps - 1) * max(acting, learning) + learning
    assert told == [0] + [1] * (steps - 1)
    assert loaded == steps


def test_without_staleness_it_takes_their_sum_and_learns_from_the_newest_weights():
    assert took([3.0] * 4, [2.0] * 4, 0) == ([0] * 4, 4, 4 * (3.0 + 2.0))


def test_over_a_slow_link_to_a_robot_learning_takes_no_time_of_its_own():
    """Twenty decisions a step, each with 50 ms there and 50 ms back; an update takes 1.5 s."""
    steps, decisions, link, learning = 5, 20, 0.05, 1.5
    acting = decisions * 2 * link
    told, _, seconds = took([2 * link] * steps, [learning] * steps, 1, horizon=decisions)
    assert seconds == pytest.approx(steps * acting + learning)
    assert told == [0] + [1] * (steps - 1)
    _, _, apart = took([2 * link] * steps, [learning] * steps, 0, horizon=decisions)
    assert apart == pytest.approx(steps * (acting + learning))


def test_more_staleness_rides_out_steps_that_take_unequally_long():
    """What is acted fast lies ready while a slow step is acted, as it does not with one step ahead."""
    acting, learning = [1.0, 1.0, 4.0] * 3, [4.0, 1.0, 1.0] * 3
    assert took(acting, learning, 2)[2] < took(acting, learning, 1)[2]


def test_weights_that_load_longer_than_a_step_learns_do_not_meet_those_that_act():
    """Version 2 is published while version 1 loads for step 2, which is acted by that one alone."""
    told, loaded, _ = took([4.0] * 5, [1.0] * 5, 1, loading=3.0)
    assert told == [0, 1, 1, 1, 1]
    assert loaded == 5


SECONDS = st.integers(0, 9).map(float)


@settings(max_examples=60)
@given(st.data())
def test_what_acts_is_never_further_behind_than_allowed_whatever_takes_how_long(data):
    count = data.draw(st.integers(1, 7))
    staleness = data.draw(st.integers(0, 3))
    every = data.draw(st.integers(1, count))
    acting, learning = (data.draw(st.lists(SECONDS, min_size=count, max_size=count)) for _ in range(2))
    loading = data.draw(SECONDS)
    told, loaded, seconds = took(acting, learning, staleness, lambda at: (at // every + 1) * every, loading)
    assert all(0 <= each <= staleness for each in told)
    assert all(told[index] == 0 for index in range(0, count, every))  # nothing began before a checkpoint was over
    assert max(sum(acting), sum(learning)) <= seconds <= sum(acting) + sum(learning) + count * loading
    if (count % every) == 0:
        assert loaded == count


# Endings -------------------------------------------------------------------------------------------------------------


def others():
    return [task for task in asyncio.all_tasks() if task.get_name() == "answers in flight"]


@pytest.mark.parametrize("wait", [0.5, 1.5, 2.5])
def test_a_step_that_is_given_up_leaves_no_acting_behind(wait):
    async def main():
        async with ActorSystem.local() as system:
            group = await modelled(system, [3.0] * 4, [2.0] * 4)
            in_flight = InFlight(Rules(1, between=True))
            await embodied_async(EmbodiedStep(0, 1, until=4, in_flight=in_flight), *group)
            second = asyncio.create_task(embodied_async(EmbodiedStep(1, 1, until=4, in_flight=in_flight), *group))
            await asyncio.sleep(wait)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            await in_flight.close()
            assert others() == []
            # and the run can go on from there: what was acted is learned from; what was not is acted anew, by weights
            # that were published and not loaded yet
            metrics = await embodied_async(EmbodiedStep(1, 1, until=2, in_flight=in_flight), *group)
            return metrics["staleness"]

    assert run_virtual(main())[0] == (1 if wait > 1.0 else 0)


def test_when_acting_fails_the_step_that_it_was_for_says_so_and_the_one_before_is_whole():
    async def main():
        async with ActorSystem.local() as system:
            group = await modelled(system, [1.0] * 4, [5.0] * 4, env_fails=2)
            in_flight = InFlight(Rules(2, between=True))
            for index in range(2):
                await embodied_async(EmbodiedStep(index, 1, until=4, in_flight=in_flight), *group)
            with pytest.raises(RuntimeError, match=r"step 2.*simulator"):
                await embodied_async(EmbodiedStep(2, 1, until=4, in_flight=in_flight), *group)
            await in_flight.close()
            assert others() == []

    run_virtual(main())


def test_when_learning_fails_nothing_goes_on_acting():
    async def main():
        async with ActorSystem.local() as system:
            group = await modelled(system, [9.0] * 4, [1.0] * 4, trainer_fails=1)
            in_flight = InFlight(Rules(1, between=True))
            await embodied_async(EmbodiedStep(0, 1, until=4, in_flight=in_flight), *group)
            with pytest.raises(RuntimeError, match=r"lesson 1.*trainer"):
                await embodied_async(EmbodiedStep(1, 1, until=4, in_flight=in_flight), *group)
            assert len(others()) == 1
            await in_flight.close()
            assert others() == []
            return asyncio.get_running_loop().time()

    assert run_virtual(main())[0] == 9.0 + 9.0 + 1.0


# Real roles ----------------------------------------------------------------------------------------------------------


async def learned(flow, staleness, count=4, until=None, fresh=True):
    async with ActorSystem.local() as system:
        group = await roles(system, env={"slices": 2})
        in_flight = InFlight(Rules(staleness, between=True))
        metrics = [
            await flow(EmbodiedStep(index, 4, 2, fresh, until=until or count, in_flight=in_flight), **group)
            for index in range(count)
        ]
        await in_flight.close()
        acting = await group["policy"][0].version()
        return metrics, await weights_of(group), acting


@pytest.mark.parametrize("fresh", [True, False])
async def test_without_staleness_it_is_the_synchronous_flow_bit_for_bit(fresh):
    metrics, weights, _ = await learned(embodied_async, 0, fresh=fresh)
    expected, same, _ = await learned(embodied, 0, fresh=fresh)
    assert metrics == expected
    equal(weights, same)


@pytest.mark.parametrize("fresh", [True, False])
async def test_with_one_version_of_staleness_a_run_repeats_bit_for_bit_and_says_how_stale_it_was(fresh):
    metrics, weights, acting = await learned(embodied_async, 1, fresh=fresh)
    again, same, _ = await learned(embodied_async, 1, fresh=fresh)
    assert [step["staleness/mean"] for step in metrics] == [0, 1, 1, 1]
    assert acting == 4
    assert metrics == again
    equal(weights, same)
    _, synchronous, _ = await learned(embodied, 0, fresh=fresh)
    assert any(not torch.equal(weights[name], synchronous[name]) for name in weights)
