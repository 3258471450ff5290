"""The flow in which a policy acts: slices and workers change nothing but the time, and giving up leaves all usable."""

import asyncio
import gc
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.envs.workers import EnvironmentLost, Slice
from rlinf.flows.embodied import embodied
from rlinf.flows.interact import interactions
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from tests.actors.programs.control import MLP, REACH

LEARNING = {"lr": 0.03, "epochs": 2, "minibatch": 16, "seed": 4}
CHUNKS = {**MLP, "chunk": 2}


async def roles(system, *, name="", policy=CHUNKS, env=None, decider=PolicyActor, **learning):
    settings = {"simulator": REACH, "workers": 0, "num_envs": 8, "max_steps": 7, **(env or {})}
    return {
        "env": await system.spawn(EnvActor, name=f"env{name}", **settings),
        "policy": await system.spawn(decider, name=f"policy{name}", policy=policy),
        "trainer": await system.spawn(PolicyTrainer, name=f"trainer{name}", policy=policy, **{**LEARNING, **learning}),
    }


async def weights_of(roles):
    return {name: tensor.clone() for name, tensor in (await roles["trainer"].weights()).named()}


async def steps(system, count, *, name="", slices=1, fresh=True, early=True, **settings):
    """Metrics of some steps, and the weights after them."""
    env = {**settings.pop("env", {}), "slices": slices}
    group = await roles(system, name=name, env=env, **settings)
    each = [EmbodiedStep(number, 4, slices, fresh, count if early else number + 1) for number in range(count)]
    metrics = [await embodied(step, **group) for step in each]
    return metrics, await weights_of(group)


def equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


# Slices and workers --------------------------------------------------------------------------------------------------


