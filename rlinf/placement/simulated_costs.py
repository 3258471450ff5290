"""Seconds and bytes of each role of a plan for any share of a step, and of generation that decodes all at once.

Flows in: a plan and the workload that it was made for. Flows out: a `RoleCost` per role. Times are of shares of a step,
so that an item of a rehearsal may stand for many: of 131,072 groups in 64 chunks, 256 items tell all that matters.

`Company` says when each item leaves that comes at any time. A token takes a + b·n with n items at work. In units of the
longest item, with B items of a step, L = a·tokens of the longest and q = b·tokens of all, that is
L + q·(n / B) / mean length. Lengths are those that make a step's items alone leave by its release curve. Nothing waits
here: `simulated_actors.py` asks when to wake.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf.placement.grammar import PlacementError
from rlinf.placement.plan import Plan, RolePlan
from rlinf.placement.profile import Release
from rlinf.placement.workload import Option, Stage, Workload

_HALVINGS = 60
"""Of an interval that holds the mean length; the last ones change no bit."""


def lengths(release: Release, seconds: float, longest: float, count: int) -> list[float]:
    """Return the lengths of a step's items, ascending to 1, the longest.

    Args:
        release: when they leave if they are alone.
        seconds: until the last of them has.
        longest: of these, L.
        count: of items.
    """
    steps = np.diff(np.array(release.chunks(count)), prepend=0.0) * seconds
    shares = np.arange(count, 0, -1) / count

    def grown(mean: float) -> np.ndarray:
        grown: np.ndarray = np.cumsum(steps / (longest + (seconds - longest) * shares / mean))
        return grown

    low, high = 1e-9, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if grown(middle)[-1] > 1 else (middle, high)
    return [float(length) for length in grown(high) / grown(high)[-1]]


class Company:
    """Items at work on one rank.

    Args:
        lengths: of a step's items on this rank, ascending to 1.
        shared: q, seconds of work that all of them share.
        longest: L, seconds of the longest item alone.
    """

    def __init__(self, lengths: Sequence[float], shared: float, longest: float) -> None:
        self._lengths = lengths
        self._longest, self._each = longest, shared / sum(lengths)
        self._grown = 0.0
        self.since = 0.0
        """Until when it has been followed; later than now while it is paused."""
        self._ends: list[tuple[float, int]] = []
        self._begun = 0

    def add(self, now: float, ids: Sequence[int]) -> None:
        """Begin with these; the lengths of each step's items come in an order that mixes them."""
        self._advance(now)
        count = len(self._lengths)
        for id in ids:
            number = self._begun % count
            length = self._lengths[(number * _stride(count)) % count]
            heapq.heappush(self._ends, (self._grown + length, id))
            self._begun += 1

    @property
    def next(self) -> float | None:
        """When the next item leaves; None if none is at work."""
        return None if not self._ends else self.since + (self._ends[0][0] - self._grown) * self._unit

    def leave(self, now: float) -> list[int]:
        """The items that have left until now."""
        self._advance(now)
        ids = []
        while self._ends and self._ends[0][0] <= self._grown + 1e-9:
            ids.append(heapq.heappop(self._ends)[1])
        return ids

    def pause(self, now: float, seconds: float) -> None:
        """Nothing grows for so long, from now on."""
        self._advance(now)
        self.since += seconds

    @property
    def _unit(self) -> float:
        """Seconds in which items grow by the longest's length."""
        return self._longest + self._each * len(self._ends)

    def _advance(self, now: float) -> None:
        if now > self.since:
            if self._ends:
                self._grown += (now - self.since) / self._unit
            self.since = now


def _stride(count: int) -> int:
    """About the golden section of a number, without a common divisor."""
    stride = max(1, round(count * 0.618))
    while np.gcd(stride, count) != 1:
        stride += 1
    return stride


