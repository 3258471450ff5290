"""Model-based learning on the toy: true episodes, a world model of them, and a policy that learns inside."""

import pytest
import torch

from rlinf.actors.env import EnvActor, WorldActor
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.actors.world_trainer import WorldTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.envs.learned import Learned
from rlinf.flows.embodied import model_based
from rlinf.flows.interact import interactions
from rlinf.flows.record import record
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.system.system import ActorSystem
from tests.flows.reaching import TOY, Expert, equal, policy_for

PPO = {"name": "ppo", "overrides": {"advantage.gamma": 0.9}}
SIZES = {"state_size": 2, "action_size": 1, "hidden": [32], "members": 2, "places": 64}


async def roles(system, *, name="", policy=None, chunk=1, trainer=None, slices=1, updates=20, **fitting):
    """Roles of a run; `env` and `world` have 8 environments each."""
    config = policy_for(policy or {"type": "mlp", "hidden": [16], "chunk": chunk})
    learning = trainer or (PolicyTrainer, {"algorithm": PPO, "minibatch": 32, "epochs": 2})
    return {
        "env": await system.spawn(EnvActor, name=f"{name}env", num_envs=8, slices=slices, **TOY),
        "policy": await system.spawn(PolicyActor, name=f"{name}policy", policy=config, keep_following=True),
        "trainer": await system.spawn(learning[0], name=f"{name}trainer", policy=config, **learning[1]),
        "world": await system.spawn(WorldActor, name=f"{name}world", world=SIZES, num_envs=8, max_steps=6),
        "world_trainer": await system.spawn(
            WorldTrainer, name=f"{name}world_trainer", world=SIZES, updates=updates, batch=32, **fitting
        ),
    }


def rounds(count, *, first=0, inside=2, slices=1):
    """Steps of the flow, each with some inside."""
    for index in range(first, first + count):
        steps = tuple(EmbodiedStep(inside * index + each, horizon=6) for each in range(inside))
        yield EmbodiedStep(index, horizon=6, slices=slices, inside=steps)


async def play(group, count, **how):
    return [await model_based(step, **group) for step in rounds(count, **how)]


async def test_a_round_collects_outside_and_learns_inside():
    async with ActorSystem.local() as system:
        group = await roles(system)
        first, second = await play(group, 2)
        version = await group["policy"][0].version()
        assert await group["world"].load(group["world_trainer"].weights()) == 2
    assert version == 4  # two steps inside in each of two rounds
    assert first["env_steps"] == second["env_steps"] == 48  # the true ones alone
    assert second["inside/env_steps"] == 48
    assert second["world/transitions"] == 96
    assert "world/new/state_error" not in first  # there was nothing that could have been wrong
    assert second["world/new/state_error"] > 0


async def test_slices_outside_change_nothing():
    async with ActorSystem.local() as system:
        one, two = await roles(system, name="a"), await roles(system, name="b", slices=2)
        mine, theirs = await play(one, 2), await play(two, 2, slices=2)
        assert equal(await one["world_trainer"][0].weights(), await two["world_trainer"][0].weights())
    for first, second in zip(mine, theirs, strict=True):
        assert first == pytest.approx(second)


async def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    async with ActorSystem.local() as system:
        group = await roles(system, name="a")
        await play(group, 2)
        await group["trainer"].save(str(tmp_path))
        await group["world_trainer"].save(str(tmp_path / "world_trainer"))
        await play(group, 1, first=2)
        expected = [await group[name][0].weights() for name in ("trainer", "world_trainer")]

        again = await roles(system, name="b")
        await again["trainer"].restore(str(tmp_path / "state"))
        assert await again["world_trainer"][0].restore(str(tmp_path / "world_trainer")) == 2
        await again["policy"].load(again["trainer"].weights())
        await play(again, 1, first=2)
        assert equal(await again["trainer"][0].weights(), expected[0])
        assert equal(await again["world_trainer"][0].weights(), expected[1])
    saved = Learned(2, path=str(tmp_path / "world_trainer" / "world"))  # for everybody else
    assert saved.reset(torch.tensor([1, 2]), torch.arange(2))["state"].shape == (2, 2)


async def test_a_world_is_learned_from_recorded_episodes_and_moves_as_the_true_one(tmp_path):
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", num_envs=32, auto_reset=False, **TOY)
        await record(env, await system.spawn(Expert, name="expert"), tmp_path, episodes=64)
        trainer = await system.spawn(
            WorldTrainer, world=SIZES, updates=300, batch=64, lr=3e-3, demonstrations=str(tmp_path)
        )
        metrics = await trainer[0].fit([])
        world = Learned(1, settings=SIZES)
        world.load(dict((await trainer[0].weights()).named()))
    assert metrics["world/state_error"] < 0.3  # standard deviations
    world.reset(torch.tensor([0]), torch.arange(1))
    world._latent = {"state": torch.tensor([[-0.5, 0.5]])}  # the point, and its target
    moved = world.step(torch.tensor([[1.0]]), torch.tensor([True]))
    assert moved.observation["state"][0].tolist() == pytest.approx([-0.25, 0.5], abs=0.1)
    assert moved.reward.item() == pytest.approx(-0.75, abs=0.15)


async def test_soft_actor_critic_learns_inside_too():
    soft = {"type": "soft", "hidden": [16]}
    learning = SacTrainer, {"batch": 16, "warmup": 16}
    async with ActorSystem.local() as system:
        (metrics,) = await play(await roles(system, policy=soft, trainer=learning), 1)
    assert metrics["optimizer_steps"] == 48  # one for each decision of the last step inside
    assert metrics["replay/rows"] == 96


async def test_chunks_and_trajectories_without_what_followed_are_refused():
    async with ActorSystem.local() as system:
        group = await roles(system, chunk=2)
        with pytest.raises((ValueError, RuntimeFault), match=r"policy\.settings\.chunk"):
            await play(group, 1)
        config = policy_for({"type": "mlp", "hidden": [16]})
        plain = await system.spawn(PolicyActor, name="plain", policy=config)
        lived = [await each for each in interactions(EmbodiedStep(0, 2), group["env"], plain)]
        with pytest.raises(ValueError, match="keep_following"):
            await group["world_trainer"].fit(lived)


async def test_weights_of_another_world_are_refused():
    async with ActorSystem.local() as system:
        group = await roles(system)
        await play(group, 1, inside=0)
        other = await system.spawn(WorldActor, name="other", world={**SIZES, "hidden": [8]}, num_envs=2)
        with pytest.raises(ValueError, match="world model"):
            await other.load(group["world_trainer"].weights())
