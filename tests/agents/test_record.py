"""The record of an episode: what was asked is answered once, and what was not is asked."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlinf.agents.record import Asked, Record
from rlinf.engines.base import Completion, PartialAnswer


def said(number, length=2):
    """An answer that can be told from others."""
    return Completion(number, np.full(length, number), np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")


def half(number, length=1):
    return PartialAnswer(np.full(length, number), np.zeros(length, np.float32), np.zeros(length, np.int32))


def ask(record, what, seed=0, **sampling):
    return record.ask(np.array([what]), seed, sampling)


def answered(record, what, number, **more):
    call = ask(record, what, **more)
    record.answered(call, said(number))
    return call


calls = st.lists(st.integers(0, 3), max_size=8)


@given(calls, st.integers(0, 8), st.integers(0, 8), calls)
def test_an_episode_that_asks_the_same_is_answered_the_same_until_it_is_on_new_ground(asked, cut, again, others):
    """However often it is stopped, and whatever it asks after the point where it leaves the record."""
    first = Record()
    for number, what in enumerate(asked):
        answered(first, what, number)
    kept = first.state({})
    for _ in range(2):  # stopped in the middle of its run from the record: nothing is lost
        second = Record(kept)
        for what in asked[:again]:
            ask(second, what)
        kept = second.state({})
    assert [call.answer.id for call in kept] == [*range(len(asked))]

    third = Record(kept)
    follows = [*asked[:cut], *others]
    same = next(
        (n for n, (one, two) in enumerate(zip(asked, follows, strict=False)) if one != two),
        min(len(asked), len(follows)),
    )
    found = []
    for what in follows:
        call = ask(third, what)
        found.append(None if call.answer is None else call.answer.id)
        if call.answer is None:
            third.answered(call, said(99))
    third.end()
    assert found == [*range(same)] + [None] * (len(follows) - same)
    assert (third.reused, third.dropped) == (2 * same, 2 * (len(asked) - same))
    assert bool(third.anew) == (same < len(asked))


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_calls_that_overlap_are_found_in_any_order(then, now):
    first = Record()
    open_calls = [ask(first, what) for what in then]
    for call in open_calls[:3]:
        first.answered(call, said(then[open_calls.index(call)]))
    second = Record(first.state({open_calls[4].name: half(7)}))
    for what in now:
        call = ask(second, what)
        place = then.index(what)
        assert (call.answer is not None) == (place < 3)
        assert call.answer is None or call.answer.id == what
        assert (call.begun is not None) == (place == 4)
    second.end()
    assert (second.reused, second.dropped, second.anew) == (7, 0, "")


def test_overlapping_calls_may_reach_new_ground_before_others_have_caught_up():
    first = Record()
    one, two = ask(first, 1), ask(first, 2)
    first.answered(one, said(1))
    first.answered(two, said(2))
    second = Record(first.state({}))
    assert ask(second, 1).answer is not None
    assert ask(second, 3).answer is None, "the first agent goes on"
    assert ask(second, 2).answer is not None, "the second one is late"
    second.end()
    assert (second.anew, second.dropped) == ("", 0)


def test_what_is_not_the_same_is_told():
    first = Record()
    answered(first, 1, 0, temperature=1.0)
    for more, why in (({"temperature": 0.5}, "other sampling"), ({"seed": 1, "temperature": 1.0}, "another seed")):
        second = Record(first.state({}))
        assert ask(second, 1, **more).answer is None
        assert (second.anew, second.dropped) == (why, 2)
    second = Record(first.state({}))
    second.end()
    assert (second.anew, second.dropped) == ("fewer calls", 2)
    assert Asked.of(np.array([1]), 0, {"top_k": np.int64(3)}) == Asked.of(np.array([1], np.int32), 0, {"top_k": 3})


def test_a_half_answer_goes_on_and_is_kept_until_it_has_ended():
    first = Record()
    call = ask(first, 1)
    second = Record(first.state({call.name: half(5)}))
    call = ask(second, 1)
    assert call.begun.response_ids.tolist() == [5]
    assert second.reused == 1
    (kept,) = second.state({})
    assert kept.begun is call.begun, "the engine has not told of it yet"
    (kept,) = second.state({call.name: half(5, 3)})
    assert len(kept.begun.response_ids) == 3
    second.answered(call, said(5, 4))
    (kept,) = second.state({})
    assert (kept.answer.id, kept.begun) == (5, None)


def test_a_call_that_was_cancelled_is_not_kept():
    record = Record()
    record.given_up(ask(record, 1))
    assert record.state({}) == ()
    assert not Record(record.state({})).resumed
