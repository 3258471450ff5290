"""Loops in a flow's graph, such as environment and policy: found, and condensed to one node.

Flows in: roles and the edges between them. Flows out: groups of roles that feed each other; the edges with each group
as one node, which is measured and planned as one stage. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .workload import Edge


def loops(names: Sequence[str], edges: Sequence[Edge]) -> list[tuple[str, ...]]:
    """Return the strongly connected parts of a graph that have more than one node, members in the given order."""
    after = _reach(names, edges)
    groups = {tuple(other for other in names if other in after[name] and name in after[other]) for name in names}
    return sorted(group for group in groups if len(group) > 1)


def condense(edges: Sequence[Edge], groups: Mapping[str, Sequence[str]]) -> tuple[Edge, ...]:
    """Return the edges with every loop in one node: those inside vanish, and parallel ones become one.

    Args:
        edges: of the flow's graph.
        groups: name of the new node to its members.
    """
    into = {member: name for name, members in groups.items() for member in members}
    joined: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        ends = into.get(edge.source, edge.source), into.get(edge.target, edge.target)
        if ends[0] == ends[1]:
            continue
        old = joined.get(ends, Edge(*ends))
        joined[ends] = replace(old, barrier=old.barrier or edge.barrier, seconds=old.seconds + edge.seconds)
    return tuple(joined.values())


def _reach(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, set[str]]:
    """Per node all that can be reached from it along edges, without itself unless it lies on a loop."""
    after: dict[str, set[str]] = {name: set() for name in names}
    for _ in names:
        for edge in edges:
            after[edge.source] |= after[edge.target] | {edge.target}
    return after
