"""A step is read as it went: time per device, stages and their edges, the release curve, what was loaded and parked."""

import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlinf.actors
from rlinf import Actor
from rlinf.metrics.timing import activity_of
from rlinf.placement.costs import ASIDE, PUBLISHING, MeasuredRun, profile_of, read_step
from rlinf.placement.profile import BESIDE, Footprint, Timing, load, save
from rlinf.runtime.observe.spans import Busy
from rlinf.runtime.system.observer import Flow, Lap, Moved

APART = {"rollout[0]": frozenset({0}), "rollout[1]": frozenset({1}), "trainer[0]": frozenset({2})}
RUN = MeasuredRun("m", "x", "rlinf.flows.grpo", memory={"trainer": (100, 10)})
GRPO = (
    Flow("flow", "rollout.generate", 8),
    Flow("rollout.generate", "judge.score", 8, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 10.0)),
    Flow("judge.score", "trainer.train", 8, (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 11.0)),
    Flow("trainer.train", "flow", 1),
    Flow("trainer.weights", "rollout.load", 2),
)


def lap(*busy, flows=GRPO, moves=(), seconds=20.0):
    """A step that begins at 100 s; times since its start."""
    parts = tuple(Busy(actor, name, tuple((100.0 + a, 100.0 + b) for a, b in times)) for actor, name, times in busy)
    moved = tuple(Moved(one.actor, one.what, 100.0 + one.start, 100.0 + one.end) for one in moves)
    return Lap(100.0, 100.0 + seconds, parts, flows, moved)


STEP = lap(
    ("rollout[0]", "generate", [(0, 10)]),
    ("rollout[1]", "generate", [(0, 6)]),
    ("judge[0]", "score", [(1, 3), (4, 5)]),
    ("trainer[0]", "train", [(2, 8), (11, 13)]),
    ("trainer[0]", "weights", [(13, 14)]),
    ("rollout[0]", "load", [(14, 16)]),
    ("trainer[0]", "save", [(16, 20)]),
)


def test_a_stage_takes_until_its_last_device_is_done_and_its_work_is_that_of_all():
    stages = read_step(STEP, APART).stages
    assert (stages["rollout"].seconds, stages["rollout"].work) == (10.0, 16.0)
    assert (stages["trainer"].seconds, stages["trainer"].work) == (8.0, 8.0)
    assert (stages["judge"].seconds, stages["judge"].work, stages["judge"].devices) == (3.0, 0.0, frozenset())


def test_the_graph_is_that_of_the_flow_without_publishing_and_without_the_flow_itself():
    seen = read_step(STEP, APART)
    assert {(edge.source, edge.target, edge.barrier) for edge in seen.edges} == {
        ("rollout", "judge", False),
        ("judge", "trainer", False),
    }
    assert seen.published == (("trainer", "rollout"),)
    assert seen.sync == 3.0
    assert seen.source == "rollout"


def test_what_the_flow_hands_on_from_one_stream_to_another_role_is_an_edge_but_its_prompts_lead_nowhere_back():
    flows = (*GRPO[:2], Flow("judge.score", "flow", 8, (2.0, 3.0)), Flow("flow", "trainer.train", 8), *GRPO[3:])
    assert read_step(lap(*_same(STEP), flows=flows), APART).edges == read_step(STEP, APART).edges


def test_promises_make_a_barrier_where_the_consumer_really_began_after_the_last():
    def barrier(began, *more):
        flows = (Flow("rollout.generate", "trainer.train", 8), *more)
        busy = (("rollout[0]", "generate", [(0, 4), (5, 10)]), ("trainer[0]", "train", [(began, 15)]))
        (edge,) = read_step(lap(*busy, flows=flows), APART).edges
        return edge.barrier

    assert barrier(10)
    assert not barrier(7), "they were passed one by one"
    assert not barrier(10, Flow("rollout.answer", "trainer.train", 8, (1.0,))), "a stream"


def test_the_release_is_told_in_the_sources_own_time_so_who_had_its_device_meanwhile_does_not_matter():
    flows = (Flow("rollout.generate", "trainer.train", 4, (1.0, 2.0, 11.0, 14.0)),)
    turns = lap(("rollout[0]", "generate", [(0, 2), (10, 14)]), ("trainer[0]", "train", [(2, 10)]), flows=flows)
    seen = read_step(turns, {"rollout[0]": frozenset({0}), "trainer[0]": frozenset({0})})
    assert seen.release is not None
    assert seen.release.chunks(4) == pytest.approx((1 / 6, 2 / 6, 3 / 6, 1.0))
    assert seen.tail.tolist() == [[14.0, 14.0]]


