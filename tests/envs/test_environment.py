"""Chunks, ends, accounts and seeds, on episodes that are written down beforehand."""

from collections import defaultdict
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.envs.environment import HELD_OUT, Environment, Rules
from rlinf.envs.toy import Reach
from rlinf.envs.workers import EnvironmentPool
from rlinf.envs.wrappers import Mixture
from tests.envs.breaking import NotFinite
from tests.envs.scripted import Scripted

GO = (1.0, False, False)
SOLVED = (1.0, False, True)
END = (10.0, True, True)
FAIL = (-10.0, True, False)


def environment(*scripts, tells_success=True, resets_together=False, first=0, **rules) -> Environment:
    """One environment per argument, each a list of episodes."""
    simulator = Scripted(scripts, tells_success=tells_success, resets_together=resets_together)
    return Environment(simulator, Rules(**rules), first=first)


def chunk(env, actions):
    return env.step(torch.zeros(env.num_envs, actions, 1))


def test_steps_after_the_end_are_not_done_and_count_nothing():
    env = environment([[GO, END], [GO, GO]], [[GO, GO, GO, GO]])
    env.reset()
    found = chunk(env, 4)
    assert found.rewards.tolist() == [[1, 10, 0, 0], [1, 1, 1, 1]]
    assert found.valid.tolist() == [[True, True, False, False], [True, True, True, True]]
    assert found.terminated.tolist() == [[False, True, False, False], [False] * 4]
    assert not found.truncated.any()


def test_the_next_episode_begins_after_the_chunk_and_the_final_observation_is_kept():
    env = environment([[GO, END], [GO, GO, GO]], [[GO] * 9])
    env.reset()
    found = chunk(env, 3)
    first, second = env.simulator.begun[0]
    assert found.ended.tolist() == [0]
    assert found.final["state"].tolist() == [[float(torch.tensor(float(first))), 2]]
    assert found.observation["state"][:, 1].tolist() == [0, 3]
    assert found.observation["state"][0, 0] == float(second)
    assert (found.episode.tolist(), found.next_episode.tolist()) == ([0, 0], [1, 0])
    assert found.running.all()


def test_after_the_last_chunk_no_episode_is_begun_that_nobody_would_act_in():
    env = environment([[GO, END], [GO, END], [GO] * 4], [[GO] * 4, [GO] * 9], max_steps=4, chunks=2)
    env.reset()
    first, last = chunk(env, 2), chunk(env, 2)
    assert (first.running.tolist(), first.next_episode.tolist()) == ([True, True], [1, 0])
    assert (last.running.tolist(), last.next_episode.tolist()) == ([False, False], [1, 0])
    assert (len(last.episodes), last.cut.tolist()) == (2, [1])
    assert [len(begun) for begun in env.simulator.begun] == [2, 1]
    assert not chunk(env, 1).valid.any()
    env.reset(1)
    assert chunk(env, 2).running.all()  # and it counts anew


def test_without_auto_reset_what_has_ended_waits():
    env = environment([[GO, END], [GO, GO, GO]], [[GO] * 9, [GO] * 9], auto_reset=False)
    env.reset()
    found = chunk(env, 3)
    assert found.running.tolist() == [False, True]
    assert found.observation["state"][:, 1].tolist() == [2, 3]
    again = chunk(env, 2)
    assert again.valid.tolist() == [[False, False], [True, True]]
    assert again.rewards.tolist() == [[0, 0], [1, 1]]
    assert again.ended.tolist() == []
    assert again.episodes == ()
    env.reset(epoch=1)
    assert chunk(env, 1).valid.all()


