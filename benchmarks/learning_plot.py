"""Before and after as an SVG: a row per recipe, in it a line per seed from the start's accuracy to the end's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.learning_runs import Outcome

LEFT, RIGHT, TOP, BOTTOM, WIDTH = 196, 84, 48, 40, 820
ROW, SEED = 30, 8
"""Height of a recipe, and distance of its seeds' lines, pixels."""
LEARNED, NOT, MARK = "#0b62a4", "#d1495b", "#444"


def picture(outcomes: Sequence[Outcome]) -> str:
    """The picture. A tick on each line is where the error is half of the start's; a run that failed is said in words.

    Args:
        outcomes: of any recipes and seeds.
    """
    recipes = list(dict.fromkeys(outcome.recipe for outcome in outcomes))
    height = TOP + ROW * len(recipes) + BOTTOM
    ended = [outcome for outcome in outcomes if not outcome.failure]
    lowest = min((min(outcome.before, outcome.after) for outcome in ended), default=0.0)
    low = int(lowest * 10) / 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13"><title>Before and after</title><rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
        *_axis(low, height),
    ]
    for number, recipe in enumerate(recipes):
        middle = TOP + ROW * (number + 0.5)
        parts.append(f'<text x="{LEFT - 12}" y="{middle + 4:.1f}" text-anchor="end">{recipe}</text>')
        seeds = [outcome for outcome in outcomes if outcome.recipe == recipe]
        for place, outcome in enumerate(seeds):
            parts += _run(outcome, low, middle + SEED * (place - (len(seeds) - 1) / 2))
        if minutes := [outcome.processor_minutes for outcome in seeds if not outcome.failure]:
            text = f"{statistics.median(minutes):.1f}"
            parts.append(f'<text x="{WIDTH - 12}" y="{middle + 4:.1f}" text-anchor="end">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _run(outcome: Outcome, low: float, y: float) -> list[str]:
    if outcome.failure:
        return [f'<text x="{LEFT + 6}" y="{y + 3:.1f}" fill="{NOT}" font-size="9">seed {outcome.seed} failed</text>']
    start, end, half = (_x(share, low) for share in (outcome.before, outcome.after, (1 + outcome.before) / 2))
    colour = LEARNED if outcome.learned else NOT
    return [
        f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="1.5"/>',
        f'<line x1="{half:.1f}" x2="{half:.1f}" y1="{y - 3:.1f}" y2="{y + 3:.1f}" stroke="{MARK}"/>',
        f'<circle cx="{start:.1f}" cy="{y:.1f}" r="3" fill="white" stroke="{colour}"/>',
        f'<circle cx="{end:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>',
    ]


def _legend() -> list[str]:
    signs = (
        (LEFT, "before", f'<circle cx="0" cy="0" r="3" fill="white" stroke="{LEARNED}"/>'),
        (LEFT + 72, "after", f'<circle cx="0" cy="0" r="3" fill="{LEARNED}"/>'),
        (LEFT + 132, "half of the error is gone", f'<line x1="0" x2="0" y1="-4" y2="4" stroke="{MARK}"/>'),
        (LEFT + 312, "error not halved", f'<circle cx="0" cy="0" r="3" fill="{NOT}"/>'),
    )
    words = [f'<text x="{WIDTH - 12}" y="22" text-anchor="end">processor minutes</text>']
    return words + [
        f'<g transform="translate({x},18)">{sign}<text x="8" y="4">{text}</text></g>' for x, text, sign in signs
    ]


def _axis(low: float, height: int) -> list[str]:
    parts = []
    for tenth in range(round(10 * low), 11):
        x = _x(tenth / 10, low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{10 * tenth}</text>')
    label = "held-out problems answered right, greedily, %"
    return [*parts, f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{label}</text>']


def _x(share: float, low: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (share - low) / max(1e-9, 1 - low)
