"""The reward functions that come with the package."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from rlinf.rewards.base import Reward
from rlinf.rewards.exact import exact, facts
from rlinf.rewards.format import format
from rlinf.rewards.function_calls import calls_in
from rlinf.rewards.instructions import instructions
from rlinf.rewards.math import math
from rlinf.rewards.regex import regex


@pytest.mark.parametrize(("response", "reward"), [("1234", 1.0), ("1243", 0.0), ("1234 ", 0.0), ("", 0.0)])
def test_exact_is_character_for_character(response, reward):
    assert exact(response, "1234") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a<answer></think>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_wants_each_tag_once_in_order_and_nothing_else(response, reward):
    assert format(response) == reward


@given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " "]), max_size=8).map("".join))
def test_format_agrees_with_the_regular_expression_that_says_the_same(text):
    import re

    pattern = r"\s*<a>(?:(?!</?[ab]>).)*</a>\s*<b>(?:(?!</?[ab]>).)*</b>\s*"
    assert format(text, tags=("a", "b")) == float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def test_a_pattern_is_looked_for_anywhere():
    assert regex("so\nit is 5", "", pattern=r"it.is \d").value == 1
    assert regex("so it is x", "", pattern=r"it is \d").value == 0
    assert regex("it\nis 5", "", pattern=r"it.is").value == 1


def test_the_last_group_named_answer_is_compared():
    found = regex("answer: A, no, answer:  B .", "B", pattern=r"answer:(?P<answer>[^,.]+)")
    assert (found.value, found.extracted) == (1, "B")
    assert regex("answer: A.", "B", pattern=r"answer:(?P<answer>[^,.]+)").value == 0
    assert regex("nothing", "B", pattern=r"answer:(?P<answer>[^,.]+)").value == 0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so \boxed{\frac12}", "0.5", True),
        ("the answer is 42.", "42", True),
        ("the answer is 41.", "42", False),
        ("It is $x=3$", "3", True),
        ("1,234", "1234", True),
        (r"first 5, then \boxed{6}", "6", True),
        (r"\boxed{6} and 5 more", r"\boxed{6}", True),
        (r"\boxed{\{1,2\}}", r"$\{2,1\}$", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("7 eggs", "5 + 2 = 7\n#### 7", True),
        ("5 eggs", "5 + 2 = 7\n#### 7", False),
        ("nothing", "4", False),
        ("", "4", False),
    ],
)
def test_mathematics_is_compared_by_what_it_means(response, answer, right):
    assert math(response, answer).value == right


def test_what_was_extracted_is_told():
    assert math(r"\boxed{\frac12}", "0.5").extracted == "1/2"
    assert math("nothing", "1").extracted is None


def test_an_answer_that_is_no_mathematics_is_nobody_s_wrong_answer():
    with pytest.raises(ValueError, match=r"read.*mathematics"):
        math("5", "")


async def test_facts_are_graded_by_a_judge_that_is_shown_question_answer_and_response(monkeypatch):
    asked = []

    async def judge(request):
        asked.append((request.headers.get("Authorization"), (await request.json())["messages"][0]["content"]))
        said = {"Paris": "A", "Lyon": "<think>C?</think> B.", "unsure": "C", "rude": "No."}[asked[-1][1].split("#")[1]]
        return web.json_response({"choices": [{"message": {"content": said}}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", judge)
    monkeypatch.setenv("JUDGES_KEY", "sesame")
    async with TestServer(application) as server:
        how = {"url": str(server.make_url("/v1")), "model": "large", "key": "JUDGES_KEY"}
        said = [f"Well.</think>#{each}#" for each in ("Paris", "Lyon", "unsure")]
        grades = [await facts(each, "Paris", "", "Where?", **how) for each in said]
        with pytest.raises(ValueError, match=r"no grade.*'No\.'"):
            await facts("#rude#", "Paris", "Where?", **how)
        with pytest.raises(ValueError, match=r"answers 404"):
            await facts("#rude#", "Paris", "Where?", url=str(server.make_url("/v2")))
    told = [(grade.value, max(grade.scores, key=grade.scores.get)) for grade in grades]
    assert told == [(1, "correct"), (0, "incorrect"), (0, "not_attempted")]
    assert asked[0][0] == "Bearer sesame"
    assert all(part in asked[0][1] for part in ("Question: Where?", "Right answer: Paris", "graded: #Paris#"))


@pytest.mark.parametrize(
    ("said", "right"), [("It is the Eiffel Tower!", 1), ("eiffel-tower", 0), ("Eiffel", 0), ("an EIFFEL   tower", 1)]
)
async def test_without_a_judge_the_words_of_a_fact_must_stand_in_the_response(said, right):
    assert (await facts(said, "Eiffel Tower", "?")).value == right


@pytest.mark.parametrize(("said", "scores"), [('"a"', (1, 1, 1)), ("a", (0, 0.5, 0)), ('Sure, here:\n"a"', (0, 0, 1))])
def test_instructions_are_all_followed_or_in_part_or_but_for_what_stands_around_the_answer(said, scores):
    score = instructions(said, ["punctuation:no_comma", "startend:quotation"], [{}, {}])
    assert (score.value, score.scores["instructions"], score.scores["loose"]) == scores


def test_what_sentences_are_counted_by_is_looked_for_before_a_run_where_it_is_named(monkeypatch):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", ["/none"])
    ready = {each: Reward.of("rlinf.rewards.instructions", {"sentences": each}).ready for each in ("trained", "plain")}
    Reward.of("rlinf.rewards.instructions").ready()  # rows may be of kinds that count none
    ready["plain"]()
    with pytest.raises(ImportError, match="punkt_tab"):
        ready["trained"]()
    with pytest.raises(ValueError, match="sentences is 'short'"):
        Reward.of("rlinf.rewards.instructions", {"sentences": "short"}).ready()


@pytest.mark.parametrize(
    ("kinds", "kwargs", "said"),
    [
        (["punctuation:no_dots"], [{}], "punctuation:no_dots"),
        (["length_constraints:number_words"], [{"num_words": 3}], "no relation"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "most"}], "'most'"),
        ([], [], "empty"),
        (["punctuation:no_comma"], [], "kwargs"),
        (["punctuation:no_comma"], "[{}]", "kwargs"),
    ],
)
def test_a_row_that_does_not_say_what_is_asked_is_told(kinds, kwargs, said):
    with pytest.raises(ValueError, match=said):
        instructions("a b c", kinds, kwargs)


def test_calls_are_read_and_never_run():
    assert calls_in("[a.b(x=-1, y=[1, 'two'], z={'k': (1,)}, w=now()), c()]") == [
        ("a.b", {"x": -1, "y": [1, "two"], "z": {"k": (1,)}, "w": "now()"}),
        ("c", {}),
    ]
    assert calls_in("```\nf(x=3 * 2)\n```") == [("f", {"x": 6})]
    for wrong in ("I cannot", "[f(x=1), 2]", "f(x=1 / 0)", "f(x=9 ** 9 ** 9)", "[" * 999, "f(x={**a})", "f(x={[]: 1})"):
        with pytest.raises(ValueError, match=r"\w"):
            calls_in(wrong)
