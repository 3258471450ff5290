"""Progress bars of long work: redrawn in place on a terminal, a few lines in a log.

In: work of any thread of this process, by `rlinf.runtime.base.progress`. Out: on a terminal a line per work at the
bottom of the screen, gone when the work is over, with everything that is printed meanwhile above it; elsewhere a line
when work turns out to be long, one a minute, and one at its end. While a run's live view is drawn, it shows the same
lines. Who wakes whom: the first work wakes the drawing thread, which then looks at a fixed pace until none is left: a
view of time needs a clock. Whoever works never waits for the terminal.

loading model-00003.safetensors  ━━━━━━━━━━━━━━━━━━━━━━  12 of 40 files  31/s  0:10 left
downloading gsm8k                                        310 MB  4.1 MB/s  1:15 gone
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rlinf.runtime.base.progress import listener, report_to

WINDOW_SECONDS = 20.0
"""Seconds over which the rate is taken: caches, warm-up and other hosts make work begin unlike it goes on."""
BAR, LEAST_BAR = 30, 8
"""Columns of a bar, at most and at least."""
LOGGED_AFTER = 5.0
"""Seconds that work takes before a log names it."""
LOGGED_EVERY = 60.0
"""Seconds between two lines of a log about the same work."""
_PREFIXES = ("", "k", "M", "G", "T")


class Ongoing:
    """Work under way, as `rlinf.runtime.base.progress` tells of it.

    Args:
        what, total, unit: see `progress.begin_work`.
        began: seconds of the clock by which it is asked later.
        over: called once with this and whether it was broken off, when it ends.
    """

    def __init__(
        self, what: str, total: float | None, unit: str, began: float, over: Callable[[Ongoing, bool], None]
    ) -> None:
        self.what = " ".join(what.split())
        self.total, self.unit, self.began = total, unit, began
        self.done = 0.0
        self.logged: float | None = None
        """When a log had the newest line on it; None: it has none."""
        self._over: Callable[[Ongoing, bool], None] | None = over
        self._looks = deque([(began, 0.0)])  # (when, done) of looks
        self._guard = threading.Lock()  # `done += amount` is several instructions

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        with self._guard:
            self.done += amount

    def at(self, done: float, total: float | None = None) -> None:
        """So much is done, of so much."""
        with self._guard:
            self.done = done
            self.total = self.total if total is None else total

    def end(self, broken: bool = False) -> None:
        """It is over."""
        with self._guard:
            over, self._over = self._over, None
        if over is not None:
            over(self, broken)

    def look(self, now: float) -> None:
        """Note how far it is: the rate is that between looks."""
        self._looks.append((now, self.done))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()

    def rate(self, now: float) -> float | None:
        """How much is done per second, lately, or on the whole if nothing was lately; None: nothing was yet."""
        since, before = self._looks[0]
        if now > since and self.done > before:
            return (self.done - before) / (now - since)
        return self.done / (now - self.began) if now > self.began and self.done > 0 else None

    def share(self) -> float | None:
        """How much of it is done, from 0 to 1; None: nobody knows, or more is done than there was said to be."""
        total, done = self.total, self.done
        return done / total if total is not None and total > 0 and 0 <= done <= total else None

    def remaining(self, now: float) -> float | None:
        """Seconds until it is done, if it goes on as lately; None: that cannot be told."""
        share, rate = self.share(), self.rate(now)
        if share is None or not rate or self.total is None:
            return None
        return (self.total - self.done) / rate


def line(work: Ongoing, now: float, width: int) -> Text:
    """How far it is, as a line with a bar.

    Args:
        work: which.
        now: seconds of the clock by which it began.
        width: of the terminal; the line is shorter.
    """
    facts = _facts(work, now)
    text = Text(f" {_printable(work.what)}", no_wrap=True)
    share = work.share()
    margin = len(facts) + 5 + (0 if share is None else LEAST_BAR + 2)
    text.truncate(max(20, width - margin), overflow="ellipsis")
    room = min(BAR, width - len(text) - len(facts) - 5)
    if share is not None and room >= LEAST_BAR:
        full = int(room * share)
        text.append("  ").append("━" * full, style="green").append("━" * (room - full), style="bright_black")
    text.append(f"  {facts}")
    text.truncate(max(1, width - 1), overflow="ellipsis")
    return text


def log_lines(works: Iterable[Ongoing], now: float) -> list[str]:
    """Return the lines that are due in a log now: of each work, one when it turns out to be long, and one a minute.

    Args:
        works: under way; it is noted when a line was made of them.
        now: seconds of the clock by which they began.
    """
    lines = []
    for work in works:
        work.look(now)
        if now >= (work.began + LOGGED_AFTER if work.logged is None else work.logged + LOGGED_EVERY):
            work.logged = now
            lines.append(_so_far(work, now))
    return lines


def _so_far(work: Ongoing, now: float) -> str:
    share = work.share()
    percent = "" if share is None or not work.unit else f" ({share:.0%})"
    amount = _amount(work)
    elapsed = f"{clock(now - work.began)} gone"
    remaining = work.remaining(now)
    parts = [f"{amount}{percent}" if amount else "", elapsed, "" if remaining is None else f"{clock(remaining)} left"]
    return f"{_printable(work.what)}: {', '.join(part for part in parts if part)}"


def last_line(work: Ongoing, now: float, broken: bool) -> str:
    """That it is over, for a log."""
    if not broken:
        return f"{_printable(work.what)}: done in {clock(now - work.began)}"
    amount = _amount(work)
    return f"{_printable(work.what)}: broken off after {clock(now - work.began)}" + (f", at {amount}" if amount else "")


def clock(seconds: float) -> str:
    """Seconds as 0:34, 12:05 or 3:04:59."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _facts(work: Ongoing, now: float) -> str:
    rate, remaining = work.rate(now), work.remaining(now)
    pace = "" if rate is None or not work.unit else _pace(rate, work.unit)
    time = f"{clock(now - work.began)} gone" if remaining is None else f"{clock(remaining)} left"
    return "  ".join(part for part in (_amount(work), pace, time) if part)


