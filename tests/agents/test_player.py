"""A player in the model's place: its words are recorded as the model's, and what the model could not say is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlinf.agents.player import Seat
from rlinf.data.sample import Prompt
from rlinf.data.tokenizer import character_tokenizer
from tests.agents.acting import TOKENIZER, begun, ids

ASKED = [{"role": "user", "content": "2+2"}]
DIGITS = character_tokenizer("0123456789+")


def seated(player, tokenizer=TOKENIZER):
    llm, actor = begun()
    llm._attempt.task, llm._attempt.seat = Prompt(3, ids("2+2"), "2+2", "4"), Seat(player, tokenizer)
    return llm, actor


async def test_a_turn_of_a_player_is_a_turn_of_the_model():
    async def player(task, messages):
        messages[-1]["content"] += "!"  # its own copy
        return f"{task.answer} after {len(messages)}"

    llm, actor = seated(player)
    first = await llm.chat(ASKED)
    second = await llm.chat([*ASKED, first.message, {"role": "user", "content": "so?"}])
    assert (first.text, second.text, actor.read) == ("4 after 1", "4 after 3", [])
    (sample,) = llm.samples(1.0)
    assert TOKENIZER.decode(sample.prompt.token_ids) == "2+2"
    eos = TOKENIZER.eos_token
    assert TOKENIZER.decode(sample.response_ids) == f"4 after 1{eos}so?4 after 3{eos}"
    assert TOKENIZER.decode(sample.response_ids[sample.loss_mask]) == f"4 after 1{eos}4 after 3{eos}"


async def test_a_player_is_asked_for_tokens_by_their_text():
    llm, _ = seated(lambda task, messages: f"{messages} so {task.answer}")
    assert (await llm.generate(ids("2+2="))).text == "[{'role': 'user', 'content': '2+2='}] so 4"


@pytest.mark.parametrize(
    ("player", "tokenizer", "said"),
    [
        (lambda task, messages: 4, TOKENIZER, "it returned 4; return a text"),
        (lambda task, messages: "4" * 64, TOKENIZER, "65 tokens with the end, .* rollout.max_new_tokens=64"),
        (lambda task, messages: "four", DIGITS, "'four', of which the tokenizer does not know"),
        (lambda task, messages: "4", SimpleNamespace(eos_token_id=None, unk_token_id=0), "no end token"),
        (lambda task, messages: 1 / 0, TOKENIZER, "division by zero"),
    ],
)
async def test_what_the_model_could_not_say_is_an_error_of_the_episode(player, tokenizer, said):
    llm, _ = seated(player, tokenizer)
    with pytest.raises(Exception, match=said):
        await llm.chat(ASKED)
    assert not llm.trajectories.turns


async def test_as_many_tokens_as_an_answer_has_at_most_are_no_mistake():
    llm, _ = seated(lambda task, messages: "4" * 63)
    assert np.array_equal((await llm.chat(ASKED)).ids[:-1], ids("4" * 63))
