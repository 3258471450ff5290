"""What it brings that devices change hands within a step: learning goes on wherever answers are done.

Flows in: a plan, its workload, the items of a step. Flows out: seconds of a synchronous step whose last stage takes
over each device of the source as soon as that has nothing left to generate. Nothing waits here.

A device of the source is free once all of its items have left: with m items on each, of which a share F(t) has left, a
share F(t)^m of the devices is (items are taken to be independent). What learns is divided among all devices that it
has, as replicas can be that meet at the optimizer step alone, up to the largest size that was planned with: nobody
knows what more would bring. So a step takes the least T such that what left the
source after any time t can still be learned: the integral from t to T of the devices there are must be at least the
device-seconds of learning that are left.
It is a calculation without loading, parking and links, so an upper limit of the gain, and never below the bound.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import combinations, pairwise

from rlinf.placement.plan import Mode
from rlinf.placement.planner.plan_tree import leaves, to_plan
from rlinf.placement.planner.search import Found
from rlinf.placement.profiling.workload import Workload


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A synchronous step with devices that change hands, beside one without."""

    mode: Mode
    """Of the plan."""
    seconds: float
    """With."""
    without: float
    """As the plan is."""

    @property
    def gain(self) -> float:
        """By which share more steps are taken in the same time, at least 0."""
        return max(0.0, self.without / self.seconds - 1)


def handed_over(found: Found, workload: Workload, items: int, least: float = 0.0) -> HandedOver | None:
    """Calculate a step whose devices change hands.

    Args:
        found: the plan; all of its stages in turns on the same devices, or all on devices of their own.
        workload: what it plans.
        items: of a step.
        least: seconds below which no step can be, see `bound`.

    Returns:
        None where nothing is known of when items leave, or where some stages share devices and others do not.
    """
    parts = [leaf for leaf in leaves(found.tree) if leaf.option.devices]
    fed = {edge.target for edge in workload.edges}
    feeds = {edge.source for edge in workload.edges}
    source = next((leaf for leaf in parts if leaf.stage.release is not None and leaf.stage.name not in fed), None)
    made = to_plan(found.tree, workload, found.chunks, None, None)
    places = [set(role.devices) for role in made.roles.values() if role.devices]
    meet = {bool(one & other) for one, other in combinations(places, 2)}
    if source is None or source.stage.release is None or len(meet) != 1:
        return None
    own = 0
    if meet == {True}:
        fillers = [leaf for leaf in parts if leaf is not source]
    else:
        fillers = [leaf for leaf in parts if leaf.stage.name not in feeds]
        own = sum(leaf.option.devices for leaf in fillers)
    work = sum(leaf.option.devices * leaf.stage.alone(leaf.option, found.chunks) for leaf in fillers)
    shares = source.stage.release.shares
    each = max(1.0, items / source.option.devices)
    times = [0.0, *(share * source.option.seconds for share in shares)]
    most = max(option.devices for leaf in fillers for option in workload.usable(leaf.stage))
    free = [source.option.devices * (number / len(shares)) ** each for number in range(len(times))]
    count = [min(own + devices, float(most)) for devices in free]
    seconds = _least(
        times, count, [at * source.option.seconds for at in source.stage.release.chunks(found.chunks)], work
    )
    return HandedOver(made.mode, min(max(seconds, least), found.seconds), found.seconds)


def _least(times: list[float], count: list[float], left: list[float], work: float) -> float:
    """The least T: for every chunk, that and all that leave later fit between its leaving and T.

    Args:
        times: ascending from 0, at which there are more devices than before.
        count: devices from then on.
        left: when each chunk leaves, ascending.
        work: device-seconds of all chunks.
    """
    done = [0.0]
    for (start, end), devices in zip(pairwise(times), count, strict=False):
        done.append(done[-1] + (end - start) * devices)

    def until(time: float) -> float:
        at = bisect_right(times, time) - 1
        return done[at] + (time - times[at]) * count[at]

    def when(amount: float) -> float:
        at = bisect_right(done, amount) - 1
        while not count[at]:  # nobody works yet: it is done when somebody begins
            at += 1
        return times[at] + max(0.0, amount - done[at]) / count[at]

    return max(when(until(time) + work * (len(left) - k) / len(left)) for k, time in enumerate(left))
