"""Breakdown of a step's time: generation, scoring, training, sync, and the rest.

In: who was busy when, on all hosts, from the runtime's spans. Out: the metrics `timing/...`, and one sentence.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

from rlinf.runtime.observe.spans import UNKNOWN, Interval, Lap, union

ACTIVITIES = ("generation", "simulation", "acting", "scoring", "training", "sync")
"""Activities of which a step consists; `timing/other` is the time in which none of them went on."""

_BY_ENDPOINT = {
    "generate": "generation",
    "answer": "generation",
    "stream": "generation",
    "score": "scoring",
    "scores": "scoring",
    "logprobs": "scoring",
    "outputs": "scoring",
    "values": "scoring",
    "train": "training",
    "sft": "training",
    "forward_backward": "training",
    "token_passes": "training",
    "optim_step": "training",
    "forward": "scoring",
    "likeliest": "scoring",
    "model_weights": "sync",
    "learn": "training",
    "remember": "training",
    "imitate": "training",
    "imitate_steps": "training",
    "study": "training",
    "fit": "training",
    "held_out": "scoring",
    "weights": "sync",
    "load": "sync",
    "load_switch": "sync",
    "follow": "sync",
    "save": "saving",
    "act": "acting",
    "trajectory": "acting",
    "reset": "simulation",
    "prepare": "simulation",
    "observe": "simulation",
    "step": "simulation",
}
_BY_ROLE = {
    "rollout": "generation",
    "judge": "scoring",
    "reward_model": "scoring",
    "reference": "scoring",
    "critic": "training",
    "trainer": "training",
    "teacher": "scoring",
    "env": "simulation",
    "trials": "simulation",
    "policy": "acting",
}
"""For what a role computes while none of its calls runs."""

PACKED, ARRIVED = "weights/checksum_seconds", "weights/arrived"
"""Spans that publishers report last, and receivers first."""

_TOLD = 0.1
"""Share of a trainer's tokens that prefix trees save from which on a step tells it: less is lost in a step's time."""
READABLE = 0.005
"""Seconds; less would be told as 0.00."""


def activity_of(actor: str, endpoint: str) -> str | None:
    """Return the activity that a call contributes to: one of `ACTIVITIES`, `saving`, or for a role of one's own the
    endpoint's name.

    None for what our roles do besides, such as agreeing among ranks: it is waiting, or too short to be told. None for
    loading and parking, which is read off a lap's moves.
    """
    role = actor.partition("[")[0]
    role = "teacher" if role.startswith("teacher_") else role  # one of several
    if endpoint in _BY_ENDPOINT:
        return _BY_ENDPOINT[endpoint]
    if endpoint == UNKNOWN:
        return _BY_ROLE.get(role, role)
    return None if role in _BY_ROLE or endpoint in ("onload", "offload") else endpoint


def stages(lap: Lap) -> dict[str, list[Interval]]:
    """Return when at least one rank of any host was at each activity; see `activity_of`."""
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for part in lap.busy:
        if (activity := activity_of(part.actor, part.endpoint)) is not None:
            intervals[activity].extend(part.intervals)
    return {name: union(times) for name, times in intervals.items()}


def timing(lap: Lap) -> dict[str, float]:
    """The metrics of one step, in seconds.

    `timing/generation`, `timing/scoring`, `timing/training` and `timing/sync` are the times in which at least one rank
    of any host was at it; they overlap, so their sum may exceed the step. `timing/overlap` is the time in which at
    least two of them went on side by side. `timing/switching` is the time in which roles were loaded or parked, if any
    was; `timing/other` that in which nothing of all this went on.
    """
    merged = stages(lap)
    ours = {name: merged.get(name, []) for name in ACTIVITIES}
    switching = union((move.start, move.end) for move in lap.moves if move.end > move.start)
    everything = union(itertools.chain(switching, *ours.values()))
    metrics = {f"timing/{name}": _length(times) for name, times in ours.items() if times}
    metrics |= {f"timing/{name}": _length(times) for name, times in merged.items() if name not in ACTIVITIES}
    if switching:
        metrics["timing/switching"] = _length(switching)
    metrics["timing/overlap"] = _shared(list(ours.values()))
    metrics["timing/other"] = max(0.0, lap.end - lap.start - _length(everything))
    return metrics


def parts(lap: Lap) -> dict[str, float]:
    """The metrics that actors told of in a step (`Actor.note`): bytes and tokens of all, seconds of the slowest, the
    largest error, and of counts the sum of each one's largest.

    `weights/send_seconds` is the time from a trainer's having packed its weights to their arrival at the last receiver.
    """
    metrics: dict[str, float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], float] = defaultdict(float)
    packed, arrived = [], []
    for span in lap.parts:
        if span.what == PACKED:
            packed.append(span.end)
        elif span.what == ARRIVED:
            arrived.append(span.end)
        if span.what.endswith(("_bytes", "_tokens")):
            metrics[span.what] += span.bytes
        elif span.what.endswith("_error"):
            metrics[span.what] = max(metrics[span.what], span.bytes)
        elif span.what.endswith("_count"):
            counts[span.what, span.actor] = max(counts[span.what, span.actor], span.bytes)
        elif span.what.endswith("_seconds"):
            seconds[span.what, span.actor] += span.end - span.start
    for (what, _), each in seconds.items():
        metrics[what] = max(metrics[what], each)
    for (what, _), count in counts.items():
        metrics[what] += count
    sent = [at - max(before) for at in arrived if (before := [end for end in packed if end <= at])]
    return {**metrics, **({"weights/send_seconds": max(sent)} if sent else {})}


def sentence(metrics: Mapping[str, float]) -> str:
    """One step's timing in words, such as "0.54 s: training 0.48, generation 0.17 (0.12 side by side), other 0.01";
    empty where the metrics have none."""
    if "timing/step" not in metrics or "timing/other" not in metrics:
        return ""
    named = [(name, metrics.get(f"timing/{name}", 0.0)) for name in (*ACTIVITIES, "switching")]
    activities = [(name, seconds) for name, seconds in named if seconds >= READABLE]
    text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(activities, key=lambda part: -part[1]))
    if (overlap := metrics.get("timing/overlap", 0.0)) >= READABLE:
        text += f" ({overlap:.2f} side by side)"
    if (other := metrics["timing/other"]) >= READABLE or text:
        text += f"{', ' if text else ''}other {other:.2f}"
    if (saved := metrics.get("tokens_read/saved", 0.0)) >= _TOLD:
        text += f"{'; ' if text else ''}beginnings in common saved {saved:.0%} of the trainer's tokens"
    return f"{metrics['timing/step']:.2f} s{f': {text}' if text else ''}"


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _shared(groups: list[list[Interval]]) -> float:
    """Seconds that lie in at least two of the groups."""
    edges = sorted((at, change) for times in groups for start, end in times for at, change in ((start, 1), (end, -1)))
    total, depth, since = 0.0, 0, 0.0
    for at, change in edges:
        if depth >= 2:
            total += at - since
        depth, since = depth + change, at
    return total
