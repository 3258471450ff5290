"""Every layout of TRL and verl becomes the same dialogues; what is none is said with its columns."""

import pytest

from rlinf.data.datasets.conversations import Format, message_of
from rlinf.data.datasets.source import DataError

U, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CHAT = ([], [U, A])


def read(row, *, kind="sft", columns=None, **more):
    layout = Format.find([row], columns or {}, kind=kind, where="rows", **more)
    if kind == "pairs":
        return [(each.prompt, each.completion) for each in layout.pair(row)]
    found = layout.dialogue(row)
    return found.prompt, found.completion


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [U, A]}, CHAT),
        ({"messages": [{**U, "tool_calls": None}, {**A, "weight": None}]}, CHAT),  # as parquet fills up
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, CHAT),
        ({"conversations": [U, A]}, CHAT),
        ({"prompt": [U], "completion": [A]}, ([U], [A])),
        ({"prompt": [U], "completion": "yo"}, ([U], [A])),
        ({"prompt": "hi", "completion": "yo"}, ("hi", "yo")),
        ({"question": "hi", "answer": "yo"}, ("hi", "yo")),
        ({"prompt": "hi", "response": "yo"}, ("hi", "yo")),
        ({"text": "hi yo"}, ("", "hi yo")),
    ],
)
def test_a_row_becomes_a_dialogue(row, expected):
    assert read(row) == expected


ARGUMENTS = {
    "text": '{"a": 1, "b": "x"}',
    "object": {"a": 1, "b": "x"},
    "filled up by a table": {"a": 1, "b": "x", "c": None},
}


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("wrapped", [True, False])
def test_arguments_of_calls_are_objects_whatever_a_row_has(given, wrapped):
    call = {"name": "add", "arguments": ARGUMENTS[given]}
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call} if wrapped else call],
    }
    _, (_, message) = read({"messages": [U, asks]})
    (made,) = message["tool_calls"]
    assert (made["function"] if wrapped else made)["arguments"] == {"a": 1, "b": "x"}
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", {}),
        (None, {}),
        ('{"a": null}', {"a": None}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("[" * 10**5, "[" * 10**5),
    ],
    ids=["empty", "null", "null as text", "no JSON", "no object", "deep"],
)
def test_arguments_that_are_odd(given, kept):
    made = message_of({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}, "row 1")
    assert made["tool_calls"][0]["function"]["arguments"] == kept


def test_numbers_are_answers_and_a_missing_number_is_none():
    assert read({"prompt": "1+1", "completion": 2}) == ("1+1", "2")
    assert read({"prompt": "1+1", "completion": 2.0}) == ("1+1", "2")
    with pytest.raises(DataError, match=r"'completion'.*missing"):
        read({"prompt": "1+1", "completion": float("nan")})
    with pytest.raises(DataError, match=r"'prompt'.*neither"):
        read({"prompt": 1, "completion": "2"})


def test_one_answer_may_be_the_beginning_of_the_other():
    one, other = read({"chosen": "xca", "rejected": "xcab"}, kind="pairs")
    assert (one, other) == (("xc", "a"), ("xc", "ab")), "as TRL's extract_prompt"
    with pytest.raises(DataError, match="beginning"):
        read({"chosen": [U, A], "rejected": [U, A, U, A]}, kind="pairs")


def test_plain_texts_become_a_chat_where_that_is_asked_for():
    assert read({"question": "hi", "answer": "yo"}, chat=True) == ([U], [A])
    said = {"role": "system", "content": "be brief"}
    assert read({"question": "hi", "answer": "yo"}, system="be brief") == ([said, U], [A])
    assert read({"messages": [U, A]}, system="be brief") == ([said], [U, A])


def test_an_instruction_is_alpacas_text_or_a_chat_where_there_is_a_template():
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    prompt, completion = read(row)
    assert prompt.startswith("Below is an instruction")
    assert prompt.endswith(":\nadd\n\n### Input:\n1 2\n\n### Response:\n")
    assert completion == "3"
    assert "### Input" not in read({**row, "input": ""})[0]
    chat = read(row, has_template=True)
    assert chat == ([{"role": "user", "content": "add\n\n1 2"}], [{"role": "assistant", "content": "3"}])


def test_nested_columns_are_found_by_name():
    row = {"extra_info": {"question": "hi", "answer": "yo"}}
    columns = {"prompt": "extra_info.question", "completion": "extra_info.answer"}
    assert read(row, columns=columns) == ("hi", "yo")


NO = {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "hi", "chosen": " yo", "rejected": " no"}, [("hi", " yo"), ("hi", " no")]),
        ({"chosen": "hi yo", "rejected": "hi no"}, [("hi", " yo"), ("hi", " no")]),
        ({"prompt": [U], "chosen": [A], "rejected": [NO]}, [([U], [A]), ([U], [NO])]),
        ({"chosen": [U, A], "rejected": [U, NO]}, [([U], [A]), ([U], [NO])]),
    ],
)
def test_a_row_becomes_a_pair_with_one_prompt(row, expected):
    assert read(row, kind="pairs") == expected


@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [
        ({"foo": "x"}, "sft", r"\['foo'\].*conversation"),
        ({"prompt": "x"}, "pairs", r"rejected.*rejected"),
        ({"messages": [U]}, "sft", r"'messages'.*assistant"),
        ({"messages": "hi"}, "sft", r"'messages'.*messages"),
        ({"messages": [{"speaker": "a"}]}, "sft", r'{"role", "content"}'),
        ({"text": 3}, "sft", r"column 'text'"),
        ({"prompt": "x", "completion": ""}, "sft", r"column 'completion'"),
        ({"chosen": [U, A], "rejected": [U, A, U]}, "pairs", r"beginning.*other"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "pairs", "are the same"),
        ({"messages": [U, A], "tools": "{"}, "sft", r"column 'tools'.*JSON"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row, kind, said):
    with pytest.raises(DataError, match=said):
        read(row, kind=kind)


def test_a_column_that_is_not_there_is_said_with_those_that_are():
    with pytest.raises(DataError, match=r"'ask'.*prompt.*\['a', 'b'\]"):
        read({"a": "x", "b": "y"}, columns={"prompt": "ask"})
    with pytest.raises(DataError, match=r"'reply'.*none"):
        read({"a": "x"}, columns={"reply": "a"})
