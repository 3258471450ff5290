"""Token ids are those of the whole rendering, and the learned ones are what the assistant says."""

import string

import numpy as np
import pytest

from rlinf.data.datasets.conversations import Dialogue
from rlinf.data.datasets.rendering import Renderer
from rlinf.data.datasets.source import DataError
from rlinf.data.tokenizer import character_tokenizer

PLAIN = (
    "{% if tools %}T{{ tools | length }}\n{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if not (m.role == 'assistant' and not loop.last) %}{{ m.content }}"
    "{% endif %}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tokenizer(template):
    found = character_tokenizer(string.ascii_letters + string.digits + " \n.:")
    found.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    found.chat_template = template
    return found


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


FOUR = [turn("user", "hi"), turn("assistant", "yo"), turn("user", "so"), turn("assistant", "bye")]


def learned(renderer, dialogue):
    """The text of all tokens, and of those that are learned."""
    found = renderer.render(dialogue)
    decode = renderer.tokenizer.decode
    return decode(found.ids), "".join(decode([token]) for token in found.ids[found.weights > 0])


def test_turns_that_are_not_learned_may_be_rendered_otherwise_when_others_follow():
    given = tokenizer(FORGETFUL)
    assert learned(Renderer(given), Dialogue(FOUR[:3], FOUR[3:]))[1] == "bye<e>"
    unlearned = [FOUR[0], {**FOUR[1], "train": False}, *FOUR[2:]]
    assert learned(Renderer(given), Dialogue([], unlearned))[1] == "bye<e>"
    assert learned(Renderer(given, "last"), Dialogue([], FOUR))[1] == "bye<e>"
    text, found = learned(Renderer(given, "all"), Dialogue([], FOUR))
    assert found == text[len("<s>") :]
    with pytest.raises(DataError, match="message 2 otherwise"):
        learned(Renderer(given), Dialogue([], FOUR))


@pytest.mark.parametrize("template", [PLAIN, BLOCKS])
@pytest.mark.parametrize(
    ("learn", "said"), [("assistant", "yo<e>bye<e>"), ("last", "bye<e>"), ("all", None)], ids=lambda value: str(value)
)
def test_the_assistants_turns_are_learned_and_the_ids_are_those_of_the_template(template, learn, said):
    given = tokenizer(template)
    renderer = Renderer(given, learn)
    whole = given.apply_chat_template(FOUR, tokenize=True, return_dict=True)["input_ids"]
    assert renderer.render(Dialogue([], FOUR)).ids.tolist() == whole
    text, found = learned(renderer, Dialogue([], FOUR))
    assert found == (text[len("<s>") :] if said is None else said)


@pytest.mark.parametrize("template", [PLAIN, BLOCKS])
def test_turns_of_the_prompt_are_only_read(template):
    assert learned(Renderer(tokenizer(template)), Dialogue(FOUR[:3], FOUR[3:]))[1] == "bye<e>"


@pytest.mark.parametrize("template", [PLAIN, BLOCKS])
def test_a_message_may_weigh_less_or_not_be_learned(template):
    messages = [FOUR[0], turn("assistant", "yo", weight=0.5), FOUR[2], turn("assistant", "bye", train=False)]
    found = Renderer(tokenizer(template)).render(Dialogue([], messages))
    assert sorted(set(found.weights.tolist())) == [0.0, 0.5]
    assert int((found.weights > 0).sum()) == 3  # y, o and the end token


def test_tools_reach_the_template():
    found, _ = learned(Renderer(tokenizer(PLAIN)), Dialogue([], FOUR, tools=[{"name": "f"}, {"name": "g"}]))
    assert found.startswith("T2\n")


def test_a_template_that_changes_earlier_turns_is_refused_unless_the_last_alone_is_learned():
    with pytest.raises(DataError, match=r"renders.*2 otherwise.*follow.*supervised.learn=last"):
        Renderer(tokenizer(FORGETFUL)).render(Dialogue([], FOUR))
    assert learned(Renderer(tokenizer(FORGETFUL), "last"), Dialogue([], FOUR))[1] == "bye<e>"


def test_a_completion_is_learned_with_an_end_token_and_a_text_as_a_whole():
    renderer = Renderer(tokenizer(None))
    assert learned(renderer, Dialogue("hi", "yo")) == ("hiyo<eos>", "yo<eos>")
    assert learned(renderer, Dialogue("hi", "yo<eos>")) == ("hiyo<eos>", "yo<eos>")
    assert learned(renderer, Dialogue("", "abc")) == ("abc<eos>", "bc<eos>")
    assert learned(Renderer(tokenizer(None), "all"), Dialogue("hi", "yo"))[1] == "iyo<eos>"
    assert renderer.render(Dialogue("hi", "yo")).prompt == 2


def test_a_token_over_the_border_of_prompt_and_completion_is_made_as_when_sampling():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4}
    merging = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    merging.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    given = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<eos>", unk_token="<unk>")
    found = Renderer(given).render(Dialogue("a", "b"))
    assert found.ids.tolist() == [2, 3, 1]  # and not [4, 1], which no model that reads "a" can write
    np.testing.assert_array_equal(found.weights, [0, 1, 1])


def test_a_chat_without_a_template_and_a_template_that_refuses_are_said():
    with pytest.raises(DataError, match=r"chat template:.*data.chat_template"):
        Renderer(tokenizer(None)).render(Dialogue([], FOUR))
    with pytest.raises(DataError, match=r"refuses.*conversation:"):
        Renderer(tokenizer("{{ raise_exception('no') }}")).render(Dialogue([], FOUR))
