"""Feedback that comes late finds its answer, whatever happened between; what was not learned from is never lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.agents.feedback import Feedback
from rlinf.data.sample import Prompt, Sample


def sample(number=0, turns=False):
    ids = np.array([number, number + 1, number + 2])
    logprobs = -np.arange(1, 4, dtype=np.float32) / 3
    mask = np.array([True, False, True]) if turns else None
    prompt = Prompt(99, np.array([7, number]), f"?{number}")
    return Sample(
        prompt, 0, ids, logprobs, np.array([1, 1, 2], np.int32), "abc", False, 0.7, loss_mask=mask, agent="planner"
    )


def batch_of(feedback, step=0):
    async def taken():
        return await asyncio.wait_for(feedback.batch(step), 60)

    return asyncio.run(taken())


def test_a_batch_is_complete_with_its_last_reward_and_has_a_group_for_each_answer():
    async def scenario():
        feedback = Feedback(2)
        first, second, third = [feedback.served([sample(number)], 0) for number in range(3)]
        waiting = asyncio.create_task(feedback.batch(0))
        feedback.record_reward(third, 1.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        feedback.record_reward(first, 0.0)
        groups = await waiting
        assert [*groups] == [third, first]
        assert [group.rewards for group in groups.values()] == [[1.0], [0.0]]
        assert len({group.prompt.id for group in groups.values()}) == 2
        assert (feedback.waiting, feedback.ready, feedback.counts.trained) == (1, 0, 2)
        assert feedback.record_reward(second, 1.0)

    asyncio.run(scenario())


def test_several_samples_of_one_answer_share_its_reward_and_its_weight():
    feedback = Feedback(1)
    feedback.record_reward(feedback.served([sample(1), sample(2)], 0), 0.5)
    (group,) = batch_of(feedback).values()
    assert [(each.index, each.reward, each.weight) for each in group.samples] == [(0, 0.5, 0.5), (1, 0.5, 0.5)]
    assert {each.prompt.id for each in group.samples} == {group.prompt.id}


def test_the_first_word_counts_and_what_nobody_knows_is_counted():
    feedback = Feedback(4)
    name = feedback.served([sample()], 0)
    assert feedback.record_reward(name, 1.0)
    assert not feedback.record_reward(name, 0.0)
    assert not feedback.record_reward("nobody's", 1.0)
    assert (feedback.counts.told, feedback.counts.unknown) == (1, 2)
    assert next(iter(feedback._ready.values())).reward == 1.0


def test_answers_that_are_too_old_are_dropped_and_counted():
    feedback = Feedback(1, max_age=2)
    old, young = feedback.served([sample(0)], 0), feedback.served([sample(1)], 1)
    feedback.record_reward(old, 1.0)
    feedback.record_reward(young, 1.0)
    assert [*batch_of(feedback, step=3)] == [young]
    assert feedback.counts.stale == 1


@pytest.mark.parametrize(("told", "together"), [(9, 9), (40, 40), (50, 40)])
def test_what_came_while_a_step_learned_is_learned_in_the_next_one_and_not_left_to_become_stale(told, together):
    feedback = Feedback(10 if told > 9 else 9, max_age=0)
    for number in range(told):
        feedback.record_reward(feedback.served([sample(number)], 0), 1.0)
    assert len(batch_of(feedback)) == together
    assert feedback.ready == told - together


def test_the_oldest_answer_without_a_reward_is_forgotten_for_one_more():
    feedback = Feedback(1, keep=2)
    names = [feedback.served([sample(number)], 0) for number in range(3)]
    assert [feedback.record_reward(name, 1.0) for name in names] == [False, True, True]
    assert (feedback.counts.forgotten, feedback.counts.unknown) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Feedback(0), "batch=0"),
        (lambda: Feedback(1, max_age=-1), "max_age=-1"),
        (lambda: Feedback(1, keep=0), "keep=0"),
        (lambda: Feedback(1).record_reward("a", float("nan")), r"online.feedback:.*reward.*nan"),
        (lambda: Feedback(1).record_reward("a", "good"), "is no number"),
        (lambda: Feedback(1).record_reward(3, 1.0), r"3.*id"),
        (lambda: Feedback(1).served([], 0), "has no sample"),
    ],
)
def test_what_cannot_be_is_said(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        wrong()


def test_an_id_is_given_once():
    feedback = Feedback(1)
    feedback.served([sample()], 0, "mine")
    with pytest.raises(ValueError, match=r"'mine' already"):
        feedback.served([sample()], 0, "mine")


def test_the_journal_keeps_every_bit_of_a_sample(tmp_path):
    before = Feedback(1, journal=tmp_path / "journal")
    given = [sample(3, turns=True), sample(4)]
    before.record_reward(before.served(given, 0, "a"), 0.25)
    after = Feedback(1, journal=tmp_path / "journal")  # the other is not closed: it was killed
    (group,) = batch_of(after).values()
    for old, new in zip(given, group.samples, strict=True):
        for name in ("response_ids", "logprobs", "versions", "loss_mask"):
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))
        assert (new.response_ids.dtype, new.logprobs.dtype) == (np.int64, np.float32)
        assert (new.prompt.text, new.agent, new.temperature, new.reward) == (old.prompt.text, "planner", 0.7, 0.25)
        np.testing.assert_array_equal(new.prompt.token_ids, old.prompt.token_ids)


def test_half_a_line_that_a_killed_process_left_is_passed_over(tmp_path):
    before = Feedback(1, journal=tmp_path / "journal")
    before.served([sample()], 0, "a")
    with (tmp_path / "journal").open("a") as file:
        file.write('{"told": "a", "rew')
    after = Feedback(1, journal=tmp_path / "journal")
    assert (after.waiting, after.ready) == (1, 0)
    after.record_reward("a", 1.0)
    assert Feedback(1, journal=tmp_path / "journal").ready == 1


EVENTS = st.lists(
    st.one_of(
        st.just(("serve",)),
        st.tuples(st.just("tell"), st.integers(0, 12)),
        st.just(("train",)),
        st.just(("checkpoint",)),
        st.just(("kill",)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_whatever_happens_what_the_checkpoint_does_not_know_is_there_after_a_kill(tmp_path_factory, events):
    journal = tmp_path_factory.mktemp("online") / "journal"
    bounds = {"max_age": 1000, "journal": journal}
    feedback, done, saved = Feedback(2, **bounds), 0, 0
    rewards, learned = {}, {}  # the model: by id, the reward; by id, the step that learned from it
    for event in events:
        match event:
            case ("serve",):
                name = f"answer {len(rewards)}"
                feedback.served([sample()], done, name)
                rewards[name] = None
            case ("tell", number):
                name = f"answer {number}"
                assert feedback.record_reward(name, float(number)) == (name in rewards and rewards[name] is None)
                if name in rewards and rewards[name] is None:
                    rewards[name] = float(number)
            case ("train",) if feedback.ready >= 2:
                groups = batch_of(feedback, done)
                assert all(group.rewards == [rewards[name]] for name, group in groups.items())
                done += 1
                learned |= dict.fromkeys(groups, done)
            case ("checkpoint",):
                saved = done
            case ("kill",):
                done = saved
                learned = {name: step for name, step in learned.items() if step <= saved}
                feedback = Feedback(2, done=done, **bounds)
        assert feedback.waiting == sum(reward is None for reward in rewards.values())
        assert feedback.ready == sum(reward is not None for reward in rewards.values()) - len(learned)
        assert feedback.counts.trained == len(learned)
