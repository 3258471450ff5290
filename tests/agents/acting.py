"""A model that says its lines to an agent, one per call, and remembers what it read; tokens are characters."""

from __future__ import annotations

import itertools
import string

import numpy as np

from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.chat import ChatFormat
from rlinf.agents.llm import Setting
from rlinf.agents.tools.formats import call_format
from rlinf.data.tokenizer import character_tokenizer
from rlinf.engines.base import Completion

TOKENIZER = character_tokenizer(string.printable)


def ids(text):
    return np.asarray(TOKENIZER(text)["input_ids"], np.int64)


class Actor:
    """Says its lines, one per call; a line that ends with a tag of the protocol was ended by it."""

    def __init__(self, lines):
        self.lines, self.read, self.stops = iter(lines), [], []

    async def answer(self, read, *, seed, conversation, **sampling):
        self.read.append(TOKENIZER.decode(read))
        self.stops.append(sampling.get("stop"))
        said = next(self.lines)
        finish = "text" if said.endswith(("</search>", "</answer>")) else "stop"
        tokens = ids(said) if finish == "text" else np.asarray([*ids(said), TOKENIZER.eos_token_id])
        return Completion(0, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), finish)

    def ended(self, conversation): ...


def begun(*lines, longest=None):
    actor = Actor(lines)
    numbers = itertools.count()
    setting = Setting(actor, 1.0, 64, longest, len(TOKENIZER))
    attempt = Attempt(setting, call_format("hermes", TOKENIZER), lambda: next(numbers))
    return AgentLLM(attempt, ChatFormat(TOKENIZER), (1,)), actor