def test_roles_that_feed_each_other_are_one_stage_that_lasts_while_any_of_them_works():
    flows = (
        Flow("env.reset", "policy.act", 1),
        Flow("policy.act", "env.step", 9),
        Flow("env.step", "policy.act", 9),
        Flow("policy.trajectory", "trainer.train", 1),
        Flow("trainer.weights", "policy.load", 1),
    )
    busy = (
        ("env[0]", "step", [(0, 2), (4, 6)]),
        ("policy[0]", "act", [(2, 4), (5, 7)]),
        ("trainer[0]", "train", [(8, 12)]),
    )
    beside = read_step(lap(*busy, flows=flows), {"policy[0]": frozenset({0}), "trainer[0]": frozenset({1})})
    loop = beside.stages["env+policy"]
    assert (loop.members, loop.seconds, loop.work) == (("env", "policy"), 7.0, 4.0)
    assert set(beside.stages) == {"env+policy", "trainer"}
    assert [(edge.source, edge.target, edge.barrier) for edge in beside.edges] == [("env+policy", "trainer", True)]
    assert beside.published == (("trainer", "env+policy"),)
    together = read_step(lap(*busy, flows=flows), dict.fromkeys(("env[0]", "policy[0]", "trainer[0]"), frozenset({0})))
    assert (together.stages["env+policy"].seconds, together.stages["env+policy"].work) == (7.0, 7.0)


times = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple), max_size=5)


@given(times, times, times)
def test_roles_that_share_a_device_without_leases_never_add_up_to_more_than_it_worked(one, two, three):
    parts = (("rollout[0]", "generate", one), ("judge[0]", "score", two), ("trainer[0]", "train", three))
    seen = read_step(lap(*parts), dict.fromkeys(("rollout[0]", "judge[0]", "trainer[0]"), frozenset({0})))
    at_work = {cell for own in (one, two, three) for start, end in own for cell in range(start, end)}
    assert sum(stage.work for stage in seen.stages.values()) == pytest.approx(len(at_work))
    assert all(stage.work == pytest.approx(stage.seconds) for stage in seen.stages.values())


def test_loading_and_parking_are_switches_of_the_actors_devices():
    moves = (
        Moved("trainer[0]", "onload", 8, 10),
        Moved("trainer[0]", "offload", 13, 14),
        Moved("judge[0]", "onload", 0, 1),
    )
    seen = read_step(lap(*_same(STEP), moves=moves), APART)
    assert seen.lanes[2].switch.tolist() == [[8, 10], [13, 14]]
    assert seen.lanes[0].switch.tolist() == []
    assert seen.moves["trainer"] == (2.0, 1.0)


def test_a_step_becomes_a_profile_that_is_read_back(tmp_path):
    moves = (Moved("trainer[0]", "onload", 8, 10),)
    made = profile_of(read_step(lap(*_same(STEP), moves=moves), APART), 8, RUN)
    assert made.stages["rollout"].timings == (Timing(8, 2, 10.0, busy=8.0),)
    assert made.stages["rollout"].release is not None
    assert made.stages["judge"].kind == BESIDE
    assert made.stages["judge"].timings == (Timing(8, 1, 3.0),)
    assert made.stages["trainer"].footprints == (Footprint(1, 100, 10, 2.0, 0.0),)
    assert made.sync == (Timing(1, 2, 3.0),)
    assert (made.items, made.flow) == (8, "rlinf.flows.grpo")
    save(made, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == made


def test_what_is_work_here_is_an_activity_in_the_metrics_and_so_on_for_all_that_our_roles_do():
    for module in pkgutil.walk_packages(rlinf.actors.__path__, "rlinf.actors."):
        importlib.import_module(module.name)
    kinds = [kind for kind in _below(Actor) if kind.__module__.startswith("rlinf.actors.")]
    endpoints = {name for kind in kinds for name in kind.endpoints}
    assert {"generate", "score", "train", "act", "step", "load", "save", "joint_ready"} <= endpoints
    for name in endpoints:
        told = activity_of("policy[0]", name)
        if name in ASIDE:
            assert told in (None, "saving"), name
        elif name in PUBLISHING:
            assert told in (None, "sync"), name
        else:
            assert told not in (None, "saving", "sync"), name


def test_a_step_in_which_nothing_was_traced_says_nothing():
    seen = read_step(Lap(0.0, 1.0, ()), APART)
    assert (seen.stages, seen.edges, seen.source, seen.release) == ({}, (), None, None)


def _same(step):
    return [
        (part.actor, part.endpoint, [(start - step.start, end - step.start) for start, end in part.intervals])
        for part in step.busy
    ]


def _below(kind):
    return {kind}.union(*map(_below, kind.__subclasses__()))
