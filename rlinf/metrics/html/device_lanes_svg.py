"""Lanes of devices as a picture: several traces side by side on one scale, readable on light and on dark ground.

In: what each device did, per trace. Out: text of an SVG without scripts, fonts or anything from outside. A thick bar is
work, a striped one a role that moves on or off the device, the line below who holds the lease; the rest is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rlinf.metrics.html.actor_lanes_svg import FINEST, MOST_LANES, in_words, spacing
from rlinf.metrics.html.device_lanes import HELD, LOADING, PARKING, DeviceLane, DeviceLanes, Use

WIDTHS = {1: 960, 2: 1080, 3: 1260}
"""Pixels of the picture, by columns."""
MARGIN, BETWEEN, LABELS, SHARES = 22, 24, 62, 40
"""Pixels: around the picture, between two columns, left of the lanes, right of them."""
BAR, LINE, GAP = 22, 4, 9
"""Pixels of height: of a lane's work, of the lease below it, between lanes."""
TITLE, AXIS, LEGEND = 54, 22, 26
"""Pixels of height: above the lanes, below them, of a row of the legend."""
SEEN = 1.5
"""Pixels: holes that are smaller are not drawn, so that a picture stays small whatever the trace."""
TOLD = 3
"""Pixels: what is smaller is not told of when the mouse is over it, since nobody could hit it."""
CHARACTER = 7.2
"""Pixels of a character, a little more than most are."""
_LIGHT = ("#3b7ddd", "#2a9d74", "#e0972b", "#c2577a", "#3aa3b8", "#8a8f2e", "#a0694b", "#5b6ac4", "#4c8a3f", "#b35cb8")
_DARK = ("#5b9bf3", "#3fbf8f", "#f0b04f", "#e07c9c", "#5cc3d6", "#b9be57", "#c99170", "#8b98ea", "#7fbb72", "#d48bd8")
"""Of roles. The first belong to what a role mostly does, the others to roles whose own is taken."""
_OWN = {"generation": 0, "training": 1, "scoring": 2, "simulation": 3, "acting": 4}
_SYNC = "sync"
_TICKS = 5

_BASE = """.d{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
.d text{font-size:13px}.d .name{font-size:15px;font-weight:600}.d .in{font-size:12px;font-weight:600}
"""
_GROUND = (
    ".d .card{{fill:{card};stroke:{line}}}.d text{{fill:{ink}}}.d .soft{{fill:{soft}}}.d .in{{fill:{card}}}"
    ".d .row{{fill:{row}}}.d .tick{{stroke:{line}}}.d .sync{{fill:{sync}}}.d .move{{fill:{soft}}}"
    ".d .stripe{{stroke:{card}}}"
)
_LIGHT_GROUND = {"card": "#ffffff", "line": "#e4e7ec", "ink": "#1c2330", "soft": "#5d6878", "row": "#eef0f3"}
_DARK_GROUND = {"card": "#141920", "line": "#2b323d", "ink": "#e6e9ef", "soft": "#98a2b3", "row": "#222a35"}


