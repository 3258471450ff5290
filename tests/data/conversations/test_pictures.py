"""Conversations and pairs about pictures."""

import numpy as np
import pytest
from PIL import Image

from rlinf.data.datasets.load import ConversationOptions, load_conversations
from rlinf.data.datasets.source import DataError
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import pictures_of
from tests.pictured import MODELS, TOKENIZER

CAT = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8))
KIND = "qwen2_5_vl"
CHAT = "{% for m in messages %}{% if m.role == 'assistant' %}:{% endif %}{{ m.content }}<eos>{% endfor %}"
CHAT += "{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer(TOKENIZER)


def groups(tokenizer, *rows, text_alone=False, **options):
    shows = None if text_alone else lambda given: pictures_of(MODELS[KIND], given)
    how = ConversationOptions(**options)
    return load_conversations(tokenizer, train=list(rows), pictures=shows, shuffle=False, options=how).train.take(
        len(rows)
    )


def said(tokenizer, ids):
    return tokenizer.decode(ids).replace("<|image_pad|>" * 6, "#").replace("<|vision_start|>#<|vision_end|>", "#")


def test_a_worked_answer_about_a_picture(tokenizer):
    rows = (
        {"prompt": "a<image>b", "completion": "12", "images": [CAT]},
        {"prompt": "a", "completion": "3", "images": []},
    )
    first, second = groups(tokenizer, *rows)
    assert said(tokenizer, first.prompt.token_ids) == "a#b"
    assert said(tokenizer, first.samples[0].response_ids) == "12<eos>"
    assert (len(first.prompt.images), second.prompt.images) == (1, ())
    (whole,) = groups(tokenizer, {"text": "a<image>bc", "image": CAT}, learn="all")
    assert said(tokenizer, whole.prompt.token_ids) == "a<|vision_start|>#"
    assert said(tokenizer, whole.samples[0].response_ids) == "<|vision_end|>bc<eos>"


def test_an_answer_that_speaks_of_a_picture_has_none(tokenizer):
    (group,) = groups(tokenizer, {"prompt": "a<image>b", "completion": "<image>", "images": [CAT]})
    assert said(tokenizer, group.prompt.token_ids) == "a#b"
    assert said(tokenizer, group.samples[0].response_ids) == "<image><eos>"


def test_a_chat_about_pictures(tokenizer):
    tokenizer.chat_template = CHAT
    parts = [{"type": "image"}, {"type": "text", "text": "a?"}]
    turns = [("user", parts), ("assistant", "1"), ("user", "b?"), ("assistant", "2")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns], "image": CAT}
    (group,) = groups(tokenizer, row)
    (sample,) = group.samples
    learned = sample.response_ids[sample.loss_mask]
    assert said(tokenizer, group.prompt.token_ids) == "#a?<eos>:"
    assert said(tokenizer, learned) == "1<eos>2<eos>"
    turns[0], turns[2] = ("user", "a?"), ("user", parts)
    row["messages"] = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(DataError, match=r"picture.*learned"):
        groups(tokenizer, row)
    (last,) = groups(tokenizer, row, learn="last")
    assert said(tokenizer, last.samples[0].response_ids) == "2<eos>"


def test_a_pair_about_a_picture(tokenizer):
    (pair,) = groups(tokenizer, {"prompt": "a", "chosen": "1", "rejected": "2", "image": CAT}, kind="pairs")
    assert said(tokenizer, pair.prompt.token_ids) == "#a"
    assert [said(tokenizer, sample.response_ids) for sample in pair.samples] == ["1<eos>", "2<eos>"]
    assert len(pair.prompt.images) == 1


def test_a_model_that_reads_text_alone_is_given_no_pictures(tokenizer):
    row = {"prompt": "a", "completion": "1", "image": CAT}
    with pytest.raises(DataError, match=r"1.*reads.*alone.*images:"):
        groups(tokenizer, row, text_alone=True)
    (group,) = groups(tokenizer, row, text_alone=True, columns={"images": None})
    assert group.prompt.images == ()
