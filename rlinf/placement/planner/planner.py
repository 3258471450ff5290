"""The planner: which stages share devices, which have their own, in which order and how finely data moves.

Flows in: a `Workload`. Flows out: the best plan, and the best of each mode, as trees with their seconds. Nothing waits
here.

One search over all structures is in `search.py`. Here is which sizes it is given: all of them if they are few.
Otherwise those that balance stages (`balance.py`), then a thinned set, and each time, round by round, those around the
best so far. The best plan so far bounds the next search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf.placement.plan import Mode
from rlinf.placement.profiling.workload import Option, Workload

from .balance import balanced
from .plan_tree import Leaf, Tree, leaves
from .search import Allowed, Found, Search

_COARSE = 8
"""Sizes per stage in a first search of plans in turns only, whose best bounds the next."""
_FINE = {1: 128, 2: 128, 3: 128, 4: 64, 5: 32, 6: 16}
"""Sizes per stage in the widest search, by number of stages: about what a quarter of a second of one core allows."""
_FINE_BEYOND = 8
"""The same for more stages."""
_BESIDE = (-2, -1, 0, 1, 2)
"""Sizes around the best so far that are tried next: its count times the ratio of the round to these powers."""
_ROUNDS = ((1.5, 0.01), (1.2, 0.005), (1.08, 0.002), (1.03, 0.002))
"""Ratio of neighbouring sizes, and by how much a round must improve the plan."""
_NEAR = 2
"""Rounds that are left out where sizes are balanced already."""
_REPEATS = 4
"""Times that a round is repeated while it improves the plan."""
TOLERANCE = 2e-3
"""A plan is not looked for that would be better by less: costs are not known so well. 0 finds the very best."""


def plan(
    workload: Workload, mode: Allowed = "any", *, tolerance: float = TOLERANCE, sizes: int | None = None
) -> Found | None:
    """Find the best plan.

    With at most `sizes` sizes per stage everything is tried, and the plan is the best within `tolerance`. Otherwise it
    begins with sizes that balance stages, tries so many per stage, spread evenly, and every structure again with sizes
    around the best ones, in ever smaller steps. That promises nothing; on 20 workloads of seven unlike stages and 1,024
    devices it ended at most 0.3 % above what a search with 32 sizes per stage finds.

    Args:
        workload: what to plan.
        mode: restrict it to stages that only take turns, that never share a device, or to mixtures of the two.
        tolerance: relative seconds by which it may be worse than the best of the sizes that were tried.
        sizes: None: 128 for up to three stages, fewer for more.

    Returns:
        The plan; None if there is none of this mode that fits.
    """
    sizes = sizes or _FINE.get(len(workload.stages), _FINE_BEYOND)
    everything = [list(workload.usable(stage)) for stage in workload.stages]
    options = [_thinned(own, workload, sizes) for own in everything]
    whole = all(len(some) == len(own) for some, own in zip(options, everything, strict=True))
    best = None if whole else _begun(workload, everything, mode, tolerance)
    if best is None and mode == "any":  # a first limit for next to nothing: everything in turns
        coarse = [_thinned(own, workload, _COARSE) for own in everything]
        best = Search(workload, coarse, workload.chunks[0], "collocated", None, 0.0).run()
    allowed = tolerance if whole else max(tolerance, 0.01)  # refinement goes below a percent, the wide search need not
    wide = None
    for chunks in workload.chunks:
        wide = Search(workload, options, chunks, mode, wide or best, allowed).run() or wide
    if whole or wide is None:
        return wide or best
    return _refined(wide, workload, everything, mode, tolerance)


def _begun(workload: Workload, everything: Sequence[Sequence[Option]], mode: Allowed, tolerance: float) -> Found | None:
    """A good plan for little: sizes that balance phases, then refined. It is the limit of the search that tries all."""
    best: Found | None = None
    for chunks in workload.chunks:
        sizes = balanced(workload, chunks, 1 if mode == "collocated" else len(workload.stages))
        if sizes is not None:
            best = Search(workload, [[size] for size in sizes], chunks, mode, best, 0.0).run() or best
    return None if best is None else _refined(best, workload, everything, mode, tolerance, _ROUNDS[_NEAR:])


def _refined(
    best: Found,
    workload: Workload,
    everything: Sequence[Sequence[Option]],
    mode: Allowed,
    tolerance: float,
    rounds: Sequence[tuple[float, float]] = _ROUNDS,
) -> Found:
    """Search every structure again, with sizes around the best ones, in ever smaller steps."""
    for ratio, improvement in rounds:
        for _ in range(_REPEATS):
            now = _by_stage(best.tree, workload)
            near = [_near(leaf, own, ratio, workload) for leaf, own in zip(now, everything, strict=True)]
            found = Search(workload, near, best.chunks, mode, best, min(improvement, tolerance)).run()
            if found is None:
                break
            best = found
    return best


def best_of_each_mode(workload: Workload, **how: Any) -> dict[Mode, Found]:
    """Return the best plan of each mode that has one, as `plan` finds it."""
    found = {mode: plan(workload, mode, **how) for mode in ("collocated", "disaggregated", "hybrid")}
    # A single stage is "collocated" however it was looked for.
    return {mode: one for mode, one in found.items() if one is not None and one.mode == mode}


def _thinned(options: Sequence[Option], workload: Workload, size: int) -> list[Option]:
    """Of each kind of device keep about `size` counts, densest where they are small; the most that fits among them."""
    kept: list[Option] = []
    for kind in sorted({option.kind for option in options}):
        own = [option for option in options if option.kind == kind]
        limit = workload.devices.get(kind, 0)
        targets = [limit * step / size for step in range(1, size + 1)]
        targets += [limit / size / 2, limit / size / 4, limit / size / 8]  # a judge needs a small share of a cluster
        kept += _closest(own, targets) if len({option.devices for option in own}) > size else own
    return kept


def _closest(options: Sequence[Option], targets: Sequence[float]) -> list[Option]:
    """For each target all options with the largest count that is not above it, or the smallest there is."""
    counts = sorted({option.devices for option in options})
    chosen = {max((count for count in counts if count <= target), default=counts[0]) for target in targets}
    return [option for option in options if option.devices in chosen]


def _by_stage(tree: Tree, workload: Workload) -> list[Leaf]:
    found = {leaf.stage.name: leaf for leaf in leaves(tree)}
    return [found[stage.name] for stage in workload.stages]


def _near(leaf: Leaf, options: Sequence[Option], ratio: float, workload: Workload) -> list[Option]:
    """Sizes around the one of a plan, and all devices, for those who would rather take turns; other kinds likewise."""
    kept: list[Option] = []
    for kind in sorted({option.kind for option in options}):
        limit = workload.devices.get(kind, 0)
        middle = leaf.option.devices if leaf.option.kind == kind else limit / 2
        targets = [middle * ratio**beside for beside in _BESIDE] + [limit]
        kept += _closest([option for option in options if option.kind == kind], targets)
    return kept
