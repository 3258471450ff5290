"""The alarms about engine and trainer that disagree, and about tokens that are too old."""

import math

from rlinf.metrics.alarm import MismatchAlarm, RouteDriftAlarm, StalenessAlarm


def mismatch(mean, largest):
    return {"mismatch/mean": mean, "mismatch/max": largest}


def test_it_names_what_is_over_its_limit_and_what_to_do():
    told = MismatchAlarm(0.05, 5.0).heard(3, mismatch(0.2, 1.0))
    assert told.startswith("step 3: engine and trainer disagree")
    assert "mismatch/mean is 0.2 nats (limit metrics.mismatch_mean = 0.05)" in told
    assert "mismatch/max" not in told
    assert "rollout.dtype" in told
    assert "algorithm.correction" in told


def test_it_rings_once_until_the_limit_was_kept_again():
    alarm = MismatchAlarm(0.05, 5.0)
    rang = [alarm.heard(step, mismatch(mean, 0.0)) is not None for step, mean in enumerate([0.1, 0.1, 0.01, 0.1])]
    assert rang == [True, False, False, True]


def test_the_second_limit_rings_while_the_first_is_still_passed():
    alarm = MismatchAlarm(0.05, 5.0)
    assert "mismatch/max" not in alarm.heard(1, mismatch(0.1, 1.0))
    assert "mismatch/max is 6 nats" in alarm.heard(2, mismatch(0.1, 6.0))


def test_what_is_no_number_rings_and_what_is_not_measured_does_not():
    assert "nan" in MismatchAlarm(0.05, None).heard(1, mismatch(math.nan, 99.0))
    assert MismatchAlarm(0.05, 5.0).heard(1, {}) is None
    assert MismatchAlarm(None, None).heard(1, mismatch(9.0, 9.0)) is None


def test_tokens_older_than_the_bound_ring_and_once_more_when_older_still():
    alarm = StalenessAlarm(2, "staleness.max")
    told = [alarm.heard(step, {"staleness/max": age}) for step, age in enumerate([0.0, 2.0, 3.0, 3.0, 2.0, 5.0])]
    assert [each is not None for each in told] == [False, False, True, False, False, True]
    assert told[2].startswith("step 2: learned from tokens that are 3 versions old (limit staleness.max = 2)")
    assert alarm.heard(7, {}) is None


def test_gates_that_disagree_ring_once_until_they_agree_again():
    alarm = RouteDriftAlarm(0.25)
    told = [alarm.heard(step, {"moe/route_drift": share}) for step, share in enumerate([0.2, 0.3, 0.4, 0.1, 0.3])]
    assert [each is not None for each in told] == [False, True, False, False, True]
    assert told[1].startswith("step 1: engine and trainer send 30% of tokens to other experts with the same weights")
    assert "limit metrics.route_drift = 0.25" in told[1]
    assert alarm.heard(6, {}) is None
    assert RouteDriftAlarm(None).heard(1, {"moe/route_drift": 1.0}) is None
