"""Draws lanes as an SVG: panels of lanes on one time scale, readable on light and on dark ground.

In: lanes of devices. Out: the text of an SVG without scripts, fonts or anything from outside.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from rlinf.dashboard.lanes import HELD, LOADING, PARKING, Lane, Lanes, Stretch

WIDTHS = {1: 960, 2: 1080, 3: 1260}
"""Pixels of the picture, by columns."""
MARGIN, BETWEEN = 22, 24
"""Pixels: around the picture, between two columns."""
BAR, LINE, GAP = 22, 4, 9
"""Pixels of height: of a lane's work, of a lease or of waiting, between lanes."""
TITLE, AXIS, LEGEND = 54, 22, 26
"""Pixels of height: above the lanes, below them, of a row of the legend."""
MOST_LANES = 32
"""More are counted, not drawn: nobody reads them, and a picture must stay small."""
FINEST = 0.6
"""Pixels: narrower holes between stretches of one kind are closed, so that a picture stays small whatever the trace;
shorter stretches are drawn as wide as this, so that they are still there."""
HOVER = 3
"""Pixels: narrower bars have no tooltip, since nobody could hit them."""
CHARACTER = 7.2
"""Pixels of a character, a little more than most are."""
_COLOURS = ("generation", "training", "scoring", "simulation", "acting", *(f"other{n}" for n in range(4)), "saving")
"""The first belong to activities and to the roles that mostly do these, the others to whatever else there is."""
_OWN = {"generation": 0, "training": 1, "scoring": 2, "simulation": 3, "acting": 4}
_SYNC = "sync"
_TICKS = 5
_STRIPES = 'fill="url(#stripes)"'


_GROUND = {name: name for name in ("card", "ink", "soft", "sync")} | {"line": "edge", "row": "lane", "idle": "waiting"}
"""Variables of a picture that are no role's colour, and what the page calls them."""


def _variables(css: str) -> str:
    """The page's colours under the names of a picture."""
    page = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6});", css))
    named = {name: page[of] for name, of in _GROUND.items()}
    numbered = {f"c{number}": page[of] for number, of in enumerate(_COLOURS)}
    return ".lanes{" + "".join(f"--{name}:{value};" for name, value in {**named, **numbered}.items()) + "}"


