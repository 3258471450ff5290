"""Off-policy learning by acting, on the toy."""

import pytest
import torch

from rlinf.actors.policy import PolicyActor
from rlinf.flows.evaluate import trials
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.replay import transitions
from tests.flows.reaching import SOFT, Expert, environments, equal, policy_for, roles, steps


@pytest.mark.repeated  # by steps on transitions in training/embodied/off_policy/test_sac_step.py
async def test_it_learns_the_toy():
    async with ActorSystem.local() as system:
        group = await roles(system)
        tried = await environments(system, "trials", num_envs=32, auto_reset=False, seed=77)
        before = await trials(tried, group["policy"], 32)
        metrics = await steps(group, 18)
        await group["trainer"].learn()
        await group["policy"].load(group["trainer"].weights())
        after = await trials(tried, group["policy"], 32)
    assert sum(each["optimizer_steps"] for each in metrics) == 17 * 32 - 32  # one for each that came after the warm-up
    assert metrics[0]["optimizer_steps"] == 0
    assert metrics[-1]["staleness/mean"] == 1
    solved = [sum(episode.success_once for episode in found) / 32 for found in (before, after)]
    assert solved[0] < 0.7
    assert solved[1] > 0.95


async def test_slices_change_nothing_and_learning_is_by_transitions_alone():
    async with ActorSystem.local() as system:
        one = await roles(system, name="a")
        two = await roles(system, name="b", slices=2)
        first, second = await steps(one, 3), await steps(two, 3, slices=2)
        assert equal(await one["trainer"][0].weights(), await two["trainer"][0].weights())
    for mine, theirs in zip(first, second, strict=True):
        assert mine == pytest.approx(theirs)


async def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    async with ActorSystem.local() as system:
        group = await roles(system, name="a", policy={"critics": 3}, subset=2, capacity=80)
        assert (await steps(group, 3))[-1]["optimizer_steps"] > 0
        await group["trainer"].save(str(tmp_path))
        state = await group["env"][0].state()
        await steps(group, 2, first=3)
        expected = await group["trainer"][0].weights()

        again = await roles(system, name="b", policy={"critics": 3}, subset=2, capacity=80)
        assert await again["trainer"][0].restore(str(tmp_path / "state")) == 3
        await again["env"][0].restore(state)
        await again["policy"].load(again["trainer"].weights())
        await steps(again, 2, first=3)
        assert equal(await again["trainer"][0].weights(), expected)


async def test_transitions_end_where_episodes_end_and_not_where_they_are_cut():
    async with ActorSystem.local() as system:
        env = await environments(system, num_envs=6, max_steps=3)
        expert = await system.spawn(Expert, name="expert")
        decider = await system.spawn(PolicyActor, keep_following=True, name="policy", policy=policy_for(SOFT))
        seen = await env[0].reset(0, 0)
        chunks, lived = [], [seen.observation["state"]]
        for _ in range(6):
            await decider[0].act((0, 0), seen)
            seen = await env[0].step(0, await expert[0].act((0, 0), seen))  # other actions, so that some arrive
            chunks.append(seen.chunk)
            lived.append(seen.observation["state"])
        _, rows = transitions([await decider[0].trajectory((0, 0), seen)])
    assert any(chunk.terminated.any() for chunk in chunks)
    assert any(chunk.truncated.any() for chunk in chunks)
    number = 0
    for time, chunk in enumerate(chunks):
        for env_number in range(6):
            point, target = rows["seen.state"][number]
            assert torch.equal(rows["seen.state"][number], lived[time][env_number])
            after, same = rows["following.state"][number]
            assert same == target  # of the same episode, even where the next one has begun
            assert rows["rewards"][number] == -(after - target).abs()
            assert (
                bool(rows["terminated"][number])
                == bool(chunk.terminated[env_number])
                == bool(abs(after - target) <= 1 / 8)
            )
            assert abs(after - point) <= 0.25
            number += 1
    assert number == len(rows["steps"]) == 36


async def test_a_chunk_that_is_cut_short_says_how_much_of_it_was_done():
    async with ActorSystem.local() as system:
        env = await environments(system, num_envs=6, max_steps=5)
        decider = await system.spawn(
            PolicyActor, keep_following=True, name="policy", policy=policy_for({**SOFT, "chunk": 3})
        )
        seen = await env[0].reset(0, 0)
        for _ in range(4):
            seen = await env[0].step(0, decider[0].act((0, 0), seen))
        whole, rows = transitions([await decider[0].trajectory((0, 0), seen)])
    assert set(rows["steps"].tolist()) >= {2, 3}  # limits of 5 cut every second chunk
    assert whole.chunks.truncated.any()
    for number, done in enumerate(rows["steps"].tolist()):
        point, target = rows["seen.state"][number]
        earned = torch.zeros(3)
        for step in range(done):
            point = (point + 0.25 * torch.tanh(rows["actions"][number, step, 0])).clamp(-1.0, 1.0)
            earned[step] = -(point - target).abs()
        torch.testing.assert_close(rows["rewards"][number], earned)
        torch.testing.assert_close(rows["following.state"][number], torch.stack([point, target]))


async def test_a_decider_that_does_not_say_what_followed_is_named():
    async with ActorSystem.local() as system:
        group = await roles(system)
        group["policy"] = await system.spawn(PolicyActor, name="plain", policy=policy_for(SOFT))
        with pytest.raises(ValueError, match="keep_following"):
            await steps(group, 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"polish": 1}, r"setting 'polish'"),
        ({"batch": 0}, "batch=0"),
        ({"demo_share": 2.0}, "demo_share=2.0"),
        ({"policy": {"type": "mlp"}}, r"MlpPolicy.*critics.*actions"),
    ],
)
async def test_a_bad_setting_is_named(settings, text):
    async with ActorSystem.local() as system:
        with pytest.raises(ValueError, match=text):
            await roles(system, **settings)
