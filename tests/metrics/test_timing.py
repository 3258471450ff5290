"""Where the time of a step went: each part, what overlapped, and the rest; and that in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.metrics.timing import ACTIVITIES, parts, sentence, timing
from rlinf.runtime.observe.spans import Busy, Span, union
from rlinf.runtime.system.observer import Lap, Moved

ENDPOINTS = {
    "generation": "generate",
    "simulation": "step",
    "acting": "act",
    "scoring": "score",
    "training": "train",
    "sync": "load",
}


def lap(**times) -> Lap:
    """A step of 12 s from 100 s on, with times of activities since its start."""
    parts = [
        Busy(f"{name}[0]", ENDPOINTS[name], tuple((100.0 + start, 100.0 + end) for start, end in union(intervals)))
        for name, intervals in times.items()
    ]
    return Lap(100.0, 112.0, tuple(parts))


def test_parts_overlap_and_the_rest_is_what_none_of_them_covers():
    metrics = timing(lap(generation=[(0, 4), (5, 6)], scoring=[(3, 5)], training=[(4, 9)], sync=[(10, 11)]))
    assert metrics == {
        "timing/generation": 5.0,
        "timing/scoring": 2.0,
        "timing/training": 5.0,
        "timing/sync": 1.0,
        "timing/overlap": 3.0,  # 3-4, 4-5 and 5-6
        "timing/other": 2.0,  # 9-10 and 11-12
    }


def test_the_time_of_several_ranks_counts_once():
    ranks = tuple(Busy(f"trainer[{rank}]", "train", ((100.0, 103.0 + rank),)) for rank in range(3))
    metrics = timing(Lap(100.0, 110.0, ranks))
    assert metrics["timing/training"] == 5.0
    assert metrics["timing/overlap"] == 0.0


def test_endpoints_of_ones_own_are_told_by_their_names():
    metrics = timing(Lap(0.0, 10.0, (Busy("critic_of_mine[0]", "criticise", ((1.0, 2.0),)),)))
    assert metrics == {"timing/criticise": 1.0, "timing/overlap": 0.0, "timing/other": 10.0}


def test_what_our_roles_do_besides_is_not_told():
    parts = (("joint_ready", 0.0), ("samples", 2.0), ("load_switch", 4.0), ("save", 6.0))
    lap = Lap(0.0, 10.0, tuple(Busy("trainer[0]", name, ((start, start + 1.0),)) for name, start in parts))
    assert timing(lap) == {
        "timing/sync": 1.0,
        "timing/saving": 1.0,
        "timing/overlap": 0.0,
        "timing/other": 9.0,
    }


def test_loading_and_parking_is_switching_whoever_does_it_and_not_time_of_nothing():
    calls = (Busy("mine[0]", "offload", ((1.0, 3.0),)), Busy("trainer[0]", "train", ((6.0, 9.0),)))
    moves = (Moved("mine[0]", "offload", 1.0, 3.0), Moved("trainer[0]", "onload", 2.0, 6.0))
    metrics = timing(Lap(0.0, 10.0, calls, moves=moves))
    assert metrics == {
        "timing/training": 3.0,
        "timing/switching": 5.0,
        "timing/overlap": 0.0,
        "timing/other": 2.0,
    }
    assert sentence({"timing/step": 10.0, **metrics}) == "10.00 s: switching 5.00, training 3.00, other 2.00"
    trees = sentence({"timing/step": 10.0, **metrics, "tokens_read/saved": 0.52})
    assert (
        trees == sentence({"timing/step": 10.0, **metrics}) + "; beginnings in common saved 52% of the trainer's tokens"
    )
    assert sentence({"timing/step": 0.01, "timing/other": 0.001, "tokens_read/saved": 0.05}) == "0.01 s"


def test_a_step_too_short_for_parts_is_told_by_its_length_alone():
    assert sentence({"timing/step": 0.01, "timing/training": 0.001, "timing/other": 0.001}) == "0.01 s"
    assert sentence({"timing/step": 0.5, "timing/other": 0.5}) == "0.50 s: other 0.50"


def test_what_goes_on_beyond_the_step_counts_for_its_role():
    assert timing(Lap(0.0, 10.0, (Busy("rollout[3]", "compute", ((1.0, 2.0),)),)))["timing/generation"] == 1.0


cells = st.sets(st.integers(0, 11), max_size=12)


@given(st.fixed_dictionaries(dict.fromkeys(ACTIVITIES, cells)))
def test_the_parts_are_what_counting_seconds_one_by_one_gives(times):
    metrics = timing(lap(**{name: [(cell, cell + 1) for cell in at] for name, at in times.items()}))
    at_work = [sum(cell in at for at in times.values()) for cell in range(12)]
    for name, at in times.items():
        assert metrics.get(f"timing/{name}", 0.0) == pytest.approx(len(at))
    assert metrics["timing/overlap"] == pytest.approx(sum(count >= 2 for count in at_work))
    assert metrics["timing/other"] == pytest.approx(sum(count == 0 for count in at_work))


def test_a_step_in_one_sentence():
    metrics = {"timing/step": 12.0} | timing(lap(generation=[(0, 4)], training=[(3, 9)], scoring=[(4, 4.001)]))
    assert sentence(metrics) == "12.00 s: training 6.00, generation 4.00 (1.00 side by side), other 3.00"
    assert sentence({"timing/step": 1.0}) == ""
    assert sentence({}) == ""


def part(actor, what, start, end, size=0):
    return Span("part", actor, "", what, start, end, size)


def test_parts_of_the_slowest_count_and_bytes_add_up():
    told = (
        part("trainer[0]", "weights/gather_seconds", 1.0, 3.0),
        part("trainer[0]", "weights/host_bytes", 3.0, 3.0, 100),
        part("trainer[0]", "weights/checksum_seconds", 2.5, 3.0),
        part("rollout[0]", "weights/arrived", 3.25, 3.25),
        part("rollout[1]", "weights/arrived", 4.0, 4.0),
        part("rollout[0]", "weights/load_seconds", 4.0, 5.0),
        part("rollout[0]", "weights/load_seconds", 6.0, 7.0),
        part("rollout[1]", "weights/load_seconds", 4.0, 5.5),
        part("rollout[0]", "weights/host_bytes", 5.0, 5.0, 100),
        part("rollout[1]", "weights/device_bytes", 5.5, 5.5, 7),
        part("rollout[0]", "weights/int8_error", 5.6, 5.6, 0.01),
        part("rollout[1]", "weights/int8_error", 5.6, 5.6, 0.02),
        part("rollout[0]", "rollout/joined_count", 5.6, 5.6, 2),
        part("rollout[0]", "rollout/joined_count", 5.7, 5.7, 1),
        part("rollout[1]", "rollout/joined_count", 5.6, 5.6, 1),
    )
    assert parts(Lap(0.0, 10.0, (), parts=told)) == {
        "weights/gather_seconds": 2.0,
        "weights/checksum_seconds": 0.5,
        "weights/load_seconds": 2.0,
        "weights/send_seconds": 1.0,
        "weights/host_bytes": 200,
        "weights/device_bytes": 7,
        "weights/int8_error": 0.02,
        "rollout/joined_count": 3,
    }


def test_weights_that_came_from_an_earlier_step_have_no_time_of_sending():
    told = (part("rollout[0]", "weights/arrived", 1.0, 1.0), part("trainer[0]", "weights/checksum_seconds", 2.0, 3.0))
    assert "weights/send_seconds" not in parts(Lap(0.0, 10.0, (), parts=told))
