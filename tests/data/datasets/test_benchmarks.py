"""Benchmarks by name: what is read of their files, how they are asked, and what is wrong with an entry."""

import csv
import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config.load import ConfigError
from rlinf.data.datasets.benchmarks import KNOWN, SCORED_BY, benchmark_mistakes, benchmark_of, benchmarks_of
from rlinf.data.datasets.load import load_data
from rlinf.data.datasets.published import _BBH as BBH
from rlinf.data.datasets.source import DataError
from rlinf.data.tokenizer import character_tokenizer
from rlinf.rewards.base import Reward
from rlinf.rewards.regex import regex
from rlinf.runs.rules import load_config
from tests.stand_in import TEMPLATE

WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@pytest.fixture
def tokenizer():
    import string

    made = character_tokenizer(string.printable)
    made.chat_template = TEMPLATE
    return made


def save_aime(path, count=30):
    rows = [{"id": n, "problem": f"{n} + 1?", "solution": "by counting", "answer": n + 1} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_gpqa(path, count):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Record ID", "Question", "Correct Answer", *WRONG, "Subdomain"])
        for n in range(count):
            table.writerow([f"rec{n}", f"Which is {n}?", f"right {n}", f"one {n}", f"two {n}", f"three {n}", "x"])
    return str(path)


def asked(tokenizer, **named):
    data = load_data(tokenizer, problems=3, named=benchmarks_of(named))
    return data.named, data.notes


def test_aime_is_asked_in_the_chat_template_for_a_boxed_answer(tokenizer, tmp_path):
    found, notes = asked(tokenizer, aime24=save_aime(tmp_path / "a.jsonl"), aime25=save_aime(tmp_path / "b.jsonl"))
    first = found["aime25"][0]
    assert first.text == (
        "[user]0 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}.\n[assistant]"
    )
    assert (first.answer, first.row[SCORED_BY]) == ("1", "aime25")
    assert [len(prompts) for prompts in found.values()] == [30, 30]
    assert not [note for note in notes if "warning" in note]


def test_without_a_chat_template_or_where_it_is_told_so_the_problem_stands_alone(tokenizer, tmp_path):
    path = save_aime(tmp_path / "a.jsonl")
    plain, _ = asked(tokenizer, aime24={"data": path, "chat": False, "template": "{problem}\nAnswer:"})
    assert plain["aime24"][1].text == "1 + 1?\nAnswer:"


def test_options_of_gpqa_stand_in_an_order_of_their_own_that_stays(tokenizer, tmp_path):
    path = save_gpqa(tmp_path / "gpqa.csv", 198)
    found, notes = asked(tokenizer, **{"gpqa-diamond": path})
    again, _ = asked(tokenizer, **{"gpqa-diamond": path})
    prompts = found["gpqa-diamond"]
    assert [(each.text, each.answer) for each in prompts] == [(e.text, e.answer) for e in again["gpqa-diamond"]]
    for number, prompt in enumerate(prompts):
        options = {line[0]: line[3:] for line in prompt.text.splitlines() if line[1:3] == ") "}
        assert options[prompt.answer] == f"right {number}"
        assert sorted(options.values()) == sorted(f"{name} {number}" for name in ("right", "one", "two", "three"))
    letters = [prompt.answer for prompt in prompts]
    assert all(25 < letters.count(letter) < 75 for letter in "ABCD")  # 49.5 +- 6.1, by chance
    assert not [note for note in notes if "warning" in note]


def test_a_set_of_another_size_is_told(tokenizer, tmp_path):
    _, notes = asked(tokenizer, aime24=save_aime(tmp_path / "a.jsonl", 12))
    assert notes[-1].startswith("warning: evaluation.named.aime24 has 12 ")


def test_a_set_of_ones_own_is_asked_like_aime_and_any_size_is_right(tokenizer, tmp_path):
    found, notes = asked(tokenizer, mine={"data": save_aime(tmp_path / "a.jsonl", 2), "samples": 4, "k": [4]})
    assert [prompt.row[SCORED_BY] for prompt in found["mine"]] == ["mine", "mine"]
    assert not [note for note in notes if "warning" in note]


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        (r"so \boxed{C}", "C"),
        (r"\boxed{A}, no, \boxed{ B }", "B"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{(A) seven}", "A"),
        (r"\boxed{\textbf{B) seven}}", "B"),
        ("**Answer:** C", "C"),
        ("Answer: **C**", "C"),
        ("The answer is (D).", "D"),
        ("the final answer is: B", "B"),
        ("Answer: A\nwait. Answer: C", "C"),
        ("Answer: All of them", None),
        (r"\boxed{Carbon}", None),
        ("A, B, C or D", None),
    ],
)
def test_the_letter_is_looked_for_where_models_write_it(said, letter):
    pattern = KNOWN["gpqa-diamond"].args["pattern"]
    for right in "ABCD":
        assert regex(said, right, pattern=pattern).value == float(right == letter)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"aime26": None}, "no benchmark"),
        ({"aime26": {"samples": 2}}, "no benchmark"),
        ({"aime24": 3}, "a mapping"),
        ({"aime24": {"sample": 3}}, "has no sample;"),
        ({"aime24": {"samples": 0}}, "samples=0: "),
        ({"aime24": {"samples": True}}, "samples=True: "),
        ({"aime24": {"temperature": -1}}, "temperature=-1: "),
        ({"aime24": {"temperature": 0}}, "take samples: 1"),
        ({"aime24": {"top_p": 2}}, "at most 1"),
        ({"aime24": {"k": 3}}, "a list"),
        ({"aime24": {"k": [64]}}, "32 answers"),
        ({"aime24": {"chat": "yes"}}, "or null"),
        ({"aime24": {"reward": "rlinf.rewards.nothing_there"}}, "reward: "),
        ({"a b": {"data": "x.jsonl"}}, "letters, digits"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_one_line_with_its_key(entry, said):
    ((key, advice),) = benchmark_mistakes(entry)
    assert key == f"evaluation.named.{next(iter(entry))}"
    assert said in advice
    assert "\n" not in advice


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(["data", "samples", "k", "top_p", "reward", "args", "what"]), anything))
def test_an_entry_is_refused_or_can_be_used(entry):
    if not [*benchmark_mistakes({"aime24": entry})]:
        made = benchmark_of("aime24", entry)
        assert made.samples >= 1
        assert all(k <= made.samples for k in made.k)


