"""What clients ask of an answer's form is kept to while it is decoded: by our own engine, through every protocol."""

import json
import string
from contextlib import asynccontextmanager

import aiohttp
import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.arguments import WrongValue
from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.llm import Setting
from rlinf.agents.tools.formats import call_format
from rlinf.config.text import EndpointConfig
from rlinf.data.sample import Prompt
from rlinf.data.tokenizer import character_tokenizer
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine

pytest.importorskip("llguidance")
TOKENIZER = character_tokenizer(string.printable)
TOKENIZER.chat_template = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "of": {"enum": ["x", 7]}},
    "required": ["ok", "of"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {**SCHEMA}}}


class Model:
    """The `LLM` of an engine around a tiny model of random weights."""

    def __init__(self):
        torch.manual_seed(1)
        config = AutoConfig.for_model(
            "qwen2", vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        self.engine = TransformersEngine(AutoModelForCausalLM.from_config(config), tokenizer=TOKENIZER)
        self.number = self.heard = 0

    async def answer(self, ids, *, seed, conversation, stop=(), hear=None, **sampling):
        self.number += 1
        self.heard += hear is not None
        rules = Sampling(stop_ids=(TOKENIZER.eos_token_id,), stop_texts=tuple(stop or ()), **sampling)
        return await self.engine.answer(Request(self.number, np.asarray(ids), rules, seed % 2**62), hear)

    def ended(self, conversation):
        pass


@asynccontextmanager
async def stand(no_forms=None):
    model = Model()
    setting = Setting(model, 1.0, 600, None, len(TOKENIZER), no_forms)
    lines = []
    endpoint = Endpoint(EndpointConfig())
    numbers = iter(range(1000))
    attempt = Attempt(setting, call_format("hermes", TOKENIZER), lambda: next(numbers), open=endpoint.session)
    llm = AgentLLM(attempt, ChatFormat(TOKENIZER, None, lines.append), (1, 2))
    llm.said, llm.model = lines, model
    try:
        yield llm
    finally:
        await endpoint.close()


class Here:
    def __init__(self, llm):
        self.url, self.key, self.llm = llm.base_url, llm.api_key, llm


async def post(here, path, body, status=200):
    headers = {"Authorization": f"Bearer {here.key}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.post(here.url + path, json=body) as got:
        answer = await got.json()
        assert got.status == status, answer
        return answer


async def streamed(here, body):
    """Deltas of a chat's stream."""
    headers = {"Authorization": f"Bearer {here.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(here.url + "/chat/completions", json=body) as got,
    ):
        lines = [line async for line in got.content if line.startswith(b"data: {")]
    return [json.loads(line[6:])["choices"][0]["delta"] for line in lines]


def format_of(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


async def test_formats_of_chat_and_responses_are_kept_to():
    async with stand() as llm:
        here = Here(llm)
        body = {"model": "policy", "messages": HI, "response_format": format_of(SCHEMA)}
        answer = await post(here, "/chat/completions", body)
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
        assert answer["choices"][0]["finish_reason"] == "stop"
        body = {
            "model": "policy",
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        }
        answer = await post(here, "/responses", body)
        jsonschema.validate(json.loads(answer["output"][-1]["content"][0]["text"]), SCHEMA)
        assert answer["status"] == "completed"
        turn = llm.trajectories.turns[0]
        assert (turn.answer.log_mass < 0).any()
        (sample,) = llm.trajectories.samples(Prompt(0, np.arange(2)), 0, 1.0)[:1]
        assert sample.log_mass is not None
        np.testing.assert_allclose(sample.column("logprobs"), sample.learned(sample.logprobs + sample.log_mass))


async def test_tools_are_called_as_wished_in_every_protocol():
    async with stand() as llm:
        here = Here(llm)
        chat = {"model": "policy", "messages": HI, "tools": [WEATHER, CLOCK]}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = await post(
                here, "/chat/completions", {**chat, "tool_choice": choice, "parallel_tool_calls": False}
            )
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            schema = {"weather": CITY, "clock": SCHEMA}[call["function"]["name"]]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
        tools = [{"name": "weather", "input_schema": CITY}]
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            body = {"model": "policy", "messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 600}
            answer = await post(here, "/messages", body)
            blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
            assert blocks
            assert answer["stop_reason"] == "tool_use"
            for block in blocks:
                jsonschema.validate(block["input"], CITY)
        flat = [{"type": "function", "name": "weather", "parameters": CITY}]
        body = {
            "model": "policy",
            "input": "Hi",
            "tools": flat,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        (item,) = (await post(here, "/responses", body))["output"]
        jsonschema.validate(json.loads(item["arguments"]), CITY)


async def test_what_is_kept_to_while_it_is_decoded_is_streamed():
    async with stand() as llm:
        here = Here(llm)
        chat = {"model": "policy", "messages": HI, "stream": True}
        deltas = await streamed(here, {**chat, "response_format": format_of(SCHEMA)})
        pieces = [piece for delta in deltas if (piece := delta.get("content"))]
        assert pieces
        jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
        wish = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        deltas = await streamed(here, {**chat, **wish})
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
        jsonschema.validate(json.loads("".join(piece["arguments"] for piece in pieces)), CITY)
        assert not any(delta.get("content") for delta in deltas)
        assert llm.model.number == llm.model.heard == 2  # each was listened to, and nobody was asked again


async def test_our_own_agents_ask_for_schemas_and_calls():
    async with stand() as llm:
        answer = await llm.chat(HI, schema=SCHEMA)
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        answer = await llm.chat(HI, tools=[WEATHER, CLOCK], tool_choice="clock")
        assert {call.name for call in answer.calls} == {"clock"}
        assert answer.broken == ()
        cut = await llm.chat(HI, schema=SCHEMA, max_new_tokens=3)
        assert cut.finish == "length"
        for wrong in ({"tool_choice": "lamp"}, {"schema": {"not": {}}}, {"schema": SCHEMA, "tool_choice": "clock"}):
            with pytest.raises(WrongValue, match=r"lamp|not|schema"):
                await llm.chat(HI, tools=[WEATHER, CLOCK], **wrong)


@pytest.mark.parametrize(
    ("keyword", "schema"), [("uniqueItems", {"type": "array", "uniqueItems": True}), ("not", {"not": {}})]
)
async def test_a_keyword_that_cannot_be_enforced_is_named(keyword, schema):
    async with stand() as llm:
        here = Here(llm)
        body = {"model": "policy", "messages": HI, "response_format": format_of(schema)}
        error = await post(here, "/chat/completions", body, status=400)
        assert keyword in error["error"]["message"]
        assert error["error"]["param"] == "response_format"
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"model": "policy", "messages": HI, "tools": [tool], "tool_choice": "required"}
        answer = await post(here, "/chat/completions", body)  # nobody insists on its arguments
        assert answer["choices"][0]["message"]["tool_calls"]
        assert "tools.parameters=not enforced" in llm.trajectories.ignored
        tool["function"]["strict"] = True
        error = await post(here, "/chat/completions", body, status=400)
        assert keyword in error["error"]["message"]


async def test_strict_tools_may_be_called_and_a_cut_answer_is_incomplete():
    async with stand() as llm:
        here = Here(llm)
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        answer = await post(
            here, "/chat/completions", {"model": "policy", "messages": HI, "tools": [strict], "max_tokens": 9}
        )
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")
        body = {"model": "policy", "input": "Hi", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1}
        answer = await post(here, "/responses", body)
        assert answer["status"] == "incomplete"


async def test_without_an_engine_that_can_clients_are_served_and_people_are_told_what_is_missing():
    async with stand(no_forms="pip install 'rlinf[schemas]'") as llm:
        here = Here(llm)
        body = {"model": "policy", "messages": HI, "response_format": format_of(SCHEMA), "max_tokens": 5}
        await post(here, "/chat/completions", body)
        assert any("rlinf[schemas]" in line for line in llm.said)
        with pytest.raises(WrongValue, match=r"rlinf\[schemas\]"):
            await llm.chat(HI, schema=SCHEMA)
