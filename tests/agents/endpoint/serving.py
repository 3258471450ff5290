"""An endpoint in the test's own process, over a model that says what it is told to."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.llm import Setting
from rlinf.agents.tools.formats import call_format
from rlinf.config.text import EndpointConfig
from rlinf.engines.base import Completion, TextScores
from tests.agents.speaking import STYLES, Style, tokenizer_of

TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that shows tools and calls, as Qwen's does."""
THINKING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set asked = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set thought = message['reasoning_content'] or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if thought and loop.index0 > asked.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ content }}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif always %}<think>\n{% endif %}{% endif %}"
)
"""A chat template that leaves out what was thought before the newest question, as Qwen3's does; with `always` it begins
the thought itself, as those of models that always think do."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2.5}}</tool_call>'


@dataclass
class Scripted:
    """Answers with the next of its texts, the last one again and again; log-probs number its calls. Listeners are told
    token by token; with a `half`, it waits for that in the middle."""

    tokenizer: object
    texts: list[str] = field(default_factory=lambda: ["ab"])
    gate: asyncio.Event | None = None
    half: asyncio.Event | None = None
    error: Exception | None = None
    calls: list = field(default_factory=list)
    """Of every call: what it read, what it said, the seed, the settings."""
    cancelled: int = 0
    over: list = field(default_factory=list)

    async def answer(self, ids, *, seed, conversation, hear=lambda ids: None, **sampling):
        number = len(self.calls)
        self.calls.append(None)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        text = self.texts[min(number, len(self.texts) - 1)]
        said = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        finish = "text" if any(stop in text for stop in sampling.get("stop") or ()) else "stop"
        if len(said) >= sampling["max_new_tokens"]:
            said, finish = said[: sampling["max_new_tokens"]], "length"
        said = np.asarray([*said, *([self.tokenizer.eos_token_id] if finish == "stop" else [])], np.int64)
        self.calls[number] = (np.asarray(ids), said, seed, sampling)
        for place, token in enumerate(said[:-1].tolist()):
            hear([token])
            if self.half is not None and place == len(said) // 2:
                try:
                    await self.half.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        logprobs = np.full(len(said), -float(number + 1), np.float32)
        return Completion(0, said, logprobs, np.full(len(said), 7, np.int32), finish)

    def ended(self, conversation):
        self.over.append(conversation)

    async def scores(self, texts, top):
        """Every token is as likely as its number says, and stands behind token 20 and others in its place."""
        if self.error is not None:
            raise self.error
        others = np.arange(20, 20 + top)
        return [
            TextScores(
                -ids[1:].astype(np.float32),
                np.full(len(ids) - 1, 2),
                np.tile(others, (len(ids) - 1, 1)),
                np.tile(-0.5 * (others - 19).astype(np.float32), (len(ids) - 1, 1)),
            )
            for ids in texts
        ]


@dataclass
class Stand:
    """What a test has at hand."""

    endpoint: Endpoint
    model: Scripted
    make: object
    llm: AgentLLM
    url: str
    key: str

    def more(self):
        """Another agent: (llm, URL, key)."""
        llm = self.make()
        return llm, *self.endpoint.session(llm)


@asynccontextmanager
async def stand(*texts, longest=None, new=400, limits=None, template=TOOLS, arguments=None, say=None, **more):
    """An endpoint with one agent."""
    tokenizer = tokenizer_of(Style(template, STYLES["chatml"].end))
    model = Scripted(tokenizer, list(texts) or ["ab"], **more)
    numbers = itertools.count()
    setting = Setting(model, 1.0, new, longest, len(tokenizer))

    def make():
        attempt = Attempt(setting, call_format("hermes", tokenizer), lambda: next(numbers), open=endpoint.session)
        return AgentLLM(attempt, ChatFormat(tokenizer, arguments, say), (1, 2))

    endpoint = Endpoint(EndpointConfig(**(limits or {})))
    llm = make()
    try:
        yield Stand(endpoint, model, make, llm, llm.base_url, llm.api_key)
    finally:
        await endpoint.close()
