"""The simulation as an actor: what is drawn follows from seeds alone, and what was saved goes on."""

from unittest.mock import patch

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.envs.workers import Slice
from rlinf.runtime.system.system import ActorSystem
from tests.actors.programs.control import REACH

SETTINGS = {"simulator": REACH, "workers": 0, "num_envs": 4, "max_steps": 3, "options": {"wind": True}}


def actions(seen):
    """Of each environment by its own seed."""
    return torch.stack([torch.rand(2, 1, generator=torch.Generator().manual_seed(int(s))) for s in seen.seeds]) * 2 - 1


async def episodes(system, name, steps=4, hosts=(0,), **settings):
    """Observations and seeds of all environments, one row per time; and what a policy must fit."""
    env = await system.spawn(EnvActor, hosts=list(hosts), name=name, **{**SETTINGS, **settings})
    found = []
    for rank in range(len(env)):
        slices = []
        for number in range(settings.get("slices", 1)):
            seen = await env[rank].reset(number, 6)
            rows = [(seen.observation["state"], seen.seeds)]
            for _ in range(steps):
                seen = await env[rank].step(number, actions(seen))
                rows.append((seen.observation["state"], seen.seeds))
            slices.append(rows)
        found.append([[torch.cat([s[time][part] for s in slices]) for part in (0, 1)] for time in range(steps + 1)])
    return env, found


@pytest.mark.parametrize(
    "settings", [{"slices": 2}, {"slices": 4}, pytest.param({"workers": 2}, marks=pytest.mark.slow)]
)
async def test_slices_and_workers_change_nothing(settings):
    async with ActorSystem.local() as system:
        _, (whole,) = await episodes(system, "one")
        _, (parts,) = await episodes(system, "many", **settings)
    for mine, theirs in zip(parts, whole, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


async def test_every_rank_time_epoch_and_environment_draws_for_itself():
    async with ActorSystem.local(2) as system:
        env, found = await episodes(system, "env", hosts=(0, 1))
        seeds = [tuple(row[1].tolist()) for rank in found for row in rank]
        again = await env[0].reset(0, 7)
        everything = [seed for row in seeds for seed in row] + again.seeds.tolist()
        assert len(set(everything)) == len(everything)
        assert not torch.equal(found[0][0][0], found[1][0][0])  # other starts on the other rank
        assert not torch.equal(again.observation["state"], found[0][0][0])
        assert torch.equal((await env[0].reset(0, 6)).observation["state"], found[0][0][0])


async def test_groups_begin_alike_and_draw_differently():
    async with ActorSystem.local() as system:
        _, (found,) = await episodes(system, "env", group_size=2, slices=2)
    state, seeds = found[0]
    assert torch.equal(state[0], state[1])
    assert torch.equal(state[2], state[3])
    assert not torch.equal(state[0], state[2])
    assert len(set(seeds.tolist())) == 4


async def test_to_observe_is_to_go_on_where_a_slice_stands():
    async with ActorSystem.local() as system:
        env = (await system.spawn(EnvActor, name="env", slices=2, **SETTINGS))[0]
        first = await env.observe(1, 5)
        same = await env.reset(1, 5)
        assert torch.equal(first.observation["state"], same.observation["state"])  # it had none, so it began
        moved = await env.step(1, actions(first))
        seen = await env.observe(1, 6)
        assert seen.chunk is None
        assert torch.equal(seen.observation["state"], moved.observation["state"])
        assert torch.equal(seen.seeds, moved.seeds)
        assert (await env.observe(0, 6)).first == 0


async def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    async with ActorSystem.local() as system:
        env = (await system.spawn(EnvActor, name="env", slices=2, **SETTINGS))[0]
        seen = await env.step(1, actions(await env.reset(1, 5)))
        torch.save(await env.state(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)  # plain values, as a checkpoint must be
        again = (await system.spawn(EnvActor, name="again", slices=2, **SETTINGS))[0]
        await again.restore(state)
        for _ in range(5):
            mine, theirs = await again.step(1, actions(seen)), await env.step(1, actions(seen))
            assert torch.equal(mine.observation["state"], theirs.observation["state"])
            assert torch.equal(mine.seeds, theirs.seeds)
            assert mine.chunk.episodes == theirs.chunk.episodes
            seen = mine
        fresh = await again.observe(0, 9)  # the other slice had nothing to save
        assert torch.equal(fresh.observation["state"], (await env.reset(0, 9)).observation["state"])


async def test_a_state_of_other_slices_is_refused():
    async with ActorSystem.local() as system:
        env = (await system.spawn(EnvActor, name="env", slices=2, **SETTINGS))[0]
        with pytest.raises(ValueError, match=r"1 slices.*environments.*2"):
            await env.restore([{}])


async def test_it_says_what_a_policy_must_fit():
    async with ActorSystem.local() as system:
        env = (await system.spawn(EnvActor, name="env", **{**SETTINGS, "options": {"dims": 2, "pixels": 8}}))[0]
        found = await env.shapes()
        low, high = found["bounds"]
        assert found["shapes"] == {"state": (4,), "rgb": (8, 8, 3)}
        assert (found["action_size"], found["choices"], found["max_steps"]) == (2, None, 3)
        assert low == [-each for each in high]
        assert len(high) == 2


IN_PROCESSES = patch.object(EnvActor, "thread", None)
"""As if simulators had processes of their own, which start in seconds."""


@pytest.mark.parametrize(
    ("between", "epoch", "begun"),
    [
        pytest.param(None, 7, 2, id="asked for at last"),
        pytest.param("weigh", 7, 3, id="under other weights of tasks"),
        pytest.param("step", 7, 3, id="acted in meanwhile"),
        pytest.param("restore", 7, 3, id="gone back to what was saved"),
        pytest.param(None, 8, 3, id="others are asked for"),
    ],
)
async def test_episodes_that_were_begun_early_are_those_of_the_reset_unless_something_came_between(
    between, epoch, begun
):
    async with ActorSystem.local() as system:
        env, fresh = [await system.spawn(EnvActor, name=name, **SETTINGS) for name in ("env", "fresh")]
        seen = await env[0].reset(0, 6)
        saved = await env[0].state()
        more = {"weigh": ([1.0],), "step": (0, actions(seen)), "restore": (saved,)}
        reset, weigh = (
            patch.object(Slice, "reset", autospec=True, side_effect=Slice.reset),
            patch.object(Slice, "weigh"),
        )
        with IN_PROCESSES, weigh, reset as resets:
            await env[0].prepare(0, 7, seen)
            if between is not None:
                await getattr(env[0], between)(*more[between])
            found = await env[0].reset(0, epoch)
        assert resets.call_count == begun - 1  # the first was before
        wanted = await fresh[0].reset(0, epoch)
    assert torch.equal(found.observation["state"], wanted.observation["state"])
    assert torch.equal(found.seeds, wanted.seeds)
    assert found.chunk is None


async def test_nothing_begins_early_in_a_thread_that_would_take_turns_with_what_learns():
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", **SETTINGS)
        seen = await env[0].reset(0, 6)
        await env[0].prepare(0, 7, seen)
        assert torch.equal((await env[0].observe(0, 6)).observation["state"], seen.observation["state"])