def test_a_file_that_is_not_there_is_told_with_the_key(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"FILE\}:.*file .*none\.jsonl"):
        asked(tokenizer, aime24=str(tmp_path / "none.jsonl"))


def test_a_key_below_a_text_is_refused_and_does_not_replace_it():
    with pytest.raises(ConfigError, match=r"command line.*evaluation\.named\.aime24"):
        load_config(None, ["evaluation.named.aime24=a.jsonl", "evaluation.named.aime24.samples=3"])
    mapping = load_config(None, ["evaluation.named.aime24.data=a.jsonl", "evaluation.named.aime24.samples=3"])
    assert mapping.evaluation.named == {"aime24": {"data": "a.jsonl", "samples": 3}}


def test_what_is_not_said_is_the_benchmarks_own():
    assert benchmarks_of({"aime24": None, "gpqa-diamond": {}}) == {
        name: KNOWN[name] for name in ("aime24", "gpqa-diamond")
    }
    changed = benchmark_of("gpqa-diamond", {"reward": "rlinf.rewards.exact"})
    assert (changed.reward, changed.args) == ("rlinf.rewards.exact", {})


PROGRAM = "def double(x):\n    return 2 * x"
MATHS = {"hmmt-feb25": "problem", "amc23": "question", "math-500": "problem"}
LETTERED = {"label": ["A", "B", "C"], "text": ["red", "green", "blue"]}
ROWS = {
    **{name: ({column: "1 + 1?", "answer": "2"}, "\\boxed{2}", "\\boxed{3}") for name, column in MATHS.items()},
    "minerva-math": ({"question": "1 + 1?", "answer": "\\frac{1}{2}"}, "so 0.5", "so 2"),
    "gsm8k": ({"question": "1 + 1?", "answer": "One and one.\n#### 2"}, "It is \\boxed{2}", "It is 3"),
    "mmlu": ({"question": "?", "choices": ["red", "green", "blue", "grey"], "answer": 2}, "\\boxed{C}", "\\boxed{A}"),
    "mmlu-pro": (
        {"question": "?", "options": [*"0123456", "I", "8", "9"], "answer": "I", "answer_index": 8},
        "The answer is (I).",
        "The answer is (H).",
    ),
    "arc-challenge": ({"question": "?", "choices": LETTERED, "answerKey": "B"}, "Answer: B", "Answer: A"),
    "openbook-qa": ({"question_stem": "?", "choices": LETTERED, "answerKey": "C"}, "\\boxed{\\text{C}}", "Answer: A"),
    "commonsense-qa": ({"question": "?", "choices": LETTERED, "answerKey": "A"}, "\\boxed{A}", "\\boxed{B}"),
    "medqa": (
        {"question": "?", "options": {"A": "red", "B": "green"}, "answer_idx": "B", "answer": "green"},
        "\\boxed{B}",
        "Answer: A",
    ),
    "humaneval-plus": (
        {
            "prompt": "def double(x):\n    '''Twice as much.'''\n",
            "entry_point": "double",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
        },
        f"```python\n{PROGRAM}\n```",
        f"```python\n{PROGRAM} + 1\n```",
    ),
    "mbpp-plus": (
        {
            "prompt": "Double a number.",
            "test_list": ["assert double(2) == 4"],
            "test": "def assertion(out, exp, atol):\n    assert out == exp\n\ninputs = [[2], [-3]]\nresults = [4, -6]\n"
            "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(double(*inp), exp, 0)\n",
        },
        f"```python\n{PROGRAM}\n```",
        "```python\ndef double(x):\n    return abs(2 * x)\n```",  # right for the first input, and in test_list
    ),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Name a cat. Please reason step by step, without commas, in two words at least.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least"}],
        },
        "<think>A cat, then.</think>\nTabby Tom",
        "Tabby, Tom",
    ),
    "musr": (
        {
            "narrative": "In a house, Ana.",
            "question": "Who was it?",
            "choices": "['Mackenzie', 'Ana']",
            "answer_index": "1",
            "answer_choice": "Ana",
        },
        "It was she.\n\nANSWER: (B - Ana)",
        "ANSWER: A",
    ),
    "simpleqa": (
        {"metadata": "{}", "problem": "How tall, step by step?", "answer": "The 1.73 m"},
        "1.73 M.",
        "73 m",
    ),
}
"""A row of each, with the columns of the published set; an answer that is right and one that is wrong."""


CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple"]
CATEGORIES += ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"]
CATEGORIES += ["irrelevance", "live_irrelevance", "live_relevance"]


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"aime24", "aime25", "gpqa-diamond", "bbh", "bfcl"}))
async def test_a_row_of_each_is_asked_and_scored(name, tokenizer, tmp_path):
    row, right, wrong = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    found, _ = asked(tokenizer, **{name: str(path)})
    (prompt,) = found[name]
    assert "step by step" in prompt.text or "one block of Python" in prompt.text
    assert [await scored(name, prompt, answer) for answer in (right, wrong)] == [1, 0]


async def scored(name, prompt, answer):
    """The score of an answer, by the benchmark's own function."""
    benchmark = benchmark_of(name, None)
    offered = {**prompt.row, "response": answer, "answer": prompt.answer, "prompt": prompt.text}
    score = Reward.of(benchmark.reward, benchmark.args)(offered)
    score = await score if inspect.isawaitable(score) else score
    return float(getattr(score, "value", score))


def save_bbh(folder, worked):
    """A clone of the repository of BIG-Bench Hard, with one problem of each task."""
    for name in ("bbh", "cot-prompts"):
        (folder / name).mkdir(parents=True)
    for task in BBH:
        row = {"input": f"Is it {task}?\nOptions:\n(A) yes\n(B) no", "target": "(B)"}
        (folder / "bbh" / f"{task}.json").write_text(json.dumps({"canary": "no training", "examples": [row]}))
        if worked:
            text = f"canary\n-----\nSay what {task} is.\n\nQ: One?\nA: Let's think step by step.\nSo the answer is (A)."
            (folder / "cot-prompts" / f"{task}.txt").write_text(text)
    return str(folder)


