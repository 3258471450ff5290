"""Search-R1 against a model that is played: what it reads, what is learned, and what it earns."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.agents.agent import samples_of
from rlinf.agents.llm import ContextFull
from rlinf.agents.search import INVALID, action_of, search_by_tool, search_r1
from rlinf.data.sample import Prompt
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import TOKENIZER, begun, ids


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": "0", "contents": "\\"Mira\\"\\nMira lives in Oslen."}\n'
        '{"id": "1", "contents": "\\"Tola\\"\\nTola lives in Baru."}\n'
    )
    return str(path)


TASK = Prompt(0, ids("Where does Mira live?"), "Where does Mira live?", '["Oslen", "Oslen City"]')


async def test_what_is_found_is_read_and_not_learned(corpus):
    llm, actor = begun("I wonder. <search> mira </search>", "So: <answer> oslen </answer>")
    assert await search_r1(TASK, llm, retriever=corpus, topk=1) == 1.0
    read = "\n\n<information>Doc 1(Title: Mira) Mira lives in Oslen.\n</information>\n\n"
    assert actor.read == [TASK.text, f"{TASK.text}I wonder. <search> mira </search>{read}"]
    assert actor.stops == [["</search>", "</answer>"]] * 2
    (sample,) = samples_of(1.0, llm)
    assert TOKENIZER.decode(sample.learned(sample.response_ids)) == (
        "I wonder. <search> mira </search>So: <answer> oslen </answer>"
    )
    assert TOKENIZER.decode(sample.response_ids) == (
        f"I wonder. <search> mira </search>{read}So: <answer> oslen </answer>"
    )


async def test_a_wrong_answer_earns_nothing(corpus):
    llm, _ = begun("<answer>Baru</answer>")
    assert await search_r1(TASK, llm, retriever=corpus) == 0.0


async def test_who_does_neither_is_told_so(corpus):
    llm, actor = begun("Hm.", "<answer>Oslen City</answer>")
    assert await search_r1(TASK, llm, retriever=corpus) == 1.0
    assert actor.read[1] == f"{TASK.text}Hm.{TOKENIZER.eos_token}{INVALID}"


async def test_searches_come_to_an_end(corpus):
    llm, actor = begun(*["<search>mira</search>"] * 9)
    assert await search_r1(TASK, llm, retriever=corpus, turns=3) == 0.0
    assert len(actor.read) == 4


async def test_nothing_found_is_read_as_nothing(corpus):
    llm, actor = begun("<search>zzz</search>", "<answer></answer>")
    assert await search_r1(TASK, llm, retriever=corpus) == 0.0
    assert actor.read[1].endswith("<information></information>\n\n")


async def test_a_context_that_is_full_ends_the_search_and_a_question_that_is_too_long_is_said(corpus):
    llm, actor = begun("<search>mira</search>", "never said", longest=60)
    assert await search_r1(TASK, llm, retriever=corpus) == 0.0
    assert len(actor.read) == 1
    llm, _ = begun("never said", longest=10)
    with pytest.raises(ContextFull):
        await search_r1(TASK, llm, retriever=corpus)


async def test_a_retriever_that_is_not_there_is_no_fault_of_the_model(corpus):
    llm, _ = begun("<search>mira</search>")
    with pytest.raises(UserError, match="cannot be read"):
        await search_r1(TASK, llm, retriever=f"{corpus}.gz")


def call(query):
    return f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'


async def test_a_model_that_was_trained_on_tools_calls_one(corpus):
    llm, actor = begun(call("mira"), "<answer>Oslen</answer>")
    assert await search_by_tool(TASK, llm, retriever=corpus, topk=1) == 1.0
    assert (
        actor.read[1] == f"{actor.read[0]}{call('mira')}{TOKENIZER.eos_token}Doc 1(Title: Mira) Mira lives in Oslen.\n"
    )
    llm, _ = begun(call("zzz"), "oslen.")
    assert await search_by_tool(TASK, llm, retriever=corpus) == 1.0  # without tags


async def test_calls_of_the_tool_come_to_an_end(corpus):
    llm, actor = begun(*[call("mira")] * 9)
    assert await search_by_tool(TASK, llm, retriever=corpus, turns=2) == 0.0
    assert len(actor.read) == 3


async def test_a_server_that_fails_behind_the_tool_is_no_fault_of_the_model():
    llm, _ = begun(call("mira"), "never said")
    settings = {"attempts": 1, "timeout": 1.0}
    with pytest.raises(UserError, match=r"documents.*1 attempts"):
        await search_by_tool(TASK, llm, retriever="http://127.0.0.1:9/retrieve", settings=settings)


@given(
    st.lists(st.sampled_from(["<search>", "</search>", "<answer>", "</answer>", "a", "\n"]), max_size=9).map("".join)
)
def test_the_first_action_with_both_of_its_tags_counts(text):
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    assert action_of(text) == (None if found is None else found.groups())