def _amount(work: Ongoing) -> str:
    """How much is done, of how much: "3 of 16 files", "1.2 of 4.0 GB", "31%", "310 MB"; "" if nobody counts."""
    done, share = work.done, work.share()
    if not work.unit:
        return "" if share is None else f"{share:.0%}"
    if share is None:
        return "" if done <= 0 else _sized(done) if work.unit == "bytes" else f"{done:,.0f} {work.unit}"
    assert work.total is not None  # or there were no share
    if work.unit == "bytes":
        number, unit = _sized(work.total).split(" ")
        return f"{done / 1000 ** (_PREFIXES.index(unit[:-1])):.{len(number.partition('.')[2])}f} of {number} {unit}"
    return f"{done:,.0f} of {work.total:,.0f} {work.unit}"


def _pace(rate: float, unit: str) -> str:
    if unit == "bytes":
        return f"{_sized(rate)}/s"
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s" if rate >= 1 else f"{clock(1 / rate)} each"


def _sized(count: float) -> str:
    """Bytes as 850 B, 1.2 MB or 31 GB."""
    power = 0
    while count >= 999.5 and power < len(_PREFIXES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{1 if power and count < 99.95 else 0}f} {_PREFIXES[power]}B"


def _printable(text: str) -> str:
    """File names and titles of others: nothing in them may move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


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
"""Escape sequences that move the cursor or choose colours."""


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
        """Return a terminal's lines about the work under way.

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

    def wrap(self, stream: TextIO) -> Any:
        """Wrap the stream for all who write on the same terminal: what they write lands above the bars."""
        return _Above(stream, self)

    def write(self, stream: TextIO, text: str) -> int:
        """Write into a stream of the same terminal."""
        if os.getpid() != self._pid:  # a fork, whose lock may be held by a thread that is not there
            return stream.write(text)
        with self._screen:
            self._erase()
            if plain := _CONTROL.sub("", text):
                self._within = not plain.endswith("\n")
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
            messages, self._ended = self._ended, []
            works, viewed = list(self._works), self._view is not None
        if not viewed:
            messages += log_lines(works, now)
        if messages:
            self._out.write("".join(f"{each}\n" for each in messages))
            self._out.flush()

    def _paint(self, lines: Iterable[Text]) -> None:
        with self._screen:
            if self._within:
                return
            works = list(lines)
            if works or self._painted:
                with self._console.capture() as capture:
                    self._console.print(Text("\n").join(works), end="", soft_wrap=True)
                self._out.write(self._upwards() + capture.get())
                self._out.flush()
            self._painted = [cell_len(each.plain) for each in works]

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


def progress_here() -> Progress | None:
    """Return the display of work in this process; None if there is none."""
    owner = listener()
    return owner if isinstance(owner, Progress) else None


@contextmanager
def progress_bars() -> Iterator[None]:
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
        stack.enter_context(report_to(progress))
        for name in ("stdout", "stderr") if terminal else ():
            stream = getattr(sys, name)
            if stream.isatty():
                wrapper = progress.wrap(stream)
                setattr(sys, name, wrapper)
                stack.callback(_put_back, name, wrapper, stream)
        yield


def _put_back(name: str, wrapper: Any, stream: TextIO) -> None:
    """Undo a replacement, unless somebody has replaced it since."""
    if getattr(sys, name) is wrapper:
        setattr(sys, name, stream)
