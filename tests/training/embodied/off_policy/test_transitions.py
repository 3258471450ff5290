"""Transitions over several decisions, and of solved episodes, beside plain loops over what happened."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.actors.policy import PolicyActor
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.replay import several_steps, transitions
from tests.flows.reaching import SOFT, environments, policy_for


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_several_decisions_earn_what_they_earn_one_after_the_other(times, environments, count, seed):
    random = torch.Generator().manual_seed(seed)
    last = torch.rand(times, environments, generator=random) < 0.3
    rewards = torch.randn(times, environments, 2, generator=random)
    outcome = {
        "rewards": rewards,
        "steps": torch.where(last, 1, 2),
        "terminated": last & (torch.rand(times, environments, generator=random) < 0.5),
        "following.state": torch.arange(times * environments).view(times, environments, 1),
    }
    found = several_steps(outcome, last, count)
    for time in range(times):
        for env in range(environments):
            earned, steps, at = [], 0, time
            while True:
                earned += rewards[at, env].tolist()
                steps += int(outcome["steps"][at, env])
                if last[at, env] or at + 1 == times or at + 1 - time == count:
                    break
                at += 1
            assert found["rewards"][time, env].tolist() == earned + [0.0] * (2 * count - len(earned))
            assert found["steps"][time, env] == steps
            assert found["terminated"][time, env] == outcome["terminated"][at, env]
            assert found["following.state"][time, env, 0] == at * environments + env


async def test_only_solved_episodes_that_ended_are_remembered():
    async with ActorSystem.local() as system:
        env = (await environments(system, slices=2, max_steps=6))[0]
        policy = await system.spawn(PolicyActor, keep_following=True, name="policy", policy=policy_for(SOFT))
        parts = []
        for number in range(2):
            seen = await env.reset(number, 0)
            for _ in range(12):
                seen = await env.step(number, await policy[0].act((0, number), seen))
            parts.append(await policy[0].trajectory((0, number), seen))
    whole, every = transitions(parts)
    _, good = transitions(parts, solved_only=True)
    solved = [episode for episode in whole.episodes if episode.success_once]
    assert 0 < len(solved) < len(whole.episodes)
    assert len(good["steps"]) == sum(episode.length for episode in solved) < len(every["steps"])
    assert int(good["terminated"].sum()) == len(solved)
