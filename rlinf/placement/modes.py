"""Devices of each role for a placement mode when nothing was measured: rules of thumb.

Flows in: a mode, the roles that compute on devices, the number of these. Flows out: the devices of each. Nothing waits
here. A planner with a profile does better; these rules fit any flow and are easy to predict.
"""

from __future__ import annotations

from collections.abc import Sequence

from .grammar import PlacementError
from .plan import Mode


def spread(mode: Mode, source: str, others: Sequence[str], devices: int) -> dict[str, tuple[int, ...]]:
    """Return the devices of each role.

    Args:
        mode: collocated: everybody on all; disaggregated: even shares; hybrid: the source on the first half, the others
            in turns on the rest.
        source: the role that the others wait for: it generates, or acts.
        others: in order of their work; the last one gets what is left over.
        devices: how many there are.

    Raises:
        PlacementError: there are too few.
    """
    names = (source, *others)
    everything = tuple(range(devices))
    if mode == "collocated":
        return dict.fromkeys(names, everything)
    if mode == "hybrid":
        if devices < 2:
            raise PlacementError([_too_few("hybrid", 2, devices, f"one for {source}, one for {', '.join(others)}")])
        middle = devices // 2
        return {source: everything[:middle], **dict.fromkeys(others, everything[middle:])}
    if devices < len(names):
        raise PlacementError([_too_few("disaggregated", len(names), devices, f"one for each of {', '.join(names)}")])
    found, first = {}, 0
    for number, name in enumerate(names):
        last = devices if number == len(others) else first + max(1, (devices - first) // (len(names) - number))
        found[name] = everything[first:last]
        first = last
    return found


def _too_few(mode: str, needed: int, devices: int, why: str) -> str:
    return (
        f"placement.mode: {mode} needs {needed} devices, {why}, and this job has {devices}: start {needed} processes "
        f"(torchrun --nproc-per-node {needed}), or take collocated"
    )