@pytest.mark.parametrize("stack", [1, 2])
def test_where_all_are_reset_together_what_has_ended_waits_for_the_slowest(stack):
    scripts = [[GO, END], [GO] * 9], [[GO, GO, GO, END], [GO] * 9]
    env = environment(*scripts, resets_together=True, frame_stack=stack)
    env.reset()
    first, second = chunk(env, 2), chunk(env, 2)
    assert (first.running.tolist(), first.next_episode.tolist()) == ([False, True], [0, 0])
    assert second.valid.tolist() == [[False, False], [True, True]]
    assert (second.ended.tolist(), second.next_episode.tolist()) == ([1], [1, 1])
    assert second.running.all()
    assert [episode.env for episode in (*first.episodes, *second.episodes)] == [0, 1]
    assert chunk(env, 2).valid.all()


@pytest.mark.parametrize("auto_reset", [True, False])
def test_where_all_are_reset_together_a_dropped_episode_waits_too(auto_reset):
    scripts = [[(float("nan"), False, False)], [GO] * 9], [[GO, GO, GO, END], [GO] * 9]
    env = environment(*scripts, resets_together=True, auto_reset=auto_reset)
    env.reset()
    first, second = chunk(env, 2), chunk(env, 2)
    assert (first.lost.tolist(), first.running.tolist()) == ([True, False], [False, True])
    assert (second.lost.tolist(), second.valid.tolist()) == ([False, False], [[False, False], [True, True]])
    assert second.running.tolist() == [auto_reset] * 2
    last = environment([[(float("nan"), False, False)], [GO] * 9], resets_together=True, auto_reset=auto_reset)
    last.reset()
    assert chunk(last, 1).running.tolist() == [auto_reset]


def test_a_time_limit_cuts_off_and_says_where_values_are_needed():
    env = environment([[GO] * 9], [[GO, GO, END]], [[GO, FAIL], [GO] * 3], max_steps=3)
    env.reset()
    found = chunk(env, 3)
    assert found.truncated.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert found.terminated.tolist() == [[False] * 3, [False, False, True], [False, True, False]]
    assert found.ended.tolist() == [0, 1, 2]
    assert found.cut.tolist() == [0]  # ended by its task in its last step: nothing was cut off


def test_ignored_terminations_let_episodes_last_until_their_limit():
    env = environment([[GO, END, GO, GO]], ignore_terminations=True, max_steps=4)
    env.reset()
    found = chunk(env, 4)
    assert not found.terminated.any()
    assert found.truncated.tolist() == [[False, False, False, True]]
    assert found.rewards.tolist() == [[1, 10, 1, 1]]
    (episode,) = found.episodes
    assert (episode.success_once, episode.success_at_end, episode.length) == (True, False, 4)


def test_accounts_of_an_episode_go_on_over_chunks():
    env = environment([[GO, SOLVED, GO, FAIL], [GO, END]])
    env.reset(epoch=6)
    assert chunk(env, 3).episodes == ()
    (first,) = chunk(env, 3).episodes
    assert (first.total, first.length, first.number, first.epoch) == (-7.0, 4, 0, 6)
    assert (first.success_once, first.success_at_end, first.truncated) == (True, False, False)
    (second,) = chunk(env, 3).episodes
    assert (second.total, second.length, second.number) == (11.0, 2, 1)
    assert (second.success_once, second.success_at_end) == (True, True)
    assert [first.seed, second.seed] == env.simulator.begun[0][:2]


def test_where_the_simulator_does_not_say_success_is_unknown():
    env = environment([[GO, END], [GO]], tells_success=False)
    env.reset()
    (episode,) = chunk(env, 2).episodes
    assert (episode.success_once, episode.success_at_end) == (None, None)


def seeds(env, epochs=1):
    for epoch in range(epochs):
        env.reset(epoch)
        chunk(env, 1)
    return env.simulator.begun


ENDLESS = [[END]] * 9


def test_seeds_follow_from_seed_epoch_environment_and_number():
    found = seeds(environment(*[ENDLESS] * 4, seed=3), epochs=2)
    assert seeds(environment(*[ENDLESS] * 4, seed=3), epochs=2) == found
    flat = [seed for begun in found for seed in begun]
    assert len(set(flat)) == len(flat) == 4 * 4
    assert all(0 <= seed < 2**31 for seed in flat)
    other = [seed for begun in seeds(environment(*[ENDLESS] * 4, seed=4), epochs=2) for seed in begun]
    assert not set(flat) & set(other)


