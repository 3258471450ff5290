"""The character tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlinf.data.tokenizer import character_tokenizer, load_tokenizer

ALPHABET = "0123456789> +="
tokenizer = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET, min_size=1))
def test_a_character_is_a_token_and_back(text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_come_first():
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("0")["input_ids"] == [3]
    assert tokenizer("?")["input_ids"] == [2]
    assert len(tokenizer) == 3 + len(ALPHABET)


def test_it_saves_and_loads_like_any_other(tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        ids = again("31 42>", add_special_tokens=False)["input_ids"]
        assert ids == tokenizer("31 42>")["input_ids"]
        assert again.decode(ids) == "31 42>"
        assert (again.pad_token_id, again.eos_token_id) == (0, 1)


@pytest.mark.parametrize("alphabet", ["", "0120"])
def test_an_alphabet_has_each_character_once(alphabet):
    with pytest.raises(ValueError, match="stands once"):
        character_tokenizer(alphabet)


def test_a_source_is_a_directory_or_an_alphabet():
    assert len(load_tokenizer({"characters": "ab"})) == 5
    with pytest.raises(ValueError, match="characters"):
        load_tokenizer({"letters": "ab"})


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path} has none"):
        load_tokenizer(str(tmp_path))
