"""Lanes as a picture: one SVG, by itself or inside a page, readable on light and on dark ground.

In: the lanes of some steps. Out: text of an SVG without scripts, fonts or anything from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rlinf.metrics.html.actor_lanes import WAITING, Lane, StepLanes, Stretch, Trace, side_by_side
from rlinf.metrics.timing import ACTIVITIES, sentence
from rlinf.runtime.observe.intervals import Interval

WIDTH, MARGIN, LABELS = 960, 24, 118
"""Pixels: of the picture, around it, and left of the lanes."""
LANE, GAP, TITLE, AXIS = 20, 7, 30, 26
"""Pixels: height of a lane, room between two, above the lanes of a step, below them."""
BETWEEN = 14
"""Pixels between two steps."""
LEGEND = 34
"""Pixels of height."""
MOST_LANES = 32
"""More are counted, not drawn: nobody reads them, and a page must stay small."""
FINEST = 0.6
"""Pixels: stretches of one kind that are nearer to each other are drawn as one."""
_TICKS = 6

STYLE = """
.lanes{--ink:#1c2330;--soft:#667085;--line:#e4e7ec;--row:#f5f6f8;--card:#ffffff;--edge:#e4e7ec;--idle:#cfd4dc;
--generation:#3b7ddd;--simulation:#c2577a;--acting:#3aa3b8;--scoring:#e0972b;--training:#2a9d74;--sync:#8e5bd0;--else:#d1557f;--both:#667085;
font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
@media (prefers-color-scheme:dark){.lanes{--ink:#e6e9ef;--soft:#98a2b3;--line:#2b323d;--row:#1b212a;--card:#141920;
--edge:#2b323d;--idle:#3a434f;--generation:#5b9bf3;--simulation:#e07c9c;--acting:#5cc3d6;--scoring:#f0b04f;--training:#3fbf8f;--sync:#ab83e6;--else:#ea7aa0;
--both:#98a2b3}}
.lanes text{fill:var(--ink);font-size:12px}.lanes .soft{fill:var(--soft);font-size:11px}
.lanes .name{font-weight:600;font-size:13px}.lanes .card{fill:var(--card);stroke:var(--edge)}
.lanes .row{fill:var(--row)}.lanes .tick{stroke:var(--line)}
.lanes .generation{fill:var(--generation)}.lanes .simulation{fill:var(--simulation)}
.lanes .acting{fill:var(--acting)}.lanes .scoring{fill:var(--scoring)}.lanes .training{fill:var(--training)}
.lanes .sync{fill:var(--sync)}.lanes .else{fill:var(--else)}.lanes .waiting{fill:var(--idle)}
.lanes .both{fill:var(--both)}
"""
"""Colours as variables, so that one picture serves on light and dark ground."""


def lanes_svg(trace: Path, steps: Sequence[int] | None = None) -> str:
    """A picture of what every role did during some steps, as a file of its own.

    Args:
        trace: path of a trace.json.
        steps: which; default: an early one, one in the middle and the last.

    Raises:
        ValueError: the file is no trace, has no step, or not one of these.
    """
    read = Trace(trace)
    chosen = list(steps) if steps is not None else read.first_middle_last()
    if not chosen:
        raise ValueError(f"{trace} has no step of a flow: was the run ended before its first step was over?")
    return picture(read.lanes(chosen), card=True)


def picture(steps: Sequence[StepLanes], *, card: bool) -> str:
    """Lanes of steps below each other, on one time scale.

    Args:
        steps: at least one.
        card: draw the ground, and bring the colours: for a file of its own. A page brings `STYLE` itself.
    """
    scale = (WIDTH - 2 * MARGIN - LABELS) / max(step.seconds for step in steps)
    top = float(MARGIN + LEGEND)
    parts: list[str] = []
    for step in steps:
        drawn, height = _step(step, top, scale)
        parts += drawn
        top += height + BETWEEN
    height = round(top - BETWEEN + MARGIN / 2)
    first = steps[0].step
    label = f"What each role did during step{'s' if len(steps) > 1 else ''} {', '.join(str(s.step) for s in steps)}"
    ground = (
        f'<style>{STYLE}</style><rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>'
    )
    return (
        f'<svg class="lanes" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-labelledby="lanes-{first}"><title id="lanes-{first}">{escape(label)}</title>'
        f"{ground if card else ''}{''.join(_legend(steps))}{''.join(parts)}</svg>\n"
    )


def _step(step: StepLanes, top: float, scale: float) -> tuple[list[str], float]:
    """The drawing of one step, and its height."""
    left, rows = MARGIN + LABELS, step.lanes[:MOST_LANES]
    parts = [
        f'<text class="name" x="{MARGIN}" y="{top + 14}">Step {step.step}</text>',
        f'<text class="soft" x="{left}" y="{top + 14}">{escape(sentence(step.timing))}</text>',
    ]
    top_of_lanes = top + TITLE - 6
    bottom = top_of_lanes + (len(rows) + 1) * (LANE + GAP)
    parts += _axis(step.seconds, scale, top_of_lanes, bottom)
    actors, several = {lane.actor for lane in step.lanes}, len({lane.host for lane in rows}) > 1
    for number, lane in enumerate(rows):
        role = lane.actor.partition("[")[0]
        name = lane.actor if f"{role}[1]" in actors else role
        parts += _lane(lane, name, top_of_lanes + number * (LANE + GAP), step.seconds, scale, several)
    y = bottom - LANE - GAP
    parts.append(f'<text class="soft" x="{MARGIN}" y="{y + 10}">side by side</text>')
    for start, end in _near(side_by_side(step), 2 * FINEST / scale):
        parts.append(_bar("both", left + start * scale, (end - start) * scale, y + 3, 5, "two roles at work"))
    if hidden := len(step.lanes) - len(rows):
        parts.append(f'<text class="soft" x="{MARGIN}" y="{bottom + 12}">and {hidden} more</text>')
    return parts, bottom - top + AXIS - GAP


def _lane(lane: Lane, name: str, y: float, seconds: float, scale: float, several: bool) -> Iterable[str]:
    left = MARGIN + LABELS
    yield f'<text x="{MARGIN}" y="{y + 14}">{escape(name)}'
    yield f'<tspan class="soft" dx="6">host {lane.host}</tspan></text>' if several else "</text>"
    yield f'<rect class="row" x="{left}" y="{y}" width="{seconds * scale:.1f}" height="{LANE}" rx="3"/>'
    for stretch in _joined(lane.stretches, FINEST / scale):
        thin = stretch.activity == WAITING
        tip = f"{stretch.activity}, {in_words(stretch.end - stretch.start)} from {in_words(stretch.start)}"
        x, width = left + stretch.start * scale, (stretch.end - stretch.start) * scale
        yield _bar(_class(stretch.activity), x, width, y + (LANE / 2 - 1 if thin else 0), 2 if thin else LANE, tip)


def _joined(stretches: Sequence[Stretch], nearer: float) -> list[Stretch]:
    """Waiting first, so that work is drawn over it; neighbours of one kind joined."""
    kinds: dict[str, list[Stretch]] = {}
    for stretch in stretches:
        own = kinds.setdefault(stretch.activity, [])
        if own and stretch.start - own[-1].end <= nearer:
            own[-1] = Stretch(stretch.activity, own[-1].start, max(own[-1].end, stretch.end))
        else:
            own.append(stretch)
    return [stretch for kind in sorted(kinds, key=lambda kind: kind != WAITING) for stretch in kinds[kind]]


def _near(intervals: Iterable[Interval], nearer: float) -> list[Interval]:
    """Intervals with the holes closed that would not be seen."""
    joined: list[Interval] = []
    for start, end in intervals:
        if joined and start - joined[-1][1] <= nearer:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _axis(seconds: float, scale: float, top: float, bottom: float) -> Iterable[str]:
    left, apart = MARGIN + LABELS, spacing(seconds, _TICKS)
    for number in range(int(seconds / apart) + 1):
        x = left + number * apart * scale
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom - GAP}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 8}" text-anchor="middle">{in_words(number * apart)}</text>'


def spacing(seconds: float, ticks: int) -> float:
    """A round number of seconds between so many ticks at most."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds / (power * factor) <= ticks:
                return power * factor
        power *= 10


def _legend(steps: Sequence[StepLanes]) -> Iterable[str]:
    there = {stretch.activity for step in steps for lane in step.lanes for stretch in lane.stretches}
    names = [name for name in (*ACTIVITIES, *sorted(there - {*ACTIVITIES, WAITING}), WAITING) if name in there]
    x = MARGIN + LABELS
    for name in names:
        yield f'<rect class="{_class(name)}" x="{x}" y="{MARGIN - 4}" width="12" height="12" rx="3"/>'
        yield f'<text class="soft" x="{x + 17}" y="{MARGIN + 6}">{escape(name)}</text>'
        x += 17 + 7 * len(name) + 20


def _class(activity: str) -> str:
    return activity if activity in (*ACTIVITIES, WAITING) else "else"


def _bar(kind: str, x: float, width: float, y: float, height: float, tip: str) -> str:
    wide = max(width, FINEST)  # what is shorter than that is still there
    corner = ' rx="2"' if wide > 6 and height > 4 else ""
    where = f'x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{height:g}"{corner}'
    return f'<rect class="{kind}" {where}><title>{escape(tip)}</title></rect>'


def in_words(seconds: float) -> str:
    """Seconds with their unit, such as "250 ms"."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
