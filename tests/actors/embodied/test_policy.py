"""The policy that acts: the trajectory it keeps, and the weights it takes over."""

from dataclasses import replace

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.algos import recipes
from rlinf.data.weights import Weights
from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectories import batch_of, intervened_in, joined
from rlinf.training.weight_sync import LoadError
from tests.actors.programs.control import COUNTING, MLP, REACH, Counting, Played

GO, END = (1.0, False, False), (4.0, True, True)


async def roles(system, policy=MLP, name="", **env):
    settings = {"simulator": REACH, "workers": 0, "num_envs": 4, "max_steps": 3, **env}
    simulation = await system.spawn(EnvActor, name=f"env{name}", **settings)
    return simulation[0], (await system.spawn(PolicyActor, name=f"policy{name}", policy=policy))[0]


async def acted(simulation, decider, seen, count, **how):
    """What was seen and done."""
    lived = []
    for _ in range(count):
        actions = await decider.act((0, 0), seen, **how)
        lived.append((seen, actions))
        seen = await simulation.step(0, actions)
    return lived, seen


async def test_the_trajectory_is_what_happened_in_order():
    async with ActorSystem.local() as system:
        simulation, decider = await roles(system)
        lived, seen = await acted(simulation, decider, await simulation.reset(0, 0), 5)
        found = await decider.trajectory((0, 0), seen)
    chunks = [after.chunk for after, _ in lived[1:]] + [seen.chunk]
    for time, ((before, actions), chunk) in enumerate(zip(lived, chunks, strict=True)):
        assert torch.equal(found.stored["state"][time], before.observation["state"])
        assert torch.equal(found.stored["actions"][time].clamp(-1, 1), actions)
        for name in ("rewards", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(found.chunks, name)[time], getattr(chunk, name)), name
    assert found.episodes == tuple(episode for chunk in chunks for episode in chunk.episodes)
    assert found.chunks.truncated.any()
    evaluated = build_policy_model(MLP).evaluate({name: array[2] for name, array in found.stored.items()})
    torch.testing.assert_close(found.logprobs[2], evaluated.logprobs)


def meddles(observation, steps):
    """Somebody who goes left in every second step, in the first two environments."""
    return -torch.ones(len(steps), 1), (steps % 2 == 1) & (torch.arange(len(steps)) < 2)


@pytest.mark.parametrize("kind", ["mlp", "soft"])
async def test_what_was_executed_is_what_is_stored_and_the_policys_own_action_is_kept_beside_it(kind):
    policy = {**MLP, "chunk": 2} if kind == "mlp" else {"type": "soft", "state_size": 2, "action_size": 1, "chunk": 2}
    options = {"simulator": REACH, "intervener": f"{__name__}.meddles", "options": {"sparse": True}}
    async with ActorSystem.local() as system:
        env = {"simulator": "rlinf.envs.interventions.Overridable", "options": options, "max_steps": 8}
        simulation, decider = await roles(system, policy, **env)
        lived, seen = await acted(simulation, decider, await simulation.reset(0, 0), 3)
        found = await decider.trajectory((0, 0), seen)
    valid, model = found.chunks.valid, build_policy_model(policy)
    assert found.intervened[0, :2, 1].equal(valid[0, :2, 1])  # the second action of the first chunk
    assert not found.intervened[0, :, 0].any()
    assert not found.intervened[:, 2:].any()
    for time, (before, actions) in enumerate(lived):
        mixed = torch.where(found.intervened[time][..., None], -1.0, actions)
        touched = found.intervened[time].any(1)
        inputs = model.inputs(before.observation)
        stored = torch.where(touched[:, None, None], model.encode(mixed, inputs), found.proposed[time])
        torch.testing.assert_close(found.stored["actions"][time], stored)
        own = torch.tanh(found.proposed[time]) if kind == "soft" else found.proposed[time].clamp(-1, 1)
        torch.testing.assert_close(own, actions)
    apart = [replace(found, rank=1, intervened=None, proposed=None), found]
    assert torch.equal(joined(apart).intervened, torch.cat([found.intervened, found.intervened & False], 1))
    assert torch.equal(joined(apart).proposed, torch.cat([found.proposed, found.stored["actions"]], 1))
    share = float((found.intervened & valid).sum() / valid.sum())
    assert intervened_in(found)["interventions/share"] == pytest.approx(share)
    with pytest.raises(ValueError, match=r"somebody else acted in \d+ steps, and ppo"):
        batch_of(found, recipes.get("ppo"), 1)


async def test_values_of_what_follows_and_of_what_was_cut_are_in_it():
    scripts = [[[GO] * 9] * 3, [[GO, GO, END], [GO] * 9], [[END]] * 9]
    async with ActorSystem.local() as system:
        simulation, decider = await roles(
            system, COUNTING, simulator=Played, num_envs=3, options={"scripts": scripts}, max_steps=3
        )
        _, seen = await acted(simulation, decider, await simulation.reset(0, 0), 4)
        found = await decider.trajectory((0, 0), seen)
    assert found.chunks.values.tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 0], [0, 0, 0]]
    assert found.chunks.next_values.tolist() == [1, 1, 0]
    assert found.chunks.final_values[2].tolist() == [3, 0, 0]  # the first was cut after three steps, the second ended
    assert found.success.tolist() == [False, True, True]


