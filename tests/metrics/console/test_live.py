"""The live view fits any terminal, draws seldom, never holds up the run, and leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rlinf.metrics import live
from rlinf.metrics.live import BARS, LiveView, ViewState, curve, picture
from rlinf.metrics.progress import clock
from rlinf.runtime.system.observer import ActorState, Moment, QueueState
from tests.metrics.console.terminal import Terminal, plain

METRICS = {
    "reward/mean": 0.487, "evaluation/accuracy": 0.83, "tokens_per_s": 4720.0, "response_length/mean": 5.1,
    "timing/step": 0.5, "timing/training": 0.4, "timing/other": 0.1, "kl": 0.001,
}  # fmt: skip
MOMENT = Moment(
    (
        ActorState("rollout[0]", 0, "computing advance", 0.2),
        ActorState("rollout[1]", 1, "waiting for prompts", 0.2),
        ActorState("judge[0]", 0, "idle", None),
    ),
    (QueueState("rollout.generate@0.41", 4, 2, 60),),
)


def shown(**changes) -> ViewState:
    state = ViewState("quickstart", 100, 37, 23.0, dict(METRICS), pace=0.55, moment=MOMENT)
    state.rewards.extend([0.1, 0.2, 0.487])
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def lines(state: ViewState, width: int, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(picture(state, width, height))
    return out.getvalue().removesuffix("\n").split("\n")


def test_it_shows_how_far_how_good_how_fast_and_who_is_at_what():
    progress, numbers, timing, rollout, judge = lines(shown(), 100)
    assert "quickstart  step 37 of 100" in progress
    assert "0:23 gone, 0:35 left" in progress
    assert progress.count("━") == 40
    assert "reward 0.487 ▁▃█" in numbers
    assert "accuracy 83.0%   tokens/s 4,720" in numbers
    assert timing.strip() == "0.50 s: training 0.40, other 0.10"
    assert rollout.split("  ")[0].strip() == "rollout"
    assert "1 computing advance, 1 waiting" in rollout
    assert rollout.rstrip().endswith("4 ready, 2 taken")
    assert judge.split() == ["judge", "idle"]


def test_a_mean_reward_that_is_no_share_is_not_shown_as_one():
    numbers = lines(shown(metrics={**METRICS, "evaluation/accuracy": 3.55, "evaluation/graded": 0.5}), 100)[1]
    assert "held-out 3.550   tokens/s" in numbers
    assert "accuracy" not in numbers


@given(st.integers(1, 200), st.integers(1, 60), st.text(max_size=30))
def test_no_line_is_wider_and_no_picture_higher_than_the_terminal(width, height, title):
    drawn = lines(shown(title=title), width, height)
    assert all(cell_len(line) <= width for line in drawn)
    assert len(drawn) <= max(height, 3)


def test_before_the_first_step_there_is_little_to_show():
    (line,) = lines(ViewState("run", 10), 30)
    assert line.split() == ["run", "step", "0", "of", "10", "0:00", "gone"]


def test_many_roles_are_counted_where_there_is_no_room():
    many = Moment(tuple(ActorState(f"role{number}[0]", 0, "idle", None) for number in range(30)), ())
    drawn = lines(shown(moment=many), 80, 12)
    assert drawn[-1].strip() == "and 25 more roles"
    assert len(drawn) <= 12


@given(st.lists(st.floats(-1e6, 1e6), max_size=500), st.integers(1, 40))
def test_a_curve_is_as_long_as_there_is_room_and_spans_all_heights(values, columns):
    bars = curve(values, columns)
    assert len(bars) == min(len(values), columns)
    assert set(bars) <= set(BARS)
    if len(values) <= columns and len(set(values)) > 1:
        assert bars[values.index(min(values))] == BARS[0]
        assert bars[values.index(max(values))] == BARS[-1]


def test_times_are_told_as_people_do():
    assert [clock(seconds) for seconds in (0, 34.4, 725, 11099)] == ["0:00", "0:34", "12:05", "3:04:59"]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


async def test_the_last_state_stays_and_the_cursor_is_there(terminal):
    view = LiveView("run", 3, terminal.out)
    view.line("warm-up is over [not markup]")
    for step in (1, 2, 3):
        view.stepped(step, METRICS)
    await view.close()
    text = terminal.text()
    assert "warm-up is over [not markup]" in plain(text)
    assert "step 3 of 3" in plain(text)[plain(text).rindex("run  step") :]
    assert text.rindex("\x1b[?25l") < text.index("\x1b[?25h") < text.index("run"), "kill -9 leaves a cursor too"
    assert "\x1b[?1049h" not in text, "it is the ordinary screen, so that everything stays"


async def test_it_draws_at_most_four_times_a_second(terminal):
    view = LiveView("run", 1000, terminal.out)
    start = time.monotonic()
    while time.monotonic() - start < 0.8:
        view.stepped(1, METRICS)
        await asyncio.sleep(0.001)
    await view.close()
    seconds = time.monotonic() - start  # beside one every quarter: the first one, the last one, and its being left
    assert 2 <= plain(terminal.text()).count("step 1 of 1000") <= seconds / live.REDRAW_SECONDS + 3


async def test_a_terminal_that_takes_nothing_holds_up_neither_the_run_nor_its_end(monkeypatch):
    class Stuck(io.StringIO):
        def __init__(self):
            super().__init__()
            self.go_on = threading.Event()

        def write(self, text):
            self.go_on.wait()
            return len(text)

    out = Stuck()
    monkeypatch.setattr(live, "CLOSE_SECONDS", 0.05)
    view = LiveView("run", 10, out)
    for step in range(1000):
        view.stepped(step, METRICS)
    await view.close()
    out.go_on.set()
