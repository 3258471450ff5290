"""From rows to prompts as the model reads them."""

import pytest

from rlinf.data.datasets.prompts import Drawn, PromptMaker, PromptOptions, Room
from rlinf.data.datasets.source import Columns, DataError, Mismatch
from rlinf.data.tokenizer import character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!<>|/+=-_()\n"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if note is defined %}{{ note }}{% endif %}"
)
PLAIN = Columns("prompt", None, "response", None)
ANSWERED = Columns("prompt", "answer", "response", None)
NO_LIMIT = Room()


@pytest.fixture
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture
def chatty(tokenizer):
    tokenizer.chat_template = CHAT
    return tokenizer


def rows(*given):
    return [Drawn(100 + index, index, row, f"data, row {index + 1}") for index, row in enumerate(given)]


def make(tokenizer, *given, columns=PLAIN, room=NO_LIMIT, **more):
    return PromptMaker(tokenizer, columns, PromptOptions(**{"unusable": "error", **more}), room=room).make(rows(*given))


def text_of(tokenizer, *given, **more):
    prompts = make(tokenizer, *given, **more).prompts
    for prompt in prompts:
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    return [prompt.text for prompt in prompts]


def test_a_text_is_encoded_as_it_is(tokenizer):
    (prompt,) = make(tokenizer, {"prompt": "21>", "answer": 12, "level": 3}, columns=ANSWERED).prompts
    assert tokenizer.decode(prompt.token_ids) == prompt.text == "21>"
    assert (prompt.id, prompt.answer, prompt.row) == (100, "12", {"level": 3})


def test_a_template_makes_the_text_from_columns(tokenizer):
    row = {"prompt": "1+1", "kind": {"name": "sum"}}
    assert text_of(tokenizer, row, template="{kind.name}: {prompt}=") == ["sum: 1+1="]


def test_the_prompt_in_a_template_is_the_prompt_s_column_whatever_it_is_called(tokenizer):
    columns = Columns("question", None, None, None)
    assert text_of(tokenizer, {"question": "1+1"}, columns=columns, template="Q: {prompt}") == ["Q: 1+1"]
    assert text_of(tokenizer, {"question": "1+1", "prompt": "x"}, columns=columns, template="{prompt}") == ["1+1"]


def test_messages_go_through_the_chat_template(chatty):
    messages = [{"role": "user", "content": "hi"}]
    (prompt,) = make(chatty, {"prompt": messages, "answer": "x"}).prompts
    assert chatty.decode(prompt.token_ids) == prompt.text == "<user>hi</user><assistant>"
    assert prompt.row["messages"] == messages


def test_plain_text_becomes_a_chat_when_asked(chatty):
    assert text_of(chatty, {"prompt": "hi"}) == ["hi"]
    assert text_of(chatty, {"prompt": "hi"}, chat=True) == ["<user>hi</user><assistant>"]
    assert text_of(chatty, {"prompt": "hi"}, chat=True, template="Q: {prompt}") == ["<user>Q: hi</user><assistant>"]


def test_a_system_message_goes_before_chats_that_have_none(chatty):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert text_of(chatty, {"prompt": "hi"}, {"prompt": own}, system="be brief") == [
        "<system>be brief</system><user>hi</user><assistant>",
        "<system>own</system><user>hi</user><assistant>",
    ]
    assert len(own) == 2  # the user's rows stay as they are


def test_a_chat_may_begin_the_answer(chatty):
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    assert text_of(chatty, {"prompt": begun}) == ["<user>hi</user><assistant>well, "]


def test_further_arguments_reach_the_chat_template(chatty):
    assert text_of(chatty, {"prompt": "hi"}, chat=True, chat_args={"note": "!"}) == ["<user>hi</user><assistant>!"]


CALLS = {
    "written as JSON": "{{ c.function.arguments | tojson }}",
    "written as text where it is one": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}"
    ),
    "written item by item": "{% for name, value in c.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}",
}


@pytest.mark.parametrize("template", CALLS)
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1, "b": None}])
def test_histories_with_calls_are_read_alike_whatever_their_rows_hold(template, arguments):
    tokenizer = character_tokenizer(ALPHABET + '{}"')
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        + CALLS[template]
        + "{% endfor %}{% endfor %}"
    )

    def row(arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        asks = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "prompt": [{"role": "user", "content": "hi", "tool_calls": None}, asks, {"role": "tool", "content": "3"}]
        }

    assert text_of(tokenizer, row(arguments)) == text_of(tokenizer, row({"a": 1}))