@dataclass(frozen=True, slots=True)
class RoleCost:
    """One role at the size that a plan gives it."""

    name: str
    """Of the role."""
    devices: tuple[int, ...]
    """Numbers of its devices, ascending."""
    points: tuple[tuple[float, float], ...] = ()
    """(share of a step, seconds), ascending; the last is the whole step."""
    at_a_time: float = 1.0
    """Share of a step that it takes at a time."""
    release: Release | None = None
    """When items leave it, if it has all of its input from the start; None: chunk by chunk."""
    active_bytes: int = 0
    """Per device while it is loaded."""
    parked_bytes: int = 0
    """Per device while it is parked."""
    onload_seconds: float = 0.0
    """From parked to loaded."""
    offload_seconds: float = 0.0
    """From loaded to parked."""
    sync_seconds: float = 0.0
    """To take new weights."""
    transfers: Mapping[str, float] = field(default_factory=dict)
    """By producer: seconds to move all items of a step from its devices to these."""
    longest: float = 0.0
    """Seconds that its longest item takes alone; see `Option.longest`."""
    lease_share: float | None = None
    """Share of a step after which it offers its devices to others; None: the runtime's own rule."""

    def seconds(self, share: float) -> float:
        """Seconds of a share of a step in one go: straight lines between what is known, and to nothing in no time."""
        points = (self.points and [(0.0, 0.0), *self.points]) or [(0.0, 0.0), (1.0, 0.0)]
        index = min(max(1, bisect_left([at for at, _ in points], share * (1 - 1e-9))), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        if math.isclose(share, x1, rel_tol=1e-9):
            return y1
        return y0 + (y1 - y0) * (share - x0) / (x1 - x0)


def costs_of(plan: Plan, workload: Workload, items: int) -> dict[str, RoleCost]:
    """Return what each role of the plan costs.

    Args:
        plan: says where roles run and how finely.
        workload: what the plan was made for.
        items: of one step, in the numbers of the plan (`RolePlan.items`).

    Raises:
        PlacementError: the plan has a role, or a size of one, that the workload does not know.
    """
    stages = {stage.name: stage for stage in workload.stages}
    if problems := [
        f"plan: role {name!r} was not profiled; there are: {', '.join(stages)}"
        for name in plan.roles
        if name not in stages
    ]:
        raise PlacementError(problems)
    costs = [_cost(plan, name, stages[name], workload, items) for name in plan.roles]
    return {member.name: member for cost in costs for member in _members(cost)}


def members(stage: str) -> list[str]:
    """Return the roles of a stage: its own name, or those of a loop, such as "env+policy"."""
    return stage.split("+")


def _members(cost: RoleCost) -> Iterator[RoleCost]:
    """The roles of a loop take turns on its devices; how its time divides over them is not known, nor does it matter to
    the others: equally. Its bytes count once, with the first."""
    names = members(cost.name)
    points = tuple((share, seconds / len(names)) for share, seconds in cost.points)
    for number, name in enumerate(names):
        if number == 0:
            yield replace(cost, name=name, points=points)
        else:
            yield RoleCost(name, cost.devices, points, cost.at_a_time, sync_seconds=cost.sync_seconds)


def _cost(plan: Plan, name: str, stage: Stage, workload: Workload, items: int) -> RoleCost:
    role = plan.roles[name]
    option = _option(role, stage, workload)
    chunks = _chunks(role, workload, items)
    alone = all(not _at_once(role, other) for key, other in plan.roles.items() if key != name)
    fed = any(
        target == name and source in plan.roles and _at_once(plan.roles[source], role) for source, target in plan.edges
    )
    whole = stage.alone(option, chunks) if alone else option.seconds
    cut = {1 / count: stage.chunk(option, count) for count in {*option.chunk_seconds, chunks} if count > 1}
    cut[1.0] = whole
    transfers = {
        edge.source: edge.seconds
        for edge in workload.edges
        if edge.target == name and edge.source in plan.roles
        if edge.seconds and not set(plan.roles[edge.source].devices) & set(role.devices)
    }
    return RoleCost(
        name,
        role.devices,
        tuple(sorted(cut.items())),
        1 / chunks,
        None if fed else stage.release,
        option.active_bytes,
        option.parked_bytes,
        option.onload_seconds,
        option.offload_seconds,
        _sync(plan, name, workload),
        transfers,
        option.longest,
        None if role.lease_items is None else role.lease_items / items,
    )


def _at_once(role: RolePlan, other: RolePlan) -> bool:
    return bool(set(role.phases) & set(other.phases))


def _option(role: RolePlan, stage: Stage, workload: Workload) -> Option:
    """The size that a plan means: its count on its kind, and of several such the one that holds as many bytes."""
    kinds = [kind for kind, count in workload.devices.items() for _ in range(count)]
    own = {kinds[number] for number in role.devices if number < len(kinds)}
    options = [
        option
        for option in stage.options
        if option.devices == len(role.devices) and (not role.devices or own == {option.kind})
    ]
    if not options:
        counts = sorted({option.devices for option in stage.options})
        near = sorted(counts, key=lambda count: abs(count - len(role.devices)))[:3]
        raise PlacementError(
            [
                f"roles.{stage.name}: nothing is known of it on {len(role.devices)} devices: give it "
                f"{', '.join(map(str, sorted(near)))}, or profile it there"
            ]
        )
    return min(options, key=lambda option: (abs(option.active_bytes - role.active_bytes), option.seconds))


def _chunks(role: RolePlan, workload: Workload, items: int) -> int:
    """Into how many parts a role's step is cut."""
    if role.items is None:
        return workload.chunks[0]
    return max(1, round(items / role.items))


def _sync(plan: Plan, name: str, workload: Workload) -> float:
    """Seconds in which it takes new weights: `together` where it shares devices with their source."""
    total = 0.0
    for sync in workload.sync:
        if sync.target == name and sync.source in plan.roles:
            shared = set(plan.roles[sync.source].devices) & set(plan.roles[name].devices)
            total += sync.together if shared else sync.apart
    return total
