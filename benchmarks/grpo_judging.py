"""Verdicts on the runs of `benchmarks.grpo`: one line per figure, with its bar and whether it is reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.grpo_contestants import BARE, OURS, THEIRS, Contestant, median_step

FASTER, OVERHEAD, MEMORY = 2.0, 0.05, 1.3
SMOOTHED = 5
"""Steps over which curves are averaged: 512 answers of one step scatter by two per cent around their probability."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure."""

    what: str
    """In words."""
    ours: str
    """Our number, with its spread over the rounds."""
    other: str
    """Whom it is compared with, and their number."""
    compared: str
    """The two in one number."""
    bar: str
    """Bar of that number; empty where it is for information."""
    verdict: str
    """pass, LOST, skipped, or nothing where there is no bar."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two sets of reward curves are from each other. A curve's value is a mean reward, 0 to 1."""

    apart: float
    """Mean over the steps of |mean of ours - mean of theirs|."""
    spread: float
    """Mean over the steps of highest - lowest seed, averaged over the two."""
    furthest: float
    """Largest |mean of ours - mean of theirs|."""
    step: int
    """Where that is, from 1."""
    spread_there: float
    """The spread at that step."""


def lines(entered: Sequence[Contestant], samples: int) -> list[Line]:
    """Every figure.

    Args:
        entered: with their runs.
        samples: answers per step.
    """
    found: list[Line] = []
    for cores in sorted({one.cores for one in entered}):
        # A peer may leave a core idle where that is its best; ours is what the quickstart does with them.
        fits = (one for one in entered if one.cores == cores or (one.cores < cores and one.system != OURS))
        found += _speed(cores, [one for one in fits if one.runs], samples)
    alone = {one.system: one for one in entered if one.cores == 1 and one.runs}
    if OURS in alone:
        found += _speed_of_cpu(alone, samples)
        found += _curves(alone)
    for one in entered:
        if one.system == OURS and one.runs:
            found += _overhead(one)
            found += _memory(one, alone.get(BARE))
    found += [Line(one.name, "", one.missing, "", "", "skipped") for one in entered if one.missing]
    return found


def agreement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Agreement:
    """Compare reward curves, each [seeds][steps] with at least one seed, smoothed over a few steps."""
    both = [[_smooth(curve) for curve in curves] for curves in (ours, theirs)]
    steps = min(len(curve) for curves in both for curve in curves)
    apart, spread = [], []
    for step in range(steps):
        values = [[curve[step] for curve in curves] for curves in both]
        apart.append(abs(statistics.mean(values[0]) - statistics.mean(values[1])))
        spread.append(statistics.mean(max(each) - min(each) for each in values))
    furthest = max(range(steps), key=apart.__getitem__)
    return Agreement(
        statistics.mean(apart), statistics.mean(spread), apart[furthest], furthest + SMOOTHED, spread[furthest]
    )


def show(values: Sequence[float], style: str) -> str:
    """The median, and the range where there are several."""
    middle = style.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} [{style.format(min(values))} to {style.format(max(values))}]"


def _speed(cores: int, there: Sequence[Contestant], samples: int) -> list[Line]:
    """How fast, beside everyone on so many cores; the bar is on the fastest setting of TRL."""
    peers = [one for one in there if one.system == THEIRS]
    best = max(peers, key=lambda one: statistics.median(one.rates), default=None)
    what = f"samples/s on {cores} core{'s' if cores > 1 else ''}"
    found = []
    for ours in (one for one in there if one.system == OURS):
        for other in [*peers, *(one for one in there if one.system == BARE)]:
            line = _rates(f"{what}, {ours.setting}", ours.rates, other, other.rates, samples)
            if other is best:
                reached = _verdict(_median_ratio(ours.rates, other.rates) >= FASTER)
                line = replace(line, bar=f"≥ {FASTER:g} ×", verdict=reached)
            found.append(line)
    return found


def _speed_of_cpu(alone: Mapping[str, Contestant], samples: int) -> list[Line]:
    """Speed per second that the process really had the core: what other work on the machine took is left out."""
    what, ours = "samples per processor second", alone[OURS]
    others = [alone[system] for system in (THEIRS, BARE) if system in alone]
    return [_rates(what, ours.rates_of_cpu, other, other.rates_of_cpu, samples) for other in others]


def _rates(what: str, ours: Sequence[float], other: Contestant, theirs: Sequence[float], samples: int) -> Line:
    mine, his = (show([rate * samples for rate in rates], "{:,.0f}") for rates in (ours, theirs))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Line(what, mine, f"{other.name}: {his}", show(ratios, "{:.2f} ×"), "", "")


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _curves(alone: Mapping[str, Contestant]) -> list[Line]:
    found = []
    mine = [run.rewards for run in alone[OURS].runs]
    last = show([statistics.mean(curve[-SMOOTHED:]) for curve in mine], "{:.3f}")
    for system in (THEIRS, BARE):
        if system not in alone or len(mine[0]) < SMOOTHED:
            continue
        curves = [run.rewards for run in alone[system].runs]
        met = agreement(mine, curves)
        their_last = show([statistics.mean(curve[-SMOOTHED:]) for curve in curves], "{:.3f}")
        compared = (
            f"means apart by {met.apart:.3f}, at most {met.furthest:.3f} at step {met.step} "
            f"(seeds there {met.spread_there:.3f})"
        )
        several = len(mine) > 1
        bar = f"≤ spread of seeds, {met.spread:.3f}" if several else "needs seeds"
        verdict = _verdict(met.apart <= met.spread) if several and system == THEIRS else ""
        found.append(Line("reward curves; last steps", last, f"{system}: {their_last}", compared, bar, verdict))
    return found


def _overhead(ours: Contestant) -> list[Line]:
    shares = [run.outside for run in ours.runs if run.outside is not None]
    loop = [median_step(run.loop) / median_step(run.seconds) for run in ours.runs]
    verdict = _verdict(statistics.median(shares) <= OVERHEAD)
    what = f"outside the stages, {ours.setting}"
    return [
        Line(what, show(shares, "{:.1%}"), "", "of a step nothing computed", f"≤ {OVERHEAD:.0%}", verdict),
        Line(what, show(loop, "{:.1%}"), "", "of a step rank 0's event loop ran, beside the stages or not", "", ""),
    ]


def _memory(ours: Contestant, bare: Contestant | None) -> list[Line]:
    if bare is None:
        return []
    ratios = [a.peak / b.peak for a, b in zip(ours.runs, bare.runs, strict=True)]
    mine, theirs = ([run.peak / 1e6 for run in one.runs] for one in (ours, bare))
    verdict = _verdict(statistics.median(ratios) <= MEMORY)
    return [
        Line(
            f"peak memory of the process that trains, {ours.setting}",
            show(mine, "{:.0f} MB"),
            f"{bare.name}: {show(theirs, '{:.0f} MB')}",
            show(ratios, "{:.2f} ×"),
            f"≤ {MEMORY:g} ×",
            verdict,
        )
    ]


def _smooth(curve: Sequence[float]) -> list[float]:
    return [statistics.mean(curve[end - SMOOTHED : end]) for end in range(SMOOTHED, len(curve) + 1)]


def _verdict(reached: bool) -> str:
    return "pass" if reached else "LOST"
