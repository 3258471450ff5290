"""The picture of `benchmarks.off_policy_learning`: a panel for each task, a line for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.off_policy_cases import CASES

Curve = Sequence[tuple[int, float]]
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_WIDTH, _HEIGHT, _COLUMNS = 300, 170, 3
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 40, 10, 26
_STYLE = "text{font:11px system-ui,sans-serif;fill:#666}.t{font-weight:600}.a{stroke:#999;fill:none}"


def picture(curves: Mapping[str, Sequence[Curve]]) -> str:
    """An SVG of all runs, by case."""
    panels: dict[str, list[str]] = {}
    for name in CASES:
        if name in curves:
            panels.setdefault(CASES[name].panel, []).append(name)
    rows = -(-len(panels) // _COLUMNS)
    parts = [
        _panel(title, {name: curves[name] for name in names}, _WIDTH * (n % _COLUMNS), _HEIGHT * (n // _COLUMNS))
        for n, (title, names) in enumerate(panels.items())
    ]
    size = f'width="{_WIDTH * _COLUMNS}" height="{_HEIGHT * rows}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"


def _panel(title: str, cases: Mapping[str, Sequence[Curve]], x: int, y: int) -> str:
    places = [place for runs in cases.values() for curve in runs for place in curve]
    last = max(step for step, _ in places)
    low, high = min(value for _, value in places), max(value for _, value in places)
    low, high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def point(step: float, value: float) -> str:
        return f"{_LEFT + across * step / last:.1f},{_TOP + down * (high - value) / (high - low):.1f}"

    found = [f'<g transform="translate({x},{y})"><text class="t" x="{_LEFT}" y="12">{escape(title)}</text>']
    found.append(f'<path class="a" d="M{_LEFT},{_TOP}v{down}h{across}"/>')
    for value in (low, high):
        found.append(f'<text text-anchor="end" x="{_LEFT - 4}" y="{_TOP + 4 + (0 if value == high else down)}">'
                     f"{round(value, 2):z.4g}</text>")  # fmt: skip
    found.append(f'<text text-anchor="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}">{last} steps</text>')
    for number, (name, runs) in enumerate(cases.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        label = f'<text x="{_LEFT + 120 * number}" y="27" style="fill:{colour}">{escape(CASES[name].label)}</text>'
        lines = (" ".join(point(*place) for place in curve) for curve in runs)
        found += [label, *(f'<polyline fill="none" stroke="{colour}" points="{line}"/>' for line in lines)]
    return "\n".join([*found, "</g>"])
