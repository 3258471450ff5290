"""Prompts: the authors' text, the first token in front, the lone space at the end."""

import pytest
import torch

from examples.tiny_checkpoints import openvla_tokenizer as tokenizer
from rlinf.models.policy.robots import OPENVLA_PROMPT
from rlinf.models.policy.vla.openvla import Prompts


@pytest.fixture(scope="module")
def made():
    return tokenizer()


def test_a_prompt_is_the_first_token_padding_and_the_words_up_to_the_lone_space(made):
    prompts = Prompts(made.to_str().encode(), OPENVLA_PROMPT, 30, 32000)
    rows = prompts.encode(["Put the red cube on the PLATE", "go left"])
    assert rows.shape == (2, 30)
    assert rows[:, 0].tolist() == [1, 1]
    assert rows[:, -1].tolist() == [29871, 29871]
    for row, text in zip(rows, ("put the red cube on the plate", "go left"), strict=True):
        words = row[1:][row[1:] != 32000]
        assert (row[1 : -len(words)] == 32000).all()
        said = "".join(made.id_to_token(word) for word in words.tolist()).replace("▁", " ").replace("<0x0A>", "\n")
        assert said == f" In: What action should the robot take to {text}?\nOut: "


def test_a_tokenizer_that_drops_the_last_space_gets_it_all_the_same(made):
    whole = Prompts(made.to_str().encode(), OPENVLA_PROMPT, 30, 32000)
    cut = Prompts(made.to_str().encode(), OPENVLA_PROMPT.rstrip(), 30, 32000)
    assert torch.equal(whole.encode(["go left"]), cut.encode(["go left"]))


def test_a_prompt_that_is_too_long_says_what_it_needs(made):
    with pytest.raises(ValueError, match=r"prompt_length=8.*short.*needs"):
        Prompts(made.to_str().encode(), OPENVLA_PROMPT, 8, 32000).encode(["go"])
