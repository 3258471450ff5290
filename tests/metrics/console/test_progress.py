"""Long work is shown by bars on a terminal and a few lines in a log, tears no line of others, holds up nobody."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rlinf.metrics import progress
from rlinf.metrics.live import LiveView
from rlinf.metrics.progress import Ongoing, Progress, last_line, line, log_lines, progress_bars, progress_here
from rlinf.runtime.base.progress import begin_work, report_to, work
from tests.metrics.console.terminal import Terminal, plain


def ongoing(what="loading", total=None, unit="", done=0.0, began=0.0) -> Ongoing:
    found = Ongoing(what, total, unit, began, lambda work, broken: None)
    found.advance(done)
    return found


class Screen(io.StringIO):
    """A terminal of 80 columns, as a list of lines."""

    def __init__(self):
        super().__init__()
        self.rows, self.row, self.column = [""], 0, 0
        self.wrote = threading.Condition()

    def isatty(self):
        return True

    def write(self, text):
        with self.wrote:
            for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
                self._take(piece)
            self.wrote.notify_all()
        return len(text)

    def _take(self, piece):
        if piece == "\n":
            self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row + 1 - len(self.rows))
        elif piece == "\r":
            self.column = 0
        elif piece.endswith("A"):
            self.row -= int(piece[2:-1])
            assert self.row >= 0
        elif piece.endswith("J"):
            self.rows[self.row :] = [self.rows[self.row][: self.column]]
        elif not piece.startswith("\x1b"):
            assert self.column == len(self.rows[self.row]), "nothing is written over"
            self.rows[self.row] += piece
            self.column += len(piece)

    def until(self, shows):
        with self.wrote:
            assert self.wrote.wait_for(lambda: any(shows in row for row in self.rows), 30), self.rows


@pytest.fixture
def at_once(monkeypatch):
    """Work is shown from its beginning, and drawn as often as a thread can."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.001)


# Words ----------------------------------------------------------------------------------------------------------------


def test_a_line_tells_how_much_is_done_how_fast_and_what_is_left():
    bar = line(ongoing(total=40, unit="files", done=10), 5.0, 80).plain
    assert bar.startswith(" loading  ━")
    assert bar.endswith("━  10 of 40 files  2.0/s  0:15 left")
    assert "  1.2 of 4.0 GB  100 MB/s  0:28 left" in line(ongoing("x", 4e9, "bytes", 1.2e9), 12.0, 80).plain
    assert line(ongoing("x", 10, "plans", 1), 30.0, 80).plain.endswith("1 of 10 plans  0:30 each  4:30 left")
    assert line(ongoing("x", 1.0, "", 0.25), 3.0, 80).plain.endswith("  25%  0:09 left")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (ongoing(), " loading  0:07 gone"),
        (ongoing(unit="files", done=14), " loading  14 files  2.0/s  0:07 gone"),
        (ongoing(unit="bytes", done=310e6), " loading  310 MB  44.3 MB/s  0:07 gone"),
        (ongoing(total=3, unit="files", done=4), " loading  4 files  0:02 each  0:07 gone"),
        (ongoing(total=0, unit="files"), " loading  0:07 gone"),
    ],
)
def test_what_nobody_knows_is_not_told(work, said):
    assert line(work, 7.0, 80).plain == said


def test_the_rate_is_that_of_late_and_the_mean_where_nothing_was_done_of_late():
    slow_first = ongoing(total=1000, unit="files")
    for second in range(1, 61):
        slow_first.advance(1 if second <= 30 else 10)
        slow_first.look(float(second))
    assert slow_first.rate(60.0) == pytest.approx(10.0)
    assert slow_first.remaining(60.0) == pytest.approx((1000 - 330) / 10)
    for second in range(61, 101):
        slow_first.look(float(second))
    assert slow_first.rate(100.0) == pytest.approx(330 / 100)


@given(
    st.text(max_size=60), st.none() | st.floats(0, 1e15), st.sampled_from(["", "bytes", "files"]),
    st.floats(-10, 2e15), st.floats(0, 1e6), st.integers(1, 200),
)  # fmt: skip
def test_no_line_is_wider_than_the_terminal_nor_moves_its_cursor(what, total, unit, done, now, width):
    said = line(ongoing(what, total, unit, done), now, width).plain
    assert cell_len(said) < max(2, width)
    assert said.isprintable()


