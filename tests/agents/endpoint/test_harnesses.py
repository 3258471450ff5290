"""Programs that everybody uses are answered as they are: what they send was recorded, shortened, and is sent again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from rlinf.agents.agent import samples_of
from tests.agents.endpoint.serving import CALL, THINKING, stand

aiohttp = pytest.importorskip("aiohttp")
openai = pytest.importorskip("openai")

HARNESSES = json.loads(Path(__file__).with_name("harnesses.json").read_text())
"""By name and version: the path, what the model answered, and the bodies of its requests."""
SAMPLES = {"claude-code": 1, "codex": 1, "openhands-sdk": 1, "qwen-code": 1, "mini-swe-agent": 2}
"""What they send back is what was said, so it is one sample; mini-swe-agent leaves out an answer without a call, and
there is one. smolagents writes its answers anew, and the others ask once per conversation."""
HI = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
SUB_CALL = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'


def learned_once(here):
    """Every generated token is learned, once, with its own log-prob; returns the samples."""
    samples = samples_of(1.0, here.llm)
    learned = []
    for one in samples:
        learned += zip(one.learned(one.response_ids).tolist(), one.learned(one.logprobs).tolist(), strict=True)
    said = [(int(token), -float(n)) for n, (_, ids, *_) in enumerate(here.model.calls, 1) for token in ids]
    assert sorted(learned) == sorted(said)
    return samples


async def post(here, path, body):
    async with aiohttp.ClientSession() as client, client.post(here.url + path, json=body) as got:
        text = await got.text()
        assert got.status == 200, text
        return json.loads(text) if not body.get("stream") else text


@pytest.mark.parametrize("name", sorted(HARNESSES))
async def test_requests_of_harnesses_are_answered_and_recorded_token_by_token(name):
    recorded = HARNESSES[name]
    async with stand(*recorded["answers"], new=4000) as here:
        for body in recorded["bodies"]:
            await post(here, recorded["path"], body)
        assert len(here.model.calls) == len(recorded["answers"])
        samples = learned_once(here)
        if (wanted := SAMPLES.get(name.split()[0])) is None:
            return
        assert len(samples) == wanted
        if wanted == 1:
            for (before, said, *_), (after, *_) in itertools.pairwise(here.model.calls):
                assert np.array_equal(after[: len(before) + len(said)], [*before, *said])


async def test_what_is_not_honoured_is_in_the_record_and_told_once():
    lines = []
    body = {
        "model": "policy", "messages": HI, "magic": 1, "ignore_eos": True, "stop_token_ids": [],
        "client_metadata": {"a": 1}, "chat_template_kwargs": {"chat_template": "x"}, "tools": [{"type": "web_search"}],
    }  # fmt: skip
    async with stand(say=lines.append) as here:
        for _ in range(2):
            await post(here, "/chat/completions", body)
        messages = {"model": "policy", "messages": HI, "max_tokens": 9, "context_management": {"edits": []}}
        await post(here, "/messages", messages)
        assert here.llm.trajectories.ignored == [
            "tools.type=web_search", "ignore_eos", "chat_template_kwargs.chat_template", "magic", "context_management",
        ]  # fmt: skip
        assert len(lines) == 5
        assert all(name in line for name, line in zip(here.llm.trajectories.ignored, lines, strict=True))
        other, url, _ = here.more()
        async with aiohttp.ClientSession() as client, client.post(f"{url}/chat/completions", json=body):
            pass
        assert "magic" in other.trajectories.ignored
        assert len(lines) == 5


async def test_arguments_of_the_chat_template_reach_it_and_make_a_history_of_their_own():
    async with stand("ab", "ab", template=THINKING) as here:
        for thinking in (False, True):
            more = {"chat_template_kwargs": {"enable_thinking": thinking}}
            await post(here, "/chat/completions", {"model": "policy", "messages": HI, **more})
        read = [here.model.tokenizer.decode(ids) for ids, *_ in here.model.calls]
        assert read[0] == f"{read[1]}<think>\n\n</think>\n\n"
        learned_once(here)


@pytest.mark.parametrize("shown", [False, True])
async def test_the_text_that_stops_an_answer_is_part_of_it_where_that_is_asked_for(shown):
    async with stand("ab STOP", "ab STOP") as here:
        for path, asked in (("/chat/completions", {"messages": HI}), ("/completions", {"prompt": "Hi"})):
            more = {"stop": ["STOP"], "include_stop_str_in_output": shown}
            told = await post(here, path, {"model": "policy", **asked, **more})
            (choice,) = told["choices"]
            assert (choice.get("text") or choice["message"]["content"]) == ("ab STOP" if shown else "ab ")


@pytest.mark.parametrize(
    "wish", [{"guided_json": {"type": "integer"}}, {"structured_outputs": {"json": {"type": "integer"}}}]
)
async def test_json_by_vllms_own_fields_is_a_wish_like_any_other(wish):
    async with stand("5", '"a"') as here:
        for wanted in (None, "the answer is not of the schema"):
            told = await post(here, "/chat/completions", {"model": "policy", "messages": HI, **wish})
            refusal = told["choices"][0]["message"]["refusal"]
            assert refusal is wanted or refusal.startswith(wanted)


# Which tools are called -----------------------------------------------------------------------------------------------

ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}
NAMED = {"type": "function", "function": {"name": "sub"}}
WISHES = [
    ({"tool_choice": "required"}, ["ab", CALL], ["add"], "calling a tool"),
    ({"tool_choice": "required"}, [CALL], ["add"], None),
    ({"tool_choice": "required"}, ["ab", "ba"], [], "calling a tool"),
    ({"tool_choice": "required"}, ["<tool_call>{}</tool_call>", CALL], ["add"], '"name"'),
    ({"tool_choice": NAMED}, [CALL, SUB_CALL], ["sub"], "calling the tool sub"),
    ({"tool_choice": NAMED}, [CALL + SUB_CALL], ["sub"], None),
    ({"parallel_tool_calls": False}, [CALL + SUB_CALL, SUB_CALL], ["sub"], "one tool at a time"),
    ({"parallel_tool_calls": False}, [CALL + SUB_CALL, CALL + SUB_CALL], ["add"], "one tool at a time"),
    ({"parallel_tool_calls": False}, ["ab"], [], None),
    ({"tool_choice": "none"}, [CALL], [], None),
    ({"tool_choice": ALLOWED}, ["ab", CALL], ["add"], "a tool"),
]  # fmt: skip


@pytest.mark.parametrize(("wish", "texts", "called", "told"), WISHES)
async def test_which_tools_are_called_is_a_wish_with_one_more_try_on_the_same_line(wish, texts, called, told):
    async with stand(*texts, "end") as here:
        body = {"model": "policy", "messages": HI, "tools": [ADD, SUB], **wish}
        got = (await post(here, "/chat/completions", body))["choices"][0]["message"]
        assert [call["function"]["name"] for call in got.get("tool_calls") or ()] == called
        assert len(here.model.calls) == len(texts)
        if told is not None:
            assert told in here.model.tokenizer.decode(here.model.calls[1][0])
        assert here.endpoint.metrics.asked_again == len(texts) - 1
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in got.get("tool_calls") or ()]
        messages = [*HI, got, *results, {"role": "user", "content": "go on"}]
        await post(here, "/chat/completions", {**body, "messages": messages, "tool_choice": "none"})
        assert len(learned_once(here)) == 1  # the client knows one answer, and the record goes on from both
        assert here.llm.counts().branches == 0


async def test_wishes_for_tools_are_understood_in_every_protocol():
    asked = {"messages": HI, "max_tokens": 300, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    items = {"input": "Hi", "tools": [{"type": "function", "name": "add"}]}
    single = {"type": "auto", "disable_parallel_tool_use": True}
    bodies = [
        ("/messages", {**asked, "tool_choice": {"type": "any"}}),
        ("/messages", {**asked, "tool_choice": {"type": "tool", "name": "add"}}),
        ("/messages", {**asked, "tool_choice": single}),
        ("/responses", {**items, "tool_choice": "required"}),
        ("/responses", {**items, "tool_choice": {"type": "function", "name": "add"}}),
        ("/responses", {**items, "parallel_tool_calls": False}),
    ]
    for path, body in bodies:
        first = CALL * 2 if "parallel" in str(body) else "ab"
        async with stand(first, CALL) as here:
            told = await post(here, path, {"model": "policy", **body})
            assert len(here.model.calls) == 2, path
            parts = told.get("content") or told["output"]
            assert [item["name"] for item in parts if item["type"] in ("tool_use", "function_call")] == ["add"]


@pytest.mark.parametrize(
    ("tools", "choice"), [([], "required"), ([ADD], NAMED), ([{"type": "web_search"}], "required")]
)
async def test_a_wish_for_a_tool_that_is_not_there_is_noted_and_costs_no_second_try(tools, choice):
    async with stand("ab", CALL) as here:
        body = {"model": "policy", "messages": HI, "tools": tools, "tool_choice": choice}
        await post(here, "/chat/completions", body)
        assert len(here.model.calls) == 1
        assert here.llm.trajectories.ignored[-1] == "tool_choice"


async def test_a_second_try_that_does_not_fit_leaves_the_first_answer():
    async with stand("ab", CALL, longest=175) as here:
        body = {"model": "policy", "messages": HI, "tools": [ADD], "tool_choice": "required"}
        told = await post(here, "/chat/completions", body)
        assert told["choices"][0]["message"]["content"] == "ab"
        assert len(here.model.calls) == 1


# Tools of other kinds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_responses_have_tools_in_namespaces_and_tools_that_take_a_text(streamed):
    tools = [
        {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", "name": "find"}]},
        {"type": "custom", "name": "patch", "description": "d", "format": {"type": "grammar", "definition": "x"}},
        {"type": "image_generation"},
    ]
    said = '<tool_call>{"name": "files.find", "arguments": {"x": 1}}</tool_call>' \
        '<tool_call>{"name": "patch", "arguments": {"input": "*** a"}}</tool_call>'  # fmt: skip
    async with stand(said, "ab") as here, openai.AsyncOpenAI(base_url=here.url, api_key="x") as client:
        settings = {"model": "policy", "tools": tools, "store": False}
        if streamed:
            events = [event async for event in await client.responses.create(input="Hi", stream=True, **settings)]
            done = events[-1].response
            (patched,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
            assert patched.input == "*** a"
        else:
            done = await client.responses.create(input="Hi", **settings)
        find, patch = done.output
        assert (find.type, find.name, find.namespace) == ("function_call", "find", "files")
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** a")
        items = [item.model_dump(exclude_none=True) for item in done.output]
        results = [
            {"type": "function_call_output", "call_id": find.call_id, "output": "3"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        ]
        asked = [{"role": "user", "content": "Hi"}, *items, *results]
        await client.responses.create(input=asked, **settings)
        assert len(learned_once(here)) == 1
        assert here.llm.trajectories.ignored == ["tools.type=image_generation"]


async def test_chat_completions_have_tools_that_take_a_text():
    tool = {"type": "custom", "custom": {"name": "patch", "description": "d"}}
    said = '<tool_call>{"name": "patch", "arguments": {"input": "*** a"}}</tool_call>'
    async with stand(said, said, "ab") as here, openai.AsyncOpenAI(base_url=here.url, api_key="x") as client:
        settings = {"model": "policy", "tools": [tool]}
        done = await client.chat.completions.create(messages=HI, **settings)
        message = done.choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "*** a")
        chunks = [
            chunk.choices[0].delta.tool_calls[0]
            async for chunk in await client.chat.completions.create(messages=HI, stream=True, **settings)
            if chunk.choices[0].delta.tool_calls
        ]
        assert "".join(chunk.custom["input"] for chunk in chunks) == "*** a"
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        await client.chat.completions.create(messages=[*HI, message.model_dump(), result], **settings)
        assert here.llm.counts().joined == 1


async def test_a_websocket_for_responses_is_refused_so_that_clients_post_at_once():
    async with stand() as here, aiohttp.ClientSession() as client, client.get(f"{here.url}/responses") as got:
        assert got.status == 426
