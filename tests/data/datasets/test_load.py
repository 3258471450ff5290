"""All that a run reads, through one door."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf.data.datasets.load import load_data
from rlinf.data.datasets.source import DataError
from rlinf.data.datasets.toy_tasks import make_task, prompts
from rlinf.data.rng import permutation
from rlinf.data.tokenizer import character_tokenizer, load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!<>|/+=-_()#'\n"
ROWS = [{"question": f"{i}+1?", "answer": f"So #### {i + 1}", "level": i % 3} for i in range(20)]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        "extra_info": {"index": i},
    }
    for i in range(10)
]


@pytest.fixture
def tokenizer():
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    return tokenizer


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def seen(prompts):
    return [(prompt.id, prompt.text, prompt.answer) for prompt in prompts]


async def test_a_generated_task_comes_with_its_own_tokenizer():
    data = load_data(task="sort", digits=3, seed=7, problems=50)
    task = make_task("sort", digits=3, held_out=50, seed=7)
    assert data.tokenizer_source == {"characters": "0123456789>"}
    assert seen(data.held_out) == seen(prompts(task.held_out, load_tokenizer(task.tokenizer)))
    warm_up, steps = ([task.train[index] for index in permutation(len(task.train), 2 * 7 + part, 0)] for part in (0, 1))
    assert [prompt.text for prompt in data.train.take(30)] == [problem.text for problem in steps[:30]]
    batches = [batch async for batch in data.worked_batches(2, 5)]
    assert [len(batch) for batch in batches] == [5, 5]
    for example, problem in zip(batches[0] + batches[1], warm_up, strict=False):
        text = data.tokenizer.decode([*example.prompt_ids, *example.response_ids])
        assert text == problem.text + problem.answer + "<eos>"
        assert len(example.prompt_ids) == 1  # the question is learned too


def test_a_file_of_one_s_own(tmp_path, tokenizer):
    data = load_data(
        tokenizer,
        train=jsonl(tmp_path / "train.jsonl"),
        evaluation=jsonl(tmp_path / "test.jsonl", ROWS[:5]),
        template="Q: {question} A:",
    )
    assert sorted(prompt.text for prompt in data.train.take(20)) == sorted(f"Q: {r['question']} A:" for r in ROWS)
    assert seen(data.held_out) == [(i, f"Q: {i}+1? A:", f"So #### {i + 1}") for i in range(5)]
    assert data.columns == ("answer", "level", "question")
    assert data.tokenizer_source is None
    assert data.notes[0].startswith(f"{tmp_path}/train.jsonl: 20 ")
    (example,) = data.examples(1)
    text = tokenizer.decode(example.response_ids)
    assert text.startswith("So #### ")  # the prompt is not learned
    assert text.endswith("<eos>")


def test_verl_s_parquet_is_recognised(tmp_path, tokenizer):
    pq.write_table(pa.Table.from_pylist(VERL), tmp_path / "train.parquet")
    data = load_data(tokenizer, train=tmp_path / "train.parquet", shuffle=False)
    assert data.notes[0].endswith("answer from reward_model.ground_truth")
    prompt = data.train.take(3)[2]
    assert (prompt.text, prompt.answer) == ("<user>2+1?<assistant>", "3")
    assert prompt.row["extra_info"] == {"index": 2}
    assert prompt.row["messages"] == VERL[2]["prompt"]


def test_evaluation_has_columns_of_its_own_and_the_same_problems_every_time(tmp_path, tokenizer):
    train = [{"q": "1", "a": "2"}]
    test = [{"problem": f"{i}", "a": str(i)} for i in range(50)]
    more = {"columns": {"prompt": "q", "answer": "a"}, "evaluation": test, "evaluation_columns": {"prompt": "problem"}}
    data = [load_data(tokenizer, train=train, problems=10, seed=seed, **more) for seed in (0, 1)]
    assert seen(data[0].held_out) == seen(data[1].held_out)
    assert [prompt.id for prompt in data[0].held_out] == sorted({prompt.id for prompt in data[0].held_out})
    assert all(prompt.answer == prompt.text == str(prompt.id) for prompt in data[0].held_out)
    assert len(data[0].held_out) == 10


def test_problems_to_evaluate_on_from_a_file_and_from_an_iterator(tmp_path, tokenizer):
    path = jsonl(tmp_path / "aime.jsonl", [{"problem": "1+1?", "answer": 2}, {"problem": "2+2?", "answer": 4}])
    found = load_data(tokenizer, train=path, evaluation=path)
    assert seen(found.held_out) == [(0, "1+1?", "2"), (1, "2+2?", "4")]
    assert load_data(tokenizer, train=path, evaluation=path, problems=0).held_out == []
    again = load_data(tokenizer, train=ROWS, columns={"prompt": "question"}, evaluation=iter(ROWS), problems=2)
    assert seen(again.held_out)[1][1] == "1+1?"


def test_multiple_choice_as_in_gpqa(tmp_path, tokenizer):
    (tmp_path / "gpqa.csv").write_text(
        "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2\nWhich?,red,blue,green\nWho?,I,you,they\n"
    )
    columns = {"prompt": "Question", "choices": ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2"]}
    first, second = load_data(tokenizer, train=tmp_path / "gpqa.csv", columns=columns, shuffle=False).train.take(2)
    assert f"\n{first.answer}) red" in first.text
    assert f"\n{second.answer}) I" in second.text
    with pytest.raises(DataError, match=r"'Right'.*choices"):
        load_data(tokenizer, train=tmp_path / "gpqa.csv", columns={**columns, "choices": ["Right"]})


def test_wrong_rows_are_gathered(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": "b"}] + [{"answer": "b"}] * 8 + [{"prompt": "a"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{oops\n")
    with pytest.raises(DataError) as caught:
        load_data(tokenizer, train=path)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{path}: 10 of 11 rows")
    assert lines[1].startswith(f"  {path}, line 2: no prompt: ")
    assert lines[-1] == "  and 5 more"


def test_wrong_rows_of_a_table_are_gathered(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": "b", "level": 1}, {"prompt": None, "answer": "b", "level": 2}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 2: .*'prompt' .*'answer', "):
        load_data(tokenizer, train=tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"train": "missing.jsonl"}, "no file"),
        ({"train": []}, "has no rows"),
        ({"train": ["a"]}, r"row 1.*str"),
        ({"train": ROWS, "columns": {"prompt": "text"}}, r"column 'text'"),
        ({"train": ROWS, "chat_template": "no/such/file"}, r"data\.chat_template: no/such/file.*neither"),
    ],
)
def test_what_cannot_be_used_is_said(tokenizer, more, text):
    with pytest.raises(DataError, match=text):
        load_data(tokenizer, **more)


def test_data_of_one_s_own_need_a_tokenizer():
    with pytest.raises(DataError, match=r"model\.path.*model\.tokenizer"):
        load_data(train=ROWS)


def test_a_chat_template_may_be_given_as_text_or_file(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, str(tmp_path / "template.jinja")):
        data = load_data({"characters": ALPHABET}, train=VERL, chat_template=given, shuffle=False)
        assert data.train.take(1)[0].text == "user: 0+1?"


def test_long_prompts_of_an_evaluation_are_told(tokenizer):
    test = [{"prompt": "a", "answer": "b"}, {"prompt": "a" * 20, "answer": "b"}]
    more = {"train": test, "evaluation": test, "max_prompt_tokens": 10}
    assert load_data(tokenizer, **more).notes[-1].startswith("evaluation on 1 of ")
    data = load_data(tokenizer, **more, overlong="truncate")
    assert data.notes[-1].startswith("evaluation on 2 of ")
    assert data.notes[-1].endswith("cut")


def test_a_problem_that_is_no_text_is_refused_with_its_line_before_anything_starts(tokenizer, tmp_path):
    lines = [
        '{"prompt": "a", "answer": "1"}',
        '{"prompt": "\\ud83d", "answer": "1"}',
        '{"prompt": "a", "answer": "\\ud83d"}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"(?s)line 2: .*ud83d.*line 3: .*ud83d"):
        load_data(tokenizer, train=str(tmp_path / "rows.jsonl"))


def test_held_out_rows_that_cannot_be_used_are_told_and_one_must_be_left(tokenizer):
    told, odd = [{"role": "user", "content": "a"}], [{"role": "user", "content": "a", "odd": True}]
    template = "{% for m in messages %}{{ m.odd + '' if m.odd }}{{ m.content }}{% endfor %}"
    rows = [{"prompt": told, "answer": "b"}, {"prompt": odd, "answer": "b"}]
    data = load_data(tokenizer, train=rows[:1], evaluation=rows, chat_template=template)
    assert len(data.held_out) == 1
    assert "row 2" in data.notes[-1]
    assert "left out" in data.notes[-1]
    with pytest.raises(DataError, match="row 1"):
        load_data(tokenizer, train=rows[:1], evaluation=rows[1:] * 2, chat_template=template)


@pytest.mark.parametrize("source", [ROWS, lambda: iter(ROWS)])
def test_all_of_it_goes_on_where_it_was(tokenizer, source):
    columns = {"prompt": "question"}
    data = load_data(tokenizer, train=source, seed=1, columns=columns)
    data.train.take(13)
    data.examples(7)
    state = json.loads(json.dumps(data.state_dict()))
    expected = seen(data.train.take(30)), [example.response_ids.tolist() for example in data.examples(9)]
    again = load_data(tokenizer, train=source, seed=1, columns=columns)
    again.load_state_dict(state)
    assert (seen(again.train.take(30)), [example.response_ids.tolist() for example in again.examples(9)]) == expected


async def test_an_async_iterable_of_one_s_own(tokenizer):
    async def rows():
        for row in ROWS:
            yield row

    data = load_data(tokenizer, train=rows, columns={"prompt": "question"}, shuffle=False)
    assert [prompt.text for prompt in await data.train.draw(3)] == ["0+1?", "1+1?", "2+1?"]
    with pytest.raises(DataError, match=r"evaluation:.*iterable"):
        load_data(tokenizer, train=ROWS, columns={"prompt": "question"}, evaluation=rows)


def test_what_comes_only_once_is_not_handed_out_twice(tokenizer):
    data = load_data(tokenizer, train=iter(ROWS), columns={"prompt": "question"})
    worked = data.examples(8)
    rest = data.train.take(12)
    assert len(worked) + len({prompt.text for prompt in rest}) == 20


@pytest.mark.parametrize(("key", "name"), [("data.train", "train"), ("evaluation.data", "evaluation")])
def test_a_file_that_cannot_be_read_is_told_with_its_key(tokenizer, tmp_path, key, name):
    (tmp_path / "cut.json").write_text('[{"prompt": "a", "ans')
    files = {"train": [{"prompt": "a", "answer": "b"}], name: tmp_path / "cut.json"}
    with pytest.raises(DataError, match=rf"^{key}: .*cut\.json is no JSON"):
        load_data(tokenizer, problems=1, **files)
