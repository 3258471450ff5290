"""What may be begun and taken: nothing is ever due and not there, whatever is finished in whatever order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.in_flight.admission import Admission
from rlinf.data.ledger import Entry


@given(st.data())
def test_nothing_is_learned_after_its_deadline_and_no_step_lacks_anything(data):
    size = data.draw(st.integers(1, 3), label="answers of a prompt")
    batch = size * data.draw(st.integers(1, 4), label="prompts of a step")
    staleness = data.draw(st.integers(0, 4), label="staleness")
    extra = data.draw(st.none() | st.integers(0, 3), label="extra")
    book = Admission(batch, staleness, extra=None if extra is None else extra * size)
    ids = itertools.count()
    loaded = 0  # weights that make tokens: they follow the published ones, sometimes later
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        taken = 0
        while book.left > 0:
            for _ in range(book.room(size, loaded)):
                book.enter(Entry(next(ids), None, size, loaded))
            assert book.answers <= (staleness + 1) * batch
            unfinished = [entry for entry in book.entries.values() if entry.result is None]
            for entry in data.draw(st.lists(st.sampled_from(unfinished), unique=True)) if unfinished else []:
                book.complete(entry.id, "answers", version=data.draw(st.integers(entry.version, book.version)))
            if (entry := book.take()) is None:
                # it waits: then something is unfinished, and the oldest of that is what it waits for
                unfinished = [entry for entry in book.entries.values() if entry.result is None]
                assert unfinished, "the step waits and nothing will come"
                oldest = min(unfinished, key=lambda entry: (entry.deadline, entry.id))
                book.complete(oldest.id, "answers", version=None)
                continue
            assert book.version - entry.version <= staleness, "too old"
            taken += entry.size
        assert taken == batch
        for _ in range(data.draw(st.integers(0, 2))):  # prompts may begin while the step learns
            for _ in range(book.room(size, loaded)):
                book.enter(Entry(next(ids), None, size, loaded))
        book.version += 1
        if data.draw(st.booleans(), label="the weights are there at once") or book.version - loaded > staleness:
            loaded = book.version
        book.next_step()
    learned = book.version * batch
    assert next(ids) * size == learned + book.answers


def test_a_younger_answer_overtakes_only_as_long_as_the_older_ones_still_fit():
    book = Admission(1, 2)
    for number in range(3):
        book.enter(Entry(number, None, 1, 0))
    book.complete(2, "answer", version=0)
    assert book.take().id == 2
    book.version, _ = 1, book.next_step()
    assert book.room(1, 1) == 1
    book.enter(Entry(3, None, 1, 1))
    book.complete(3, "answer", version=1)
    assert book.take() is None  # 0 and 1 are due by version 2, and there are two steps until then
    book.complete(1, "answer", version=0)
    assert book.take().id == 1


def test_nothing_begins_for_steps_that_there_will_not_be():
    book = Admission(2, 3)
    assert book.room(1, 0, after=1) == 4
    assert book.room(1, 0, after=0) == 2
    assert book.room(1, 0, after=-1) == 0
    assert book.room(1, 0) == 8


def test_parts_of_a_group_are_learned_apart():
    book = Admission(4, 1)
    book.enter(Entry(7, "prompt", 4, 0))
    assert book.complete(7, "two of them", version=0, size=2)
    assert (book.take().result, book.left, book.answers) == ("two of them", 2, 2)
    assert book.complete(7, "the others", version=None, size=2)
    assert (book.take().result, book.left, book.answers) == ("the others", 0, 0)
    assert not book.complete(7, "once more", version=0)


def test_what_was_taken_and_given_up_is_taken_again():
    book = Admission(1, 0)
    book.enter(Entry(5, None, 1, 0))
    book.complete(5, "answer", version=0)
    entry = book.take()
    assert (book.left, book.take()) == (0, None)
    book.give_back(entry)
    assert book.take() is entry
