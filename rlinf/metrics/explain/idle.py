"""What devices waited for in one step, second by second.

In: the `Lap` of a step, the devices of every actor, and what was read off the lap. Out: seconds of the step by what
they went to, as means over the devices; together with work they are the step. Pure.

A moment in which a device does no work counts once, as the first of these that it is: the device loads or parks roles;
it publishes or takes weights; the last few items are generated; a role works on other devices; a role beside the
devices works, such as the reward; nobody works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.placement.profiling.spans import Spans, in_turn, joined, length, spans
from rlinf.placement.profiling.step_costs import ASIDE, MOVING, PUBLISHING, Seen, role_of
from rlinf.runtime.observe.lap import Lap


@dataclass(frozen=True, slots=True)
class Waited:
    """Where the devices' time of a step went, seconds of the step."""

    seconds: float
    """Of the step."""
    work: float
    """Devices worked."""
    switching: float
    """They loaded and parked roles."""
    sync: float
    """They published or took weights."""
    tail: float
    """They idled while the last few items were generated."""
    others: Mapping[tuple[str, str], float]
    """They idled while a role worked elsewhere: by (role whose device idled, role that worked)."""
    beside: Mapping[str, float]
    """No device worked, and a role beside them did: by role."""
    nobody: float
    """Nobody worked."""
    by_actor: Mapping[str, float]
    """Seconds that each actor on devices worked."""
    moved: Mapping[str, float]
    """By role: seconds of loading and parking, added up over its actors."""


def waited(lap: Lap, devices: Mapping[str, frozenset[int]], seen: Seen) -> Waited:
    """Split the time of a step.

    Args:
        lap: the step.
        devices: of every actor, by a name such as "rollout[0]"; an actor that is missing has none.
        seen: what was read off it.
    """
    actors: dict[str, list[Spans]] = defaultdict(list)
    for part in lap.busy:
        if part.endpoint not in ASIDE | MOVING | PUBLISHING:
            actors[part.actor].append(spans(part.intervals, lap.start, lap.end))
    own = {actor: joined(*parts) for actor, parts in actors.items()}
    roles: dict[str, list[Spans]] = defaultdict(list)
    beside: dict[str, list[Spans]] = defaultdict(list)
    for actor, times in own.items():
        (roles if devices.get(actor) else beside)[role_of(actor)].append(times)
    on, off = ({role: joined(*parts) for role, parts in each.items()} for each in (roles, beside))
    sums: dict[str, float] = defaultdict(float)
    others: dict[tuple[str, str], float] = defaultdict(float)
    apart: dict[str, float] = defaultdict(float)
    names = sorted(off, key=lambda role: -length(off[role]))
    for number, lane in seen.lanes.items():
        mine = sorted({role_of(actor) for actor, where in devices.items() if number in where})
        working = [role for role in on if len(on[role])]
        parts = [
            lane.work,
            lane.switch,
            lane.sync,
            seen.tail,
            *(on[role] for role in working),
            *(off[n] for n in names),
        ]
        found = in_turn(parts)
        for name, seconds in zip(("work", "switching", "sync", "tail"), found, strict=False):
            sums[name] += seconds
        for role, seconds in zip(working, found[4:], strict=False):
            others["+".join(mine) or "nobody", role] += seconds
        for role, seconds in zip(names, found[4 + len(working) :], strict=True):
            apart[role] += seconds
        sums["nobody"] += seen.seconds - sum(found)
    count = max(1, len(seen.lanes))
    moved: dict[str, float] = defaultdict(float)
    for move in lap.moves:
        moved[role_of(move.actor)] += move.end - move.start
    return Waited(
        seen.seconds,
        sums["work"] / count,
        sums["switching"] / count,
        sums["sync"] / count,
        sums["tail"] / count,
        {pair: seconds / count for pair, seconds in others.items()},
        {role: seconds / count for role, seconds in apart.items()},
        sums["nobody"] / count,
        {actor: length(times) for actor, times in own.items() if devices.get(actor)},
        dict(moved),
    )
