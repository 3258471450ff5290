"""A loop stays awake after a frame only where that has been worth it, for a moment, and never beside a computation."""

from __future__ import annotations

import pytest

from rlinf.runtime.transport import lane
from rlinf.runtime.transport.lane import BACK_OFF, MOMENT, PREEMPTED, SOON, BusyPoll


class Turns:
    """A loop whose turns take a tenth of a moment each, and its clock."""

    def __init__(self):
        self.now = 100.0
        self.lost = 0.0  # to other processes
        self.callbacks = []

    def call_soon(self, callback):
        self.callbacks.append(callback)

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.now - self.lost

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
    """One whose frames were followed by these: something in time, or too late."""
    poll = BusyPoll(turns)
    for each in worth:
        poll.left()
        turns.now += MOMENT / 2 if each else SOON * 2
        poll.came()
        turns.run()
    return poll


def test_at_first_and_where_answers_came_too_late_it_falls_asleep(turns):
    taught(turns).left()
    taught(turns, *[True] * 10, *[False] * 10).left()
    assert turns.run() == 0


def test_a_receipt_is_not_worth_it(turns):
    poll = taught(turns, *[True] * 10)
    for _ in range(10):
        poll.left()
        poll.came(worth=False)
    turns.run()
    poll.left()
    assert turns.run() == 0


def test_where_answers_came_at_once_it_stays_awake_for_a_moment(turns):
    taught(turns, *[True] * 10).left()
    assert 9 <= turns.run() <= 11


def test_awake_it_wants_answers_sooner_than_asleep(turns):
    poll = BusyPoll(turns)
    for _ in range(10):
        poll.left()
        turns.now += SOON * 0.9
        poll.came()
        turns.run()
    assert poll.worth < 0.7  # by turns: what is soon enough for a sleeper is late for who waits


def test_it_rests_when_the_answer_is_here(turns):
    poll = taught(turns, *[True] * 10)
    poll.left()
    poll.came()
    assert turns.run() == 1


def test_frames_in_a_row_make_one_moment_longer_and_not_turns_by_the_dozen(turns):
    poll = taught(turns, *[True] * 10)
    for _ in range(12):
        poll.left()
    assert len(turns.callbacks) == 1
    assert turns.run() <= 11


def test_who_was_preempted_falls_asleep_for_a_second_then_for_two(turns):
    poll, first = taught(turns, *[True] * 20), BACK_OFF[0]
    for off in (first, 2 * first):
        poll.left()
        turns.now += 2 * PREEMPTED
        turns.lost += 2 * PREEMPTED
        assert turns.run() == 1
        turns.now += off * 0.9
        poll.left()
        assert turns.run() == 0
        poll.came()
        turns.now += off * 0.2
    poll.left()
    assert turns.run() > 1


def test_work_of_its_own_between_two_turns_is_nobody_elses(turns):
    poll = taught(turns, *[True] * 20)
    poll.left()
    turns.now += 2 * PREEMPTED
    turns.run()
    poll.left()
    assert turns.run() > 1


def test_beside_a_computation_and_with_more_hosts_than_cores_it_falls_asleep(turns, monkeypatch):
    poll = taught(turns, *[True] * 10)
    monkeypatch.setattr(lane, "computing", lambda: True)
    poll.left()
    assert turns.run() == 0
    monkeypatch.setattr(lane, "computing", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    taught(turns, *[True] * 10).left()
    assert turns.run() == 0


def test_a_computation_that_begins_meanwhile_ends_it(turns, monkeypatch):
    taught(turns, *[True] * 10).left()
    monkeypatch.setattr(lane, "computing", lambda: True)
    assert turns.run() == 1
