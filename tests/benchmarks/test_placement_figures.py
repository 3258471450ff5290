"""`benchmarks.placement` judges its rows by their bars; the rehearsal says what the real protocols take; its processes
run."""

from dataclasses import replace

import pytest

from benchmarks import placement
from benchmarks.placement_cases import PREDICTED, Job, balanced
from benchmarks.placement_measured import Measured, efficiencies, measured, predictions, rehearsed, virtual_rows
from benchmarks.placement_planned import Row
from benchmarks.placement_stages import virtually
from rlinf.placement.profile import Profile, StageProfile, Timing

SIDE_BY_SIDE = next(case for case in PREDICTED if case.mode == "disaggregated")
PAIR = balanced(8)[0]


def told(efficiency, seconds=1.0, **lost):
    return {"bound/seconds": seconds * efficiency, "bound/efficiency": efficiency} | {
        f"lost/{name}": value for name, value in lost.items()
    }


def exact_profile(case):
    """What would be measured if nothing took time but the stages."""
    plan, stages = case.plan(), {}
    for stage in case.workload().stages:
        count = len(plan.roles[stage.name].devices)
        seconds = next(option.seconds for option in stage.options if option.devices == count)
        timing = Timing(case.items, max(1, count), seconds)
        stages[stage.name] = StageProfile((timing,), stage.release, kind="gpu" if count else "none")
    edges = tuple((edge.source, edge.target, edge.barrier) for edge in case.workload().edges)
    sync = (Timing(1, 1, case.sync),)
    return Profile("modelled", "sleeping", stages, {}, sync, "", case.items, edges, (("trainer", "rollout"),))


@pytest.mark.parametrize("case", PREDICTED, ids=lambda case: case.name)
def test_the_rehearsal_of_a_plan_takes_what_its_roles_take_where_messages_take_no_time(case):
    assert rehearsed(case, case.workload()) == pytest.approx(virtually(case), rel=1e-6)


def test_every_mode_is_predicted():
    assert {case.mode for case in PREDICTED} == {"collocated", "disaggregated", "hybrid"}
    assert all(case.plan().mode == case.mode for case in PREDICTED)


def test_a_prediction_within_its_bar_is_met_and_one_beyond_it_lost():
    seconds = rehearsed(SIDE_BY_SIDE, SIDE_BY_SIDE.workload())
    for factor, met in ((1.0, True), (1.04, True), (1.07, False), (0.93, False)):
        one = Measured(SIDE_BY_SIDE, (seconds * factor,), (told(1.0),), exact_profile(SIDE_BY_SIDE))
        assert [row.met for row in predictions([one])] == [met, met]


def test_losses_that_do_not_add_up_are_lost():
    profile = Profile("modelled", "sleeping")
    whole = Measured(PAIR, (1.0,), (told(0.96, imbalance=0.03, overhead=0.01),), profile)
    short = Measured(PAIR, (1.0,), (told(0.94, imbalance=0.03, overhead=0.01),), profile)
    assert [row.met for row in efficiencies([whole])] == [True, True]
    assert [row.met for row in efficiencies([short])] == [False, False]


def test_a_part_that_fails_is_a_line_and_keeps_what_it_found(monkeypatch):
    def breaks(part, quick):
        yield Row("first", "<= 1", "0", True)
        raise RuntimeError("no more")

    monkeypatch.setitem(placement.PARTS, "planner", breaks)
    part = placement.Part("planner")
    part.measure(True)
    assert [row.met for row in part.rows] == [True, False]
    assert "no more" in part.rows[1].found


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_processes_measure_steps_that_take_at_least_what_their_stages_do():
    shared = replace(SIDE_BY_SIDE, name="in turns", mode="collocated", items=8, chunks=4, devices=2)
    roles = {name: replace(role, work=role.work / 10, moving=0.01) for name, role in shared.roles.items()}
    shared = replace(shared, roles=roles)
    cases = (shared, PAIR)
    found, late = measured(Job(cases, 1, 1, 1))
    assert late >= 0
    for one in found:
        assert one.middle >= rehearsed(one.case, one.case.workload()) * 0.99
        assert one.missing <= 0.01
    assert found[0].from_profile == pytest.approx(found[0].middle, rel=0.5)
    assert found[0].typical["lost/switching"] > 0
    assert next(virtual_rows(cases)).met
