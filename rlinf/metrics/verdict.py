"""Summary of a run's efficiency in two lines: step time, its lower bound, and where the difference went.

In: the metrics `bound/...`, `lost/...` and `timing/step` of its steps, and how much of its devices they used. Out:
their typical values, and two or three plain lines, the larger loss first.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlinf.metrics.limits import known, used, worth_a_word

PARTS = ("imbalance", "tail", "switching", "sync", "scaling", "interference", "overhead")
"""Losses of a step, metrics `lost/...`: together all that lies above the bound."""
MEANINGS = {
    "imbalance": "a device idles while another works",
    "tail": "devices idle while the last few items are generated",
    "switching": "roles are loaded and parked",
    "sync": "weights are published",
    "scaling": "roles run on more devices than suits them best",
    "interference": "work takes longer than usual: a busy machine, or longer answers",
    "overhead": "no device works: the runtime, data, scoring beside the devices, the flow itself",
}
"""Meaning of each of `PARTS`."""
BINDING = {
    "area": "all devices at work all the time",
    "saturation": "the slowest role, or roles that wait for each other's whole output",
    "network": "publishing weights",
}
"""Constraints that can set the bound, metrics `bound/...`."""
RESOURCES = {"mfu": "products", "mbu": "bandwidth"}
"""Limits of a device, by the metrics that tell what share of them a role used."""
_OF_DEVICES = ("mfu/", "mbu/", "idle/")
_JOINED = "rollout/joined_count"
"""Engines of other processes, whose work is on no device of the run."""
FAMILIES = ("bound/", "lost/", "timing/", "tokens_read/", _JOINED, *_OF_DEVICES)
"""Beginnings of the metrics that a verdict is made of: they tell how a step was done, and not what it learned."""
READABLE = 0.005
"""Share of a step; less is not worth a word."""
_OF_FIVE = 5
"""Steps of which four are told: fewer cannot be told from accidents."""
_HALVED = 4
"""Steps of which the quickest and the slowest quarter are left out: fewer have none."""
_FEW = 0.05
"""Engines that joined, on average: fewer were not there for one step in twenty."""
_SPREAD = 0.05
"""Share of the bound by which it varies between steps before that is told."""


def typical(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the middle half of the steps by how long they took: so neither first steps nor accidents count, and
    the parts still add up to the whole.

    Args:
        steps: metrics of each, in order; those without `bound/seconds` are left out if others have it, and the first
            one, which warms up, if there are others.

    Returns:
        The means, of `timing/...` too; and where bounds are known, between which values those of four of five steps
        lie, `bound/low` and `bound/high`: what roles cost varies with what else the machine does.
    """
    counted = _counted(steps)
    ordered = sorted(counted, key=lambda step: float(step["timing/step"]))
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    names = {name for step in middle for name in step if name.startswith(FAMILIES)}
    means = {name: _mean(name, middle) for name in names}
    if "bound/seconds" in means:
        means["bound/efficiency"] = means["bound/seconds"] / means["timing/step"]
        means["bound/low"], means["bound/high"] = _four_of_five([float(step["bound/seconds"]) for step in ordered])
    return means


def _mean(name: str, steps: Sequence[Mapping[str, Any]]) -> float:
    """Mean of a metric; where it is missing it is 0, but of devices whose limits came to be known between two steps."""
    known_later = name == "bound/device" or name.startswith(_OF_DEVICES)
    return statistics.fmean(float(step.get(name) or 0.0) for step in steps if name in step or not known_later)


def over(steps: Iterable[Mapping[str, Any]]) -> str:
    """The steps that `typical` takes means over, in words: "the middle half of the steps, on average"; "" for a run of
    a single one.

    Args:
        steps: metrics of each.
    """
    steps = list(steps)
    count = len(_counted(steps))
    if count >= _HALVED:
        return "the middle half of the steps, on average"
    if count > 1:
        return f"the {count} steps after the first, on average"
    return "the step after the first" if sum("timing/step" in step for step in steps) > 1 else ""