def device_lanes_svg(traces: Sequence[DeviceLanes]) -> str:
    """Draw traces side by side, up to three in a row, all on the time scale of the longest.

    Args:
        traces: at least one.
    """
    columns = min(len(traces), max(WIDTHS))
    width = WIDTHS[columns]
    panel = (width - 2 * MARGIN - (columns - 1) * BETWEEN) / columns
    scale = (panel - LABELS - SHARES) / max(1e-9, *(one.seconds for one in traces))
    colours = _colours(traces)
    parts, top = _legend(traces, colours, width)
    for first in range(0, len(traces), columns):
        row = traces[first : first + columns]
        for column, one in enumerate(row):
            parts += _panel(one, MARGIN + column * (panel + BETWEEN), top, panel, scale, colours)
        top += max(_height(one) for one in row) + MARGIN
    height = round(top)
    label = escape(f"What each device did: {', '.join(one.title for one in traces)}")
    return (
        f'<svg class="d" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-labelledby="d-title"><title id="d-title">{label}</title><style>{_style(colours)}</style>'
        '<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="move" width="5" height="5"/><line class="stripe" x1="0" y1="0" x2="0" y2="5" stroke-width="4"/>'
        f'</pattern></defs><rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _colours(traces: Sequence[DeviceLanes]) -> dict[str, int]:
    """A colour for each role: that of what it does longest, or the next that is free."""
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for use in (use for one in traces for lane in one.lanes for use in (*lane.work, *lane.leases)):
        spent[use.role][use.what] += 0.0 if use.what in (_SYNC, HELD) else use.end - use.start
    colours: dict[str, int] = {}
    for role, activities in spent.items():
        own = _OWN.get(max(activities, key=lambda what: activities[what]), len(_OWN))
        free = [number for number in range(len(_LIGHT)) if number not in colours.values()]
        unclaimed = [number for number in free if number >= len(_OWN)]
        colours[role] = own if own in free else next(iter(unclaimed or free), len(colours) % len(_LIGHT))
    return colours


def _style(colours: Mapping[str, int]) -> str:
    numbers = sorted(set(colours.values()))

    def ground(colours: Mapping[str, str], of_roles: Sequence[str], sync: str) -> str:
        return _GROUND.format(**colours, sync=sync) + "".join(f".d .r{n}{{fill:{of_roles[n]}}}" for n in numbers)

    dark = ground(_DARK_GROUND, _DARK, "#ab83e6")
    return f"{_BASE}{ground(_LIGHT_GROUND, _LIGHT, '#8e5bd0')}\n@media (prefers-color-scheme:dark){{{dark}}}"


def _legend(traces: Sequence[DeviceLanes], colours: Mapping[str, int], width: int) -> tuple[list[str], float]:
    """What the colours mean, in as many rows as it takes, and where the next thing may begin."""
    lanes = [lane for one in traces for lane in one.lanes]
    entries = [(f'class="r{number}"', 12, role) for role, number in colours.items()]
    if any(use.what == _SYNC for lane in lanes for use in lane.work):
        entries.append(('class="sync"', 12, "weights"))
    if any(lane.moves for lane in lanes):
        entries.append(('fill="url(#stripes)"', 12, f"{LOADING} or {PARKING}"))
    entries.append(('class="row"', 12, "idle"))
    if any(lane.leases for lane in lanes):
        entries.append(('class="soft"', LINE, "lease held, in its role's colour"))
    parts, x, y = [], float(MARGIN), float(MARGIN)
    for look, high, name in entries:
        wide = 18 + CHARACTER * len(name) + 16
        if x + wide > width and x > MARGIN:
            x, y = float(MARGIN), y + LEGEND
        parts.append(f'<rect {look} x="{x:.1f}" y="{y + (12 - high) / 2:g}" width="12" height="{high}" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 18:.1f}" y="{y + 11:g}">{escape(name)}</text>')
        x += wide
    return parts, y + LEGEND


def _height(one: DeviceLanes) -> float:
    shown = min(len(one.lanes), MOST_LANES)
    return TITLE + shown * (BAR + LINE + GAP) + AXIS + (16 if len(one.lanes) > shown else 0)


def _panel(
    one: DeviceLanes, x: float, top: float, width: float, scale: float, colours: Mapping[str, int]
) -> Iterator[str]:
    """The drawing of one trace."""
    room = int(width / (CHARACTER + 1.5))
    title = one.title if len(one.title) <= room else f"{one.title[: room - 1]}…"
    which = f"step {one.step}: " if one.step is not None else ""
    yield f'<text class="name" x="{x:.1f}" y="{top + 16:g}">{escape(title)}<title>{escape(one.title)}</title></text>'
    told = f"{which}{in_words(one.seconds)}, devices busy {one.busy:.0%}"
    yield f'<text class="soft" x="{x:.1f}" y="{top + 36:g}">{told}</text>'
    left, lanes, first = x + LABELS, one.lanes[:MOST_LANES], top + TITLE
    bottom = first + len(lanes) * (BAR + LINE + GAP) - GAP / 2
    apart = spacing(max(one.seconds, 1e-9), max(2, round(one.seconds * scale / (width - LABELS - SHARES) * _TICKS)))
    for number in range(int(one.seconds / apart * (1 + 1e-9)) + 1):
        at = left + number * apart * scale
        yield f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{first - 4:g}" y2="{bottom:g}"/>'
        label = in_words(number * apart)
        yield f'<text class="soft" x="{at:.1f}" y="{bottom + 15:g}" text-anchor="middle">{label}</text>'
    for number, lane in enumerate(lanes):
        yield from _lane(lane, one.seconds, x, first + number * (BAR + LINE + GAP), scale, colours)
    if hidden := len(one.lanes) - len(lanes):
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 32:g}">and {hidden} more</text>'