_DARK_RULE = "@media (prefers-color-scheme: dark)"
_LIGHT, _, _DARK = (Path(__file__).parent / "page" / "page.css").read_text(encoding="utf-8").partition(_DARK_RULE)
STYLE = (
    f"{_variables(_LIGHT)}\n"
    f"@media (prefers-color-scheme:dark){{{_variables(_DARK)}}}\n"
    '.lanes{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}\n'
    ".lanes text{fill:var(--ink);font-size:13px}.lanes .name{font-size:15px;font-weight:600}"
    ".lanes .card{fill:var(--card);stroke:var(--line)}.lanes .soft,.lanes .move{fill:var(--soft)}"
    ".lanes .in{fill:var(--card);font-size:12px;font-weight:600}.lanes .row{fill:var(--row)}"
    ".lanes .tick{stroke:var(--line)}.lanes .stripe{stroke:var(--card)}"
    ".lanes .waiting{fill:var(--idle)}.lanes .sync{fill:var(--sync)}"
    + "".join(f".lanes .c{number}{{fill:var(--c{number})}}" for number in range(len(_COLOURS)))
)
"""Colours as variables, so that one picture serves on light and dark ground."""
_DEFINITIONS = (
    '<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="move" width="5" height="5"/><line class="stripe" x1="0" y1="0" x2="0" y2="5" stroke-width="4"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True, slots=True)
class _Bar:
    """A stretch as it is drawn in its row."""

    look: str
    """Attribute that gives the colour: a class, or the striped filling."""
    start: float
    """Seconds."""
    end: float
    """Seconds."""
    tip: str
    """Tooltip, without the times."""
    top: float = 0.0
    """Pixels below the row's upper edge."""
    height: float = BAR
    """Pixels."""
    text: str = ""
    """Written inside where it fits."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One lane of a panel."""

    label: str
    """Left of it."""
    bars: Sequence[_Bar]
    """Later ones over earlier ones."""
    note: str = ""
    """Behind the label, in a softer colour."""
    share: str = ""
    """Right of it."""
    height: int = BAR
    """Pixels of its ground; 0: none."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """Rows over one time axis."""

    title: str
    """First line above it."""
    subtitle: str
    """Second line, in a softer colour."""
    seconds: float
    """Length of the axis."""
    rows: Sequence[_Row]
    hidden: int
    """Lanes that are not among the rows."""


def device_lanes_svg(traces: Sequence[Lanes]) -> str:
    """Draw what happened on the devices in several runs, up to three side by side.

    A thick bar is work, a striped one a role that moves on or off the device, the line below who holds the lease; the
    rest is idle.

    Args:
        traces: lanes of devices, at least one.
    """
    colours = _role_colours(traces)

    def look(stretch: Stretch) -> str:
        return f'class="{_SYNC}"' if stretch.activity == _SYNC else f'class="c{colours[stretch.name]}"'

    def row(lane: Lane, seconds: float) -> _Row:
        rows, leases = lane.rows(), lane.of(HELD)
        high = BAR / (1 + max(rows.values(), default=0))
        bars = [_Bar(_STRIPES, s.start, s.end, f"{s.name}: {s.activity}") for s in lane.of(LOADING, PARKING)]
        for s in lane.work:
            text = "weights" if s.activity == _SYNC else s.name
            bars.append(_Bar(look(s), s.start, s.end, f"{s.name}: {s.activity}", high * rows[s.name], high, text))
        bars += [_Bar(look(s), s.start, s.end, f"{s.name}: {s.activity}", BAR, LINE) for s in leases]
        share = f"{lane.busy / seconds if seconds else 0.0:.0%}"
        return _Row(f"{'device' if leases else 'host'} {lane.host}", bars, share=share, height=BAR + LINE)

    panels = []
    for one in traces:
        lanes, which = one.lanes[:MOST_LANES], f"step {one.step}: " if one.step is not None else ""
        title_text = f"{which}{in_words(one.seconds)}, devices busy {one.busy:.0%}"
        rows = [row(lane, one.seconds) for lane in lanes]
        panels.append(_Panel(one.title, title_text, one.seconds, rows, len(one.lanes) - len(lanes)))
    label = f"What each device did: {', '.join(one.title for one in traces)}"
    return _picture(panels, _device_legend(traces, colours), label, min(len(traces), max(WIDTHS)))


def _role_colours(traces: Sequence[Lanes]) -> dict[str, int]:
    """A colour for each role: that of what it does longest, or the next that is free."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for use in (use for one in traces for lane in one.lanes for use in (*lane.work, *lane.of(HELD))):
        spent[use.name][use.activity] += 0.0 if use.activity in (_SYNC, HELD) else use.end - use.start
    colours: dict[str, int] = {}
    for role, activities in spent.items():
        own = _OWN.get(max(activities, key=lambda activity: activities[activity]), len(_OWN))
        free = [number for number in range(len(_COLOURS)) if number not in colours.values()]
        unclaimed = [number for number in free if number >= len(_OWN)]
        colours[role] = own if own in free else next(iter(unclaimed or free), len(colours) % len(_COLOURS))
    return colours


def _device_legend(traces: Sequence[Lanes], colours: Mapping[str, int]) -> list[tuple[str, int, str]]:
    activities = {stretch.activity for one in traces for lane in one.lanes for stretch in lane.stretches}
    legend = [(f'class="c{number}"', 12, role) for role, number in colours.items()]
    if _SYNC in activities:
        legend.append((f'class="{_SYNC}"', 12, "weights"))
    if activities & {LOADING, PARKING}:
        legend.append((_STRIPES, 12, f"{LOADING} or {PARKING}"))
    legend.append(('class="row"', 12, "idle"))
    if HELD in activities:
        legend.append(('class="soft"', LINE, "lease held, in its role's colour"))
    return legend


def _picture(panels: Sequence[_Panel], legend: Iterable[tuple[str, int, str]], label: str, columns: int) -> str:
    """Panels in columns, all on the time scale of the longest.

    Args:
        panels: at least one.
        legend: look, height in pixels and name of each kind of bar.
        label: what the picture shows, for those who cannot see it.
        columns: of panels.
    """
    width = WIDTHS[columns]
    room = (width - 2 * MARGIN - (columns - 1) * BETWEEN) / columns
    rows = [row for panel in panels for row in panel.rows]
    margin = 4 + CHARACTER * max((len(f"{row.label} {row.note}".strip()) for row in rows), default=0)
    right = 40 if any(row.share for row in rows) else 0
    longest = max(1e-9, *(panel.seconds for panel in panels))
    scale = (room - margin - right) / longest
    parts, top = _legend(legend, width)
    for first in range(0, len(panels), columns):
        line = panels[first : first + columns]
        for column, panel in enumerate(line):
            parts += _panel(panel, MARGIN + column * (room + BETWEEN), top, room, margin, scale, longest)
        top += max(_height(panel) for panel in line) + MARGIN
    height = round(top)
    ground = f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>'
    return (
        f'<svg class="lanes" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-labelledby="lanes-title"><title id="lanes-title">{escape(label)}</title>{_DEFINITIONS}'
        f"<style>{STYLE}</style>{ground}{''.join(parts)}</svg>\n"
    )


def _legend(entries: Iterable[tuple[str, int, str]], width: int) -> tuple[list[str], float]:
    """Draw the legend of the colours, in as many rows as it takes, and return its parts and where the next thing may
    begin."""
    parts, x, y = [], float(MARGIN), float(MARGIN)
    for look, high, name in entries:
        wide = 18 + CHARACTER * len(name) + 16
        if x + wide > width and x > MARGIN:
            x, y = float(MARGIN), y + LEGEND
        parts.append(f'<rect {look} x="{x:.1f}" y="{y + (12 - high) / 2:g}" width="12" height="{high}" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 18:.1f}" y="{y + 11:g}">{escape(name)}</text>')
        x += wide
    return parts, y + LEGEND


def _height(panel: _Panel) -> float:
    rows = sum((row.height or BAR) + GAP for row in panel.rows)
    return TITLE + rows + AXIS + (16 if panel.hidden else 0)


def _panel(
    panel: _Panel, x: float, top: float, width: float, margin: float, scale: float, longest: float
) -> Iterator[str]:
    """The drawing of one panel, `width` pixels wide with `margin` for labels; the longest one has `longest` seconds."""
    room = int(width / (CHARACTER + 1.5))
    title = panel.title if len(panel.title) <= room else f"{panel.title[: room - 1]}…"
    yield f'<text class="name" x="{x:.1f}" y="{top + 16:g}">{escape(title)}<title>{escape(panel.title)}</title></text>'
    yield f'<text class="soft" x="{x:.1f}" y="{top + 36:g}">{escape(panel.subtitle)}</text>'
    first, start = top + TITLE, x + margin
    bottom = first + sum((row.height or BAR) + GAP for row in panel.rows) - GAP / 2
    apart = spacing(max(panel.seconds, 1e-9), max(2, round(panel.seconds / longest * _TICKS)))
    for number in range(int(panel.seconds / apart * (1 + 1e-9)) + 1):
        at = start + number * apart * scale
        yield f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{first - 4:g}" y2="{bottom:g}"/>'
        label = in_words(number * apart)
        yield f'<text class="soft" x="{at:.1f}" y="{bottom + 15:g}" text-anchor="middle">{label}</text>'
    y = first
    for row in panel.rows:
        yield from _row(row, panel.seconds, x, y, start, scale)
        y += (row.height or BAR) + GAP
    if panel.hidden:
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 32:g}">and {panel.hidden} more</text>'


