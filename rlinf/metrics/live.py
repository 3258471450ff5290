"""Live view of a run on a terminal: how far, how good, how fast, and what each role is at.

In: steps and moments, from the event loop, which never waits for the terminal. Out: a few lines at the bottom of the
screen that are redrawn in place; other lines go above them. Who wakes whom: each event wakes the drawing thread, which
then keeps still for a quarter of a second. The cursor stays visible and the screen is the ordinary one, so whatever
ends the process leaves a usable terminal with the last state on it. `picture` makes one drawing; it does no I/O:

quickstart  step 37 of 100  ━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━  0:23 gone, 0:34 left
reward 0.487 ▁▁▂▂▃▃▄▅   accuracy 83.0%   tokens/s 4,720   length 5.1
0.55 s: training 0.48, generation 0.17; 0.12 of it side by side, other 0.01
rollout  computing advance            4 ready
judge    waiting for rollout.generate
trainer  computing learn_fresh
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlinf.metrics.progress import clock, progress_here
from rlinf.metrics.tables import ACCURACY, FAILED, GRADED, HELD_OUT
from rlinf.metrics.timing import sentence
from rlinf.runtime.system.observer import ActorState, Moment, QueueState

HISTORY = 400
"""Steps of which the curve remembers the reward; wider than any terminal."""
CURVE = 24
"""Columns of the reward's curve, at most."""
BARS = "▁▂▃▄▅▆▇█"
FRAME = 6
"""Lines that are not about roles, with one to spare, so that a low terminal does not scroll with every drawing."""
NUMBERS = (
    ("not scored", FAILED, "{:.1%}"),
    ("accuracy", ACCURACY, "{:.1%}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("cut", "truncated", "{:.1%}"),
    ("clip frac", "clip_frac", "{:.1%}"),
    ("grad norm", "grad_norm", "{:.2f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
)
"""(label, metric, format), the most telling first: what does not fit the width is left out from the end. Failures are
there while there are any."""


@dataclass(slots=True)
class ViewState:
    """All that the view knows of a run."""

    title: str
    """Name of the run."""
    steps: int | None
    """How many there will be; None: nobody knows."""
    step: int = 0
    """The last one that is over."""
    elapsed: float = 0.0
    """Seconds since the view began."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric: an accuracy stays until it is measured again."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """Mean reward of each step so far."""
    pace: float | None = None
    """Seconds per step, smoothed."""
    moment: Moment | None = None
    """State of all actors and queues."""
    works: Sequence[Text] = ()
    """A line about each long work under way."""


def picture(state: ViewState, width: int, height: int) -> Group:
    """The lines of the view, none longer than the terminal is wide.

    Args:
        state: what is known.
        width, height: of the terminal, characters.
    """
    lines = [_progress(state, width), *state.works]
    if state.metrics:
        lines.append(_numbers(state, width))
        if timing_text := sentence(state.metrics):
            lines.append(Text(f" {timing_text}", style="dim"))
    if state.moment is not None:
        lines += _roles(state.moment, max(0, height - FRAME - len(state.works)))
    for line in lines:
        line.no_wrap = True
        line.truncate(max(1, width - 1), overflow="ellipsis")
    return Group(*lines)


def curve(values: Sequence[float], columns: int) -> str:
    """Values as a row of bars, from the lowest to the highest of them; the means of equal parts if they are many."""
    if not values or columns < 1:
        return ""
    count = min(columns, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    spread = high - low
    return "".join(BARS[0 if spread == 0 else round((mean - low) / spread * (len(BARS) - 1))] for mean in means)


def _progress(state: ViewState, width: int) -> Text:
    title = "".join(character if character.isprintable() else " " for character in state.title)
    of = "" if state.steps is None else f" of {state.steps}"
    text = Text(" ").append(title, style="bold").append(f"  step {state.step}{of}")
    times = f"{clock(state.elapsed)} gone"
    if state.steps is None:
        return text.append(f"  {times}")
    if state.pace is not None:
        times += f", {clock(state.pace * (state.steps - state.step))} left"
    room = min(40, width - len(text) - len(times) - 5)
    if room >= 8:
        done = round(room * state.step / max(1, state.steps))
        text.append("  ").append("━" * done, style="green").append("━" * (room - done), style="bright_black")
    return text.append(f"  {times}")


def _numbers(state: ViewState, width: int) -> Text:
    text = Text(" ")
    if state.rewards:
        text.append("reward ").append(f"{state.rewards[-1]:.3f} ", style="bold green")
        text.append(curve(list(state.rewards), min(CURVE, width - len(text) - 1)), style="green")
    graded = GRADED in state.metrics
    for label, name, style in (HELD_OUT if graded and number[1] == ACCURACY else number for number in NUMBERS):
        value = state.metrics.get(name)
        if value is None or (name == FAILED and not value):
            continue
        cell = style.format(value)
        if len(text) + len(label) + len(cell) + 4 >= width:
            break
        text.append(f"   {label} ").append(cell, style="bold")
    return text


def _roles(moment: Moment, most: int) -> list[Text]:
    """A line per role: what its ranks do, and how many of its items wait to be taken."""
    ranks: dict[str, list[ActorState]] = defaultdict(list)
    for state in moment.actors:
        ranks[_role(state.actor)].append(state)
    queues: dict[str, list[QueueState]] = defaultdict(list)
    for queue in moment.queues:
        queues[queue.name.partition(".")[0]].append(queue)
    names = max(map(len, ranks), default=0)
    doings = {role: _doing(states) for role, states in ranks.items()}
    longest = max(map(len, doings.values()), default=0)
    lines = [_role_line(role.ljust(names), doings[role], longest, queues[role]) for role in ranks]
    if len(lines) > most:
        lines[max(0, most - 1) :] = [Text(f" and {len(lines) - max(0, most - 1)} more roles", style="dim")]
    return lines[:most]


def _role_line(role: str, doing: Text, longest: int, queues: Iterable[QueueState]) -> Text:
    text = Text(f" {role}  ").append_text(doing)
    ready, running = sum(queue.ready for queue in queues), sum(queue.running for queue in queues)
    if ready or running:
        text.append(" " * (longest - len(doing))).append(f"   {ready} ready, {running} taken", style="dim")
    return text


def _doing(states: Sequence[ActorState]) -> Text:
    """Summarize the states of a role's ranks: "computing advance", with numbers if they differ."""
    counts = Counter(state.doing.replace(" _", " ") for state in states)  # a private function's name
    text = Text()
    for doing, count in counts.most_common():
        style = "green" if doing.startswith("computing") else "dim" if doing == "idle" else "yellow"
        text.append(", " if len(text) else "").append(f"{count} " if len(states) > 1 else "").append(doing, style=style)
    return text


def _role(actor: str) -> str:
    return actor.partition("[")[0]


REDRAW_SECONDS = 0.25
"""Between two drawings: more often than four times a second nobody reads, and it costs the run time."""
CLOSE_SECONDS = 1.0
"""Until a terminal that takes nothing more (Ctrl-S) is left as it is."""
_SMOOTH = 0.3
"""Weight of the newest step in the pace from which the remaining time is told."""


class LiveView:
    """Draws a run.

    Args:
        title: what the run is called.
        steps: how many there will be; None: nobody knows.
        out: a terminal.
    """

    def __init__(self, title: str, steps: int | None, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._state = ViewState(title, steps)
        self._lines: list[str] = []
        self._version = 0
        self._over = False
        self._began = time.monotonic()
        self._changed = threading.Condition()  # guards all of the above
        self._progress = progress_here()
        if self._progress is not None:
            self._progress.lend(self._more)
        self._thread = threading.Thread(target=self._draw, name="live view", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Print a line above the view, where it stays."""
        with self._changed:
            self._lines.append(text)
            self._touch()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        with self._changed:
            state = self._state
            state.step = step
            state.metrics.update(metrics)
            if "reward/mean" in metrics:
                state.rewards.append(metrics["reward/mean"])
            if (seconds := metrics.get("timing/step")) is not None:
                state.pace = seconds if state.pace is None else state.pace + _SMOOTH * (seconds - state.pace)
            self._touch()

    def moment(self, moment: Moment) -> None:
        """This is what everybody is at."""
        with self._changed:
            self._state.moment = moment
            self._touch()

    async def close(self) -> None:
        """Draw the last state and leave it there; no other method may be called after this."""
        with self._changed:
            self._over = True
            self._touch()
        try:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        finally:  # a run that is cancelled now still shows how its work goes on
            if self._progress is not None:
                self._progress.take_back()

    def _more(self) -> None:
        """Long work has begun or ended."""
        with self._changed:
            self._touch()

    def _touch(self) -> None:
        self._version += 1
        self._changed.notify()

    def _draw(self) -> None:
        """The thread: consumes changes; unblocked by the next one, a quarter of a second after the last drawing, or
        then by the clock while long work is under way."""
        with Live(
            console=self._console,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stderr=sys.stderr.isatty(),  # a library's warnings land above; in a file they stay in the file
        ) as live:
            self._console.show_cursor(True)
            version, over = 0, False
            while not over:
                with self._changed:
                    works = self._progress is not None and self._progress.busy
                    self._changed.wait_for(lambda: self._version != version, 0.0 if works else None)  # noqa: B023
                    version, over = self._version, self._over
                    lines, self._lines = self._lines, []
                width, height = self._console.size
                works_shown = () if self._progress is None else self._progress.lines(width, max(0, height - FRAME))
                with self._changed:
                    self._state.elapsed = time.monotonic() - self._began
                    self._state.works = works_shown
                    drawing = picture(self._state, width, height)
                for line in lines:
                    live.console.print(line, markup=False, soft_wrap=True)
                live.update(drawing, refresh=True)
                with self._changed:
                    self._changed.wait_for(lambda: self._over, REDRAW_SECONDS)
