"""Spans of a text that tokens of two tokenizers end with, against a slow reading of both, and what is carried over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlinf.data.alignment import Span, Translator, carried_over, spans_of
from rlinf.data.sample import Prompt, Sample
from rlinf.data.tokenizer import load_tokenizer

TEXT = "sort these: 3142 gives 1234, and 9 naïve cafés say 你好 to 好 people. " * 3


def byte_level(size, eos="<end>"):
    """A tokenizer of bytes and of pairs that are frequent in TEXT; characters beyond ASCII fall into several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[eos], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


SMALL, LARGE = byte_level(262), byte_level(330, "</s>")
BOTH = Translator(SMALL, LARGE)


def sample(ids, prompt="3142>", temperature=1.0, loss_mask=None, row=None):
    ids = np.asarray(ids, np.int64)
    return Sample(
        prompt=Prompt(0, np.asarray(SMALL(prompt)["input_ids"]), text=prompt, row=row or {}),
        index=0,
        response_ids=ids,
        logprobs=-np.arange(1.0, len(ids) + 1, dtype=np.float32),
        versions=np.zeros(len(ids), np.int32),
        text="",
        truncated=False,
        temperature=temperature,
        loss_mask=loss_mask,
    )


@given(st.text(alphabet="sort 3142gives, naïvé你好好.\n", max_size=40))
def test_each_span_is_the_same_text_in_both_and_none_could_be_cut(text):
    ids = SMALL(text)["input_ids"]
    row, spans = BOTH.row(sample([*ids, SMALL.eos_token_id]))
    others = row.response_ids.tolist()
    assert others == [*LARGE(text)["input_ids"], LARGE.eos_token_id]
    *inner, last = spans
    assert (last.own, last.other) == (slice(len(ids), len(ids) + 1), slice(len(others) - 1, len(others)))
    begins = ends = 0
    for span in inner:
        assert (span.own.start, span.other.start) == (begins, ends)
        begins, ends = span.own.stop, span.other.stop
        assert SMALL.decode(ids[span.own]) == LARGE.decode(others[span.other])
        whole = {SMALL.decode(ids[span.own.start : cut]) for cut in range(span.own.start + 1, span.own.stop)}
        parts = {LARGE.decode(others[span.other.start : cut]) for cut in range(span.other.start + 1, span.other.stop)}
        assert not {each for each in whole & parts if "\ufffd" not in each}
    assert (begins, ends) == (len(ids), len(others) - 1)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], [(1, 1), (1, 1), (1, 1)]),
        ([1, 2, 3], [3], [(3, 1)]),
        ([2, 4], [1, 2, 3, 4], [(1, 2), (1, 2)]),
        ([-1, 1, 2], [-1, -1, 1, 2], [(2, 3), (1, 1)]),
        ([1, 3], [2, 4], []),
        ([1, 1, 2], [1, 2], [(2, 1), (1, 1)]),
        ([], [], []),
    ],
)
def test_spans_end_where_tokens_of_both_end(own, other, expected):
    sizes = [(s.own.stop - s.own.start, s.other.stop - s.other.start) for s in spans_of(own, other)]
    assert sizes == expected


def test_a_tokens_difference_is_that_of_its_span():
    spans = [Span(slice(0, 2), slice(0, 1)), Span(slice(2, 3), slice(1, 3))]
    one = sample([5, 6, 7, 8])
    carried = carried_over(one, spans, np.array([-2.5, -1.0, -0.5]))
    np.testing.assert_allclose(carried - one.logprobs, [0.5, 0.5, 1.5, 0.0])
    learned = sample([5, 6, 7, 8], loss_mask=np.array([True, False, True, True]))
    np.testing.assert_allclose(carried_over(learned, spans, np.array([-2.5, -1.0, -0.5]))[2] - one.logprobs[2], 1.5)
    assert carried_over(learned, spans, np.array([-2.5, -1.0, -0.5]))[0] == one.logprobs[0]


def test_with_one_tokenizer_what_is_carried_over_is_what_the_teacher_said():
    ids = [*SMALL("sort 你好")["input_ids"], SMALL.eos_token_id]
    one, said = sample(ids), -np.linspace(0.5, 4.0, len(ids))
    row, spans = Translator(SMALL, SMALL).row(one)
    assert row.response_ids.tolist() == ids
    carried = carried_over(one, spans, said)
    singles = [span for span in spans if span.own.stop - span.own.start == 1]
    assert singles
    assert all(carried[s.own] == pytest.approx(said[s.own], rel=1e-6) for s in singles)
    for span in spans:  # tokens within a character have its difference
        difference = said[span.own].sum() - one.logprobs[span.own].sum()
        np.testing.assert_allclose(carried[span.own] - one.logprobs[span.own], difference, rtol=1e-5, atol=1e-5)


def test_a_cut_answer_ends_without_the_teachers_end_and_what_lies_behind_the_last_span_differs_by_nothing():
    ids = SMALL("3142 你")["input_ids"][:-1]  # within a character
    row, spans = BOTH.row(sample(ids))
    assert LARGE.eos_token_id not in row.response_ids
    assert spans[-1].own.stop < len(ids)
    said = np.full(len(row.response_ids), -3.0)
    assert carried_over(sample(ids), spans, said)[-1] == sample(ids).logprobs[-1]


def test_a_conversation_is_read_in_the_teachers_own_template():
    teacher = byte_level(300)
    teacher.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    messages = [{"role": "user", "content": "sort 3142"}]
    prompt = sample([5], row={"messages": messages}).prompt
    assert teacher.decode(Translator(SMALL, teacher).prompt_ids(prompt)) == "[user]sort 3142[assistant]"
    assert SMALL.decode(Translator(SMALL, SMALL).prompt_ids(prompt)) == "3142>"


def test_tokens_of_characters_go_with_those_of_pieces():
    characters = load_tokenizer({"characters": "0123456789>"})
    ids = np.array([*characters("1234")["input_ids"], characters.eos_token_id])
    row, spans = Translator(characters, LARGE).row(sample(ids))
    assert sum(span.own.stop - span.own.start for span in spans) == 5
    assert LARGE.decode(row.response_ids[:-1]) == "1234"


def test_a_tokenizer_that_does_not_say_where_tokens_lie_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="teacher's tokenizer, Slow"):
        Translator(SMALL, Slow())  # type: ignore[arg-type]