def test_a_log_is_told_of_long_work_alone_then_once_a_minute_and_of_its_end():
    work, said = ongoing(total=300, unit="files"), []
    for second in range(1, 151):
        work.at(second)
        said += [(second, told) for told in log_lines([work], float(second))]
    assert [second for second, _ in said] == [5, 65, 125]
    assert said[0][1] == "loading: 5 of 300 files (2%), 0:05 gone, 4:55 left"
    assert last_line(work, 151.0, broken=False) == "loading: done in 2:31"
    assert last_line(work, 151.0, broken=True) == "loading: broken off after 2:31, at 150 of 300 files"
    assert log_lines([ongoing()], 4.9) == []


# A terminal -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.text("ab\n", max_size=5)), max_size=12))
def test_what_is_printed_beside_bars_stays_whole_and_above_them(events):
    screen = Screen()
    shows = Progress(screen, terminal=True, now=lambda: 0.0)
    out, printed = shows.wrap(screen), ""
    for bars, text in events:
        shows._paint([line(ongoing(f"work {number}"), 9.0, 60) for number in range(bars)])
        out.write(text)
        printed += text
        above = "\n".join(screen.rows)
        assert above.startswith(printed.rstrip("\n"))
    shows._paint([line(ongoing("work"), 9.0, 60)])
    if not printed or printed.endswith("\n"):
        assert screen.rows[-1].startswith(" work")
    shows._erase()
    assert "\n".join(screen.rows) == printed


def test_bars_are_there_while_work_is_and_leave_nothing_behind(at_once):
    screen = Screen()
    shows = Progress(screen, terminal=True)
    with report_to(shows):
        with work("outer", 4, "files") as outer, work("inner"):
            outer.advance()
            screen.until("1 of 4 files")
            screen.until(" inner")
            shows.wrap(screen).write("a line\n")
            screen.until(" outer")
        shows.close()
    assert screen.rows == ["a line", ""]


def test_many_works_take_few_lines():
    shows = Progress(Screen(), terminal=True, now=iter([0.0] * 30 + [9.0]).__next__)
    for number in range(30):
        shows._works.append(ongoing(f"work {number}", began=shows._now()))
    drawn = [each.plain for each in shows.lines(80)]
    assert drawn == [f" work {number}  0:09 gone" for number in range(4)] + [" and 26 more"]


def test_a_terminal_that_takes_nothing_holds_up_no_work(at_once, monkeypatch):
    class Stuck(Screen):
        go_on = threading.Event()
        asked = threading.Event()

        def write(self, text):
            self.asked.set()
            self.go_on.wait()
            return len(text)

    monkeypatch.setattr(progress, "CLOSE_SECONDS", 0.01)
    shows = Progress(out := Stuck(), terminal=True)
    with report_to(shows):
        with work("outer", 1000, "files") as outer:
            assert out.asked.wait(30)
            for _ in range(1000):
                outer.advance()
                begin_work("inner").end()
        shows.close()
    out.go_on.set()


def test_work_of_many_threads_is_counted_whole():
    shows = Progress(io.StringIO(), terminal=False)
    whole = shows.begin("counting", 8000, "items")
    threads = [
        threading.Thread(target=lambda: [whole.advance() for _ in range(1000)], name=f"worker {number}")
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole.done == 8000
    whole.end()
    whole.end()  # of a file that is closed twice
    assert not shows.busy
    shows.close()


# Who shows it ---------------------------------------------------------------------------------------------------------


def test_a_log_of_short_work_is_empty(capsys):
    with progress_bars(), work("short"):
        assert progress_here() is not None
    assert progress_here() is None
    assert capsys.readouterr() == ("", "")


def test_other_ranks_show_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with progress_bars():
        assert progress_here() is None


def test_streams_of_a_terminal_are_shared_meanwhile_and_then_as_before(monkeypatch, at_once):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bars(), progress_bars(), work("loading"):
        screen.until(" loading")
        print("said")
        assert sys.stdout.isatty()
    assert sys.stdout is screen
    assert sys.stderr is screen
    assert screen.rows == ["said", ""]


async def test_a_live_view_shows_the_work_below_its_first_line(monkeypatch, at_once):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    shows = Progress(terminal.out, terminal=True)
    with report_to(shows):
        view = LiveView("run", 3, terminal.out)
        with work("evaluating", 8, "problems") as evaluating:
            evaluating.advance(2)
            await view.close()
        assert shows._view is None
        shows.close()
    drawn = plain(terminal.text()).replace("\r", "").split("\n")
    at = max(number for number, row in enumerate(drawn) if "step 0 of 3" in row)  # as it was closed
    assert drawn[at + 1].startswith(" evaluating")
    assert "2 of 8 problems" in drawn[at + 1]