async def test_big_bench_hard_is_asked_behind_its_authors_worked_problems_or_alone(tokenizer, tmp_path):
    shown, _ = asked(tokenizer, bbh={"data": save_bbh(tmp_path / "a", worked=True), "chat": False})
    alone, _ = asked(tokenizer, bbh={"data": save_bbh(tmp_path / "b", worked=False), "chat": False})
    assert len(shown["bbh"]) == len(BBH) == 27
    assert shown["bbh"][0].text == (
        "Say what boolean_expressions is.\n\nQ: One?\nA: Let's think step by step.\nSo the answer is (A).\n\n"
        "Q: Is it boolean_expressions?\nOptions:\n(A) yes\n(B) no\nA: Let's think step by step."
    )
    assert alone["bbh"][0].text.startswith("Is it boolean_expressions?")
    answers = {"No.\nSo the answer is (B).": 1, "the answer is **(B)**": 1, "the answer is (A).": 0, "(B)": 0}
    assert {said: await scored("bbh", shown["bbh"][0], said) for said in answers} == answers


def test_tasks_of_big_bench_hard_are_read_from_tables_too_and_one_that_is_missing_is_named(tokenizer, tmp_path):
    for task in BBH:
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({"input": "not ( True )", "target": "False"}) + "\n")
    assert len(asked(tokenizer, bbh=str(tmp_path))[0]["bbh"]) == 27
    with pytest.raises(DataError, match=r"no directory"):
        asked(tokenizer, bbh=str(tmp_path / "none"))
    (tmp_path / f"{BBH[3]}.jsonl").unlink()
    with pytest.raises(DataError, match=rf"evaluation\.named\.bbh.*{BBH[3]}"):
        asked(tokenizer, bbh=str(tmp_path))


def save_bfcl(folder):
    """Files as the package bfcl-eval has them, with a problem each."""
    (folder / "possible_answer").mkdir(parents=True)
    function = {"name": "maths.double", "description": "Double it.", "parameters": {"type": "dict"}}
    function["parameters"] |= {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for category in CATEGORIES:
        row = {"id": f"{category}_0", "question": [[{"role": "user", "content": "Twice 3?"}]], "function": [function]}
        (folder / f"BFCL_v4_{category}.json").write_text(json.dumps(row) + "\n")
        right = {"id": row["id"], "ground_truth": [{"maths.double": {"x": [3]}}]}
        (folder / "possible_answer" / f"BFCL_v4_{category}.json").write_text(json.dumps(right) + "\n")
    return str(folder)


async def test_calls_of_functions_are_asked_with_their_descriptions_and_compared(tokenizer, tmp_path):
    folder = save_bfcl(tmp_path / "data")
    found, _ = asked(tokenizer, bfcl=folder)
    by_category = {prompt.row["category"]: prompt for prompt in found["bfcl"]}
    assert list(by_category) == CATEGORIES
    assert by_category["parallel"].text.startswith("[system]You are an expert in composing functions.")
    assert '"description": "Double it. Note that the provided function is in Python 3 syntax."' in found["bfcl"][0].text
    for category, prompt in by_category.items():
        scores = [
            await scored("bfcl", prompt, said) for said in ("[maths.double(x=3)]", "maths.double(x='3')", "I cannot.")
        ]
        assert scores == {"irrelevance": [0, 0, 1], "live_relevance": [1, 1, 0]}.get(
            category.removeprefix("live_") if category.endswith("irrelevance") else category, [1, 0, 0]
        )
    for name, lines, wrong in (
        ("possible_answer/BFCL_v4_parallel.json", "", "parallel_0"),
        ("possible_answer/BFCL_v4_parallel.json", '{"idd": 3}', "line 1 has no id"),
        ("BFCL_v4_multiple.json", "[1]", "line 1 has no id"),
        ("BFCL_v4_multiple.json", '{"id": "multiple_0", "question": [], "function": []}', "multiple_0"),
    ):
        (tmp_path / "data" / name).write_text(lines)
        with pytest.raises(DataError, match=rf"evaluation\.named\.bfcl.*{wrong}"):
            asked(tokenizer, bfcl=folder)
    with pytest.raises(DataError, match=r"bfcl-eval"):
        asked(tokenizer, bfcl=str(tmp_path))