def _lane(
    lane: DeviceLane, seconds: float, x: float, y: float, scale: float, colours: Mapping[str, int]
) -> Iterator[str]:
    left, kind = x + LABELS, "device" if lane.leases else "host"
    yield f'<text x="{x:.1f}" y="{y + BAR / 2 + 5:g}">{kind} {lane.host}</text>'
    yield f'<rect class="row" x="{left:.1f}" y="{y:g}" width="{seconds * scale:.1f}" height="{BAR + LINE}" rx="3"/>'
    share = lane.seconds / seconds if seconds else 0.0
    yield f'<text class="soft" x="{left + seconds * scale + 6:.1f}" y="{y + BAR / 2 + 5:g}">{share:.0%}</text>'
    high = BAR / (1 + max(lane.rows.values(), default=0))
    for use in _joined(lane.moves, SEEN / scale):
        yield _bar('fill="url(#stripes)"', use, left, y, BAR, scale)
    for use in _joined(lane.work, SEEN / scale):
        at, look = y + high * lane.rows[use.role], _look(use, colours)
        yield _bar(look, use, left, at, high, scale)
        if high > 14 and (use.end - use.start) * scale > CHARACTER * len(_name(use)) + 8:
            middle = left + (use.start + use.end) / 2 * scale
            label = f'x="{middle:.1f}" y="{at + high / 2 + 4:g}" text-anchor="middle"'
            yield f'<text class="in" {label} pointer-events="none">{escape(_name(use))}</text>'
    for use in _joined(lane.leases, SEEN / scale):
        yield _bar(_look(use, colours), use, left, y + BAR, LINE, scale)


def _joined(uses: Sequence[Use], nearer: float) -> list[Use]:
    """Neighbours of one kind that are too near to each other to be told apart become one."""
    joined: list[Use] = []
    last: dict[tuple[str, str], int] = {}
    for use in uses:
        at = last.get((use.role, use.what))
        if at is not None and use.start - joined[at].end <= nearer:
            joined[at] = Use(use.role, use.what, joined[at].start, max(joined[at].end, use.end))
        else:
            last[use.role, use.what] = len(joined)
            joined.append(use)
    return joined


def _look(use: Use, colours: Mapping[str, int]) -> str:
    return f'class="{_SYNC}"' if use.what == _SYNC else f'class="r{colours[use.role]}"'


def _name(use: Use) -> str:
    return "weights" if use.what == _SYNC else use.role


def _bar(look: str, use: Use, left: float, y: float, height: float, scale: float) -> str:
    wide = max((use.end - use.start) * scale, FINEST)  # what is shorter than that is still there
    corner = ' rx="2"' if wide > 6 and height > LINE else ""
    where = f'x="{left + use.start * scale:.1f}" y="{y:g}" width="{wide:.1f}" height="{height:g}"{corner}'
    if wide < TOLD:
        return f"<rect {look} {where}/>"
    tip = f"{use.role}: {use.what}, {in_words(use.end - use.start)} from {in_words(use.start)}"
    return f"<rect {look} {where}><title>{escape(tip)}</title></rect>"
