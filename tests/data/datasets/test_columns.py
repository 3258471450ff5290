"""Which column is what."""

import pytest

from rlinf.data.datasets.source import Columns, DataError, fields, fill, lookup

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0},
}
SEARCH_R1 = {
    "question": "who was it?",
    "golden_answers": ["Ada", "Ada Lovelace"],
    "prompt": [{"role": "user", "content": "Answer the given question. Question: who was it?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada Lovelace"]}},
}
DEEPCODER = {"problem": "Print 1.", "solutions": ["print(1)"], "tests": '[{"input": "", "output": "1"}]'}


def find(row, given=None, **more):
    return Columns.find([row], given or {}, where="data", **more)


def test_columns_may_be_nested_and_may_have_dots_in_their_names():
    assert lookup(VERL, "reward_model.ground_truth") == "2"
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup(VERL, "reward_model.truth") is None
    assert lookup(VERL, "ability.x") is None


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "a", "answer": "b"}, "prompt", "answer"),
        ({"question": "a", "answer": "b"}, "question", "answer"),
        ({"problem": "a", "solution": "long", "answer": "b"}, "problem", "answer"),
        ({"problem": "a", "solution": "b"}, "problem", "solution"),
        ({"prompt": "a"}, "prompt", None),
        (VERL, "prompt", "reward_model.ground_truth"),
        (SEARCH_R1, "prompt", "reward_model.ground_truth.target"),
        ({"question": "a", "golden_answers": ["b"]}, "question", "golden_answers"),
        (DEEPCODER, "problem", None),
    ],
)
def test_common_layouts_are_recognised(row, prompt, answer):
    columns = find(row)
    assert (columns.prompt, columns.answer) == (prompt, answer)


def test_what_the_user_says_comes_first():
    columns = find({**VERL, "text": "a"}, {"prompt": "text", "answer": "extra_info.index"})
    assert (columns.prompt, columns.answer) == ("text", "extra_info.index")


def test_what_was_said_for_other_data_holds_where_it_fits():
    row = {"q": "a", "answer": "b"}
    columns = find(row, {}, inherited={"prompt": "q", "answer": "missing"})
    assert (columns.prompt, columns.answer) == ("q", "answer")


@pytest.mark.parametrize(
    ("row", "given", "text"),
    [
        ({"text": "a"}, {}, r"column.*prompt"),
        ({"prompt": None, "answer": "b"}, {}, r"prompt is null"),
        ({"question": "a"}, {"prompt": "quesiton"}, r"'quesiton'.*'question'\?"),
        (VERL, {"answer": "reward_model.truth"}, r"column 'reward_model\.truth'.*answer"),
        ({"prompt": "a"}, {"promt": "a"}, r"\['promt'\].*none"),
    ],
)
def test_a_column_that_is_not_there_is_an_error_with_advice(row, given, text):
    with pytest.raises(DataError, match=text):
        find(row, given)


def test_a_template_replaces_the_prompt_column_and_its_fields_must_be_there():
    assert find({"text": "a"}, template="Q: {text}").prompt is None
    with pytest.raises(DataError, match=r"data\.template.*'text'\?"):
        find({"text": "a"}, template="Q: {test}")


def test_a_column_may_be_missing_from_the_first_rows():
    columns = Columns.find([{"prompt": "a"}, {"prompt": "b", "response": "c"}], {}, where="data")
    assert columns.response == "response"


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "a", "answer": "b"}, None),
        ({"prompt": "a", "answer": ""}, None),
        ({"answer": "b"}, "'prompt' is missing"),
        ({"prompt": "", "answer": "b"}, "'prompt' is empty; there"),
        ({"prompt": "a", "answer": None}, "'answer' is empty (null)"),
        ({"prompt": "a"}, "are ['prompt']"),
        ({"prompt": 5, "answer": "b"}, "'prompt' is a int"),
        ({"prompt": [{"role": "user"}], "answer": "b"}, "'prompt' has"),
    ],
)
def test_what_is_wrong_with_a_row(row, wrong):
    problem = Columns("prompt", "answer", None, None).problem_in(row)
    assert problem is None if wrong is None else wrong in problem


@pytest.mark.parametrize(("value", "text"), [("2", "2"), (2, "2"), (0.5, "0.5"), (["a", 1], '["a", 1]'), (None, "")])
def test_answers_become_text(value, text):
    assert Columns("prompt", "answer", None, None).answer_in({"answer": value}) == text


def test_reward_functions_get_all_other_columns_by_their_own_names():
    assert find(VERL).rest_of(VERL) == {name: value for name, value in VERL.items() if name != "prompt"}
    row = {"question": "a", "solution": "b", "level": 3}
    assert find(row).rest_of(row) == {"solution": "b", "level": 3}


@pytest.mark.parametrize("name", ["the text", "a.b", "the-text", "Frage (de)", "1", "质问", "x/y"])
def test_any_column_name_works_in_a_template(name):
    rows = [{name: "5", "answer": "1"}]
    template = f"What of {{{name}}}?"
    assert find(*rows, template=template).others == (name,)
    assert fill(template, rows[0], "row 1") == "What of 5?"
    assert fill(f"{{{{{name}}}}}", rows[0], "row 1") == f"{{{name}}}", "an escape"
    assert fill(f"{{{{{{{name}}}}}}}", rows[0], "row 1") == "{5}", "the same within braces"


def test_a_name_with_spaces_that_is_no_column_is_a_mistake_and_other_text_in_braces_is_not():
    with pytest.raises(DataError, match=r"data\.template.*text'\?"):
        find({"the text": "a"}, template="Q: {the txt}")
    template = 'Answer as {"number": 1} or {{"text": "x"}}, {the text}'
    assert find({"the text": "a"}, template=template).others == ("the text",)
    assert fill(template, {"the text": "a"}, "row 1") == 'Answer as {"number": 1} or {"text": "x"}, a'


def test_templates_leave_other_braces_alone():
    row = {"q": "x", "outer": {"inner": 5}}
    template = r"{q}: put {outer.inner} into \boxed{}, not {{q}} or \frac{1}{2}"
    assert fields(template) == ["q", "outer.inner"]
    assert fill(template, row, "row 1") == r"x: put 5 into \boxed{}, not {q} or \frac{1}{2}"
    assert fill(r"\boxed{{}}", row, "row 1") == r"\boxed{}"  # as Python's own templates have it
    with pytest.raises(DataError, match=r"1: data\.template.*braces"):
        fill(r"\frac{a}{2}", row, "row 1")


def test_a_missing_number_is_no_answer_and_a_whole_one_has_no_fraction():
    columns = Columns("prompt", "answer", None, None)
    assert "NaN" in columns.problem_in({"prompt": "a", "answer": float("nan")})
    assert [columns.answer_in({"prompt": "a", "answer": answer}) for answer in (7.0, 7, 7.5, True, 1e300)] == [
        "7", "7", "7.5", "True", "1e+300",
    ]  # fmt: skip


def test_a_column_without_a_value_is_said_to_be_empty():
    with pytest.raises(DataError, match=r"'question'.*rows.*\['answer'\]"):
        Columns.find([{"question": None, "answer": "1"}], {"prompt": "question"}, where="data")
