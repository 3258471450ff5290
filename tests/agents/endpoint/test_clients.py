"""OpenAI's and Anthropic's own clients work unchanged, and what they send back is known by its exact tokens."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest

from rlinf.agents.agent import samples_of
from tests.agents.endpoint.serving import CALL, stand

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("aiohttp")

ADD = {
    "type": "function",
    "function": {
        "name": "add", "description": "a + b",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}  # fmt: skip


def openai_of(here, **more):
    return openai.AsyncOpenAI(base_url=here.url, api_key=here.key, max_retries=0, **more)


def anthropic_of(here, **more):
    return anthropic.AsyncAnthropic(base_url=here.url, api_key=here.key, max_retries=0, **more)


def checked(here, turns):
    """The record is one line of turns, in which each call reads what the one before read and said, token by token."""
    counts = here.llm.counts()
    assert (counts.calls, counts.joined, counts.branches) == (turns, turns - 1, 0)
    for (before, said, *_), (after, *_) in itertools.pairwise(here.model.calls):
        assert np.array_equal(after[: len(before) + len(said)], [*before, *said])
    (sample,) = samples_of(1.0, here.llm)
    learned = sample.learned(sample.response_ids).tolist()
    assert learned == [int(token) for _, said, *_ in here.model.calls for token in said]
    numbers = [-float(n) for n, (_, said, *_) in enumerate(here.model.calls, 1) for _ in said]
    assert sample.column("logprobs").tolist() == numbers
    assert set(sample.learned(sample.versions).tolist()) == {7}


TEXTS = [CALL, f"let us see {CALL}\n{CALL}", " ab ", "<think>so</think> done"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_chat_of_four_turns_with_tools_is_one_line_of_exact_tokens(streamed):
    async with stand(*TEXTS) as here, openai_of(here) as client:
        messages = [{"role": "system", "content": "Be good"}, {"role": "user", "content": "1 + 2.5?"}]
        for _ in range(4):
            if streamed:
                async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
                    async for _ in stream:
                        pass
                    done = await stream.get_final_completion()
            else:
                done = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            message = done.choices[0].message
            messages.append(message.model_dump())  # nulls, parsed arguments and all that the client adds
            calls = message.tool_calls or []
            assert done.choices[0].finish_reason == ("tool_calls" if calls else "stop")
            for call in calls:
                assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2.5}')
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3.5"})
            if not calls:
                messages.append({"role": "user", "content": [{"type": "text", "text": "more"}]})
        assert [len(m.get("tool_calls") or ()) for m in messages if m["role"] == "assistant"] == [1, 2, 0, 0]
        checked(here, 4)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_messages_of_four_turns_with_tools_are_one_line_of_exact_tokens(streamed):
    tool = {"name": "add", "description": "a + b", "input_schema": ADD["function"]["parameters"]}
    async with stand(*TEXTS) as here, anthropic_of(here) as client:
        messages = [{"role": "user", "content": "1 + 2.5?"}]
        settings = {"model": "policy", "max_tokens": 400, "system": "Be good", "tools": [tool]}
        for _ in range(4):
            if streamed:
                async with client.messages.stream(messages=messages, **settings) as stream:
                    done = await stream.get_final_message()
            else:
                done = await client.messages.create(messages=messages, **settings)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in done.content]})
            calls = [block for block in done.content if block.type == "tool_use"]
            assert done.stop_reason == ("tool_use" if calls else "end_turn")
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3.5"} for call in calls]
            assert all((call.name, call.input) == ("add", {"a": 1, "b": 2.5}) for call in calls)
            messages.append({"role": "user", "content": results or "more"})
        checked(here, 4)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_openai_responses_of_four_turns_with_tools_are_one_line_of_exact_tokens(streamed, by_id):
    tool = {"type": "function", **ADD["function"], "strict": False}
    async with stand(*TEXTS) as here, openai_of(here) as client:
        items, previous = [{"role": "user", "content": "1 + 2.5?"}], None
        for _ in range(4):
            settings = {"model": "policy", "input": items, "instructions": "Be good", "tools": [tool]}
            if by_id and previous is not None:
                settings["previous_response_id"] = previous
            if streamed:
                async with client.responses.stream(**settings) as stream:
                    async for _ in stream:
                        pass
                    done = await stream.get_final_response()
            else:
                done = await client.responses.create(**settings)
            assert done.status == "completed"
            calls = [item for item in done.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "3.5"} for call in calls]
            new = new or [{"role": "user", "content": "more"}]
            items = new if by_id else [*items, *(item.model_dump(exclude_none=True) for item in done.output), *new]
            previous = done.id
        assert done.output_text == "<think>so</think> done"
        checked(here, 4)


CODE = "def f():\\n    return 1\\n" * 5
WRITES = f'<tool_call>{{"name": "add", "arguments": {{"a": "{CODE}"}}}}</tool_call>'


async def pieces_of_call(here, protocol, half):
    """What a client of a stream is told of a call, by its client's own events: pieces of arguments, and the arguments
    that the client has put together. Once it was told the name and some arguments, the model goes on."""
    pieces = []

    def told(piece):
        pieces.append(piece)
        half.set()

    hi = [{"role": "user", "content": "Hi"}]
    if protocol == "chat":
        asked = {"model": "policy", "messages": hi, "tools": [ADD]}
        async with openai_of(here) as client, client.chat.completions.stream(**asked) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta" and event.arguments_delta:
                    assert event.name == "add"
                    told(event.arguments_delta)
            done = (await stream.get_final_completion()).choices[0]
        return pieces, done.message.tool_calls[0].function.arguments, done.finish_reason
    if protocol == "responses":
        asked = {"model": "policy", "input": hi, "tools": [{"type": "function", **ADD["function"], "strict": False}]}
        async with openai_of(here) as client, client.responses.stream(**asked) as stream:
            async for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    told(event.delta)
            done = await stream.get_final_response()
        (item,) = [item for item in done.output if item.type == "function_call"]
        assert item.name == "add"
        return pieces, item.arguments, done.status
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    asked = {"model": "policy", "messages": hi, "max_tokens": 400, "tools": [tool]}
    async with anthropic_of(here) as client, client.messages.stream(**asked) as stream:
        async for event in stream:
            if event.type == "input_json":
                told(event.partial_json)
        done = await stream.get_final_message()
    (block,) = [block for block in done.content if block.type == "tool_use"]
    assert block.name == "add"
    return pieces, json.dumps(block.input), done.stop_reason


ENDS = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}


@pytest.mark.parametrize("protocol", ENDS)
@pytest.mark.parametrize("broken", [False, True])
async def test_arguments_of_a_call_come_piece_by_piece_before_the_answer_has_ended(protocol, broken):
    half = asyncio.Event()
    written = WRITES.replace('"}}', '" "}}') if broken else WRITES
    async with stand(f"let us see {written}", "ab", half=half) as here:
        pieces, arguments, end = await pieces_of_call(here, protocol, half)
        assert len(pieces) > 20
        assert end == ENDS[protocol]
        code = json.loads(f'"{CODE}"')
        if not broken:
            assert json.loads("".join(pieces)) == json.loads(arguments) == {"a": code}
            return
        assert json.loads("".join(pieces) + "}") == {"a": code}  # and no more: what follows is no JSON


@pytest.mark.parametrize("broken", [False, True])
async def test_a_call_that_was_told_in_pieces_joins_by_its_tokens_when_it_comes_back_whole_or_half(broken):
    written = WRITES.replace('"}}', '" "}}') if broken else WRITES
    async with stand(f"let us see {written}", "ab") as here, openai_of(here) as client:
        messages = [{"role": "user", "content": "Hi"}]
        stream = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], stream=True)
        text, arguments, id = "", "", None
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or ():
                id, arguments = id or call.id, arguments + call.function.arguments
        call = {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": "no"},
        ]
        await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        checked(here, 2)


async def test_clients_that_block_work_as_well():
    async with stand("ab", "abc") as here:

        def speak():
            with openai.OpenAI(base_url=here.url, api_key="any", max_retries=0) as client:
                done = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
            settings = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
            with anthropic.Anthropic(base_url=here.url, api_key="any", max_retries=0) as client:
                said = [
                    event.delta.text
                    for event in client.messages.create(**settings, stream=True)
                    if event.type == "content_block_delta"
                ]
                return done.choices[0].message.content, "".join(said)

        assert await asyncio.to_thread(speak) == ("ab", "abc")


async def test_a_key_in_the_header_does_where_the_url_has_none():
    async with stand() as here:
        root = here.url.split("/s/")[0]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=here.key) as client:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
        async with anthropic.AsyncAnthropic(base_url=root, api_key=here.key) as client:
            await client.messages.create(model="policy", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
        assert here.llm.counts().calls == 2


@pytest.mark.parametrize("by", ["url", "header"])
async def test_a_name_behind_the_key_is_another_agent_of_the_episode(by):
    async with stand("ab") as here:
        root, names = here.url.split("/s/")[0], ["judge-1", "judge-1", "judge-2"]
        for name in names:
            url = f"{root}/s/{here.key}.{name}/v1" if by == "url" else f"{root}/v1"
            headers = {} if by == "url" else {"X-Session-Id": f"{here.key}.{name}"}
            async with openai.AsyncOpenAI(base_url=url, api_key=here.key, default_headers=headers) as client:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
        spoke = {name: len(llm.trajectories.turns) for name, llm in here.llm.agents.items() if name}
        assert (spoke, len(here.llm.trajectories.turns)) == ({"judge-1": 2, "judge-2": 1}, 0)
        here.llm.agent("judge-1").leave_out()
        assert [one.agent for one in samples_of(1.0, here.llm)] == ["judge-2"]
        url = f"{root}/s/rl-nobody.judge-1/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=here.key, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    assert here.endpoint.sessions == {}


async def test_several_answers_have_logprobs_token_ids_and_seeds_of_their_own():
    async with stand("ab", "a", "b", "ab", "a", "b") as here, openai_of(here) as client:
        seeds = []
        for _ in range(2):
            done = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}], n=3, seed=5, logprobs=True,
                top_logprobs=1,
                max_completion_tokens=9, temperature=0.5, top_p=0.9, extra_body={"return_token_ids": True, "top_k": 7},
            )  # fmt: skip
            made = here.model.calls[-3:]
            for choice, (_, said, _, sampling) in zip(done.choices, made, strict=True):
                assert choice.token_ids == said.tolist()
                assert len(choice.logprobs.content) == len(said)
                assert choice.logprobs.content[0].logprob == choice.logprobs.content[0].top_logprobs[0].logprob
                assert {name: sampling[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")} == {
                    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_new_tokens": 9,
                }  # fmt: skip
            assert done.prompt_token_ids == made[0][0].tolist()
            assert done.usage.completion_tokens == sum(len(said) for _, said, *_ in made)
            seeds.append([seed for *_, seed, _ in made])
        assert seeds[0] == seeds[1]
        assert len(set(seeds[0])) == 3


async def test_every_whole_number_is_a_seed():
    async with stand() as here, openai_of(here) as client:
        for seed in (0, 0, -1, 5, 5):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}], seed=seed
            )
        zero, again, minus, five, same = (seed for *_, seed, _ in here.model.calls)
        assert (zero, five) == (again, same)
        assert len({zero, minus, five}) == 3


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_what_stops_an_answer_is_not_told_and_the_answer_still_joins(kind):
    async with stand("ab STOP", "ab") as here, openai_of(here) as client, anthropic_of(here) as other:
        messages = [{"role": "user", "content": "Hi"}]
        if kind == "openai":
            done = await client.chat.completions.create(model="policy", messages=messages, stop="STOP")
            text = done.choices[0].message.content
        else:
            done = await other.messages.create(
                model="policy", messages=messages, stop_sequences=["STOP"], max_tokens=50
            )
            text = done.content[0].text
            assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", "STOP")
        assert text == "ab "
        messages += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=messages)
        checked(here, 2)


async def test_calls_that_are_not_allowed_are_text_and_still_join():
    async with stand(CALL, "ab") as here, openai_of(here) as client:
        messages = [{"role": "user", "content": "Hi"}]
        done = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], tool_choice="none")
        message = done.choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        checked(here, 2)


async def test_completions_go_on_from_texts_and_token_ids():
    async with stand("ab", "a", "b") as here, openai_of(here) as client:
        done = await client.completions.create(
            model="policy", prompt=[5, 6, 7], logprobs=1, extra_body={"return_token_ids": True}
        )
        (choice,) = done.choices
        assert choice.prompt_token_ids == [5, 6, 7]
        assert choice.logprobs.token_logprobs == [-1.0] * len(choice.token_ids)
        await client.completions.create(model="policy", prompt=[5, 6, 7, *choice.token_ids, 8])
        checked(here, 2)
        many = await client.completions.create(model="policy", prompt=["Hi", "Ho"], n=2)
        assert [each.index for each in many.choices] == [0, 1, 2, 3]
        stream = await client.completions.create(model="policy", prompt="Hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "b"


async def test_prompts_are_told_with_their_logprobs_before_the_answer_or_alone():
    async with stand("ab") as here, openai_of(here) as client:
        tokenizer = here.model.tokenizer
        ids = tokenizer("x: ba")["input_ids"]
        for prompt in ("x: ba", ids):
            reply = await client.completions.create(model="policy", prompt=prompt, echo=True, logprobs=1, max_tokens=9)
            told = reply.choices[0].logprobs
            assert reply.choices[0].text == "x: baab"
            assert told.tokens == [tokenizer.decode([id]) for id in ids] + ["ab", "<|im_end|>"]
            assert told.token_logprobs[: len(ids)] == [None, *(-float(id) for id in ids[1:])]
            assert [max(top.values()) for top in told.top_logprobs[1 : len(ids)]] == [-0.5] * (len(ids) - 1)
            assert told.token_logprobs[len(ids) :] == [-float(len(here.model.calls))] * 2  # of the answer, as recorded
            assert told.text_offset[len(ids)] == len("x: ba")
        assert len(here.llm.trajectories.turns) == 2
        more = {"max_tokens": 0, "extra_body": {"prompt_logprobs": 2}, "logprobs": 0}
        reply = await client.completions.create(model="policy", prompt=[ids, [7]], echo=True, **more)
        assert [each.text for each in reply.choices] == ["x: ba", tokenizer.decode([7])]
        assert reply.choices[0].logprobs.token_logprobs == [None, *(-float(id) for id in ids[1:])]
        first, *places = reply.choices[0].model_dump()["prompt_logprobs"]
        others = {"20": {"logprob": -0.5, "rank": 1}, "21": {"logprob": -1.0, "rank": 2}}
        assert first is None
        assert places == [{**others, str(id): {"logprob": -float(id), "rank": 2}} for id in ids[1:]]
        assert reply.choices[1].model_dump()["prompt_logprobs"] == [None]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids) + 1, 0)
        assert len(here.model.calls) == 2  # nothing was generated and recorded
        assert len(here.llm.trajectories.turns) == 2


async def test_json_that_was_asked_for_is_checked():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with stand('{"a": 1}', '{"a": "b"}', "ab") as here, openai_of(here) as client:
        told = []
        for chosen in (form, form, {"type": "json_object"}):
            done = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}], response_format=chosen
            )
            told.append((done.choices[0].message.content, done.choices[0].message.refusal))
        assert told[0] == ('{"a": 1}', None)
        assert "'b' is not of type" in told[1][1]
        assert "valid JSON" in told[2][1]
        asked = here.model.tokenizer.decode(here.model.calls[0][0])
        assert json.dumps(schema) in asked
        assert here.endpoint.metrics.malformed == 2


async def test_a_schema_that_takes_forever_is_given_up_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr("rlinf.agents.endpoint.requests._SCHEMA_SECONDS", 1.0)
    slow = {"type": "string", "pattern": "^(a+)+$"}
    doubling = {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}}
    doubling |= {"$ref": "#/$defs/d0"}
    doubling["$defs"]["d40"] = {"type": "string"}
    none = {"type": "strange"}
    async with stand(f'"{"a" * 40}!"', '"a"') as here, openai_of(here) as client:
        told = []
        for schema in (slow, doubling, {"type": "string", "pattern": "^a$"}, none):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            try:
                done = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "Hi"}], response_format=form
                )
            except openai.BadRequestError as error:
                told.append(error.param)
            else:
                told.append(done.choices[0].message.refusal)
        assert "within 1 s" in told[0]
        assert "within 1 s" in told[1]
        assert told[2:] == [None, "response_format"]


async def test_a_stream_ends_with_usage_and_has_logprobs():
    async with stand("abba") as here, openai_of(here) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}], stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        told = [each.logprobs.content for chunk in chunks for each in chunk.choices if each.logprobs is not None]
        assert sum(map(len, told)) == chunks[-1].usage.completion_tokens
        assert chunks[-1].choices == []
        read, said, *_ = here.model.calls[0]
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(read), len(said))


async def test_tokens_are_counted_without_asking_the_model():
    async with stand() as here, anthropic_of(here) as client:
        messages = [{"role": "user", "content": "Hi"}]
        counted = await client.messages.count_tokens(model="policy", messages=messages)
        assert here.model.calls == []
        done = await client.messages.create(model="policy", messages=messages, max_tokens=9)
        assert counted.input_tokens == done.usage.input_tokens == len(here.model.calls[0][0])
