"""A loop stays awake after a frame only where that has been worth it, for a moment, and never beside a computation."""

from __future__ import annotations

import pytest

from rlinf.runtime.transport import lane
from rlinf.runtime.transport.lane import MOMENT, BusyPoll


class Turns:
    """A loop whose turns take a tenth of a moment each, and its clock."""

    def __init__(self):
        self.now = 100.0
        self.callbacks = []

    def call_soon(self, callback):
        self.callbacks.append(callback)

    def monotonic(self):
        return self.now

    def run(self):
        """Turns until nothing is left to do."""
        turns = 0
        while self.callbacks:
            self.now += MOMENT / 10
            self.callbacks.pop(0)()
            turns += 1
        return turns


@pytest.fixture
def turns(monkeypatch):
    loop = Turns()
    monkeypatch.setattr(lane, "time", loop)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    return loop


def taught(turns, *worth):
    alert = BusyPoll(turns)
    for each in worth:
        alert.was_worth(each)
    return alert


def test_at_first_and_where_answers_brought_nothing_it_falls_asleep(turns):
    taught(turns).stay()
    taught(turns, *[True] * 10, *[False] * 10).stay()
    assert turns.run() == 0


def test_where_answers_brought_replies_it_stays_awake_for_a_moment(turns):
    taught(turns, *[True] * 10).stay()
    assert 9 <= turns.run() <= 11


def test_it_rests_when_the_answer_is_here(turns):
    alert = taught(turns, *[True] * 10)
    alert.stay()
    alert.rest()
    assert turns.run() == 1


def test_frames_in_a_row_make_one_moment_longer_and_not_turns_by_the_dozen(turns):
    alert = taught(turns, *[True] * 10)
    for _ in range(12):
        alert.stay()
    assert len(turns.callbacks) == 1
    assert turns.run() <= 11


def test_beside_a_computation_and_with_more_hosts_than_cores_it_falls_asleep(turns, monkeypatch):
    monkeypatch.setattr(lane, "computing", lambda: True)
    taught(turns, *[True] * 10).stay()
    monkeypatch.setattr(lane, "computing", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    taught(turns, *[True] * 10).stay()
    assert turns.run() == 0


def test_a_computation_that_begins_meanwhile_ends_it(turns, monkeypatch):
    taught(turns, *[True] * 10).stay()
    monkeypatch.setattr(lane, "computing", lambda: True)
    assert turns.run() == 1
