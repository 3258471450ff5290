"""Which groups give a gradient, by every recipe."""

from functools import partial

import numpy as np
import pytest

from rlinf.algos import recipes
from rlinf.data.in_flight.admission import Choosing
from rlinf.data.ledger import Entry
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.training.policy import advantage_rows, teaches

SHAPED = {"shaping": {"longest": 6, "cache": 2}}  # of more than 4 tokens; at 6 half a reward is lost


def group(*answers):
    """Answers as (reward, length), or (reward, length, cut)."""
    prompt = Prompt(0, np.array([4]))
    return Group(
        prompt,
        tuple(
            Sample(prompt, index, np.ones(length, int), np.zeros(length, np.float32), np.zeros(length, int), "",
                   bool(cut), reward=reward)
            for index, (reward, length, *cut) in enumerate(answers)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "answers", "expected"),
    [
        ("grpo", {}, [(0.0, 2), (1.0, 2)], True),
        ("grpo", {}, [(0.0, 2), (0.0, 6)], False),
        ("grpo", SHAPED, [(0.0, 2), (0.0, 6)], True),  # a penalty is part of the reward
        ("grpo", SHAPED, [(0.0, 2), (0.5, 6)], False),  # and may level what differed
        ("dapo", SHAPED, [(0.0, 2), (0.0, 6)], False),  # right ones and wrong ones there must be
        ("dapo", SHAPED, [(1.0, 2), (1.0, 6)], False),
        ("dapo", SHAPED, [(0.0, 2), (1.0, 6)], True),
        ("dapo", SHAPED, [(0.0, 2), (0.5, 6)], False),
        ("grpo", {"truncated": "mask"}, [(0.0, 2, True), (1.0, 2, True)], False),
        ("grpo", {"truncated": "mask"}, [(0.0, 2, True), (1.0, 2)], True),
        ("grpo", {}, [(0.0, 0), (1.0, 0)], False),
    ],
)
def test_a_group_teaches_if_rewards_differ_as_the_algorithm_compares_them(name, changes, answers, expected):
    spec, judged = recipes.get(name, changes), group(*answers)
    assert teaches(spec, judged) == expected
    (rows,) = advantage_rows(spec, [judged]).rows
    assert any(row.learned and row.advantage for row in rows) == expected, (
        "what is trained on is what the definition says"
    )


def test_work_in_flight_is_chosen_by_the_same_definition():
    spec = recipes.get("dapo", SHAPED)
    choosing = Choosing(spec.sampling, 2, partial(teaches, spec))
    entries = [Entry(number, None, 2, 0) for number in range(4)]
    even, levelled, good, two = group((0.0, 2), (0.0, 6)), group((0.0, 2), (0.5, 6)), group((0.0, 2), (1.0, 2)), [
        group((1.0, 2), (1.0, 2)), group((0.0, 2), (0.0, 2)),
    ]  # fmt: skip
    told = [choosing.keep(entry, made) for entry, made in zip(entries, ([even], [levelled], [good], two), strict=True)]
    assert told == [False, False, True, False], "of several groups each is compared within itself"
    metrics = choosing.metrics()
    assert (metrics["sampling/kept"], metrics["sampling/dropped"]) == (1.0, 3.0)
