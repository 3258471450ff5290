"""Reward curves as an SVG: per system the mean over its seeds, in a band from the lowest seed to the highest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 56, 44, 24, 20
COLOURS = ("#0b62a4", "#d1495b", "#5a8f29")


def reward_curves(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """The picture.

    Args:
        curves: per system, mean reward (0 to 1) of each step, [seeds][steps].
    """
    steps = max(len(curve) for seeds in curves.values() for curve in seeds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><title>Mean reward per step</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(steps),
    ]
    for number, ((system, seeds), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        across = list(zip(*seeds, strict=True))
        low, high = ([_point(step, edge(each), steps) for step, each in enumerate(across)] for edge in (min, max))
        middle = [_point(step, statistics.mean(each), steps) for step, each in enumerate(across)]
        parts.append(f'<polygon points="{" ".join([*low, *reversed(high)])}" fill="{colour}" fill-opacity="0.18"/>')
        parts.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 18 + 20 * number
        parts.append(f'<line x1="{LEFT + 14}" x2="{LEFT + 40}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{LEFT + 48}" y="{y + 4}">{system} ({len(seeds)} seeds)</text>')
    return "\n".join([*parts, "</svg>\n"])


def _axes(steps: int) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        x, y = _place(0, tenth / 10, steps)
        parts.append(f'<line x1="{x:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for quarter in range(5):
        step = round(quarter * steps / 4)
        x, _ = _place(step, 0, steps)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}" text-anchor="middle">reward</text>')
    return parts


def _place(step: float, value: float, steps: int) -> tuple[float, float]:
    x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps)
    return x, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value


def _point(step: float, value: float, steps: int) -> str:
    x, y = _place(step, value, steps)
    return f"{x:.1f},{y:.1f}"