def _counted(steps: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Steps that tell of a typical one: those with a bound if there are any, without the first of several."""
    timed = [step for step in steps if "timing/step" in step]
    with_bound = [step for step in timed if isinstance(step.get("bound/seconds"), int | float)] or timed
    return with_bound[1:] or with_bound


def tells(steps: Sequence[Mapping[str, Any]]) -> bool:
    """True if there are enough steps for a verdict in words: "four steps of five" wants five, and the first warms up.

    Args:
        steps: metrics of each.
    """
    return sum("bound/seconds" in step for step in steps) > _OF_FIVE


def _four_of_five(values: Sequence[float]) -> tuple[float, float]:
    """Between which values four of five lie: the 10 % and 90 % quantiles."""
    if len(values) < 2:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def lost(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts worth a word, the largest first, seconds of a step."""
    parts = [(part, metrics.get(f"lost/{part}", 0.0)) for part in PARTS]
    worth = [(part, seconds) for part, seconds in parts if seconds >= READABLE * metrics["timing/step"]]
    return sorted(worth, key=lambda part: -part[1])


def binding(metrics: Mapping[str, float]) -> str:
    """Return the constraint that sets the bound: a key of `BINDING`."""
    return max(BINDING, key=lambda name: metrics.get(f"bound/{name}", 0.0))


def verdict(metrics: Mapping[str, float], device: str = "") -> Sequence[str]:
    """Typical metrics in a few lines; none where they tell no bound.

    Args:
        metrics: see `typical`.
        device: what the job's devices are, see `machine`.
    """
    if "bound/seconds" not in metrics:
        return []
    devices = round(metrics["bound/devices"])
    step, least, which = metrics["timing/step"], metrics["bound/seconds"], binding(metrics)
    low, high = metrics.get("bound/low", least), metrics.get("bound/high", least)
    spread = f" ({_seconds(low, step)} to {_seconds(high, step)} in four steps of five)"
    lines = [
        f"{metrics['bound/efficiency']:.0%} of what is possible on {devices} device{'s' if devices != 1 else ''}, at "
        f"what the roles cost in this run: no step could take less than {_seconds(least, step)} s"
        f"{spread if high - low >= _SPREAD * least else ''} ({which}: {BINDING[which]})"
    ]
    if (engines := metrics.get(_JOINED, 0.0)) >= _FEW:
        lines.append(
            f"engines that joined generated too, {engines:.2g} on average: what they could do is not in the bound"
        )
    if parts := lost(metrics):
        losses = ", ".join(f"{part} {_seconds(seconds, step)}" for part, seconds in parts)
        lines.append(f"lost per step: {losses} s")
    if own := of_the_device(metrics, device):
        lines.insert(0 if idles_most(metrics, device) else len(lines), own)
    return lines


def idles_most(metrics: Mapping[str, float], device: str = "") -> bool:
    """True if devices lost more while roles had them than all parts of `lost`; `metrics`, `device`: see `verdict`."""
    above = metrics["timing/step"] - metrics["bound/seconds"]
    return worth_a_word(metrics, _kind(device)) and sum(idle(metrics).values()) > above


def _kind(device: str) -> str:
    return "cpu" if device.startswith("CPU") else "cuda"


def idle(metrics: Mapping[str, float]) -> dict[str, float]:
    """By role, the most first: seconds of a step in which its devices were its own and did little of what they can."""
    roles = {name.removeprefix("idle/"): value for name, value in metrics.items() if name.startswith("idle/")}
    return dict(sorted(roles.items(), key=lambda part: -part[1]))


def of_the_device(metrics: Mapping[str, float], device: str = "") -> str:
    """How much of what its devices can do a step used, in words; "" where their limits are not known.

    Args:
        metrics: see `typical`.
        device: what the devices are.
    """
    if "bound/device" not in metrics:
        return ""
    shares = {role: {kind: metrics.get(f"{kind}/{role}", 0.0) for kind in RESOURCES} for role in idle(metrics)}
    most = [(role, max(kinds, key=lambda kind: kinds[kind])) for role, kinds in shares.items()]
    clauses = ", ".join(used(role, RESOURCES[kind], shares[role][kind], "its") for role, kind in most)
    known_by = "" if known(device) else ", measured"
    where = f"the device{'s' if metrics['bound/devices'] > 1 else ''}{f' ({device}{known_by})' if device else ''}"
    if not worth_a_word(metrics, _kind(device)):
        return f"too little work to fill {where}: {clauses}"
    step, least = metrics["timing/step"], metrics["bound/device"]
    share = f"{least / step:.{0 if least >= 0.095 * step else 1}%}"
    return f"{share} of what {where} could do, whose own limit is {_seconds(least, step)} s a step: {clauses}"


def _seconds(seconds: float, step: float) -> str:
    """With as many digits as tell a hundredth of a step."""
    return f"{seconds:.{1 if step >= 10 else 2 if step >= 0.5 else 3 if step >= 0.05 else 4}f}"