GROUPED = {"policy": {**CHUNKS, "value_level": None}, "algorithm": "grpo", "group_size": 2}
KINDS = {
    "ppo": ({}, {}, True),
    "ppo, episodes go on": ({}, {}, False),
    "grpo": (GROUPED, {"group_size": 2}, True),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_slices_change_neither_what_happens_nor_what_is_learned(kind):
    learning, env, fresh = KINDS[kind]
    async with ActorSystem.local() as system:
        found = [
            await steps(system, 3, name=str(slices), slices=slices, fresh=fresh, env=env, **learning)
            for slices in (1, 2, 4)
        ]
    (metrics, weights), *others = found
    assert sum(step["episodes"] for step in metrics) > 0
    assert sum(step["optimizer_steps"] for step in metrics) > 0
    for more, same in others:
        for mine, theirs in zip(metrics, more, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)  # fewer rows at a time are rounded otherwise
        for key, tensor in weights.items():
            torch.testing.assert_close(same[key], tensor, rtol=1e-4, atol=1e-5)


async def test_what_was_learned_arrives_at_the_policy_with_its_running_statistics():
    class Open(PolicyActor):
        @endpoint
        async def now(self):
            return {name: tensor.clone() for name, tensor in self._policy.state_dict().items()}

    async with ActorSystem.local() as system:
        group = await roles(system, decider=Open)
        before = await group["policy"][0].now()
        metrics = await embodied(EmbodiedStep(0, 4), **group)
        after = await group["policy"][0].now()
        equal(after, await weights_of(group))
        assert await group["policy"][0].version() == 1
    assert after["norm.count"] == metrics["decisions"] == 32
    assert not torch.equal(before["actor.0.weight"], after["actor.0.weight"])
    assert metrics["staleness/mean"] == 0


@pytest.mark.parametrize("fresh", [True, False])
async def test_acting_without_messages_changes_nothing_but_how_many_calls_there_are(fresh):
    counts, found = [], []
    for brief in (True, False):
        with patch.object(PolicyActor, "is_brief", lambda self, fn, brief=brief: brief):
            async with ActorSystem.local() as system:
                with patch.object(system._host, "call", wraps=system._host.call) as calls:
                    found.append(await steps(system, 2, fresh=fresh))
                counts.append(sum(call.args[2] in ("act", "step") for call in calls.call_args_list))
    (alone, weights), (asked, same) = found
    assert counts == [0, 16]
    assert alone == asked
    equal(weights, same)


async def test_episodes_that_begin_while_the_policy_learns_change_nothing_that_is_learned():
    reset = patch.object(Slice, "reset", autospec=True, side_effect=Slice.reset)
    found, counts = [], []
    with patch.object(EnvActor, "thread", None), reset as resets:
        for early in (True, False):
            async with ActorSystem.local() as system:
                with patch.object(system._host, "call", wraps=system._host.call) as calls:
                    found.append(await steps(system, 3, slices=2, early=early))
                counts.append(sum(call.args[2] == "prepare" for call in calls.call_args_list))
            assert resets.call_count == 6 * len(found)  # of each slice once a step, and none that nobody acts in
    assert counts == [4, 0]
    (ahead, weights), (asked, same) = found
    assert ahead == asked
    equal(weights, same)


async def test_a_simulator_that_fails_beside_the_policy_is_named():
    async with ActorSystem.local() as system:
        group = await roles(system)
        fails = patch("rlinf.envs.toy.Reach.step", side_effect=ZeroDivisionError("by nothing"))
        named = pytest.raises(EnvironmentLost, match=r"env\[0\].*ZeroDivisionError: by nothing")
        with fails, patch.object(PolicyActor, "is_brief", return_value=True), named:
            await embodied(EmbodiedStep(0, 4), **group)
        assert (await embodied(EmbodiedStep(1, 4), **group))["decisions"] == 32


# Overlap -------------------------------------------------------------------------------------------------------------


class Modelled(Actor):
    """One thing at a time, each for a number of seconds."""

    async def setup(self, seconds, slices=1):
        self.seconds, self.turn, self.slices = seconds, asyncio.Lock(), slices

    async def work(self, seconds):
        async with self.turn:
            await asyncio.sleep(seconds)


class ModelledSimulation(Modelled):
    @endpoint
    async def reset(self, number, epoch):
        return f"{number} at 0"

    @endpoint
    async def step(self, number, actions):
        await self.work(self.seconds / self.slices)
        return actions


class ModelledPolicy(Modelled):
    @endpoint(device=True)
    async def act(self, key, seen):
        await self.work(self.seconds / self.slices)
        slice_, _, time = seen.split()
        assert slice_ == str(key[1])
        return f"{slice_} at {int(time) + 1}"

    @endpoint
    async def trajectory(self, key, seen):
        return key, seen

    @endpoint
    async def load(self, weights):
        self.weights = weights


class ModelledTrainer(Modelled):
    @endpoint(joint=True)
    async def train(self, trajectories):
        await self.work(self.seconds)
        return {"told": sorted(trajectories)}

    @endpoint(joint=True)
    async def weights(self):
        return "weights"


def modelled(slices, simulating, deciding, *, horizon=50, simulations=1, hosts=1):
    async def main():
        async with ActorSystem.local(hosts, serialize=hosts > 1) as system:
            env = await system.spawn(
                ModelledSimulation, hosts=list(range(simulations)), name="env", seconds=simulating, slices=slices
            )
            policy = await system.spawn(
                ModelledPolicy, hosts=[hosts - 1], name="policy", seconds=deciding, slices=slices
            )
            trainer = await system.spawn(ModelledTrainer, hosts=[0], name="trainer", seconds=7.0)
            return await embodied(EmbodiedStep(0, horizon, slices), env, policy, trainer)

    return run_virtual(main())


@pytest.mark.parametrize("hosts", [1, 2])
def test_with_one_slice_simulation_and_policy_wait_for_each_other(hosts):
    metrics, seconds = modelled(1, 1.0, 0.5, hosts=hosts)
    assert metrics["told"] == [((0, 0), "0 at 50")]
    assert seconds == 50 * (1.0 + 0.5) + 7.0


@pytest.mark.parametrize(("simulating", "deciding"), [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("hosts", [1, 2])
def test_with_two_slices_one_is_simulated_while_the_other_is_decided(simulating, deciding, hosts):
    metrics, seconds = modelled(2, simulating, deciding, hosts=hosts)
    assert metrics["told"] == [((0, 0), "0 at 50"), ((0, 1), "1 at 50")]
    # the slower stage never waits; before its first piece of work and after its last one the other one works alone
    assert seconds == 50 * max(simulating, deciding) + min(simulating, deciding) / 2 + 7.0


# Giving up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acts", [1, 3, 6])
async def test_a_step_that_was_given_up_leaves_nothing_behind(acts):
    class Counting(PolicyActor):
        async def setup(self, **settings):
            await super().setup(**settings)
            self.acts, self.stop = 0, None

        @endpoint
        async def reached(self, count):
            self.stop = asyncio.Event()
            self.left = count
            await self.stop.wait()

        @endpoint(device=True)
        async def act(self, key, seen, *, greedy=False, keep=True):
            if self.stop is not None:
                self.left -= 1
                if self.left <= 0:
                    self.stop.set()
            return await self.compute(self._act, key, seen, greedy, keep)

    async with ActorSystem.local() as system:
        _, expected = await steps(system, 2, name="whole", slices=2)
        group = await roles(system, env={"slices": 2}, decider=Counting)
        await embodied(EmbodiedStep(0, 4, 2), **group)
        reached = asyncio.ensure_future(group["policy"][0].reached(acts))
        await asyncio.sleep(0)
        half = asyncio.create_task(embodied(EmbodiedStep(1, 4, 2), **group))
        await reached
        half.cancel()
        with pytest.raises(asyncio.CancelledError):
            await half
        await embodied(EmbodiedStep(1, 4, 2), **group)
        equal(await weights_of(group), expected)


async def test_a_value_that_is_no_number_changes_nothing_and_the_roles_go_on():
    async with ActorSystem.local() as system:
        group = await roles(system)
        before = await weights_of(group)
        acted = await asyncio.gather(*interactions(EmbodiedStep(0, 4), group["env"], group["policy"]))
        (whole,) = await asyncio.gather(*acted)
        broken = replace(whole, chunks=replace(whole.chunks, values=whole.chunks.values * torch.nan))
        with pytest.raises(FloatingPointError, match="value"):
            await group["trainer"].train([broken])
        equal(await weights_of(group), before)
        await embodied(EmbodiedStep(0, 4), **group)
        _, expected = await steps(system, 1, name="sound ones")
        equal(await weights_of(group), expected)


async def test_an_episode_whose_reward_is_no_number_is_dropped_and_the_others_are_learned_from():
    async with ActorSystem.local() as system:
        group = await roles(system, env={"simulator": "tests.actors.programs.control.Broken"})
        before = await weights_of(group)
        metrics = await embodied(EmbodiedStep(0, 4), **group)
        assert metrics["episodes/lost"] == 9  # its third steps, of one environment at a time
        assert metrics["optimizer_steps"] > 0
        after = await weights_of(group)
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
        assert not torch.equal(before["actor.0.weight"], after["actor.0.weight"])


async def test_what_a_policy_decides_that_is_no_number_is_dropped_and_spreads_to_no_gradient():
    """Stored with a decision is the action, of which a gradient would be no number, too, whatever its mask."""

    class Doubtful(PolicyActor):
        def _act(self, key, output, greedy, keep):
            act = self._policy.act(output.observation, generator=output.seeds)
            if key == (0, 0) and output.chunk is None:
                for array in (act.actions, act.logprobs, *act.stored.values()):
                    array[1] = torch.nan
            with patch.object(self._policy, "act", lambda *_, **__: act):
                return super()._act(key, output, greedy, keep)

    async with ActorSystem.local() as system:
        group = await roles(system, decider=Doubtful)
        metrics = await embodied(EmbodiedStep(0, 4), **group)
        assert metrics["episodes/lost"] == 1
        assert all(bool(tensor.isfinite().all()) for tensor in (await weights_of(group)).values())


async def test_what_a_simulator_raises_is_told_once_with_its_traceback(caplog):
    async with ActorSystem.local() as system:
        raising = {"simulator": "tests.envs.breaking.NotFinite", "options": {"spoils": "raise", "at": [3]}}
        group = await roles(system, env={**raising, "slices": 2})
        with pytest.raises(EnvironmentLost, match=r"env\[0\]:.*simulator.*RuntimeError:") as told:
            await embodied(EmbodiedStep(0, 4, 2), **group)
        assert str(told.value).count("Traceback") == 1
        assert "in step\n    raise RuntimeError" in str(told.value)
        del told
        gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]
