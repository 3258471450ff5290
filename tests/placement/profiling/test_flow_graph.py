"""Loops: their formula against a replay of every slice, against published steps, and inside a plan."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.grammar import PlacementError
from rlinf.placement.planner.plan_tree import leaves
from rlinf.placement.planner.planner import plan
from rlinf.placement.profiling.flow_graph import (
    Member,
    condense,
    inner_plans,
    loop_seconds,
    loop_stage,
    loops,
    measured_loop,
)
from rlinf.placement.profiling.profile import Footprint, StageProfile, Timing
from rlinf.placement.profiling.workload import Edge, Option, Stage, Workload


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


TURNS = 80


def profiled(seconds, *footprints, kind="gpu"):
    """A member measured in steps of 80 turns; `seconds` are of one turn."""
    timings = tuple(Timing(items, devices, one * TURNS) for (items, devices), one in seconds.items())
    return StageProfile(timings, footprints=footprints, kind=kind)


def members(env_bytes=0, policy_bytes=0):
    """The published costs again, as a run would have measured them: rendering 0.95 s, the policy by its batch."""
    env = {(items, devices): 0.95 for items in (32, 64) for devices in (1, 2)}
    policy = {(64, 1): 1.82, (64, 2): 0.88, (32, 1): 0.88, (32, 2): 0.405}
    return {
        "env": profiled(env, Footprint(1, env_bytes, env_bytes // 2)),
        "policy": profiled(policy, Footprint(1, policy_bytes, policy_bytes // 10)),
    }


def test_a_profile_decides_into_how_many_slices_a_loop_is_cut():
    """By hand, 64 environments on two devices. In turns: 80 (0.95 + 0.88). On one device each, in two slices:
    c(2) = max(2 * 0.95, 2 * 0.88, 0.95 + 0.88) = 1.9, and 0.88 until the loop is full; in one: 0.95 + 1.82."""
    stage = measured_loop("loop", members(), 64, TURNS, [2], slices=(1, 2))
    together, split = stage.options
    assert (together.inner.collocated, together.inner.devices, together.inner.slices) == (True, (2, 2), 1)
    assert together.seconds == pytest.approx(80 * 1.83)
    assert (split.inner.collocated, split.inner.devices, split.inner.slices) == (False, (1, 1), 2)
    assert split.seconds == pytest.approx(80 * 1.9 + 0.88)
    (whole,) = (one for one in measured_loop("loop", members(), 64, TURNS, [2], slices=(1,)).options[1:])
    assert whole.seconds == pytest.approx(80 * (0.95 + 1.82))


def test_more_slices_only_pay_while_the_members_scale_with_the_batch():
    """Rendering takes as long for fewer, so four slices cost 4 * 0.95 a turn: two are better, and none is better yet
    where the policy's share of the time is small."""
    flat = profiled({(items, 1): 0.95 for items in (16, 32, 64)})
    quick = profiled({(items, 1): 0.4 for items in (16, 32, 64)})
    slow = profiled({(items, 1): items / 64 * 3.8 for items in (16, 32, 64)})
    assert measured_loop("loop", {"env": flat, "policy": quick}, 64, TURNS, [2]).options[-1].inner.slices == 1
    found = measured_loop("loop", {"env": flat, "policy": slow}, 64, TURNS, [2]).options[-1]
    # p = 1: 0.95 + 3.8 = 4.75; p = 2: max(2 * 1.9, 0.95 + 1.9) = 3.8; p = 4: max(4 * 0.95, 0.95 + 0.95) = 3.8
    assert found.inner.slices == 2
    assert found.seconds == pytest.approx(80 * 3.8 + 0.95)


def test_slices_that_were_not_measured_are_left_out_unless_one_asks_for_them():
    few = {name: StageProfile(tuple(t for t in one.timings if t.batch == 64)) for name, one in members().items()}
    options = measured_loop("loop", few, 64, TURNS, [2], slices=(1, 2)).options
    assert [option.inner.slices for option in options] == [1, 1]
    with pytest.raises(ValueError, match="loop 'loop' can run on none of"):
        measured_loop("loop", few, 96, TURNS, [2])
    more = measured_loop("loop", few, 64, TURNS, [2], slices=(2,), extrapolate=True).options
    assert [option.inner.slices for option in more] == [1, 2]


def test_the_planner_takes_the_slices_of_the_loop_that_leaves_room_for_the_trainer():
    loop = measured_loop("loop", members(env_bytes=30, policy_bytes=20), 64, TURNS, [2], slices=(1, 2))
    assert [(one.active_bytes, one.parked_bytes) for one in loop.options] == [(50, 17), (30, 15)]
    trainer = Stage("trainer", (Option(2, 10.0, active_bytes=45, parked_bytes=45),))
    for memory, slices in ((100, 1), (76, 2)):
        workload = Workload((loop, trainer), (Edge("loop", "trainer", barrier=True),), {"gpu": 2}, {"gpu": memory})
        found = plan(workload)
        assert next(leaf.option.inner.slices for leaf in leaves(found.tree) if leaf.stage.name == "loop") == slices


def test_members_on_devices_of_different_kinds_are_no_loop_on_one():
    mixed = {"env": profiled({(64, 1): 1.0}, kind="cpu"), "policy": profiled({(64, 1): 1.0})}
    with pytest.raises(ValueError, match="measured on cpu and gpu"):
        measured_loop("loop", mixed, 64, TURNS, [2])
