"""Devices that change hands within a step, held against a step that is followed moment by moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.asynchronous import handover
from rlinf.placement.planner import Candidate, Leaf, Pair, replay
from rlinf.placement.profile import Release
from rlinf.placement.workload import Edge, Option, Stage, Workload

ITEMS = 16


def planned(how, rollout, trainer, shares, sizes=(4, 4), chunks=8, wide=True):
    options = Option(sizes[1], trainer), Option(sum(sizes), trainer * sizes[1] / sum(sizes))
    stages = (
        Stage("rollout", (Option(sizes[0], rollout),), Release((*sorted(shares), 1.0))),
        Stage("trainer", options if wide else options[:1]),
    )
    work = Workload(stages, (Edge("rollout", "trainer"),), {"gpu": sum(sizes)}, chunks=(chunks,))
    tree = Pair(how, *(Leaf(stage, stage.options[0]) for stage in stages))
    seconds = replay(tree, work, chunks)
    return Candidate(tree, chunks, seconds, seconds), work


def followed(how, rollout, trainer, shares, sizes=(4, 4), chunks=8, moments=20000):
    """The same, in small moments: whoever is free takes of what has left."""
    curve = Release((*sorted(shares), 1.0))
    work, each = sizes[1] * trainer, max(1.0, ITEMS / sizes[0])
    left = [share * rollout for share in curve.chunks(chunks)]
    moment, now, done = (rollout + trainer * sizes[1] / sum(sizes) + trainer) / moments, 0.0, 0.0
    while done < work * (1 - 1e-9):
        gone = sum(share * rollout <= now for share in curve.shares) / len(curve.shares)
        free = sizes[0] * gone**each + (sizes[1] if how == "spatial" else 0)
        there = work * sum(time <= now for time in left) / chunks
        done += max(0.0, min(there - done, free * moment))
        now += moment
    return now


@given(
    st.sampled_from(("spatial", "temporal")), st.floats(1, 20), st.floats(1, 20),
    st.lists(st.floats(0, 1), min_size=3, max_size=9),
)  # fmt: skip
def test_a_step_takes_what_it_does_moment_by_moment(how, rollout, trainer, shares):
    found, work = planned(how, rollout, trainer, shares)
    calculated = handover(found, work, ITEMS)
    assert calculated.seconds == pytest.approx(
        min(followed(how, rollout, trainer, shares, moments=4000), found.seconds), rel=0.01
    )
    assert calculated.gain >= 0


def test_a_long_tail_is_filled_with_learning():
    shares = (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    found, work = planned("temporal", 20.0, 8.0, shares)
    assert handover(found, work, 4).seconds == pytest.approx(20.0 + 8.0 / 8)  # but for the last chunk, all is done
    apart = planned("spatial", 20.0, 30.0, shares)
    assert handover(*apart, 4).gain > 0.2


def test_it_promises_no_more_than_the_sizes_that_were_planned_with_and_the_bound():
    shares = (0.1,) * 7
    found, work = planned("spatial", 20.0, 30.0, shares)
    free = handover(found, work, 4)
    assert free.gain > 0.2
    assert handover(*planned("spatial", 20.0, 30.0, shares, wide=False), 4).gain < 0.02, "of four trainers alone"
    least = (free.seconds + free.without) / 2
    assert handover(found, work, 4, least).seconds == least


def test_where_nothing_is_known_of_a_tail_nothing_is_said():
    stages = (Stage("a", (Option(1, 2.0),)), Stage("b", (Option(1, 2.0),)))
    work = Workload(stages, (Edge("a", "b"),), {"gpu": 2}, chunks=(2,))
    tree = Pair("spatial", *(Leaf(stage, stage.options[0]) for stage in stages))
    assert handover(Candidate(tree, 2, 3.0, 3.0), work, 4) is None