def test_chats_may_be_written_as_sharegpt_writes_them(chatty):
    said = [{"from": "human", "value": "hi"}]
    assert text_of(chatty, {"prompt": said}) == ["<user>hi</user><assistant>"]


def test_a_chat_without_a_chat_template_names_the_keys_to_set(tokenizer):
    told = r"data, row 1 is to be put as a chat.*set data\.chat_template .*data\.template"
    with pytest.raises(DataError, match=told):
        make(tokenizer, {"prompt": [{"role": "user", "content": "hi"}]})


def test_tokens_that_begin_a_text_are_added_and_an_end_is_not():
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer(ALPHABET)
    ends = TemplateProcessing(single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.chat_template = CHAT
    plain, chat = make(tokenizer, {"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}).prompts
    letter = tokenizer.convert_tokens_to_ids("a")
    assert plain.token_ids.tolist() == [0, letter]
    assert 0 not in chat.token_ids  # the chat template writes such tokens itself
    assert 1 not in chat.token_ids


def test_long_prompts_are_dropped_and_counted(tokenizer):
    batch = make(tokenizer, {"prompt": "abcdef"}, {"prompt": "abc"}, max_prompt_tokens=3)
    assert [(prompt.id, prompt.text) for prompt in batch.prompts] == [(101, "abc")]
    assert (batch.dropped, batch.truncated) == (1, set())


def test_long_prompts_are_cut_at_their_beginning(tokenizer):
    assert text_of(tokenizer, {"prompt": "abcdef"}, {"prompt": "abc"}, max_prompt_tokens=3, overlong="truncate") == [
        "def",
        "abc",
    ]
    assert make(tokenizer, {"prompt": "abcdef"}, max_prompt_tokens=3, overlong="truncate").truncated == {100}


def test_long_prompts_are_refused(tokenizer):
    with pytest.raises(DataError, match=r"2:.*prompt.*6 tokens.*data.max_prompt_tokens=3"):
        make(tokenizer, {"prompt": "abc"}, {"prompt": "abcdef"}, max_prompt_tokens=3, overlong="error")


@pytest.mark.parametrize(
    ("most", "told"),
    [(None, r"4 tokens"), (9, r"4 tokens \("), (3, r"data.max_prompt_tokens=3")],
)
def test_the_room_that_model_and_engine_leave_is_a_limit_too(tokenizer, most, told):
    room = Room(4, "positions for 6, of which an answer may have 2")
    batch = make(tokenizer, {"prompt": "abcde"}, {"prompt": "abc"}, max_prompt_tokens=most, room=room)
    assert ([prompt.text for prompt in batch.prompts], batch.dropped) == (["abc"], 1)
    with pytest.raises(DataError, match=f"1:.*prompt.*5 tokens.*{told}"):
        make(tokenizer, {"prompt": "abcde"}, max_prompt_tokens=most, room=room, overlong="error")
    (cut,) = make(tokenizer, {"prompt": "abcde"}, max_prompt_tokens=most, room=room, overlong="truncate").prompts
    assert cut.text == "abcde"[-min(most or 4, 4) :]


MISFITS = {
    "a surrogate": ({"prompt": "a\ud83d"}, r"\\ud83d.*character 2"),
    "a surrogate in a chat": ({"prompt": [{"role": "user", "content": "a\ud83d"}]}, r"\\ud83d"),
    "a surrogate in the answer": ({"prompt": "a", "answer": "\ud83d"}, r"\\ud83d"),
    "a template that refuses": ({"prompt": [{"role": "user", "content": ["a"]}]}, "cannot be put"),
    "an id that the model has not": ({"prompt": "a)"}, r"token id \d+.*embedding ends at 80"),
    "no prompt": ({"prompt": None}, "no prompt"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_one_row_that_does_not_fit_is_left_out_by_its_place_and_the_others_stay(tokenizer, name):
    row, told = MISFITS[name]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    given = [{"prompt": "a", "answer": "1"}, {"answer": "1", **row}, {"prompt": "b", "answer": "2"}]
    more = {"columns": ANSWERED, "room": Room(ids=81)}
    batch = make(tokenizer, *given, unusable="drop", **more)
    assert [(prompt.id, prompt.text) for prompt in batch.prompts] == [(100, "a"), (102, "b")]
    assert (batch.dropped, [*batch.unusable]) == (0, [101])
    assert "data, row 2" in batch.unusable[101]
    with pytest.raises(DataError, match=rf"(?s)data, row 2.*{told}"):
        make(tokenizer, *given, **more)


def test_a_text_that_the_tokenizer_itself_refuses_costs_its_own_row_alone(tokenizer, monkeypatch):
    encode = type(tokenizer).__call__

    def strict(self, texts, **more):
        if any("x" in text for text in texts):
            raise OverflowError("an x")
        return encode(self, texts, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", strict)
    batch = make(tokenizer, {"prompt": "a"}, {"prompt": "x"}, {"prompt": "b"}, unusable="drop")
    assert [prompt.text for prompt in batch.prompts] == ["a", "b"]
    assert "row 2" in batch.unusable[101]
    assert "an x" in batch.unusable[101]


def test_what_is_wrong_with_every_row_costs_no_row(tokenizer):
    with pytest.raises(Mismatch, match="row 1"):
        make(tokenizer, {"prompt": [{"role": "user", "content": "hi"}]}, unusable="drop")


@pytest.mark.parametrize("row", [{"answer": "a"}, {"prompt": ""}, {"prompt": None}, {"prompt": 5}])
def test_a_row_without_a_prompt_is_named(tokenizer, row):
    with pytest.raises(DataError, match=r"2:.*prompt:.*'prompt'"):
        make(tokenizer, {"prompt": "abc"}, row)


def test_options_are_added_and_the_answer_is_a_letter(tokenizer):
    columns = Columns("prompt", "answer", None, "options")
    row = {"prompt": "Which?\n", "options": ["red", "blue"], "answer": 1}
    (prompt,) = make(tokenizer, row, columns=columns).prompts
    assert prompt.text == "Which?\n\nA) red\nB) blue"
    assert prompt.answer == "B"
    assert text_of(tokenizer, row, columns=columns, template="{choices}\n{prompt}") == ["A) red\nB) blue\nWhich?\n"]


def test_options_with_a_column_each_are_in_an_order_of_the_row(tokenizer):
    columns = Columns("prompt", None, None, ("Correct Answer", "Incorrect Answer"))
    row = {"prompt": "Which?", "Correct Answer": "red", "Incorrect Answer": "blue"}
    first = make(tokenizer, *[row] * 20, columns=columns).prompts
    again = make(tokenizer, *[row] * 20, columns=columns).prompts
    assert {prompt.answer for prompt in first} == {"A", "B"}
    assert [prompt.text for prompt in first] == [prompt.text for prompt in again]
    assert all(f"{prompt.answer}) red" in prompt.text for prompt in first)


def test_worked_examples_end_with_the_end_token(tokenizer):
    maker = PromptMaker(tokenizer, ANSWERED)
    prompts = maker.make(rows({"prompt": "21>", "answer": "12"}, {"prompt": "a", "response": "so b", "answer": "b"}))
    first, second = maker.worked(prompts.prompts)
    assert tokenizer.decode(first.prompt_ids) == "21>"
    assert tokenizer.decode(first.response_ids) == "12<eos>"
    assert tokenizer.decode(second.response_ids) == "so b<eos>"
    (whole,) = maker.worked(prompts.prompts[:1], learn_prompt=True)
    assert tokenizer.decode(whole.prompt_ids) == "2"
    assert tokenizer.decode(whole.response_ids) == "1>12<eos>"
    assert maker.worked([]) == []


def test_a_prompt_without_a_worked_answer_is_named(tokenizer):
    maker = PromptMaker(tokenizer, PLAIN)
    with pytest.raises(DataError, match=r"'abc'.*'response'.*''"):
        maker.worked(maker.make(rows({"prompt": "abc"})).prompts)


def test_a_tokenizer_without_an_end_token_cannot_end_responses(tokenizer):
    maker = PromptMaker(tokenizer, ANSWERED)
    prompts = maker.make(rows({"prompt": "21>", "answer": "12"})).prompts
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"end token"):
        maker.worked(prompts)


@pytest.mark.parametrize(
    ("row", "counts", "characters"),
    [
        ({"prompt": "你好1", "answer": "1"}, "2 of 3", "你好"),
        ({"prompt": "1", "answer": "好"}, "1 of 1", "好"),
        ({"prompt": "1", "answer": "1", "response": "ok 你你你你你"}, "5 of 8", "你"),
        ({"prompt": "你1", "answer": "12"}, None, ""),
    ],
)
def test_a_text_that_the_tokenizer_cannot_write_is_told_with_its_row_and_characters(tokenizer, row, counts, characters):
    batch = make(tokenizer, {"prompt": "1", "answer": "2"}, row, columns=Columns("prompt", "answer", "response", None))
    assert len(batch.prompts) == 2
    assert [*batch.unknown] == ([101] if counts else [])
    assert all(each in batch.unknown[101] for each in [counts, "data, row 2", *characters] if counts)