def test_division_into_workers_does_not_change_the_starts():
    whole = seeds(environment(*[ENDLESS] * 4, seed=3, group_size=2))
    parts = [seeds(environment(*[ENDLESS] * 2, seed=3, group_size=2, first=first)) for first in (0, 2)]
    assert parts[0] + parts[1] == whole


def test_a_group_shares_its_starts_and_no_other_group_has_them():
    found = seeds(environment(*[ENDLESS] * 6, group_size=3))
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4] == found[5]
    assert not set(found[0]) & set(found[3])


def test_groups_that_would_be_divided_are_refused():
    with pytest.raises(ValueError, match=r"groups.*2.*3 environments"):
        environment(*[ENDLESS] * 3, group_size=2)
    with pytest.raises(ValueError, match="from number 1"):
        environment(*[ENDLESS] * 2, group_size=2, first=1)


def test_episodes_that_nothing_would_end_are_refused():
    with pytest.raises(ValueError, match="needs max_steps"):
        environment(ENDLESS, ignore_terminations=True)


def test_a_step_before_the_first_reset_and_actions_of_another_shape_say_what_is_wrong():
    env = environment(ENDLESS)
    with pytest.raises(RuntimeError, match=r"reset\(\) first"):
        chunk(env, 1)
    env.reset()
    with pytest.raises(ValueError, match=r"\[1, C, 1\], not \[1, 2, 3\]"):
        env.step(torch.zeros(1, 2, 3))


def test_an_adapter_that_breaks_its_own_specification_is_told_how():
    simulator = Scripted([ENDLESS])
    simulator._look = lambda: torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"'state' .*\[1, 3\].*\[1, 2\]"):
        Environment(simulator).reset()


def test_a_saved_state_is_refused_under_other_rules():
    env = environment(ENDLESS, seed=1)
    env.reset()
    saved = env.state_dict()
    with pytest.raises(ValueError, match="'seed': 1"):
        environment(ENDLESS, seed=2).load_state_dict(saved)


def test_a_saved_state_is_not_changed_by_going_on():
    env = Environment(Reach(4, dims=2, wind=True), Rules(max_steps=5))
    env.reset()
    actions = torch.rand(8, 4, 2, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    env.step(actions[0])
    saved = env.state_dict()
    runs = []
    for _ in range(2):
        env.load_state_dict(saved)
        runs.append([env.step(each).rewards.tolist() for each in actions])
    assert runs[0] == runs[1]


def test_actions_are_scaled_to_the_bounds_of_the_simulator():
    spec = Scripted([ENDLESS]).action_spec
    low, high = torch.tensor([0.0, -torch.inf, -1.0]), torch.tensor([4.0, torch.inf, 1.0])
    spec = type(spec)(low, high)
    found = spec.scaled(torch.tensor([[-1.0, 7.0, 0.3], [0.5, -7.0, -2.0]]))
    assert found.tolist() == [[0.0, 7.0, float(torch.tensor(0.3))], [3.0, -7.0, -1.0]]


scripts = st.lists(  # of an environment: episodes of steps that earn whole numbers, so that sums are exact
    st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=9), min_size=1, max_size=4
)


