"""Whoever does long work tells how far it is, and need not know whether anybody listens."""

from __future__ import annotations

import pytest

from rlinf.runtime.base.progress import begun, counted, heard_by, listener, work


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
    begun("reading").end()
    assert list(counted(range(3), "counting")) == [0, 1, 2]


def test_the_listener_hears_what_is_done_and_the_end():
    notes = Notes()
    with heard_by(notes), work("reading", 3, "files") as reading:
        reading.advance(2)
        reading.at(3, 4)
    assert notes.told == [("reading", 3, "files"), 2, (3, 4), "done"]
    assert listener() is None


def test_items_know_how_many_they_are_or_nobody_does():
    notes = Notes()
    with heard_by(notes):
        assert list(counted("ab", "reading", unit="files")) == ["a", "b"]
        assert list(counted(iter("a"), "reading")) == ["a"]
    assert notes.told == [("reading", 2, "files"), 1, 1, "done", ("reading", None, ""), 1, "done"]


def test_work_that_fails_or_is_left_is_told_as_broken_off():
    notes = Notes()
    with heard_by(notes):
        with pytest.raises(ValueError, match="damaged"), work("reading"):
            raise ValueError("damaged")
        for _ in counted("ab", "reading"):
            break
    assert notes.told == [("reading", None, ""), "broken", ("reading", 2, ""), "broken"]


def test_a_listener_inside_another_is_heard_alone():
    outer, inner = Notes(), Notes()
    with heard_by(outer):
        with heard_by(inner):
            begun("one").end()
        begun("two").end()
    assert (inner.told[0][0], outer.told[0][0]) == ("one", "two")
