"""How far long work is, in words: a line with a bar for terminals, and lines for logs. Pure but for a count; no I/O.

loading model-00003.safetensors  ━━━━━━━━━━━━━━━━━━━━━━  12 of 40 files  31/s  0:10 left
downloading gsm8k                                        310 MB  4.1 MB/s  1:15 gone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from rich.text import Text

WINDOW_SECONDS = 20.0
"""What came before no longer counts for the rate: caches, warm-up and other hosts make work begin unlike it goes on."""
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
        what, total, unit: see `progress.begun`.
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
        self._seen = deque([(began, 0.0)])  # (when, done) of looks
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
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()

    def rate(self, now: float) -> float | None:
        """How much is done per second, lately, or on the whole if nothing was lately; None: nothing was yet."""
        since, before = self._seen[0]
        if now > since and self.done > before:
            return (self.done - before) / (now - since)
        return self.done / (now - self.began) if now > self.began and self.done > 0 else None

    def share(self) -> float | None:
        """How much of it is done, from 0 to 1; None: nobody knows, or more is done than there was said to be."""
        total, done = self.total, self.done
        return done / total if total is not None and total > 0 and 0 <= done <= total else None

    def left(self, now: float) -> float | None:
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
    beside = len(facts) + 5 + (0 if share is None else LEAST_BAR + 2)
    text.truncate(max(20, width - beside), overflow="ellipsis")
    room = min(BAR, width - len(text) - len(facts) - 5)
    if share is not None and room >= LEAST_BAR:
        full = int(room * share)
        text.append("  ").append("━" * full, style="green").append("━" * (room - full), style="bright_black")
    text.append(f"  {facts}")
    text.truncate(max(1, width - 1), overflow="ellipsis")
    return text


def log_lines(works: Iterable[Ongoing], now: float) -> list[str]:
    """What a log is to be told now: of each, one line when it turns out to be long, and one a minute.

    Args:
        works: under way; it is noted when a line was made of them.
        now: seconds of the clock by which they began.
    """
    told = []
    for work in works:
        work.look(now)
        if now >= (work.began + LOGGED_AFTER if work.logged is None else work.logged + LOGGED_EVERY):
            work.logged = now
            told.append(_so_far(work, now))
    return told


def _so_far(work: Ongoing, now: float) -> str:
    share = work.share()
    percent = "" if share is None or not work.unit else f" ({share:.0%})"
    amount = _amount(work)
    gone = f"{clock(now - work.began)} gone"
    left = work.left(now)
    parts = [f"{amount}{percent}" if amount else "", gone, "" if left is None else f"{clock(left)} left"]
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
    rate, left = work.rate(now), work.left(now)
    pace = "" if rate is None or not work.unit else _pace(rate, work.unit)
    time = f"{clock(now - work.began)} gone" if left is None else f"{clock(left)} left"
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
