"""The table of modes: quickest first, bubbles as they are, and a sentence that follows from them."""

from dataclasses import replace

import pytest

from rlinf.placement.auto import choose_for, reason
from rlinf.placement.workload import Edge, Option, Stage, Workload


def halves(chunks, switch=0.0):
    """Two equal stages that cannot be divided further than half of the devices."""

    def stage(name):
        held = {"active_bytes": 6, "parked_bytes": 1, "onload_seconds": switch}
        return Stage(name, (Option(2, 8.0, **held), Option(4, 8.0, **held)))

    return Workload((stage("a"), stage("b")), (Edge("a", "b"),), {"gpu": 4}, {"gpu": 10}, chunks=(chunks,))


def test_side_by_side_wins_where_stages_do_not_scale():
    workload = halves(chunks=16, switch=1.0)
    chosen = choose_for(workload, 16, per_mode=1)
    rows = chosen.best_of_modes
    assert [row.mode for row in rows] == ["disaggregated", "collocated"]
    best, second = rows
    assert (best.seconds, second.seconds) == (8.5, 18.0)
    assert best.bubble == pytest.approx(1 - 32 / (4 * 8.5))
    assert second.bubble == pytest.approx(1 - 32 / (4 * 18.0))
    assert (best.peak_bytes, second.peak_bytes) == (6, 7)
    assert {name: len(role.devices) for name, role in best.plan.roles.items()} == {"a": 2, "b": 2}
    assert reason(rows, chosen.bound) == chosen.reason == chosen.plan.reason
    assert chosen.reason == (
        "disaggregated is 112% quicker than collocated, because devices idle 6% of the time instead of 56%; "
        "it reaches 94% of the bound, which area sets"
    )


def test_modes_that_differ_by_less_than_costs_vary_are_called_equal():
    chosen = choose_for(halves(chunks=16), 16, per_mode=1)
    best, second = chosen.best_of_modes
    said = reason((best, replace(second, calculated=best.calculated * 1.01)), chosen.bound)
    assert said.startswith(f"{best.mode} and {second.mode} ")
    assert "1%" in said


def test_a_single_mode_says_so():
    workload = Workload((Stage("a", (Option(1, 2.0),)),), (), {"gpu": 1})
    assert choose_for(workload, 16, per_mode=1).reason.startswith(
        "collocated is the only mode that fits; it reaches 100%"
    )
