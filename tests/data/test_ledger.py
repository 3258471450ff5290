"""The ledger counts every sample once, whatever becomes of it, and finds what is lost, repeated or from nowhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.ledger import Ledger, _Numbers, balance, of_ranges, packed, ranges, unpacked
from rlinf.data.sample import Group, Learned, Prompt, Sample

NONE = np.empty(0, np.int64)


def sample(prompt, index, reward=1.0, tokens=2, **more):
    ids = np.zeros(tokens, np.int64)
    logprobs, versions = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32)
    return Sample(prompt, index, ids, logprobs, versions, "", False, reward=reward, outcome="ok", **more)


def group(number, *rewards):
    prompt = Prompt(number, NONE)
    return Group(prompt, tuple(sample(prompt, index, reward) for index, reward in enumerate(rewards)))


@given(st.lists(st.integers(-20, 20)))
def test_ranges_are_read_back(numbers):
    assert of_ranges(ranges(numbers)) == sorted(numbers)


@given(st.dictionaries(st.integers(0, 30), st.lists(st.integers(0, 5), min_size=1)))
def test_samples_are_read_back(samples):
    assert {number: [*indices] for number, indices in unpacked(packed(samples))} == {
        number: sorted(indices) for number, indices in samples.items()
    }


def test_a_step_of_a_thousand_prompts_is_a_short_line():
    ledger = Ledger()
    ledger.drawn(range(1000), 16)
    ledger.dropped(17, "unscored", [3])
    ledger.trained({number: [i for i in range(16) if (number, i) != (17, 3)] for number in range(1000)}, tokens=5)
    line = ledger.close(1)
    assert len(json.dumps(line)) < 250
    assert line == {
        "step": 1,
        "drawn": {"0-15": "0-999"},
        "trained": {"0-15": "0-16,18-999", "0-2,4-15": "17"},
        "dropped": {"unscored": {"3": "17"}},
        "tokens": {"trained": 5},
    }
    assert ledger.open == {}


def test_what_is_neither_trained_nor_dropped_nor_in_flight_is_lost():
    ledger = Ledger()
    ledger.drawn([1, 2, 3], 2)
    ledger.trained({1: [0]})
    line = ledger.close(1, {2: 2, 3: [1]})
    assert line["in_flight"] == {"0-1": "2", "1": "3"}
    assert line["lost"] == {"1": "1", "0": "3"}
    found = balance([line])
    assert not found.balances
    assert found.problems == ["step 1: lost: 2 samples (prompt/sample 1/1, 3/0)"]
    assert (found.samples, found.trained, found.in_flight) == (6, 1, 3)


def test_what_a_flow_of_ones_own_says_nothing_about_is_unknown():
    ledger = Ledger(own=True)
    ledger.drawn([1, 2], 2)
    ledger.trained({1: [0, 0, 1], 900: [0]})
    found = balance([ledger.close(1)])
    assert found.balances
    assert (found.unknown, found.elsewhere, found.trained) == (2, 2, 4)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (
            {"trained": {"0": "5", "0-1": "4"}},
            "step 2: trained although",
        ),
        ({"trained": {"0": "77"}}, "1 samples (prompt/sample 77/0)"),
        ({"drawn": {"0": "4"}}, "drawn twice: 1"),
        ({"dropped": {"too old": {"1": "4"}}}, "step 2: dropped although"),
        ({"in_flight": {"0": "4"}}, "last line"),
        ({"drawn": {"0": "9"}}, "lost: "),
        ({"step": 4}, "of step 4"),
    ],
)
def test_lines_that_cannot_be_are_named(events, problem):
    first = {"step": 1, "drawn": {"0-1": "4", "0": "5"}, "trained": {"0-1": "4", "0": "5"}}
    found = balance([first, {"step": 2, **events}])
    assert any(problem in each for each in found.problems), found.problems


def test_a_checkpoint_is_held_against_the_lines_before_it():
    ledger = Ledger()
    ledger.drawn([0, 1], 2)
    ledger.trained({0: [0, 1]})
    lines = [ledger.close(1, {1: 2})]
    ledger.drawn([2], 2)  # between the end of the step and the checkpoint
    ledger.dropped(1, "too old", [0], tokens=7)
    state = json.loads(json.dumps(ledger.state_dict()))
    assert balance(lines, {1: [1], 2: [0, 1]}, state["since"]).balances
    assert balance(lines, {1: 1, 2: 2}, state["since"]).balances
    assert not balance(lines, {1: 1, 2: 1}, state["since"]).balances, "a sample is missing in the checkpoint"
    assert not balance(lines, {1: 2, 2: 2}, state["since"]).balances, "it has more than there are"
    assert not balance(lines, {2: [0, 1]}, state["since"]).balances, "a sample is missing in the checkpoint"
    assert not balance(lines, {1: [0, 1], 2: [0, 1]}, state["since"]).balances, "it has one that was dropped"
    again = Ledger()
    again.load_state_dict(state)
    assert again.open == ledger.open == {1: [1], 2: [0, 1]}
    again.trained({1: [1], 2: [0, 1]})
    found = balance([*lines, again.close(2)])
    assert found.balances
    assert (found.prompts, found.samples, found.trained, found.dropped) == (3, 6, 5, {"too old": 1})
    assert found.tokens == {"dropped": 7}


def test_several_conversations_of_one_attempt_are_one_sample():
    prompt = Prompt(3, NONE)
    told = [(0, 0, "", 1.0), (1, 0, "", 1.0), (2, 1, "", None), (3, 2, "", None), (4, 2, "", 1.0), (0, 0, "other", 1.0)]
    samples = tuple(
        sample(prompt, index, reward, attempt=attempt, agent=agent) for index, attempt, agent, reward in told
    )
    found = Learned.of([Group(prompt, samples)])
    assert (found.trained, found.unscored, found.tokens) == ({3: [0, 2]}, {3: [1]}, 8)


def test_a_sample_that_comes_twice_is_told_twice():
    once = group(1, 1.0, 0.0)
    assert Learned.of([once, once]).trained == {1: [0, 1, 0, 1]}
    assert (Learned.of([once]) + Learned.of([group(2, None, 1.0)])).trained == {1: [0, 1], 2: [1]}


@settings(deadline=None)
@given(st.data())
def test_whatever_happens_the_ledger_balances_and_no_single_change_does(data):
    """Random programs: prompts are drawn, trained whole or in parts, dropped, carried over; then one event is removed
    or repeated."""
    ledger, lines, following = Ledger(), [], 0
    for step in range(1, data.draw(st.integers(1, 5)) + 1):
        count = data.draw(st.integers(0, 4))
        ledger.drawn(range(following, following + count), 3)
        following += count
        for number, indices in ledger.open.items():
            for index in indices:
                what = data.draw(st.sampled_from(["train", "drop", "carry"]))
                if what == "train":
                    ledger.trained({number: [index]})
                elif what == "drop":
                    ledger.dropped(number, data.draw(st.sampled_from(["too old", "surplus"])), [index])
        if data.draw(st.booleans()):
            ledger.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
        lines.append(ledger.close(step, ledger.open))
    assert all("lost" not in line for line in lines)
    found = balance(lines)
    assert found.balances, found.problems
    assert found.samples == found.trained + sum(found.dropped.values()) + found.in_flight == 3 * following
    events = [(line, key) for line in lines for key in ("drawn", "trained") if key in line]
    if events:
        line, key = data.draw(st.sampled_from(events))
        removed = [{**each} for each in lines]
        del removed[lines.index(line)][key]
        assert not balance(removed).balances
        if key == "trained":
            line[key] = {f"{indices},{indices}": numbers for indices, numbers in line[key].items()}
            assert not balance(lines).balances


@given(st.lists(st.integers(0, 40)))
def test_numbers_are_a_set(numbers):
    found = _Numbers()
    for number in numbers:
        found.add(number)
    assert [number for number in range(42) if number in found] == sorted({*numbers})
    assert all(end < first for end, first in zip(found._end, found._first[1:], strict=False))
