"""From episodes that were written down beforehand to the rows that are learned from, by hand."""

import dataclasses

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.algos import recipes
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectories import batch_of, check, counted, metrics_of, summary
from tests.actors.programs.control import COUNTING, Played

PPO = recipes.get("ppo", {"advantage": {"gamma": 0.5, "lam": 0.5, "whiten": False}})
GRPO = recipes.get("grpo", {"advantage": {"scale": "none"}})
GO, END, FAIL = (1.0, False, False), (4.0, True, True), (-1.0, True, False)
SCRIPTS = [
    [[GO, (2.0, False, False), END], [GO] * 4],  # ends by its task in the middle of the second chunk
    [[GO] * 9, [GO] * 9],  # is cut by the time limit, 4
    [[GO, GO, GO, FAIL], [GO] * 9],  # ends by its task just when it would have been cut
    [[(5.0, True, True)], [GO] * 9],  # ends with its first action; the next one goes on
]


async def played(scripts, chunks=2, *, policy=None, lose=None, **env):
    """The trajectory of actions in chunks of two; `lose` (time, environment) has that episode die there."""
    async with ActorSystem.local() as system:
        settings = {"simulator": Played, "options": {"scripts": scripts}, "num_envs": len(scripts), "workers": 0, **env}
        simulation = (await system.spawn(EnvActor, **settings))[0]
        decider = (await system.spawn(PolicyActor, policy={**COUNTING, "chunk": 2, **(policy or {})}))[0]
        seen = await simulation.reset(0, 0)
        for time in range(chunks):
            seen = await simulation.step(0, await decider.act((0, 0), seen))
            if lose is not None and lose[0] == time:
                seen = dataclasses.replace(seen, chunk=lost(seen.chunk, lose[1]))
        return await decider.trajectory((0, 0), seen)


def lost(chunk, env):
    """The chunk, as it is when the simulator of one environment died in it."""
    gone = torch.zeros_like(chunk.lost)
    gone[env] = True
    kept = ~gone[:, None]
    flags = {name: getattr(chunk, name) & kept for name in ("valid", "terminated", "truncated")}
    ended = chunk.ended[chunk.ended != env]
    final = {name: array[chunk.ended != env] for name, array in chunk.final.items()}
    episodes = tuple(episode for episode in chunk.episodes if episode.env != env)
    return dataclasses.replace(chunk, **flags, lost=gone, ended=ended, final=final, episodes=episodes)


async def test_ppo_by_hand():
    """V counts the steps of the episode, gamma = lambda = 1/2. Environment by environment, A and then A + V:

    ends:     A1 = 4 - 2 = 2                  A0 = 3 + 2/2 - 0 + 2/4 = 4.5
    is cut:   A1 = 1 + (1 + 4/2) - 2 = 2      A0 = 2 + 2/2 - 0 + 2/4 = 3.5
    fails:    A1 = 1 - 1 - 2 = -2             A0 = 2 + 2/2 - 0 - 2/4 = 2.5
    two:      A1 = 2 + 2/2 - 0 = 3            A0 = 5
    """
    trajectory = await played(SCRIPTS, max_steps=4)
    found = batch_of(trajectory, PPO, 1)
    advantages = torch.tensor([4.5, 3.5, 2.5, 5.0, 2.0, 2.0, -2.0, 3.0])
    assert torch.equal(found.advantages, advantages[:, None].expand(8, 2))
    assert found.values[:, 0].tolist() == [0, 0, 0, 0, 2, 2, 2, 0]
    assert torch.equal(found.returns, advantages[:, None] + found.values)
    # what was not done counts for nothing, though its chunk has an advantage
    assert found.mask.tolist() == [*[[True, True]] * 3, [True, False], [True, False], *[[True, True]] * 3]
    assert found.value_mask.all()
    assert found.sequences is None
    assert found.stored["state"][:, 1].tolist() == found.values[:, 0].tolist()
    assert torch.equal(found.logprobs.flatten(), trajectory.logprobs.flatten())


async def test_the_accounts_by_hand():
    trajectory = await played(SCRIPTS, max_steps=4)
    told = metrics_of([trajectory], trajectory, batch_of(trajectory, PPO, 1))
    assert (told["env_steps"], told["decisions"], told["episodes"], told["episodes/lost"]) == (14.0, 8.0, 4.0, 0.0)
    earned = [7.0, 4.0, 2.0, 5.0]
    assert told["reward/step"] == (sum(earned) + 2.0) / 14.0
    assert told["reward/mean"] == sum(earned) / 4
    assert (told["success_once"], told["success_at_end"], told["episodes/length"]) == (0.5, 0.5, 3.0)
    assert told["learned_from"] == 14 / 16


