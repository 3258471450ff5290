"""Candidate plans for rehearsal: the best of each mode by formula, and its neighbours.

Flows in: a workload. Flows out: plans as trees with calculated seconds, best first. Nothing waits here.

A formula ranks structures well, and near neighbours badly: a chunk more or less, a node more here and less there. So
the neighbours of each mode's best are listed, as far as they fit, for the rehearsal to tell apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from rlinf.placement.plan import Plan
from rlinf.placement.planner.plan_tree import Leaf, Tree, leaves, replay, to_plan, width
from rlinf.placement.planner.planner import best_of_each_mode
from rlinf.placement.planner.search import Found
from rlinf.placement.profiling.workload import Option, Workload

WITHIN = 1.1
"""Neighbours that are slower than the best of their mode by more are not rehearsed: formula and rehearsal differ by
less."""


def finalists(workload: Workload, per_mode: int = 3, *, sizes: int | None = None) -> list[Found]:
    """Return the best plans of each mode.

    Args:
        workload: what to plan.
        per_mode: how many of each.
        sizes: see `planner.plan`.
    """
    chosen: list[Found] = []
    for best in best_of_each_mode(workload, sizes=sizes).values():
        near = sorted(_neighbours(best, workload), key=lambda found: found.seconds)
        close = (found for found in near if found.seconds <= WITHIN * best.seconds)
        chosen += islice(_distinct(chain([best], close), workload), per_mode)
    return sorted(chosen, key=lambda found: found.seconds)


def fits(plan: Plan, workload: Workload) -> bool:
    """Whether no device is given more than it holds."""
    kinds = [kind for kind, count in workload.devices.items() for _ in range(count)]
    limited = workload.memory if workload.memory else {}
    return all(
        device < len(kinds) and peak <= limited.get(kinds[device], peak) for device, peak in peaks(plan, kinds).items()
    )


def peaks(plan: Plan, kinds: Sequence[str] = ()) -> dict[int, int]:
    """Return the most bytes on devices: of all of one kind with the same roles, for the first of them."""
    roles: dict[int, list[str]] = defaultdict(list)
    for name, role in plan.roles.items():
        for device in role.devices:
            roles[device].append(name)
    alike: dict[tuple[str, ...], int] = {}
    for device, names in roles.items():
        alike.setdefault((*names, kinds[device] if device < len(kinds) else ""), device)
    return {device: plan.peak(device) for device in alike.values()}


def _neighbours(found: Found, workload: Workload) -> Iterator[Found]:
    for chunks in workload.chunks:
        yield Found(found.tree, chunks, replay(found.tree, workload, chunks), found.estimate)
    for tree in _resized(found.tree, workload):
        yield Found(tree, found.chunks, replay(tree, workload, found.chunks), found.estimate)


def _resized(tree: Tree, workload: Workload) -> Iterator[Tree]:
    """The same structure with one stage a size larger or smaller, or one larger and another smaller."""
    names = [leaf.stage.name for leaf in leaves(tree)]
    for name in names:
        for step in (-1, 1):
            changed = _with(tree, name, step, workload)
            if changed is None:
                continue
            others = [_with(changed, other, -step, workload) for other in names if other != name]
            for one in (changed, *others):
                if one is not None and _beside_each_other(one, workload):
                    yield one


def _with(tree: Tree, name: str, step: int, workload: Workload) -> Tree | None:
    """The tree with one stage at its next larger or smaller size on the same kind of device; None if there is none."""
    if not isinstance(tree, Leaf):
        left, right = _with(tree.left, name, step, workload), _with(tree.right, name, step, workload)
        if left is not None:
            return replace(tree, left=left)
        return None if right is None else replace(tree, right=right)
    if tree.stage.name != name:
        return None
    option = _next(tree.option, workload.usable(tree.stage), step)
    return None if option is None else replace(tree, option=option)


def _next(option: Option, options: tuple[Option, ...], step: int) -> Option | None:
    beside = [one for one in options if one.kind == option.kind and (one.devices - option.devices) * step > 0]
    return min(beside, key=lambda one: (abs(one.devices - option.devices), one.seconds), default=None)


def _beside_each_other(tree: Tree, workload: Workload) -> bool:
    return all(count <= workload.devices.get(kind, 0) for kind, count in width(tree).items())


def _distinct(found: Iterable[Found], workload: Workload) -> Iterator[Found]:
    """Those that fit, without those that a rehearsal could not tell from an earlier one."""
    seen: set[object] = set()
    for one in found:
        made = to_plan(one.tree, workload, one.chunks, None, None)
        cut = one.chunks if len(made.phases) < len(made.roles) else 1
        key = (cut, *((name, role.devices, role.phases, role.resident) for name, role in made.roles.items()))
        if key not in seen and fits(made, workload):
            seen.add(key)
            yield one