def _row(row: _Row, seconds: float, x: float, y: float, margin: float, scale: float) -> Iterator[str]:
    middle = y + BAR / 2 + 5
    label = f'{escape(row.label)} <tspan class="soft">{escape(row.note)}</tspan>' if row.note else escape(row.label)
    yield f'<text x="{x:.1f}" y="{middle:g}">{label}</text>'
    if row.height:
        x_y = f'x="{margin:.1f}" y="{y:g}"'
        yield f'<rect class="row" {x_y} width="{seconds * scale:.1f}" height="{row.height}" rx="3"/>'
    if row.share:
        yield f'<text class="soft" x="{margin + seconds * scale + 6:.1f}" y="{middle:g}">{row.share}</text>'
    for bar in _joined(row.bars, FINEST / scale):
        wide = max((bar.end - bar.start) * scale, FINEST)
        corner = ' rx="2"' if wide > 6 and bar.height > LINE else ""
        at = f'x="{margin + bar.start * scale:.1f}" y="{y + bar.top:g}" width="{wide:.1f}" height="{bar.height:g}"'
        tip = f"{bar.tip}, {in_words(bar.end - bar.start)} from {in_words(bar.start)}"
        yield f"<rect {bar.look} {at}{corner}" + (f"><title>{escape(tip)}</title></rect>" if wide >= HOVER else "/>")
        if bar.text and bar.height > 14 and wide > CHARACTER * len(bar.text) + 8:
            where = f'x="{margin + (bar.start + bar.end) / 2 * scale:.1f}" y="{y + bar.top + bar.height / 2 + 4:g}"'
            yield f'<text class="in" {where} text-anchor="middle" pointer-events="none">{escape(bar.text)}</text>'


def _joined(bars: Sequence[_Bar], nearer: float) -> list[_Bar]:
    """Neighbours of one kind that are too near to each other to be told apart become one."""
    joined: list[_Bar] = []
    last: dict[tuple[str, float], int] = {}
    for bar in bars:
        at = last.get((bar.tip, bar.top))
        if at is not None and bar.start - joined[at].end <= nearer:
            joined[at] = replace(bar, start=joined[at].start, end=max(joined[at].end, bar.end))
        else:
            last[bar.tip, bar.top] = len(joined)
            joined.append(bar)
    return joined


def spacing(seconds: float, ticks: int) -> float:
    """A round number of seconds between so many ticks at most."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds / (power * factor) <= ticks:
                return power * factor
        power *= 10


def in_words(seconds: float) -> str:
    """Seconds with their unit, such as "250 ms"."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
