"""An agent that lets the model use tools until it answers without."""

from __future__ import annotations

import pytest

from rlinf.agents.agent import samples_of
from rlinf.agents.llm import ContextFull
from rlinf.agents.tools.tool import use_tools
from rlinf.data.sample import Prompt
from tests.agents.acting import TOKENIZER, begun, ids

TASK = Prompt(0, ids("What is 6*7?"), "What is 6*7?", "42")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
TOOLS = ["rlinf.agents.tools.arithmetic.calculator"]


async def test_results_are_read_until_it_answers_and_the_judge_is_left_to_score():
    llm, actor = begun(CALL, "It is 42.")
    assert await use_tools(TASK, llm, tools=TOOLS) is None
    assert actor.read[1].endswith(f"{CALL}{TOKENIZER.eos_token}42")
    (sample,) = samples_of(None, llm)
    assert sample.reward is None
    assert TOKENIZER.decode(sample.learned(sample.response_ids)) == f"{CALL}<eos>It is 42.<eos>"


async def test_turns_come_to_an_end():
    llm, actor = begun(*[CALL] * 9)
    await use_tools(TASK, llm, tools=TOOLS, turns=3)
    assert len(actor.read) == 3


async def test_a_context_that_is_full_is_the_end_and_a_task_that_is_too_long_is_said():
    llm, actor = begun(CALL, "never said", longest=90)
    await use_tools(TASK, llm, tools=TOOLS)
    assert len(actor.read) == 1
    with pytest.raises(ContextFull):
        await use_tools(TASK, begun("never said", longest=5)[0], tools=TOOLS)
