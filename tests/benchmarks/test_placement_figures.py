"""The rehearsal of `benchmarks.placement` says what the real protocols take, and its processes run."""

from dataclasses import replace

import pytest

from benchmarks.placement_cases import PREDICTED, Job, balanced
from benchmarks.placement_measured import measured, rehearsed, virtual_rows
from benchmarks.placement_stages import virtually

SIDE_BY_SIDE = next(case for case in PREDICTED if case.mode == "disaggregated")
PAIR = balanced(8)[0]


@pytest.mark.parametrize("case", PREDICTED, ids=lambda case: case.name)
def test_the_rehearsal_of_a_plan_takes_what_its_roles_take_where_messages_take_no_time(case):
    assert rehearsed(case, case.workload()) == pytest.approx(virtually(case), rel=1e-6)


def test_every_mode_is_predicted():
    assert {case.mode for case in PREDICTED} == {"collocated", "disaggregated", "hybrid"}
    assert all(case.plan().mode == case.mode for case in PREDICTED)


@pytest.mark.torchrun
@pytest.mark.repeated
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
