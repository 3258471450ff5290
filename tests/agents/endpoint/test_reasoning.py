"""What a model thinks is told apart from its answer, and turns are one line whether a harness sends it back or not."""

from __future__ import annotations

import pytest

from rlinf.agents.endpoint.requests import split_thought
from tests.agents.endpoint.serving import CALL, THINKING, stand
from tests.agents.endpoint.test_clients import ADD, anthropic_of, checked, openai_of

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("aiohttp")

THOUGHTS = [
    f"<think>\nadd them\n</think>\n\n{CALL}",
    "<think>\nso\n</think>\n\nab",
    "ba",
    "<think>\nso\n</think>\n\nab",
]
"""Answers of a model that thinks mostly: a call, a text, a text without a thought, the text before once more."""


def thinking(always=False):
    """The model at the endpoint."""
    given = THOUGHTS if not always else [t.removeprefix("<think>\n") for t in THOUGHTS if t.startswith("<think>")]
    return stand(*given, template=THINKING, arguments={"always": True} if always else None)


WAYS = pytest.mark.parametrize(
    ("streamed", "always", "returned"),
    [(False, False, True), (False, False, False), (True, False, True), (True, True, False), (False, True, True)],
)


@WAYS
async def test_chat_completions_have_reasoning_content_and_turns_are_one_line(streamed, always, returned):
    async with thinking(always) as here, openai_of(here) as client:
        messages = [{"role": "system", "content": "Be good"}, {"role": "user", "content": "1 + 2.5?"}]
        thoughts, count = [], len(here.model.texts)
        for _ in range(count):
            if streamed:
                chunks = [
                    chunk.choices[0].delta
                    async for chunk in await client.chat.completions.create(
                        model="policy", messages=messages, tools=[ADD], stream=True
                    )
                ]
                message = {"role": "assistant", "content": "".join(chunk.content or "" for chunk in chunks)}
                message["reasoning_content"] = (
                    "".join(getattr(c, "reasoning_content", None) or "" for c in chunks) or None
                )
                calls = [call.model_dump() for chunk in chunks for call in chunk.tool_calls or ()]
                if calls:
                    written = "".join(call["function"]["arguments"] for call in calls)
                    message["tool_calls"] = [{**calls[0], "function": {"name": "add", "arguments": written}}]
            else:
                done = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
                message = done.choices[0].message.model_dump()
            thoughts.append(message.get("reasoning_content"))
            assert "think>" not in (message["content"] or "")
            if not returned:
                message.pop("reasoning_content", None)
            messages.append(message)
            calls = message.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3.5"} for call in calls]
            messages += [] if calls else [{"role": "user", "content": "more"}]
        assert thoughts == (["add them", "so", "so"] if always else ["add them", "so", None, "so"])
        checked(here, count)


@WAYS
async def test_responses_have_items_of_reasoning_and_turns_are_one_line(streamed, always, returned):
    tool = {"type": "function", **ADD["function"], "strict": False}
    async with thinking(always) as here, openai_of(here) as client:
        items, count = [{"role": "user", "content": "1 + 2.5?"}], len(here.model.texts)
        for turn in range(count):
            settings = {"model": "policy", "input": items, "tools": [tool], "store": False}
            if streamed:
                async with client.responses.stream(**settings) as stream:
                    events = [event async for event in stream]
                    done = await stream.get_final_response()
                told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
            else:
                done = await client.responses.create(**settings)
                told = "".join(item.content[0].text for item in done.output if item.type == "reasoning")
            assert told == ("add them" if turn == 0 else "" if not always and turn == 2 else "so")
            assert "think>" not in done.output_text
            kept = [item for item in done.output if returned or item.type != "reasoning"]
            calls = [item for item in done.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "3.5"} for call in calls]
            items += [item.model_dump(exclude_none=True) for item in kept]
            items += new or [{"role": "user", "content": "more"}]
        checked(here, count)