class Listening(Counting):
    """Expects 1 of an episode that is to go right, and 0 of others."""

    def value(self, observation, instructions=None):
        return torch.tensor([float(text == "go right") for text in instructions])


async def test_what_was_cut_is_valued_by_its_own_instruction_and_not_by_that_of_the_next_episode():
    policy = {**COUNTING, "type": f"{__name__}.Listening"}
    async with ActorSystem.local() as system:
        simulation, decider = await roles(system, policy, num_envs=16, options={"words": True}, max_steps=2)
        lived, seen = await acted(simulation, decider, await simulation.reset(0, 0), 2)
        found = await decider.trajectory((0, 0), seen)
    cut = found.chunks.truncated[1].any(-1)
    words, after = (torch.tensor([text == "go right" for text in each.instructions]) for each in (lived[1][0], seen))
    assert (words != after)[cut].any()
    assert found.chunks.final_values[1][cut].tolist() == words[cut].float().tolist()


async def test_an_observation_without_a_chunk_begins_anew():
    """Whatever an earlier step that was given up half way has left."""
    async with ActorSystem.local() as system:
        simulation, decider = await roles(system)
        await acted(simulation, decider, await simulation.reset(0, 0), 2)
        _, seen = await acted(simulation, decider, await simulation.reset(0, 1), 3)
        found = await decider.trajectory((0, 0), seen)
        other_simulation, other = await roles(system, name="other")
        _, seen = await acted(other_simulation, other, await other_simulation.reset(0, 1), 3)
        expected = await other.trajectory((0, 0), seen)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.stored["state"], expected.stored["state"])
    assert torch.equal(found.chunks.rewards, expected.chunks.rewards)


async def test_each_slice_has_a_trajectory_of_its_own_and_each_is_told_once():
    async with ActorSystem.local() as system:
        simulation, decider = await roles(system, slices=2)
        seen = [await simulation.reset(number, 0) for number in range(2)]
        for number in (0, 1, 1):
            seen[number] = await simulation.step(number, await decider.act((0, number), seen[number]))
        lengths = [len((await decider.trajectory((0, number), seen[number])).logprobs) for number in range(2)]
        assert lengths == [1, 2]
        with pytest.raises(ValueError, match=r"nothing.*1.*env\[0\]"):
            await decider.trajectory((0, 1), seen[1])


async def test_greedy_actions_do_not_depend_on_seeds_and_need_not_be_kept():
    async with ActorSystem.local() as system:
        simulation, decider = await roles(system)
        seen = await simulation.reset(0, 0)
        drawn = [await decider.act((0, 0), seen, keep=False) for _ in range(2)]
        greedy = await decider.act((0, 0), seen, greedy=True, keep=False)
        assert torch.equal(*drawn)  # the same seeds
        assert not torch.equal(drawn[0], greedy)
        mean = build_policy_model(MLP).act(seen.observation, greedy=True).actions
        assert torch.equal(greedy, mean)
        with pytest.raises(ValueError, match=r"nothing.*done"):
            await decider.trajectory((0, 0), seen)


async def test_weights_that_do_not_fit_are_refused_and_those_in_use_stay():
    async with ActorSystem.local() as system:
        simulation, _ = await roles(system)
        group = await system.spawn(PolicyActor, name="receiver", policy=MLP)
        seen = await simulation.reset(0, 0)
        before = await group[0].act((0, 0), seen, greedy=True, keep=False)
        wider = build_policy_model({**MLP, "hidden": [9]}).state_dict()
        with pytest.raises(LoadError, match=r"actor\.0\.bias"):
            await group.load(Weights.pack(wider.items(), 3))
        assert torch.equal(await group[0].act((0, 0), seen, greedy=True, keep=False), before)
        assert await group[0].version() == 0
        other = build_policy_model({**MLP, "seed": 9}).state_dict()
        await group.load(Weights.pack(other.items(), 3))
        assert not torch.equal(await group[0].act((0, 0), seen, greedy=True, keep=False), before)
        assert await group[0].version() == 3


async def test_a_saved_policy_is_taken_instead_of_a_new_one(tmp_path):
    other = build_policy_model({**MLP, "seed": 9})
    save_policy(other, tmp_path)
    async with ActorSystem.local() as system:
        simulation, _ = await roles(system)
        decider = (await system.spawn(PolicyActor, name="saved", policy=MLP, path=str(tmp_path)))[0]
        seen = await simulation.reset(0, 0)
        found = await decider.act((0, 0), seen, greedy=True, keep=False)
    assert torch.equal(found, other.act(seen.observation, greedy=True).actions)
