"""The live view of a run on a terminal: how far, how good, how fast, and what each role is at.

In: steps and moments, from the event loop, which never waits for the terminal. Out: a few lines at the bottom of the
screen that are redrawn in place; other lines go above them. Who wakes whom: each event wakes the drawing thread, which
then keeps still for a quarter of a second. The cursor stays visible and the screen is the ordinary one, so whatever
ends the process leaves a usable terminal with the last state on it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live

from rlinf.metrics.console.live_picture import FRAME, Shown, picture
from rlinf.metrics.console.progress import progress_shown
from rlinf.runtime.system.observer import Moment

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
        self._shown = Shown(title, steps)
        self._lines: list[str] = []
        self._version = 0
        self._over = False
        self._began = time.monotonic()
        self._changed = threading.Condition()  # guards all of the above
        self._progress = progress_shown()
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
            shown = self._shown
            shown.step = step
            shown.metrics.update(metrics)
            if "reward/mean" in metrics:
                shown.rewards.append(metrics["reward/mean"])
            if (seconds := metrics.get("timing/step")) is not None:
                shown.pace = seconds if shown.pace is None else shown.pace + _SMOOTH * (seconds - shown.pace)
            self._touch()

    def moment(self, moment: Moment) -> None:
        """This is what everybody is at."""
        with self._changed:
            self._shown.moment = moment
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
            drawn, over = 0, False
            while not over:
                with self._changed:
                    works = self._progress is not None and self._progress.busy
                    self._changed.wait_for(lambda: self._version != drawn, 0.0 if works else None)  # noqa: B023
                    drawn, over = self._version, self._over
                    lines, self._lines = self._lines, []
                width, height = self._console.size
                works_shown = () if self._progress is None else self._progress.lines(width, max(0, height - FRAME))
                with self._changed:
                    self._shown.elapsed = time.monotonic() - self._began
                    self._shown.works = works_shown
                    drawing = picture(self._shown, width, height)
                for line in lines:
                    live.console.print(line, markup=False, soft_wrap=True)
                live.update(drawing, refresh=True)
                with self._changed:
                    self._changed.wait_for(lambda: self._over, REDRAW_SECONDS)
