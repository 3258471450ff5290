"""Loops of a flow's graph are found, and condensed to one node."""

import pytest

from rlinf.placement.grammar import PlacementError
from rlinf.placement.workload import Edge, Option, Stage, Workload, condense, loops


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
    with pytest.raises(PlacementError, match=r"-> policy ->.*condense"):
        Workload(stages, (Edge("env", "policy"), Edge("policy", "env")), {"gpu": 1})
