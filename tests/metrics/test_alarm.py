"""The alarms about engine and trainer that disagree, about tokens that are too old, and steps without a lesson."""

import math

import pytest

from rlinf.metrics.alarms import (
    FLOAT8,
    MismatchAlarm,
    NothingLearnedAlarm,
    NoUpdateAlarm,
    RoundingAlarm,
    RouteDriftAlarm,
    ShapingAlarm,
    StalenessAlarm,
    default_reward,
)


def mismatch(mean, largest):
    return {"mismatch/mean": mean, "mismatch/max": largest}


def test_it_names_what_is_over_its_limit_and_what_to_do():
    told = MismatchAlarm(0.05, 5.0).check(3, mismatch(0.2, 1.0))
    assert told.startswith("step 3: ")
    assert "mismatch/mean is 0.2 nats (limit metrics.mismatch_mean = 0.05)" in told
    assert "mismatch/max" not in told
    assert "rollout.dtype" in told
    assert "algorithm.correction" in told


def test_it_rings_once_until_the_limit_was_kept_again():
    alarm = MismatchAlarm(0.05, 5.0)
    rang = [alarm.check(step, mismatch(mean, 0.0)) is not None for step, mean in enumerate([0.1, 0.1, 0.01, 0.1])]
    assert rang == [True, False, False, True]


def test_the_second_limit_rings_while_the_first_is_still_passed():
    alarm = MismatchAlarm(0.05, 5.0)
    assert "mismatch/max" not in alarm.check(1, mismatch(0.1, 1.0))
    assert "mismatch/max is 6 nats" in alarm.check(2, mismatch(0.1, 6.0))


def test_what_is_no_number_rings_and_what_is_not_measured_does_not():
    assert "nan" in MismatchAlarm(0.05, None).check(1, mismatch(math.nan, 99.0))
    assert MismatchAlarm(0.05, 5.0).check(1, {}) is None
    assert MismatchAlarm(None, None).check(1, mismatch(9.0, 9.0)) is None


def test_where_every_token_is_older_the_youngest_ones_are_watched():
    alarm = MismatchAlarm(0.05, 5.0)
    assert alarm.check(2, {"staleness/drift/1": 0.4, "staleness/drift/2": 9.0, "staleness/ess": 0.9}) is None
    told = alarm.check(3, {"staleness/drift/2": 0.6})
    assert "staleness/drift/2 is 0.6" in told
    assert "staleness.max" in told.do
    assert alarm.check(4, {"mismatch/mean": 0.01, "staleness/drift/1": 0.9}) is None, "measured where it can be"


def test_tokens_older_than_the_bound_ring_and_once_more_when_older_still():
    alarm = StalenessAlarm(2, "staleness.max")
    told = [alarm.check(step, {"staleness/max": age}) for step, age in enumerate([0.0, 2.0, 3.0, 3.0, 2.0, 5.0])]
    assert [each is not None for each in told] == [False, False, True, False, False, True]
    assert told[2].startswith("step 2: ")
    assert "(limit staleness.max = 2)" in told[2]
    assert alarm.check(7, {}) is None


def test_gates_that_disagree_ring_once_until_they_agree_again():
    alarm = RouteDriftAlarm(0.25)
    told = [alarm.check(step, {"moe/route_drift": share}) for step, share in enumerate([0.2, 0.3, 0.4, 0.1, 0.3])]
    assert [each is not None for each in told] == [False, True, False, False, True]
    assert told[1].startswith("step 1: ")
    assert "30%" in told[1]
    assert "limit metrics.route_drift = 0.25" in told[1]
    assert alarm.check(6, {}) is None
    assert RouteDriftAlarm(None).check(1, {"moe/route_drift": 1.0}) is None


ROWS = [{"response": "so 1 + 1 = 3", "answer": "2"}, {"response": "x" * 90 + "the end", "answer": ""}]
TEACHES = {"reward/mean": 0.5, "reward/std": 0.5, "groups/uniform": 0.5, "grad_norm": 0.1, "truncated": 0.2}
EQUAL = {**TEACHES, "reward/mean": 0.0, "reward/std": 0.0, "groups/uniform": 1.0, "grad_norm": 0.0}


def silence(*steps, compares=True, last=None, **settings):
    """What is told in each of these steps."""
    alarm = NothingLearnedAlarm(compares, 16, "mine.reward", **settings)
    return [alarm.check(step, metrics, ROWS, step == last) for step, metrics in enumerate(steps, 1)]


@pytest.mark.parametrize(
    ("compares", "metrics", "told"),
    [
        (True, EQUAL, ["same reward, 0", "'so 1 + 1 = 3' (right: '2')", "the end' (the data", "mine.reward"]),
        (True, {**EQUAL, "reward/mean": 1.0}, ["same reward, 1", "harder problems"]),
        (True, {**TEACHES, "groups/uniform": 1.0}, ["no group", "algorithm.group_size"]),
        (True, {**TEACHES, "grad_norm": 0.0}, ["gradient was 0", "optimizer.lr"]),
        (True, {**TEACHES, "truncated": 1.0}, ["rollout.max_new_tokens=16", "rollout.stop"]),
        (True, {**EQUAL, "truncated": 1.0}, ["cut every answer", "same reward, 0"]),
        (False, {**EQUAL, "grad_norm": 0.3}, ["same reward, 0"]),
        (None, {"grad_norm": 0.0}, ["gradient was 0"]),
    ],
)
def test_three_steps_that_teach_nothing_are_told_once_with_what_to_do(compares, metrics, told):
    first, second, third, fourth = silence(metrics, metrics, metrics, metrics, compares=compares)
    assert (first, second, fourth) == (None, None, None)
    assert third.startswith("step 3: ")
    assert "1 to 3" in third
    assert [each for each in told if each not in third] == []
    assert third.do
    assert "\n" not in third