@WAYS
async def test_anthropics_messages_have_blocks_of_thinking_and_turns_are_one_line(streamed, always, returned):
    tool = {"name": "add", "description": "a + b", "input_schema": ADD["function"]["parameters"]}
    async with thinking(always) as here, anthropic_of(here) as client:
        messages, count = [{"role": "user", "content": "1 + 2.5?"}], len(here.model.texts)
        settings = {"model": "policy", "max_tokens": 2000, "tools": [tool], "thinking": {"type": "adaptive"}}
        for turn in range(count):
            if streamed:
                async with client.messages.stream(messages=messages, **settings) as stream:
                    done = await stream.get_final_message()
            else:
                done = await client.messages.create(messages=messages, **settings)
            told = [block.thinking for block in done.content if block.type == "thinking"]
            assert told == (["add them"] if turn == 0 else [] if not always and turn == 2 else ["so"])
            kept = [block.model_dump() for block in done.content if returned or block.type != "thinking"]
            calls = [block for block in done.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3.5"} for call in calls]
            messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": results or "more"}]
        checked(here, count)
        del settings["thinking"]
        done = await client.messages.create(messages=messages, **settings)
        assert [block.type for block in done.content] == ["text"]  # as everybody reads it who asked for no thinking


async def test_reasoning_of_answers_that_were_given_elsewhere_reaches_the_template():
    async with stand("ab", template=THINKING) as here, openai_of(here) as client, anthropic_of(here) as other:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        tool = {"role": "tool", "tool_call_id": "c", "content": "3"}
        said = {"role": "assistant", "content": None, "reasoning_content": "aba", "tool_calls": [call]}
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}, said, tool])
        blocks = [
            {"type": "thinking", "thinking": "aba", "signature": ""},
            {"type": "tool_use", "id": "c", "name": "add", "input": {}},
        ]
        result = [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks}]
        history.append({"role": "user", "content": result})
        await other.messages.create(model="policy", messages=history, max_tokens=9)
        thought = {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "aba"}],
        }
        items = [
            {"role": "user", "content": "Hi"}, thought,
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ]  # fmt: skip
        await client.responses.create(model="policy", input=items)
        read = [here.model.tokenizer.decode(ids) for ids, *_ in here.model.calls]
        assert read[0] == read[1] == read[2]
        assert "<think>\naba\n</think>" in read[0]


async def test_sealed_reasoning_comes_back_by_clients_that_keep_nothing_else_of_it():
    async with stand(*THOUGHTS[:1], "ab", template=THINKING) as here, openai_of(here) as client:
        settings = {"model": "policy", "include": ["reasoning.encrypted_content"], "store": False}
        done = await client.responses.create(input="Hi", **settings)
        sealed = done.output[0].encrypted_content
        asked = [
            {"role": "user", "content": "Ho"}, {"type": "reasoning", "summary": [], "encrypted_content": sealed},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ]  # fmt: skip
        await client.responses.create(input=asked, **settings)
        assert "<think>\nadd them\n</think>" in here.model.tokenizer.decode(here.model.calls[1][0])


@pytest.mark.parametrize(
    ("reasoning", "template", "content"),
    [("none", THINKING, THOUGHTS[1]), ("think", None, "ab"), ("auto", THINKING, "ab"), ("auto", None, THOUGHTS[1])],
)
async def test_the_configuration_says_whether_the_model_thinks_in_marks(reasoning, template, content):
    more = {} if template is None else {"template": template}
    async with stand(THOUGHTS[1], limits={"reasoning": reasoning}, **more) as here, openai_of(here) as client:
        done = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
        assert done.choices[0].message.content == content


async def test_a_thought_that_a_limit_cut_is_no_answer_and_calls_nothing():
    async with (
        stand(f"I could {CALL}", template=THINKING, arguments={"always": True}) as here,
        openai_of(here) as client,
    ):
        done = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}], tools=[ADD]
        )
        message = done.choices[0].message
        assert (message.content, message.tool_calls) == ("", None)
        assert message.reasoning_content.startswith("I could <tool_call>")


@pytest.mark.parametrize(
    ("text", "begun", "told"),
    [
        ("<think>\na\n</think>\n\nb", False, ("a", "b")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("<think>\n\n</think>\n\nb", False, (None, "b")),
        ("<think>a", False, ("a", "")),
        ("a", True, ("a", "")),
        ("b", False, (None, "b")),
        ("b <think>a</think>", False, (None, "b <think>a</think>")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("", False, (None, "")),
        ("", True, (None, "")),
    ],
)
def test_thoughts_are_told_from_what_is_said(text, begun, told):
    assert split_thought(text, thinking=begun) == told
