"""Faces of groups: they tell what their groups do, of samples that are elsewhere."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from rlinf.algos import recipes
from rlinf.data.face import face_of
from rlinf.data.packing import AwayRow, Row, shared
from rlinf.data.sample import Learned
from rlinf.training.batch_metrics import describe
from rlinf.training.policy import advantage_rows, teaches
from tests.actors import toys

GRPO, DAPO = recipes.get("grpo"), recipes.get("dapo")


def common(one: Row, other: Row) -> int:
    """Tokens that two rows have alike at their beginnings, one by one."""
    texts = [[*row.prompt_ids.tolist(), *row.response_ids.tolist()] for row in (one, other)]
    count = 0
    for left, right in zip(*texts, strict=False):
        if left != right:
            break
        count += 1
    return count


@pytest.fixture(params=range(4))
def batch(request):
    made = toys.groups(9, seed=request.param)
    return toys.conversations(made) if request.param % 2 else made


def sent(batch):
    faces = [face_of(group) for group in batch]
    return [pickle.loads(pickle.dumps(face)) for face in faces]


def test_by_faces_a_batch_has_the_same_metrics_account_and_rows(batch):
    faces = sent(batch)
    for spec in (GRPO, DAPO):
        assert describe(faces, 3, spec, oldest=4) == describe(batch, 3, spec, oldest=4)
        assert [teaches(spec, group) for group in faces] == [teaches(spec, group) for group in batch]
        planned, whole = advantage_rows(spec, faces), advantage_rows(spec, batch)
        assert (planned.advantages, planned.rewards) == (whole.advantages, whole.rewards)
        for group, some, rows in zip(batch, planned.rows, whole.rows, strict=True):
            for away, row in zip(some, rows, strict=True):
                assert (away.size, away.learned) == (row.size, row.learned)
                mine = away.whole(group)
                assert np.array_equal(mine.response_ids, row.response_ids)
                assert mine.advantage == row.advantage
                assert np.array_equal(mine.old_logprobs, row.old_logprobs)
    assert Learned.of(faces) == Learned.of(batch)


def test_rows_of_one_group_share_what_their_tokens_do(batch):
    planned, whole = advantage_rows(GRPO, sent(batch)), advantage_rows(GRPO, batch)
    for some, rows in zip(planned.rows, whole.rows, strict=True):
        ordered = sorted(range(len(some)), key=lambda at: some[at].lead.order.index(some[at].at))
        counts = shared([some[at] for at in ordered])
        assert counts[1:] == [common(rows[a], rows[b]) for a, b in itertools.pairwise(ordered)]


def test_whoever_asks_a_face_for_tokens_is_told_that_they_are_elsewhere(batch):
    face = sent(batch)[0]
    with pytest.raises(TypeError, match="stay where they were made"):
        np.concatenate([face.samples[0].response_ids])
    row = next(row for rows in advantage_rows(GRPO, sent(batch)).rows for row in rows)
    assert isinstance(row, AwayRow)
    with pytest.raises(TypeError, match="elsewhere"):
        row.places()


def test_a_group_without_verdict_or_with_columns_of_others_has_no_face(batch):
    assert all(face_of(group) is None for group in toys.told(batch))
