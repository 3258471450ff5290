"""Shows how far long work is: bars that are redrawn in place on a terminal, a few lines in a log.

In: work of any thread of this process, by `rlinf.runtime.base.progress`. Out: on a terminal a line per work at the
bottom of the screen, gone when the work is over, with everything that is printed meanwhile above it; elsewhere a line
when work turns out to be long, one a minute, and one at its end. While a run's live view is drawn, it shows the same
lines. Who wakes whom: the first work wakes the drawing thread, which then looks at a fixed pace until none is left: a
view of time needs a clock. Whoever works never waits for the terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rlinf.metrics.console.progress_lines import Ongoing, last_line, line, log_lines
from rlinf.runtime.base.progress import heard_by, listener

SHOWN_AFTER = 0.5
"""Seconds that work takes before a terminal shows it: what flashes by is not read."""
REDRAW_SECONDS = 0.25
"""Between two drawings on a terminal."""
LOOK_SECONDS = 1.0
"""Between two looks where there is none."""
MOST = 5
"""Lines on a terminal, at most."""
CLOSE_SECONDS = 1.0
"""Until a terminal that takes nothing more (Ctrl-S) is left as it is."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What moves the cursor or chooses colours."""


class Progress:
    """Shows work until it is closed; begin, advance and end it from any thread.

    Args:
        out: where.
        terminal: bars can be redrawn there.
        now: the clock.
    """

    def __init__(self, out: TextIO, *, terminal: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._terminal, self._now = out, terminal, now
        self._console = Console(file=out, highlight=False)
        self._works: list[Ongoing] = []
        self._ended: list[str] = []  # last lines that no log has yet
        self._view: Callable[[], None] | None = None  # wakes the live view that draws instead
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all of the above
        self._screen = threading.RLock()  # guards what follows; held while something is written
        self._painted: list[int] = []  # columns of each line that is drawn now
        self._within = False  # somebody has written part of a line
        self._pid = os.getpid()

    def begin(self, what: str, total: float | None, unit: str) -> Ongoing:
        """Some work begins."""
        work = Ongoing(what, total, unit, self._now(), self._over)
        with self._changed:
            self._works.append(work)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
                self._thread.start()
            self._changed.notify()
            wake = self._view
        if wake is not None:
            wake()
        return work

    def close(self) -> None:
        """Leave the terminal without bars."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def lend(self, wake: Callable[[], None]) -> None:
        """A live view draws `lines` from now on.

        Args:
            wake: called from any thread when there are more of them, or fewer.
        """
        with self._changed:
            self._view = wake
        self._erase()

    def take_back(self) -> None:
        """The live view is over."""
        with self._changed:
            self._view = None

    def lines(self, width: int, most: int = MOST) -> list[Text]:
        """What a terminal shows of the works under way.

        Args:
            width: of the terminal, characters.
            most: how many lines at most.
        """
        now = self._now()
        with self._changed:
            works = [work for work in self._works if now - work.began >= SHOWN_AFTER]
        for work in works:
            work.look(now)
        if len(works) <= most:
            return [line(work, now, width) for work in works]
        left_out = Text(f" and {len(works) - most + 1} more", style="dim", no_wrap=True)
        return [*(line(work, now, width) for work in works[: most - 1]), left_out][:most]

    @property
    def busy(self) -> bool:
        """There is work under way."""
        return bool(self._works)

    def beside(self, stream: TextIO) -> Any:
        """The same stream, for all who write on the same terminal: what they write lands above the bars."""
        return _Above(stream, self)

    def write(self, stream: TextIO, text: str) -> int:
        """Write into a stream of the same terminal."""
        if os.getpid() != self._pid:  # a fork, whose lock may be held by a thread that is not there
            return stream.write(text)
        with self._screen:
            self._erase()
            if said := _CONTROL.sub("", text):
                self._within = not said.endswith("\n")
            return stream.write(text)

    def _over(self, work: Ongoing, broken: bool) -> None:
        now = self._now()
        with self._changed:
            self._works.remove(work)
            if work.logged is not None:
                self._ended.append(last_line(work, now, broken))
                self._changed.notify()
            wake = self._view
        if wake is not None:
            wake()

    def _draw(self) -> None:
        """The thread: consumes works; unblocked by the first one, and then by the clock until there is none."""
        pace = REDRAW_SECONDS if self._terminal else LOOK_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._works or self._ended)
                over = self._closed
            if self._terminal:
                self._paint([] if over or self._view is not None else self.lines(self._console.width))
            else:
                self._log()
            with self._changed:
                if over:
                    return
                self._changed.wait_for(lambda: self._closed or self._ended, pace)
                rests = not self._works
            if rests and self._terminal:
                self._erase()

    def _log(self) -> None:
        """Write what a log is to be told now."""
        now = self._now()
        with self._changed:
            told, self._ended = self._ended, []
            works, viewed = list(self._works), self._view is not None
        if not viewed:
            told += log_lines(works, now)
        if told:
            self._out.write("".join(f"{each}\n" for each in told))
            self._out.flush()

    def _paint(self, lines: Iterable[Text]) -> None:
        with self._screen:
            if self._within:
                return
            shown = list(lines)
            if shown or self._painted:
                with self._console.capture() as drawn:
                    self._console.print(Text("\n").join(shown), end="", soft_wrap=True)
                self._out.write(self._upwards() + drawn.get())
                self._out.flush()
            self._painted = [cell_len(each.plain) for each in shown]

    def _erase(self) -> None:
        with self._screen:
            if self._painted:
                self._out.write(self._upwards())
                self._out.flush()
                self._painted = []

    def _upwards(self) -> str:
        """Moves to where the bars begin and clears what follows; lines of a terminal that was made narrower are two."""
        width = max(1, self._console.width)
        rows = sum(max(1, -(-columns // width)) for columns in self._painted)
        return "" if not rows else f"\r\x1b[{rows - 1}A\x1b[J" if rows > 1 else "\r\x1b[J"


class _Above:
    """A stream on the terminal of a `Progress`; everything else is the stream's own."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream, self._progress = stream, progress

    def write(self, text: str) -> int:
        return self._progress.write(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress_shown() -> Progress | None:
    """Who shows work in this process; None: nobody does."""
    found = listener()
    return found if isinstance(found, Progress) else None


@contextmanager
def shown() -> Iterator[None]:
    """Work of this process is shown meanwhile: on stderr, with bars if that is a terminal.

    In ranks other than 0, and where work is shown already, this changes nothing.
    """
    if listener() is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    progress = Progress(sys.stderr, terminal=terminal)
    with ExitStack() as stack:
        stack.callback(progress.close)
        stack.enter_context(heard_by(progress))
        for name in ("stdout", "stderr") if terminal else ():
            stream = getattr(sys, name)
            if stream.isatty():
                beside = progress.beside(stream)
                setattr(sys, name, beside)
                stack.callback(_put_back, name, beside, stream)
        yield


def _put_back(name: str, beside: Any, stream: TextIO) -> None:
    """Undo a replacement, unless somebody has replaced it since."""
    if getattr(sys, name) is beside:
        setattr(sys, name, stream)