async def test_where_episodes_begin_with_the_step_only_the_first_of_each_environment_counts():
    """The second environment has a second episode, and it is only there because its first one was short."""
    trajectory = await played([[[GO] * 9], [[END], [(7.0, True, False)]]], max_steps=4)
    assert [episode.total for episode in trajectory.episodes] == [4.0, 4.0, 7.0]
    assert [(episode.env, episode.number) for episode in counted(trajectory)] == [(1, 0), (0, 0)]
    names = ("rewards", "terminated", "truncated", "valid", "values", "final_values")
    later = {name: getattr(trajectory.chunks, name)[1:] for name in names}
    under_way = dataclasses.replace(trajectory, chunks=dataclasses.replace(trajectory.chunks, **later))
    assert counted(under_way) == trajectory.episodes  # where they had begun before, all count


async def test_nothing_is_learned_from_an_episode_that_was_lost():
    trajectory = await played(SCRIPTS, max_steps=4, lose=(1, 1))
    found = batch_of(trajectory, PPO, 1)
    assert trajectory.lost == 1
    assert not found.mask[[1, 5]].any()  # both chunks of environment 1
    assert not found.value_mask[[1, 5]].any()
    assert found.advantages[[0, 2, 4, 6], 0].tolist() == [4.5, 2.5, 2.0, -2.0]
    told = metrics_of([trajectory], trajectory, found)
    assert (told["env_steps"], told["episodes/lost"], told["episodes"]) == (10.0, 1.0, 3.0)


async def test_a_loss_in_an_earlier_chunk_leaves_the_episode_that_followed():
    trajectory = await played(SCRIPTS, max_steps=4, lose=(0, 1))
    found = batch_of(trajectory, PPO, 1)
    assert found.mask[[1, 5]].tolist() == [[False, False], [True, True]]
    assert not found.value_mask[1]


GROUPED = [
    [[GO, GO, END], [GO] * 9],  # 6, solved
    [[GO, FAIL], [END], [GO] * 9],  # 0; what its next episode earns is another matter
    [[END], [GO] * 9],  # 4, solved
    [[(3.0, False, False), END], [GO] * 9],  # 7, solved: as the other one in its group
]


async def test_grpo_by_hand():
    """Returns within the first group are 6 and 0, so advantages 3 and -3; in the second all solved the task."""
    free = {"value_level": None}
    found = batch_of(await played(GROUPED, policy=free, group_size=2, max_steps=9), GRPO, 2)
    mask = [[True, True], [True, True], *[[False, False]] * 2, [True, False], *[[False, False]] * 3]
    assert found.mask.tolist() == mask
    assert found.advantages[[0, 1, 4], 0].tolist() == [3.0, -3.0, 3.0]
    assert found.values is found.returns is found.value_mask is None


async def test_where_nobody_says_whether_a_task_was_solved_returns_alone_count():
    free = {"value_level": None}
    trajectory = await played(
        GROUPED, policy=free, group_size=2, max_steps=9, options={"scripts": GROUPED, "tells_success": False}
    )
    assert trajectory.success is None
    found = batch_of(trajectory, GRPO, 2)
    assert found.advantages[[0, 1, 2, 3], 0].tolist() == [3.0, -3.0, -1.5, 1.5]


async def test_before_any_episode_has_ended_what_was_earned_so_far_is_compared():
    scripts = [[[GO] * 9], [[(3.0, False, False)] * 9]]
    found = batch_of(await played(scripts, policy={"value_level": None}, group_size=2, max_steps=9), GRPO, 2)
    assert found.mask.all()
    assert found.advantages[:2, 0].tolist() == [-4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "changes", "has_critic", "group_size", "said"),
    [
        ("ppo", {}, False, 1, "value_level"),
        ("grpo", {}, True, 1, "env.group_size"),
        ("rloo", {}, True, 2, "ppo"),
        ("deepseek_grpo", {}, True, 2, "kl"),
        ("dapo", {}, True, 2, "shaping"),
        ("grpo_tis", {}, True, 2, "correction"),
        ("async_grpo", {}, True, 2, "proximal"),
    ],
)
def test_an_algorithm_that_cannot_be_had_says_why(name, changes, has_critic, group_size, said):
    with pytest.raises(ValueError, match=f"algorithm {name!r}.*{said}"):
        check(recipes.get(name, changes), has_critic=has_critic, group_size=group_size)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "gspo", "grpo_clip_higher", "cispo", "sapo"])
def test_algorithms_for_actions_pass(name):
    check(recipes.get(name), has_critic=True, group_size=2)


def test_without_episodes_there_is_nothing_to_sum_up():
    assert summary([]) == {"episodes": 0.0}
