"""What attempts at one task have in common is encoded once, and whatever tells two apart keeps them apart."""

import numpy as np
import pytest

from rlinf.agents.chat import _KEPT, _PROBE, ChatFormat
from rlinf.runtime.base.errors import UserError
from tests.agents.speaking import STYLES, tokenizer_of

ASKED = [{"role": "user", "content": "how many?"}]
SAID = [*ASKED, {"role": "assistant", "content": "aba"}]
READ = [{"role": "user", "content": "again"}]


class Counting:
    """A tokenizer's chat template, counted."""

    def __init__(self, monkeypatch):
        self.tokenizer, self.rendered = tokenizer_of(STYLES["chatml"]), 0
        render = self.tokenizer.apply_chat_template

        def counted(*args, **kwargs):
            self.rendered += _PROBE not in str(args)  # a role is looked for once
            return render(*args, **kwargs)

        monkeypatch.setattr(self.tokenizer, "apply_chat_template", counted)


@pytest.fixture
def counting(monkeypatch):
    return Counting(monkeypatch)


def test_the_same_messages_are_rendered_once_and_nobody_shares_the_array(counting):
    chat = ChatFormat(counting.tokenizer)
    first, again = chat.opening(ASKED), chat.with_arguments().opening([dict(ASKED[0])])
    assert counting.rendered == 1
    first[:] = 0
    assert np.array_equal(again, chat.opening(ASKED))
    assert again.any()
    other = [ASKED[0], {"role": "assistant", "content": "another answer"}]
    assert np.array_equal(chat.following(SAID, READ), chat.following(other, READ))  # what was said is tokens already
    assert counting.rendered == 2


def test_whatever_differs_is_rendered_by_itself(counting):
    chat = ChatFormat(counting.tokenizer)
    asks = [
        lambda: chat.opening(ASKED),
        lambda: chat.opening(ASKED, answer=False),
        lambda: chat.opening(READ),
        lambda: chat.with_arguments(thinking=True).opening(ASKED),
        lambda: chat.following(SAID, READ),
        lambda: chat.following(SAID, ASKED),
    ]
    for number, ask in enumerate(asks, 1):
        ask()
        assert counting.rendered == number
    counting.tokenizer.chat_template = counting.tokenizer.chat_template.replace("Be good.", "Be bad.")
    before = chat.opening(ASKED)
    assert counting.rendered == len(asks) + 1
    assert "Be bad." in counting.tokenizer.decode(before)


def test_what_is_not_plain_data_is_rendered_each_time_and_old_encodings_go(counting):
    chat = ChatFormat(counting.tokenizer)
    odd = [{**ASKED[0], "more": object()}]
    chat.opening(odd), chat.opening(odd)
    assert counting.rendered == 2
    for number in range(_KEPT + 1):
        chat.opening([{"role": "user", "content": str(number)}])
    rendered = counting.rendered
    chat.opening([{"role": "user", "content": str(_KEPT)}])
    assert counting.rendered == rendered
    chat.opening([{"role": "user", "content": "0"}])
    assert counting.rendered == rendered + 1


def test_a_template_that_leaves_out_what_was_said_is_an_error_each_time():
    tokenizer = tokenizer_of(STYLES["chatml"])
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    chat = ChatFormat(tokenizer)
    for _ in range(2):
        with pytest.raises(UserError, match=r"assistant message"):
            chat.following(SAID, READ)
