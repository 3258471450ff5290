"""The bound holds for every plan, and the split of what lies above it adds up."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.bound import Bound, Lane, Losses, bound, joined
from rlinf.placement.bound import split as split_lanes
from rlinf.placement.planner import plan
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload


def two(**changes):
    stages = (
        Stage("rollout", (Option(1, 20.0, active_bytes=6), Option(2, 12.0, active_bytes=6, onload_seconds=1.0))),
        Stage("trainer", (Option(2, 5.0, active_bytes=6, offload_seconds=3.0), Option(4, 3.0, active_bytes=6))),
    )
    return Workload(stages, (Edge("rollout", "trainer"),), {"gpu": 4}, **changes)


def test_the_parts_are_what_they_say():
    limit = bound(two(), source="rollout", longest_item=2.0)
    assert limit.area == (20.0 + 10.0) / 4
    assert limit.saturation == 12.0
    assert limit.tail == 2.0 + 3.0 / 16
    assert limit.memory == limit.area
    assert (limit.seconds, limit.binding, limit.network) == (12.0, "saturation", 0.0)
    assert limit.efficiency(24.0) == 0.5


def test_stages_that_need_all_of_what_another_makes_come_one_after_the_other():
    stages = tuple(Stage(name, (Option(1, seconds),)) for name, seconds in (("a", 2.0), ("b", 3.0), ("c", 4.0)))
    barriers = (Edge("a", "b", barrier=True), Edge("b", "c"), Edge("a", "c", barrier=True))
    assert bound(Workload(stages, barriers, {"gpu": 9})).saturation == 2.0 + 4.0
    assert bound(Workload(stages, (Edge("a", "b"), Edge("b", "c")), {"gpu": 9})).saturation == 4.0


def test_a_long_item_and_what_follows_it_bind():
    limit = bound(two(sync=(Sync("trainer", "rollout", 1.0, 2.0),)), source="rollout", longest_item=30.0)
    assert limit.binding == "tail"
    assert limit.seconds == 30.0 + 3.0 / 16 + 1.0


def test_what_does_not_fit_at_once_must_switch():
    """Two devices, of each 4 bytes: 8 are there, 10 are wanted, so 2 of the cheaper to move have to be parked."""
    stages = (
        Stage("a", (Option(1, 1.0, active_bytes=4, onload_seconds=2.0, offload_seconds=2.0),)),
        Stage("b", (Option(2, 1.0, active_bytes=3, onload_seconds=6.0),)),
    )
    limit = bound(Workload(stages, (), {"gpu": 2}, {"gpu": 4}))
    assert limit.area == 1.5
    assert limit.memory == pytest.approx(1.5 + 2 * (4.0 / 4) / 2)


def test_each_kind_of_device_has_its_own_area():
    stages = (Stage("a", (Option(1, 8.0, "x"),)), Stage("b", (Option(1, 2.0, "x"), Option(1, 3.0, "y"))))
    assert bound(Workload(stages, (), {"x": 1, "y": 9})).area == 8.0


class Interval(NamedTuple):
    """A device did something for a while."""

    device: int
    start: float
    end: float
    kind: str


def array(pairs):
    return joined(np.array(pairs, np.float64).reshape(-1, 2))


def split(did, devices, *how, tail=(), **more):
    """`lost_time.split` of what devices did, listed in any order."""
    made = [
        Lane(*(array([one[1:3] for one in did if (one.device, one.kind) == (number, kind)]) for kind in KINDS))
        for number in range(devices)
    ]
    return split_lanes(made, *how, tail=array(tail), **more)


KINDS = ("work", "switch", "sync")
spans = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted).map(tuple)
intervals = st.builds(
    lambda device, span, kind: Interval(device, *span, kind),
    st.integers(0, 3), spans, st.sampled_from(KINDS),
)  # fmt: skip


@given(
    st.lists(intervals, max_size=20), st.floats(0, 9), st.floats(0, 40), st.floats(0, 40), st.lists(spans, max_size=2)
)
def test_the_parts_of_any_step_add_up_to_what_lies_above_the_bound(did, other, least, expected, tail):
    least = min(least, 40.0)
    limit = Bound(area=least / 4, saturation=other, tail=0.0, memory=0.0, network=0.0)
    losses = split(did, 4, 10.0, limit, least=least, expected=expected, tail=tail)
    assert math.isclose(losses.total, 10.0 - limit.seconds, abs_tol=1e-6)


def lanes(seconds, *did, least, expected=None, tail=(), **limit):
    parts = {"area": least / 2, "saturation": 0.0, "tail": 0.0, "memory": 0.0, "network": 0.0} | limit
    return split(
        did, 2, seconds, Bound(**parts), least=least, expected=least if expected is None else expected, tail=tail
    )


NOTHING = Losses(0, 0, 0, 0, 0, 0, 0)


def test_each_part_shows_where_it_belongs():
    work = Interval(0, 0, 4, "work")
    assert lanes(4.0, work, Interval(1, 0, 2, "work"), least=6) == Losses(1, 0, 0, 0, 0, 0, 0)
    assert lanes(4.0, work, Interval(1, 0, 2, "work"), least=6, tail=[(2, 4)]) == Losses(0, 1, 0, 0, 0, 0, 0)
    assert lanes(4.0, work, Interval(1, 0, 3, "work"), Interval(1, 2, 4, "switch"), least=7).switching == 0.5
    assert lanes(4.0, work, Interval(1, 0, 3, "work"), Interval(1, 3, 4, "sync"), least=7).sync == 0.5
    assert lanes(4.0, work, Interval(1, 0, 4, "work"), least=6, expected=8).scaling == 1.0
    assert lanes(4.0, work, Interval(1, 0, 4, "work"), least=6, expected=6).interference == 1.0
    assert lanes(5.0, work, Interval(1, 0, 4, "work"), least=8) == Losses(0, 0, 0, 0, 0, 0, 1)


def test_what_the_tail_bound_asks_for_is_no_loss():
    work, short = Interval(0, 0, 4, "work"), Interval(1, 0, 2, "work")
    losses = lanes(4.0, work, short, least=6, tail=[(2, 4)])
    assert losses.tail == 1.0
    assert lanes(4.0, work, short, least=6, tail=[(2, 4)] * 1) == losses
    excused = split([work, short], 2, 4.0, Bound(3, 0, 4, 0, 0), least=6, expected=6, tail=[(2, 4)])
    assert excused == NOTHING


def test_the_best_plan_of_a_perfectly_divisible_workload_reaches_the_area_bound():
    sizes = tuple(Option(n, 64 / n) for n in (1, 2, 4, 8))
    workload = Workload((Stage("a", sizes), Stage("b", sizes)), (Edge("a", "b"),), {"gpu": 8})
    assert plan(workload).seconds == pytest.approx(bound(workload).seconds)
