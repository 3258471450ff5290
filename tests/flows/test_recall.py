"""Policies with a memory in the flow: what they remember belongs to an episode, wherever it goes on."""

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.demonstrations import read_demonstrations
from rlinf.data.step import EmbodiedStep
from rlinf.flows.embodied import embodied
from rlinf.flows.evaluate import trials
from rlinf.flows.record import record
from rlinf.models.policy.build import build_policy_model
from rlinf.runtime.system.system import ActorSystem
from tests.flows.recalling import LENGTH, remembering

RECALL = {"simulator": "tests.flows.recalling.Recall", "workers": 0, "num_envs": 32}
LEARNING = {"lr": 0.005, "epochs": 4, "minibatch": 128, "seed": 1, "fresh": False}
HORIZON = 6
"""Decisions of a step: episodes begin and end within it."""


async def roles(system, policy, name="", **env):
    return {
        "env": await system.spawn(EnvActor, name=f"env{name}", **{**RECALL, **env}),
        "policy": await system.spawn(PolicyActor, name=f"policy{name}", policy=policy),
        "trainer": await system.spawn(PolicyTrainer, name=f"trainer{name}", policy=policy, **LEARNING),
    }


async def learned(system, policy, steps, name):
    group = await roles(system, policy, name, slices=2)
    for number in range(steps):
        await embodied(EmbodiedStep(number, HORIZON, 2, fresh=False), **group)
    tested = await system.spawn(EnvActor, name=f"tested{name}", **{**RECALL, "auto_reset": False, "seed": 9})
    episodes = await trials(tested, group["policy"], 64)
    return sum(episode.success_at_end for episode in episodes) / len(episodes)


async def test_what_was_shown_at_the_beginning_is_learned_with_a_memory_and_never_without():
    async with ActorSystem.local() as system:
        with_memory = await learned(system, remembering(memory=12, sequence=HORIZON), 40, "with")
        without = await learned(system, remembering(), 10, "without")
    assert with_memory >= 0.95
    assert without < 0.75


async def acted(env, policy, steps, seen):
    for _ in range(steps):
        seen = await env.step(0, await policy.act((0, 0), seen))
    return seen, await policy.trajectory((0, 0), seen)


async def test_memories_go_on_from_step_to_step_and_over_a_restart_and_end_with_episodes():
    policy = remembering(memory=5, sequence=1)
    async with ActorSystem.local() as system:
        group = await roles(system, policy)
        env, decider = group["env"][0], group["policy"][0]
        _, first = await acted(env, decider, 3, await env.reset(0, 0))
        state = await env.state()
        _, second = await acted(env, decider, 3, await env.observe(0, 1))
        other = await roles(system, policy, "other")
        await other["env"][0].restore(state)
        _, again = await acted(other["env"][0], other["policy"][0], 3, await other["env"][0].observe(0, 1))
    assert torch.equal(second.stored["memory"], again.stored["memory"])
    counts = torch.cat([first.stored["memory"], second.stored["memory"]])[..., -1]
    assert counts[:, 0].tolist() == [number % LENGTH for number in range(6)]
    assert second.chunks.ended[0].all()


async def test_what_the_horizon_cannot_be_divided_into_is_said():
    async with ActorSystem.local() as system:
        group = await roles(system, remembering(memory=4, sequence=4))
        with pytest.raises(ValueError, match=r"6.*environment.*policy\.settings\.sequence=4"):
            await embodied(EmbodiedStep(0, HORIZON), **group)


async def test_what_is_recorded_is_decided_with_a_memory_and_does_not_show_it(tmp_path):
    config = remembering(memory=5, sequence=2)
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", **{**RECALL, "num_envs": 4, "auto_reset": False})
        decider = await system.spawn(PolicyActor, name="policy", policy=config)
        await record(env, decider, tmp_path, 4, greedy=False, solved=False)
        seen, memories = await env[0].reset(0, 0), []
        for _ in range(LENGTH):  # once more, step by step
            decision = await decider[0].act((0, 0), seen, keep=False)
            memories.append(seen.observation.get("memory", torch.zeros(4, 6)))
            seen = await env[0].step(0, decision)
    model = build_policy_model(config)
    found = read_demonstrations(tmp_path, solved=False)
    assert len(found) == 4
    for number, shown in enumerate(found):
        assert set(shown.observation) == {"state"}
        memory = torch.zeros(1, 6)
        for time in range(LENGTH):
            torch.testing.assert_close(memory[0], memories[time][number])
            state = shown.observation["state"][time][None]
            memory = model.act({"state": state, "memory": memory}, greedy=True).memory
