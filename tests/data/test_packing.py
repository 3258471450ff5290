"""Laying sequences one behind another, and cutting them into pieces."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.packing import Parcel, Row, cut, pack
from rlinf.data.prefix_tree import begins_of
from rlinf.data.sample import ImageRef, Prompt, Sample, prefix_key


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def sample(prompt, response, temperature=1.0):
    return Sample(
        prompt=Prompt(0, ids(*prompt)),
        index=0,
        response_ids=ids(*response),
        logprobs=np.array([-0.1 * token for token in response], dtype=np.float32),
        versions=np.zeros(len(response), dtype=np.int32),
        text="",
        truncated=False,
        temperature=temperature,
    )


def plain(row):
    def bare(value):
        if isinstance(value, dict):
            return {name: bare(each) for name, each in value.items()}
        return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value

    return [bare(getattr(row, name)) for name in Row.__slots__]


COLUMNS = st.sampled_from([(), ("versions",), ("values", "versions")])


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans(), st.booleans()), max_size=6), COLUMNS)
def test_rows_arrive_as_they_left_and_share_what_they_shared(kinds, names):
    shared, picture, rows = ids(5, 6), ImageRef("digest"), []
    for number, (length, masked, by_token, odd) in enumerate(kinds):
        mask = np.arange(length) % 2 == 0 if masked else None
        learned = np.arange(length, dtype=np.float32)[: int(mask.sum()) if masked else length] - number
        columns = {name: learned.astype(np.int32) for name in (*names, *(("more",) if odd else ()))}
        old, gain = (None if odd else learned), (learned if by_token else 0.5 * number)
        images = (picture,) if masked else ()
        prompt = ids(number) if odd else shared
        rows.append(Row(prompt, np.arange(length), old, gain, 0.5, columns, images, mask, 1.0 + number, None))
    arrived = pickle.loads(pickle.dumps(Parcel(rows), 5))
    assert isinstance(arrived, tuple)
    assert [plain(row) for row in arrived] == [plain(row) for row in rows]
    assert len({id(row.prompt_ids) for row in arrived}) == len({id(row.prompt_ids) for row in rows})


def test_sequences_lie_one_behind_another_and_positions_begin_anew():
    packed = pack([Row(ids(5, 6), ids(7, 8)), Row(ids(1, 2, 3), ids(4, 9, 9)), Row(ids(4), ids())])
    assert packed.ids.tolist() == [5, 6, 7, 1, 2, 3, 4, 9, 4], "a response's last token predicts nothing"
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert packed.lengths == (3, 5, 1)
    assert packed.places is None
    assert packed.predictors.tolist() == [1, 2, 5, 6, 7]
    assert packed.targets.tolist() == [7, 8, 4, 9, 9]


def test_a_prompt_with_several_answers_is_read_once():
    packed = pack([Row(ids(5, 6), ids(7, 8)), Row(ids(1), ids(2)), Row(ids(5, 6), ids(9, 8, 7)), Row(ids(5, 6), ids())])
    assert packed.ids.tolist() == [5, 6, 7, 1, 9, 8]
    assert packed.positions.tolist() == [0, 1, 2, 0, 2, 3]
    assert packed.lengths == (3, 1, 4, 2)
    assert packed.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1]
    assert packed.predicting().tolist() == [1, 2, 3, 1, 4, 5]
    assert packed.targets.tolist() == [7, 8, 2, 9, 8, 7]


CAT, DOG = ImageRef("c0", "cat.png"), ImageRef("d0", "dog.png")


def test_equal_placeholders_of_different_pictures_are_never_read_once():
    rows = [Row(ids(5, 5, 6), ids(7, 8), images=(picture,)) for picture in (CAT, DOG)]
    packed = pack(rows)
    assert packed.places is None
    assert packed.ids.tolist() == [5, 5, 6, 7, 5, 5, 6, 7]
    assert packed.images == (CAT, DOG)
    assert pack([Row(ids(5, 5, 6), ids(7)), rows[0]]).places is None, "nor a picture and none"


def test_equal_pictures_are_read_once_wherever_they_are_kept():
    copied = ImageRef("c0", "elsewhere/cat.png")
    rows = [Row(ids(5, 6), ids(7, 8), images=(picture,)) for picture in (CAT, DOG, copied)]
    packed = pack(rows)
    assert packed.ids.tolist() == [5, 6, 7, 5, 6, 7]
    assert packed.places.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert packed.images == (CAT, DOG)


def test_turns_with_further_pictures_share_those_before_them():
    turns = [((5, 6), (7, 8), (CAT,)), ((5, 6, 7, 8, 5), (9, 1), (CAT, DOG)), ((5, 6), (7, 2), (DOG,))]
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        packed = pack([Row(ids(*turns[n][0]), ids(*turns[n][1]), images=turns[n][2]) for n in order])
        assert len(packed.ids) == 6 + 3, "the first turn is in the second; the third has another picture"
        assert packed.images == ((DOG, CAT, DOG) if order[0] == 2 else (CAT, DOG, DOG))


def test_a_prefix_key_is_of_what_the_model_reads_alone():
    same = Prompt(1, ids(5, 6), text="one", images=(CAT,)), Prompt(2, ids(5, 6).astype(np.int32), images=(CAT,))
    assert same[0].prefix_key == same[1].prefix_key == prefix_key(ids(5, 6), (CAT,))
    others = Prompt(1, ids(5, 6)), Prompt(1, ids(5, 6), images=(DOG,)), Prompt(1, ids(5, 7), images=(CAT,))
    others += (Prompt(1, ids(5, 6), images=(CAT, CAT)), Prompt(1, ids(5, 6), images=(CAT, DOG)))
    assert len({same[0].prefix_key, *(prompt.prefix_key for prompt in others)}) == 6


def test_a_samples_pictures_come_along_with_its_prompt():
    drawn = sample([5, 6], [7])
    pictured = replace(drawn, prompt=replace(drawn.prompt, images=(CAT,)))
    assert Row.of(pictured).images == (CAT,)


def test_what_a_sample_says_stands_where_its_tokens_are_predicted():
    rows = [Row.of(sample([5, 6], [7, 8]), 1.0), Row.of(sample([1, 2, 3], [4, 9, 9], 0.5), -2.0)]
    packed = pack(rows)
    np.testing.assert_allclose(packed.old_logprobs, -0.1 * packed.targets.numpy(), rtol=1e-6)
    assert packed.advantages.tolist() == [1, 1, -2, -2, -2]
    assert packed.temperature.tolist() == [1, 1, 0.5, 0.5, 0.5]
    assert pack(rows[:1]).temperature is None


def test_advantages_of_tokens_and_further_columns_stand_there_too():
    versions = {"versions": np.array([3, 4], np.int32)}, {"versions": np.array([5, 6, 7], np.int32)}
    packed = pack([
        Row.of(sample([5, 6], [7, 8]), np.array([0.5, -0.5], np.float32), versions[0]),
        Row.of(sample([1, 2, 3], [4, 9, 9]), 2.0, versions[1]),
    ])  # fmt: skip
    assert packed.advantages.tolist() == [0.5, -0.5, 2, 2, 2]
    assert packed.sequences.tolist() == [0, 0, 1, 1, 1]
    assert packed.columns["versions"].tolist() == [3, 4, 5, 6, 7]
    elsewhere = packed.to(torch.device("meta"))
    assert elsewhere.columns["versions"].device == elsewhere.sequences.device == torch.device("meta")
    assert elsewhere.lengths == packed.lengths


def test_tokens_outside_the_mask_are_read_and_not_predicted():
    mask = np.array([False, True, False, True, False, False])
    conversation = replace(sample([5, 6], [7, 8, 9, 3, 4, 2]), loss_mask=mask)
    row = Row.of(conversation, np.array([0.5, -0.5], np.float32), {"versions": np.array([3, 4], np.int32)})
    packed = pack([row, Row.of(sample([5, 6], [1]), 2.0, {"versions": np.array([5], np.int32)})])
    assert packed.ids.tolist() == [5, 6, 7, 8, 9], "what follows the last learned token predicts none"
    assert packed.predicting().tolist() == [2, 4, 1]
    assert packed.targets.tolist() == [8, 3, 1]
    assert packed.advantages.tolist() == [0.5, -0.5, 2]
    np.testing.assert_allclose(packed.old_logprobs, [-0.8, -0.3, -0.1], rtol=1e-6)
    assert packed.sequences.tolist() == [0, 0, 1]
    assert packed.columns["versions"].tolist() == [3, 4, 5]
    assert packed.mask.tolist() == [True] * 3


def test_a_response_that_teaches_nothing_is_not_read():
    packed = pack([Row(ids(5, 6), ids(7, 8), loss_mask=np.zeros(2, bool)), Row(ids(1), ids(2))])
    assert (packed.ids.tolist(), packed.lengths, packed.targets.tolist()) == ([5, 6, 1], (2, 1), [2])


def test_greedy_logprobs_are_at_temperature_one():
    assert Row.of(sample([1], [2], 0.0), 1.0).temperature == 1.0


def test_nothing_is_one_token_with_nothing_to_learn():
    packed = pack([])
    assert packed.ids.tolist() == [0]
    assert len(packed.predictors) == len(packed.targets) == len(packed.advantages) == 0


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"1.*empty prompt"):
        pack([Row(ids(1), ids(2)), Row(ids(), ids(2))])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=8))
def test_laid_end_to_end_every_sequence_is_there_and_its_tokens_predict_the_next(sizes):
    rows = [Row(np.arange(p) + 100 * n, np.arange(p, p + r) + 100 * n) for p, r, n in sizes]
    packed = pack(rows)
    places = np.arange(len(packed.ids)) if packed.places is None else packed.places.numpy()
    read, positions = packed.ids.numpy()[places], packed.positions.numpy()[places]
    expected = [[*row.prompt_ids, *row.response_ids[:-1]] for row in rows]
    assert read.tolist() == [token for sequence in expected for token in sequence]
    assert positions.tolist() == [place for sequence in expected for place in range(len(sequence))]
    assert packed.lengths == tuple(map(len, expected))
    assert packed.targets.tolist() == [token for row in rows for token in row.response_ids]
    assert (packed.ids[packed.predicting()] + 1 == packed.targets).all()


FORKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.lists(st.integers(0, 1), max_size=6)), min_size=1)


@given(FORKS, st.integers(1, 3), st.booleans())
def test_every_beginning_is_read_once_and_a_text_ends_with_what_is_its_own(forks, prompt, routed):
    texts, rng = [], np.random.default_rng(0)
    for other, kept, more in forks:  # each goes on from within an earlier one
        texts.append([*(texts[other % len(texts)][: prompt + kept] if texts else [3] * prompt), *more, 2])
    routes = [rng.integers(0, 2, (len(text), 1, 2)).astype(np.uint8) if routed else None for text in texts]
    rows = [
        Row(ids(*text[:prompt]), ids(*text[prompt:]), routes=each) for text, each in zip(texts, routes, strict=True)
    ]
    packed = pack(rows)
    read = [tuple(text[:-1]) for text in texts]
    stands = np.arange(len(packed.ids)) if packed.stands is None else packed.stands
    assert packed.lengths == tuple(map(len, read))
    assert packed.ids.numpy()[stands].tolist() == [token for text in read for token in text]
    assert packed.positions.numpy()[stands].tolist() == [at for text in read for at in range(len(text))]
    once = {text[: end + 1] for text in read for end in range(len(text))}
    if packed.stands is None:
        assert routed or len(once) > 0.9 * sum(packed.lengths)
    elif not routed:
        assert len(packed.ids) == len(once)
    else:
        said = np.concatenate([each[: len(text)] for each, text in zip(routes, read, strict=True)])
        answers = np.concatenate([np.arange(len(text)) >= prompt for text in read])
        assert (packed.routes.numpy()[stands] == said)[answers].all()
    starts, before = np.cumsum([0, *packed.lengths]), 0
    for begin, start, end in zip(begins_of(packed.lengths, stands), starts[:-1], starts[1:], strict=True):
        fresh = stands[start + begin : end]
        assert fresh.tolist() == list(range(before, before + len(fresh)))
        before += len(fresh)


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_cutting_keeps_order_and_budget(sizes, budget):
    pieces = list(cut(range(len(sizes)), sizes, budget))
    assert [item for piece in pieces for item in piece] == list(range(len(sizes)))
    for piece in pieces:
        assert piece
        assert len(piece) == 1 or sum(sizes[item] for item in piece) <= budget
    for one, following in itertools.pairwise(pieces):
        assert sum(sizes[item] for item in one) + sizes[following[0]] > budget  # no piece is smaller than need be
