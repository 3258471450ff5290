"""Whoever does long work tells how far it is, and need not know whether anybody listens."""

from __future__ import annotations

import pytest

from rlinf.runtime.base.progress import begin_work, listener, report_to, track, work


class Notes:
    """Hears everything."""

    def __init__(self):
        self.told = []

    def begin(self, what, total, unit):
        self.told.append((what, total, unit))
        return self

    def advance(self, amount=1):
        self.told.append(amount)

    def at(self, done, total=None):
        self.told.append((done, total))

    def end(self, broken=False):
        self.told.append("broken" if broken else "done")


def test_work_that_nobody_hears_of_goes_on_all_the_same():
    assert listener() is None
    with work("reading", 3, "files") as reading:
        reading.advance()
        reading.at(2, 4)
    begin_work("reading").end()
    assert list(track(range(3), "counting")) == [0, 1, 2]


def test_the_listener_hears_what_is_done_and_the_end():
    notes = Notes()
    with report_to(notes), work("reading", 3, "files") as reading:
        reading.advance(2)
        reading.at(3, 4)
    assert notes.told == [("reading", 3, "files"), 2, (3, 4), "done"]
    assert listener() is None


def test_items_know_how_many_they_are_or_nobody_does():
    notes = Notes()
    with report_to(notes):
        assert list(track("ab", "reading", unit="files")) == ["a", "b"]
        assert list(track(iter("a"), "reading")) == ["a"]
    assert notes.told == [("reading", 2, "files"), 1, 1, "done", ("reading", None, ""), 1, "done"]


def test_work_that_fails_or_is_left_is_told_as_broken_off():
    notes = Notes()
    with report_to(notes):
        with pytest.raises(ValueError, match="damaged"), work("reading"):
            raise ValueError("damaged")
        for _ in track("ab", "reading"):
            break
    assert notes.told == [("reading", None, ""), "broken", ("reading", 2, ""), "broken"]


def test_a_listener_inside_another_is_heard_alone():
    outer, inner = Notes(), Notes()
    with report_to(outer):
        with report_to(inner):
            begin_work("one").end()
        begin_work("two").end()
    assert (inner.told[0][0], outer.told[0][0]) == ("one", "two")
