"""A run beside what was possible, in two lines: typical steps only, and parts that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.metrics.verdict import BINDING, MEANINGS, PARTS, over, tells, typical, verdict

parts = st.fixed_dictionaries({f"lost/{part}": st.floats(0, 5) for part in PARTS})
steps = st.lists(st.tuples(st.floats(0.1, 10), parts), min_size=1, max_size=12)


def step(least, **lost):
    return {
        "timing/step": least + sum(lost.values()),
        "bound/seconds": least,
        "bound/area": least,
        "bound/saturation": least / 2,
        "bound/network": 0.0,
        "bound/devices": 2.0,
        **{f"lost/{part}": lost.get(part, 0.0) for part in PARTS},
    }


@given(steps)
def test_typical_parts_add_up_to_what_a_typical_step_takes(found):
    rows = [step(least, **{name.removeprefix("lost/"): value for name, value in lost.items()}) for least, lost in found]
    told = typical(rows)
    assert told["bound/seconds"] + sum(told[f"lost/{part}"] for part in PARTS) == pytest.approx(told["timing/step"])
    assert told["bound/efficiency"] == pytest.approx(told["bound/seconds"] / told["timing/step"])


def test_neither_the_first_step_nor_an_accident_counts():
    usual = [step(0.38, imbalance=0.08, overhead=0.05, sync=0.03)] * 6
    rows = [step(20.0, overhead=9.0), *usual, step(0.38, interference=60.0), {"reward/mean": 1.0}]
    assert verdict(typical(rows)) == [
        "70% of what is possible on 2 devices, at what the roles cost in this run: no step could take less than "
        "0.38 s (area: all devices at work all the time)",
        "lost per step: imbalance 0.08, overhead 0.05, sync 0.03 s",
    ]
    assert typical(rows[:1])["timing/step"] == 29.0, "the only step there is"


def test_a_bound_that_varies_is_told_with_its_spread():
    """On a machine that others use too, what roles cost varies, and one number would claim too much."""
    rows = [step(0.2 + 0.02 * number) for number in range(1, 12)]
    (line, *_) = verdict(typical([step(9.0), *rows]))
    assert "0.320 s (0.240 to 0.400" in line
    assert "four steps" not in verdict(typical([step(0.3)] * 9))[0]


def test_a_few_steps_have_no_verdict_and_steps_without_a_bound_are_timed_all_the_same():
    assert not tells([step(1.0)] * 5)
    assert tells([step(1.0)] * 6)
    assert not tells([{"timing/step": 1.0}] * 9)
    assert typical([{"timing/step": 9.0}, {"timing/step": 1.0, "timing/other": 0.5}]) == {
        "timing/step": 1.0,
        "timing/other": 0.5,
    }


def test_what_is_too_little_is_not_told_and_nothing_at_all_is_no_line():
    (line,) = verdict(typical([step(12.0, tail=0.001) | {"bound/devices": 1.0, "bound/saturation": 13.0}]))
    assert line.startswith("100% of")
    assert "12.0 s (saturation: " in line
    assert verdict(typical([{"timing/step": 1.0}])) == []
    assert verdict(typical([])) == []


def test_engines_that_joined_are_told_beside_a_bound_that_does_not_count_them():
    rows = [step(0.3) | {"rollout/joined_count": count} for count in (0.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0)]
    (_, line) = verdict(typical(rows))
    assert line.startswith("engines that joined generated too, 1.5 on average")
    assert len(verdict(typical([row | {"rollout/joined_count": 0.0} for row in rows]))) == 1


def test_short_steps_are_told_in_digits_that_say_something():
    assert " 0.0100 s" in verdict(typical([step(0.01, overhead=0.005)]))[0]


@pytest.mark.parametrize(
    ("steps", "seconds", "which"),
    [(1, 1.0, ""), (2, 2.0, "the first"), (3, 2.5, "2 steps"), (4, 3.0, "3 steps"), (5, 3.5, "middle half")],
)
def test_a_few_steps_have_no_middle_half(steps, seconds, which):
    rows = [{"timing/step": float(number)} for number in range(1, steps + 1)]
    assert typical(rows)["timing/step"] == seconds
    assert which in over(rows)
    assert bool(over(rows)) == (steps > 1)


def test_every_part_has_a_meaning():
    assert set(MEANINGS) == set(PARTS)
    assert set(BINDING) == {"area", "saturation", "network"}