@given(
    st.lists(scripts, min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 9)
)
def test_valid_steps_of_chunks_are_the_episodes_whatever_the_sizes_of_chunks(earned, sizes, limit):
    earned = [(one * 60)[:60] for one in earned]
    tables = [
        [[(reward, False, False) for reward in each[:-1]] + [(each[-1], True, True)] for each in one] for one in earned
    ]
    env = environment(*tables, max_steps=limit)
    env.reset()
    seen = defaultdict(list)
    finished = {}
    for size in sizes:
        found = chunk(env, size)
        for row in range(env.num_envs):
            valid = found.valid[row].tolist()
            assert valid == sorted(valid, reverse=True)  # what is done comes first
            seen[row, int(found.episode[row])] += found.rewards[row][found.valid[row]].tolist()
        finished.update({(episode.env, episode.number): episode for episode in found.episodes})
    for (row, number), rewards in seen.items():
        script = earned[row][number][:limit]
        assert rewards == script[: len(rewards)]
        assert ((row, number) in finished) == (len(rewards) == len(script))
    for (row, number), episode in finished.items():
        script = earned[row][number]
        assert (episode.total, episode.length) == (sum(script[:limit]), min(limit, len(script)))
        assert episode.truncated == (len(script) > limit)
        assert episode.success_once == (not episode.truncated)


# Evaluation ----------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 10**6), env=st.integers(0, 99), episode=st.integers(0, 10**6))
def test_no_episode_of_training_begins_by_a_seed_that_is_held_out(seed, epoch, env, episode):
    ours, theirs = Rules(seed=seed), Rules(seed=seed, held_out=True)
    assert 0 <= ours.seed_of(epoch, env, episode) < HELD_OUT <= theirs.seed_of(epoch, env, episode) < 2**31


@pytest.mark.parametrize("slices", [1, 2])
async def test_what_an_episode_was_to_do_is_told_with_its_end_beside_what_the_next_is_to_do(slices):
    options = {"words": True, "max_steps": 2}
    async with EnvironmentPool(Reach, options, num_envs=8, workers=0, slices=slices) as pool:
        for part in pool.slices:
            start = await part.reset(1)
            chunk = await part.step(torch.zeros(part.num_envs, 2, 1))
            assert chunk.ended.tolist() == list(range(part.num_envs))
            assert chunk.final_instructions == start.instructions == chunk.following[1] != chunk.instructions
            later = await part.step(torch.zeros(part.num_envs, 1, 1))
            assert later.final_instructions == ()
            assert later.following[1] == later.instructions == chunk.instructions


class Noting(NotFinite):
    """Notes by which seeds it begins episodes."""

    seeds: ClassVar[list[int]] = []

    def reset(self, seeds, env_ids):
        self.seeds.extend(seeds.tolist())
        return super().reset(seeds, env_ids)


@pytest.mark.parametrize("held_out", [False, True])
async def test_no_way_to_begin_an_episode_leads_to_a_seed_of_the_others(held_out, monkeypatch):
    """Mixed tasks by changing weights, frame stacks, groups, dropped episodes, several slices."""
    monkeypatch.setattr(Noting, "seeds", [])
    options = {"simulator": Noting, "tasks": [{"name": "one"}, {"name": "other"}], "options": {"at": [2]}}
    rules = Rules(frame_stack=2, group_size=2, max_steps=3, held_out=held_out)
    async with EnvironmentPool(Mixture, options, num_envs=8, workers=0, slices=2, rules=rules) as pool:
        dropped = 0
        for epoch in range(3):
            for part in pool.slices:
                await part.weigh([1.0, epoch])
                await part.reset(epoch)
                for _ in range(5):
                    dropped += int((await part.step(torch.zeros(4, 2, 1))).lost.sum())
    assert dropped
    assert len(Noting.seeds) > 60
    assert {seed >= HELD_OUT for seed in Noting.seeds} == {held_out}


def test_an_episode_tells_its_task_as_it_was_at_its_beginning():
    environment = Environment(Reach(4, words=True, max_steps=2), Rules(auto_reset=False))
    start = environment.reset(1)
    episodes = environment.step(torch.zeros(4, 2, 1)).episodes
    assert tuple(episode.task for episode in episodes) == start.instructions
    environment = Environment(Reach(4, words=True, max_steps=3))
    environment.reset(1)
    environment.step(torch.zeros(4, 2, 1))
    again = Environment(Reach(4, words=True, max_steps=3))
    again.load_state_dict(environment.state_dict())
    assert [episode.task for episode in again.step(torch.zeros(4, 1, 1)).episodes] == list(start.instructions)
