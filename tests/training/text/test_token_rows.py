"""A response token by token: texts that join to the whole, and what is known of each token."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlinf.data.sample import Prompt, Sample, Segment
from rlinf.data.tokenizer import character_tokenizer, shown_prompt
from rlinf.training.batch_metrics import MOST, read_spans, token_rows, token_texts

CHARACTERS = character_tokenizer("0123456789>")


@functools.cache
def of_bytes() -> PreTrainedTokenizerFast:
    """As GPT-2's and Qwen's: a token is some bytes, not always whole characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the cat, the hat"] * 9, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@functools.cache
def of_pieces() -> PreTrainedTokenizerFast:
    """As Llama's first ones: the space before a word belongs to it, and is left out at the beginning of a text."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "the", "."]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(st.text(max_size=30))
def test_texts_of_bytes_join_to_the_text(text):
    ids = of_bytes().encode(text)
    texts = token_texts(ids, of_bytes())
    assert "".join(texts) == text
    assert len(texts) == len(ids)


@given(st.lists(st.sampled_from([1, 2, 3, 5, 6]), max_size=12))
def test_spaces_between_words_are_kept(ids):
    assert "".join(token_texts(ids, of_pieces())) == of_pieces().decode(ids)


def test_what_the_model_read_is_shown_beside_what_was_asked():
    ids = np.array(CHARACTERS.encode("12>11"), np.int64)
    assert shown_prompt(Prompt(0, ids, "m"), CHARACTERS) == {"prompt": "12>11", "task": "m"}
    assert shown_prompt(Prompt(0, ids), CHARACTERS) == {"prompt": "12>11"}
    assert shown_prompt(Prompt(0, ids, "12>11"), CHARACTERS) == {}
    assert shown_prompt(Prompt(0, ids[:0], "m"), CHARACTERS) == {}, "of a checkpoint, without tokens"


def test_a_character_of_several_tokens_comes_with_the_last_of_them():
    ids = of_bytes().encode("ab€c")
    assert token_texts(ids, of_bytes()) == ["a", "b", "", "", "€", "c"]
    assert token_texts(ids[:4], of_bytes())[-1] == "\ufffd", "half a character at the end"


def sample(**more):
    ids = np.array(CHARACTERS.encode("1234"))
    given = {
        "response_ids": ids,
        "logprobs": np.array([-0.12345, -1.0, -2.0, -0.5], np.float32),
        "versions": np.array([3, 3, 4, 4], np.int32),
        **more,
    }
    return Sample(Prompt(0, np.array([1])), 0, text="1234", truncated=False, **given)


def test_what_is_known_of_each_token():
    assert token_rows(sample(), CHARACTERS) == {
        "texts": ["1", "2", "3", "4"], "logprobs": [-0.123, -1.0, -2.0, -0.5], "mask": [1] * 4, "versions": [3, 3, 4, 4]
    }  # fmt: skip


def test_of_a_conversation_all_segments_are_told_and_what_the_model_did_not_say_is_unknown():
    said = np.array(CHARACTERS.encode("12"))
    segments = [
        Segment(said, np.array([-1.0, -2.0], np.float32), np.array([5, 6], np.int32)),
        Segment(np.array(CHARACTERS.encode("34"))),
    ]
    talk = Sample.of_segments(Prompt(0, np.array([1])), 0, segments, text="1234", truncated=False)
    told = token_rows(talk, CHARACTERS)
    assert told == {
        "texts": ["1", "2", "3", "4"], "logprobs": [-1.0, -2.0, None, None], "mask": [1, 1, 0, 0],
        "versions": [5, 6, -1, -1],
    }  # fmt: skip
    assert json.loads(json.dumps(told)) == told


def talking(*runs, tokenizer):
    """A conversation of runs of text: (what was said, the model said it)."""
    segments = []
    for text, spoken in runs:
        ids = np.array(tokenizer.encode(text), np.int64)
        told = (np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32)) if spoken else ()
        segments.append(Segment(ids, *told))
    text = "".join(text for text, _ in runs)
    return Sample.of_segments(Prompt(0, np.array([1])), 0, segments, text=text, truncated=False)


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6))
def test_what_was_only_read_is_told_in_characters(texts):
    runs = [(text, at % 2 == 0) for at, text in enumerate(texts)]
    talk = talking(*runs, tokenizer=of_bytes())
    spans = read_spans(talk, talk.text, of_bytes())
    assert [talk.text[begin:end] for begin, end in spans] == texts[1::2]
    short = talk.text[:3]
    assert all(0 <= begin < end <= 3 for begin, end in read_spans(talk, short, of_bytes()))
    assert read_spans(talk, talk.text + "!", of_bytes()) == [], "a text that the tokens do not say"


def test_words_have_their_spaces_where_speakers_change():
    segments = [
        Segment(np.array([1, 3]), np.array([-1.0, -1.0], np.float32), np.zeros(2, np.int32)),
        Segment(np.array([2, 5])),
        Segment(np.array([1]), np.array([-1.0], np.float32), np.zeros(1, np.int32)),
    ]
    text = of_pieces().decode([1, 3, 2, 5, 1])
    talk = Sample.of_segments(Prompt(0, np.array([1])), 0, segments, text=text, truncated=False)
    ((begin, end),) = read_spans(talk, text, of_pieces())
    assert text[begin:end] == " catthe"


def test_an_answer_that_the_model_said_alone_has_nothing_read():
    assert read_spans(sample(), "1234", CHARACTERS) == []


@pytest.mark.parametrize("more", [0, 7])
def test_of_long_responses_the_beginning_is_told(more):
    ids = np.array(CHARACTERS.encode("1" * (MOST + more)))
    long = sample(response_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), np.int32))
    told = token_rows(long, CHARACTERS)
    assert [len(told[name]) for name in ("texts", "logprobs", "mask", "versions")] == [MOST] * 4
    assert told.get("cut", 0) == more
