"""The best plan of each mode side by side, and one sentence of why the first is the best.

Flows in: a workload and what the planner found for each mode. Flows out: rows for a table, and the sentence. All
seconds are predictions. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .bound import Bound
from .composition import leaves, to_plan
from .plan import Mode
from .search import Found
from .workload import Workload


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The best plan of one mode."""

    mode: Mode
    """How stages share devices."""
    seconds: float
    """Of a step, predicted."""
    efficiency: float
    """Bound / seconds."""
    bubble: float
    """Share of the device-seconds of a step in which a device does no stage's work."""
    peak_bytes: int
    """The most that any device holds at any time."""
    sizes: dict[str, int]
    """Devices of each stage."""


def overview(workload: Workload, found: Mapping[Mode, Found], limit: Bound) -> list[PlanRow]:
    """Return a row per mode, the quickest first."""
    return sorted((_row(workload, mode, one, limit) for mode, one in found.items()), key=lambda row: row.seconds)


def _row(workload: Workload, mode: Mode, found: Found, limit: Bound) -> PlanRow:
    everywhere = sum(workload.devices.values())
    work = sum(leaf.option.devices * leaf.stage.alone(leaf.option, found.chunks) for leaf in leaves(found.tree))
    made = to_plan(found.tree, workload, found.chunks, None, None)
    return PlanRow(
        mode,
        found.seconds,
        limit.efficiency(found.seconds),
        1 - work / (everywhere * found.seconds) if everywhere and found.seconds else 0.0,
        max((made.peak(device) for device in made.devices), default=0),
        {leaf.stage.name: leaf.option.devices for leaf in leaves(found.tree)},
    )


def reason(rows: list[PlanRow], limit: Bound) -> str:
    """Say in one sentence why the first row is the best, and what keeps it from the bound."""
    if not rows:
        return "no plan fits"
    best, *others = rows
    gap = f"it reaches {best.efficiency:.0%} of the bound, which {limit.binding} sets"
    if not others:
        return f"{best.mode} is the only mode that fits; {gap}"
    second = others[0]
    if second.bubble > best.bubble + 0.01:
        why = f"devices idle {best.bubble:.0%} of the time instead of {second.bubble:.0%}"
    else:
        why = "its sizes and switches cost fewer device-seconds"
    return f"{best.mode} is {second.seconds / best.seconds - 1:.0%} quicker than {second.mode}, because {why}; {gap}"
