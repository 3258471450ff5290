"""Are generated tokens ever encoded again? Trajectories whose harness sends the whole history with each call, and
rewrites it now and then; and what the record of them costs.

A scripted model answers with random letters in random pieces, as models do: most of its answers would be cut into other
tokens if their text were encoded. Of every call it is looked up, in the ids that the model really read, whether each
answer that the harness left as it was still stands there as the tokens that were generated.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.chat import ChatFormat
from rlinf.agents.llm import Setting
from rlinf.agents.tools.formats import call_format
from rlinf.engines.base import Completion
from tests.agents.speaking import STYLES, tokenizer_of

TURNS = 4
REWRITTEN = 0.05
"""Share of calls whose harness rewrites the history."""


@dataclass
class Scripted:
    """Answers with random letters."""

    rng: np.random.Generator
    letters: np.ndarray
    end: int
    read: list[np.ndarray] = field(default_factory=list)

    async def answer(self, ids: np.ndarray, *, seed: int, conversation: int | None, **sampling: Any) -> Completion:
        said = np.append(self.rng.choice(self.letters, 12), self.end)
        self.read.append(ids)
        return Completion(0, said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), "stop")

    def ended(self, conversation: int) -> None:
        """It keeps nothing."""


@dataclass(frozen=True)
class Found:
    """Counts over so many trajectories."""

    trajectories: int
    calls: int
    rewritten: int
    """Calls whose history was rewritten."""
    generated: int
    """Generated tokens that stood in histories."""
    reencoded: int
    """Number of those that the model did not read as they were generated."""
    naive: int
    """How many it would not have, had every history been encoded from its text."""
    milliseconds: float
    """Time of the record, per call."""


async def histories(trajectories: int, seed: int = 0) -> Found:
    """Play trajectories.

    Args:
        trajectories: how many.
        seed: of what is said and rewritten.
    """
    tokenizer = tokenizer_of(STYLES["chatml"])
    rng, numbers = np.random.default_rng(seed), itertools.count()
    letters = np.array(tokenizer.convert_tokens_to_ids(["a", "b", "ab", "ba", "x"]))
    chat, calls = ChatFormat(tokenizer), call_format(None, tokenizer)
    rewritten = generated = reencoded = naive = 0
    seconds = 0.0
    for number in range(trajectories):
        model = Scripted(rng, letters, tokenizer.eos_token_id)
        llm = AgentLLM(Attempt(Setting(model, 1.0, 16), calls, numbers.__next__), chat, (seed, number))
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        said: dict[int, np.ndarray] = {}  # by place in the messages
        for turn in range(TURNS):
            if turn and rng.random() < REWRITTEN:
                rewritten += 1
                messages[0] = {"role": "user", "content": f"begin, rewritten {turn}"}
            begun = time.perf_counter()
            answer = await llm.chat(messages)
            seconds += time.perf_counter() - begun
            read = model.read[-1]
            plain = chat.opening(messages) if said else read
            for ids in said.values():
                generated += len(ids)
                reencoded += 0 if _within(ids, read) else len(ids)
                naive += 0 if _within(ids, plain) else len(ids)
            said[len(messages)] = answer.ids
            messages = [*messages, answer.message, {"role": "user", "content": "go on"}]
    count = trajectories * TURNS
    return Found(trajectories, count, rewritten, generated, reencoded, naive, 1e3 * seconds / count)


def _within(part: np.ndarray, whole: np.ndarray) -> bool:
    """Tell whether an array stands in another, in one piece."""
    windows = np.lib.stride_tricks.sliding_window_view(whole, len(part)) if len(whole) >= len(part) else whole[:0]
    return bool((windows == part).all(-1).any()) if len(windows) else False


def rows(quick: bool) -> list[tuple[str, str, str, bool]]:
    """(what, bar, found, met) for the table of `benchmarks.agents`."""
    found = asyncio.run(histories(200 if quick else 10_000))
    what = f"tokens encoded again, {found.trajectories:,} trajectories, {found.rewritten:,} histories rewritten"
    told = (
        f"{found.reencoded:,} of {found.generated:,} (from texts: {found.naive:,}); {found.milliseconds:.2f} ms a call"
    )
    return [(what, "0", told, found.reencoded == 0)]
