"""Seconds of a step in the long run, where generation for later steps overlaps learning of this one.

Flows in: a plan as a tree, its workload, and how many steps ahead generation may be. Flows out: seconds of a step, and
what sets them. Nothing waits here.

Batch k + s + 1 is begun once batch k is learned from and its weights are published (s: the staleness). So a step takes,
on average, the most of

* each device's work per batch: stages that share devices add up, stages on devices of their own do not;
* the way of one batch from its prompts to published weights, T of the synchronous step, over the s + 1 batches that are
  on it at once: the largest mean weight of a cycle in the timed event graph of the flow.

Both are exact for stages on devices of their own that take chunks in order (`tests/placement/asynchronous` holds them
against an event simulation). Generation that decodes all of its answers at once is no such stage. A token of it takes
a + b·n with n answers at work; so a batch alone takes S = L + q: L, its longest answer alone (`Option.longest`), and q,
work that all share. Begun early, later answers fill the places of those that are done, but slow the longest one down.
By Little's law n = (a·tokens / P) / (1 - q/P) on average, so the longest takes L·P / (P - q); with f, what follows on
it, that must fit into the s + 1 steps until its batch is learned from: (s + 1)·P = L·P / (P - q) + f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlinf.placement.planner.plan_tree import Leaf, Tree, layout, leaves, replay
from rlinf.placement.profiling.workload import Option, Workload


@dataclass(frozen=True, slots=True)
class Steady:
    """A step in the long run."""

    busiest: float
    """Seconds of work per step of the device that has the most, with its share of the tail."""
    loop: float
    """Seconds from prompts to published weights, divided among the batches that are on the way."""

    @property
    def seconds(self) -> float:
        """Of a step, on average."""
        return max(self.busiest, self.loop)


def steady(tree: Tree, workload: Workload, chunks: int, staleness: int) -> Steady:
    """Calculate a step in the long run.

    Args:
        tree: the plan.
        workload: what it plans.
        chunks: into how many a step is cut.
        staleness: versions by which the weights that make an answer may be older than those that learn from it, so the
            batches that are begun early; 0 is the synchronous step.
    """
    latency = replay(tree, workload, chunks)
    if not staleness:
        return Steady(0.0, latency)
    where = layout(tree, dict.fromkeys(workload.devices, 0))
    parts = {leaf.stage.name: leaf for leaf in leaves(tree)}
    alone = {name for name in parts if not any(_meet(name, other, where, parts) for other in parts if other != name)}
    busy = {name: load(leaf, chunks, staleness, alone=name in alone) for name, leaf in parts.items()}
    for name, seconds in _publishing(where, parts, workload):
        busy[name] += seconds
    # Devices are ranges without gaps, so the most stages meet where one of them begins.
    busiest = max(
        busy[name] + sum(busy[other] for other in parts if other != name and _meet(name, other, where, parts, at=0))
        for name in parts
    )
    filled = [parts[name].option for name in alone if parts[name].option.longest]
    return Steady(
        busiest, max((_loop(option, latency, staleness + 1) for option in filled), default=latency / (staleness + 1))
    )


def _loop(option: Option, latency: float, batches: int) -> float:
    """The least P for which a batch with company takes no more than so many steps: batches·P = L·P / (P - q) + f."""
    shared, after = option.seconds - option.longest, latency - option.seconds
    half = (batches * shared + option.longest + after) / 2
    return (half + math.sqrt(max(0.0, half**2 - batches * after * shared))) / batches


def load(leaf: Leaf, chunks: int, staleness: int, *, alone: bool) -> float:
    """Seconds of a step for which a stage needs its devices, switches included.

    Args:
        leaf: the stage.
        chunks: of a step.
        staleness: see `steady`.
        alone: no other stage is on its devices, so that it keeps them while its longest items go on. A stage that
            takes turns gives them up only when its items are done.
    """
    option = leaf.option
    switches = 0.0 if leaf.resident else option.onload_seconds + option.offload_seconds
    filled = option.longest * staleness / (staleness + 1) if alone else 0.0
    return leaf.stage.alone(option, chunks) - filled + switches


def _meet(name: str, other: str, where: Mapping[str, tuple[int, ...]], parts: Mapping[str, Leaf], at: int = -1) -> bool:
    """Whether another stage has devices of this one; with `at`: whether it has its first."""
    own, theirs = where[name], where[other]
    if not own or not theirs or parts[name].option.kind != parts[other].option.kind:
        return False
    return theirs[0] <= own[at] and own[0] <= theirs[-1]


def _publishing(
    where: Mapping[str, tuple[int, ...]], parts: Mapping[str, Leaf], workload: Workload
) -> Iterator[tuple[str, float]]:
    """Seconds that publishing takes of its source's devices, and of its target's: once, if both are on the same."""
    for sync in workload.sync:
        if _meet(sync.source, sync.target, where, parts):
            yield sync.target, sync.together
        else:
            yield sync.source, sync.apart
            yield sync.target, sync.apart