@pytest.mark.parametrize(
    ("compares", "steps"),
    [
        (True, [TEACHES] * 9),
        (True, [EQUAL, EQUAL, TEACHES] * 3),  # chance
        (True, [{}] * 9),  # the critic learns alone
        (False, [{**TEACHES, "groups/uniform": 1.0}] * 9),  # groups of one: answers of the batch are compared
        (None, [{**EQUAL, "grad_norm": 0.1}] * 9),  # learns from a teacher
    ],
)
def test_steps_that_may_teach_something_are_no_alarm(compares, steps):
    assert silence(*steps, compares=compares) == [None] * len(steps)


def test_what_begins_later_is_told_and_a_run_that_ends_earlier_tells_at_its_end():
    assert [bool(each) for each in silence(TEACHES, EQUAL, EQUAL, EQUAL, TEACHES, EQUAL)] == [0, 0, 0, 1, 0, 0]
    (only,) = silence(EQUAL, last=1)
    assert only.startswith("step 1: in step 1 ")
    uniform = {**TEACHES, "groups/uniform": 1.0}
    assert [bool(each) for each in silence(EQUAL, uniform, last=2)] == [0, 1]


def test_a_run_that_learned_is_not_alarmed_by_its_last_step_alone():
    assert silence(TEACHES, TEACHES, EQUAL, last=3) == [None] * 3
    assert silence(TEACHES, EQUAL, EQUAL, last=3) == [None] * 3
    assert silence(EQUAL, TEACHES, EQUAL, last=3) == [None] * 3
    assert NothingLearnedAlarm(True, 16).check(51, EQUAL, ROWS, last=True) is None, "a run that was resumed"


def test_answers_of_a_single_token_want_no_end():
    moves = {**TEACHES, "truncated": 1.0}
    assert [NothingLearnedAlarm(True, 1).check(step, moves, ROWS, last=True) for step in (1, 2, 3)] == [None] * 3


def test_answers_that_cannot_end_are_told_with_why():
    assert (
        silence(*[{**TEACHES, "truncated": 1.0}] * 3, no_end="No end token is named")[2].do == "No end token is named"
    )


def test_a_reward_that_nobody_chose_is_told_with_the_right_answers():
    told = default_reward("step 1", ROWS)
    assert told.startswith("step 1: ")
    assert "(right: '2')" in told
    assert "reward.function" in told.do


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"sampling/kept": 0.0, "sampling/drawn": 640.0, "sampling/rounds": 10.0}, ["640", "10 rounds", "group_size"]),
        ({"truncated": 1.0}, ["algorithm.truncated=mask", "rollout.max_new_tokens"]),
        ({}, ["groups/uniform"]),
    ],
)
def test_a_step_without_an_update_rings_and_says_why(metrics, words):
    told = NoUpdateAlarm().check(3, {**metrics, "update/skipped": 1.0})
    assert told.startswith("step 3: ")
    assert all(word in told for word in words)


def test_steps_without_an_update_ring_at_the_first_and_the_tenth_in_a_row():
    alarm, steps = NoUpdateAlarm(), [True] * 12 + [False] + [True] * 3
    rang = [
        alarm.check(step, {"update/skipped": 1.0} if skipped else {}) is not None
        for step, skipped in enumerate(steps, 1)
    ]
    assert [step for step, each in enumerate(rang, 1) if each] == [1, 10, 14]


def shaped(reward, after, **more):
    return {"reward/mean": reward, "reward/shaped": after, "reward/std": 0.5, "samples": 100.0, **more}


def test_a_penalty_that_falls_on_right_answers_rings_until_it_does_so_no_more():
    alarm = ShapingAlarm()
    shares = [0.4, 0.6, 0.9, 0.3, 0.6, 0.2, 0.6]
    told = [
        alarm.check(step, shaped(0.3, 0.1, **{"shaping/penalised_best": share})) for step, share in enumerate(shares)
    ]
    assert [each is not None for each in told] == [False, True, False, False, False, False, True]
    assert "60% of" in told[1]
    assert "rollout.max_new_tokens" in told[1]


@pytest.mark.parametrize(
    ("reward", "after", "rings"),
    [
        (lambda step: 0.5 - 0.02 * step, lambda step: -0.5 + 0.02 * step, True),  # shorter, and worse
        (lambda step: 0.3 + 0.02 * step, lambda step: -0.5 + 0.02 * step, False),
        (lambda step: 0.5 - 0.02 * step, lambda step: -0.1 - 0.02 * step, False),
        (lambda step: 0.5 - 0.02 * (step % 2), lambda step: -0.1 + 0.02 * (step % 2), False),  # chance
    ],
)
def test_reward_and_its_shaped_form_that_part_ring_once(reward, after, rings):
    alarm = ShapingAlarm()
    told = [alarm.check(step, shaped(reward(step), after(step))) for step in range(25)]
    assert sum(each is not None for each in told) == rings
    assert ShapingAlarm().check(1, {"reward/mean": 0.5}) is None


def test_a_block_of_float8_that_is_further_off_than_rounding_can_make_it_rings_once():
    alarm = RoundingAlarm()
    errors = [0.027, FLOAT8, 0.08, 0.08, math.nan, 0.03, 0.2]
    told = [alarm.check(step, {"weights/float8_block_error": error}) for step, error in enumerate(errors)]
    assert [line is not None for line in told] == [False, False, True, False, False, False, True]
    assert "8.0%" in told[2]
    assert alarm.check(9, {}) is None
