"""Loops: their formula against a replay of every slice, against published steps, and inside a plan."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.grammar import PlacementError
from rlinf.placement.loops import Member, condense, inner_plans, loop_seconds, loop_stage, loops
from rlinf.placement.planner import plan
from rlinf.placement.workload import Edge, Option, Stage, Workload


def replayed(seconds, slices, turns):
    """Every slice on its way around, members serving one at a time in order of arrival."""
    free = [0.0] * len(seconds)
    ready = [0.0] * slices
    for _ in range(turns):
        for member, time in enumerate(seconds):
            for number in range(slices):
                free[member] = ready[number] = max(free[member], ready[number]) + time
    return max(ready)


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 30))
def test_the_formula_equals_a_replay_of_every_slice(seconds, slices, turns):
    assert loop_seconds(seconds, slices, turns) == pytest.approx(replayed(seconds, slices, turns))


def published():
    """64 simulators on 2 devices: rendering takes nearly the same however many there are, the policy does not."""
    policy = {64: 1.82, 32: 0.88, 16: 0.405}
    return [
        Member("env", lambda items, devices: 0.95),
        Member("policy", lambda items, devices: policy[items // devices]),
    ]


def test_published_embodied_steps_follow_from_two_costs():
    plans = {(one.collocated, one.slices): one.seconds for one in inner_plans(published(), 64, 1000, 2, slices=(1, 2))}
    assert plans[True, 1] / 1000 == pytest.approx(1.83, abs=0.01)
    assert plans[False, 1] / 1000 == pytest.approx(2.77, abs=0.01)
    assert plans[False, 2] / 1000 == pytest.approx(1.90, abs=0.01)


def test_a_loop_offers_its_best_collocated_and_its_best_split_plan():
    stage = loop_stage("rollout", published(), 64, 80, [2], slices=(1, 2))
    assert [option.note for option in stage.options] == ["env 2 | policy 2, taking turns", "env 1 | policy 1, 2 slices"]
    with pytest.raises(ValueError, match="loop 'rollout' can run on none"):
        loop_stage("rollout", [Member("env", lambda items, devices: math.inf)], 64, 80, [1])


def test_memory_decides_whether_a_loop_is_split():
    """Together simulator and policy leave no room for the trainer beside them; split, they do."""
    env = Member("env", lambda items, devices: 1.0, lambda items, devices: 30, parked_bytes=30)
    policy = Member("policy", lambda items, devices: 2.0 / devices, lambda items, devices: 20, parked_bytes=5)
    loop = loop_stage("rollout", [env, policy], 8, 10, [4], slices=(1, 2))
    trainer = Stage("trainer", (Option(4, 10.0, active_bytes=45, parked_bytes=5),))
    for memory, split in ((100, False), (78, True)):
        found = plan(Workload((loop, trainer), (Edge("rollout", "trainer"),), {"gpu": 4}, {"gpu": memory}))
        assert ("slices" in found.tree.left.option.note) is split


def test_slices_that_do_not_divide_the_batch_are_left_out():
    assert {one.slices for one in inner_plans(published(), 64, 1, 2, slices=(1, 3))} == {1}


def test_loops_are_found_and_condensed_to_one_node():
    edges = [Edge("env", "policy"), Edge("policy", "env"), Edge("policy", "trainer", seconds=2.0),
             Edge("env", "trainer", barrier=True, seconds=1.0), Edge("trainer", "export")]  # fmt: skip
    names = ["export", "env", "policy", "trainer"]
    assert loops(names, edges) == [("env", "policy")]
    assert condense(edges, {"rollout": ("env", "policy")}) == (
        Edge("rollout", "trainer", True, 3.0),
        Edge("trainer", "export"),
    )


def test_a_loop_that_was_not_condensed_is_refused():
    stages = tuple(Stage(name, (Option(1, 1.0),)) for name in ("env", "policy"))
    with pytest.raises(PlacementError, match="env -> policy -> env is a loop: condense it first"):
        Workload(stages, (Edge("env", "policy"), Edge("policy", "env")), {"gpu": 1})
