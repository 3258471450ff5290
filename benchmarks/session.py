"""`python -m benchmarks.session`: answers asked for one by one beside whole batches, and what keeping KV caches gains.

Callers: 64 at once each await an answer and then ask again (`Rollout.answer`), beside `Rollout.generate` of the same
prompts with the same seeds, so the tokens are the same. Conversations: 16 at once of 4 turns, a prompt of 300 tokens,
32 new tokens per turn and 60 tokens of a tool between turns; with the KV cache kept from turn to turn, and reading
everything again.

Both once more by `rlinf.Session`, as a program of one's own has them: `session.complete` beside `Rollout.generate`, and
`session.conversation` beside `session.complete` of all that was said. Every answer has the same length there, because a
session draws its own seeds.

One process, one thread. Contestants take turns, A B A B …, because the machine's speed drifts; a ratio is taken within
a round, and shown are medians over the rounds with their quartiles in brackets. A row that misses its bar says LOST.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import string
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine import spread
from benchmarks.runtime import machine
from rlinf import ActorSystem, Session
from rlinf.actors.rollout import Rollout
from rlinf.data.rng import mix
from rlinf.data.sample import Prompt

RESULTS = Path(__file__).resolve().parent / "results"
ALPHABET = string.digits + string.ascii_letters[:51]
"""With the three special tokens a vocabulary of 64: a new model ends an answer after 64 tokens on average."""
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}
"""The model of `benchmarks.engine`, about a million parameters."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    callers: int = 64
    """At once, each with one answer in flight."""
    asks: int = 4
    """Answers that each asks for."""
    max_new_tokens: int = 128
    """Length of such an answer."""
    conversations: int = 16
    """At once."""
    turns: int = 4
    """Turns of each."""
    prompt: int = 300
    """Tokens that a conversation begins with."""
    reply: int = 32
    """Tokens that the model answers per turn."""
    tool: int = 60
    """Tokens that come between two turns."""


@dataclass
class Case:
    """One kind of work: who does it, and how fast they were."""

    name: str
    runs: dict[str, Callable[[], Awaitable[int]]]
    """By contestant, ours first; each returns how many tokens it made."""
    bar: float
    """Our tokens per second over the other's, to reach."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second by contestant, one per round."""

    async def turn(self) -> None:
        """One round."""
        for name, run in self.runs.items():
            start = time.perf_counter()
            tokens = await run()
            self.rates.setdefault(name, []).append(tokens / (time.perf_counter() - start))

    @property
    def ratios(self) -> list[float]:
        """Ratios of the first contestant's rate to the second's, one per round."""
        ours, theirs = self.rates.values()
        return [one / other for one, other in zip(ours, theirs, strict=True)]


def callers(rollout: Any, size: Size) -> Case:
    """Single requests beside a batch."""
    rng = np.random.default_rng(0)
    asked = [Prompt(i, rng.integers(3, 64, rng.integers(8, 33))) for i in range(size.callers * size.asks)]

    async def one_by_one() -> int:
        async def caller(number: int) -> int:
            tokens = 0
            for prompt in asked[number :: size.callers]:
                answer = await rollout[0].answer(prompt, seed=mix(0, prompt.id, 0))
                tokens += len(answer.response_ids)
            return tokens

        return sum(await asyncio.gather(*(caller(number) for number in range(size.callers))))

    async def batch() -> int:
        groups = [group async for group in rollout.generate(asked)]
        return sum(len(sample.response_ids) for group in groups for sample in group.samples)

    return Case(f"{size.callers} callers, one answer each at a time", {"answer": one_by_one, "generate": batch}, 0.85)


def conversations(rollout: Any, size: Size) -> Case:
    """Turns that go on from a kept cache beside turns that read everything again."""
    rng = np.random.default_rng(1)
    openings = rng.integers(3, 64, (size.conversations, size.prompt))
    tools = rng.integers(3, 64, (size.conversations, size.turns, size.tool))

    async def talk(number: int, conversation: int | None) -> int:
        ids, tokens = openings[number], 0
        for turn in range(size.turns):
            seed = mix(0, number, turn)
            answer = await rollout[0].answer(
                ids, seed=seed, conversation=conversation, min_new_tokens=size.reply, max_new_tokens=size.reply
            )
            tokens += len(answer.response_ids)
            ids = np.concatenate([ids, answer.response_ids, tools[number, turn]])
        return tokens

    def all_of_them(kept: bool) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            numbers = range(size.conversations)
            return sum(await asyncio.gather(*(talk(number, number if kept else None) for number in numbers)))

        return run

    name = f"{size.conversations} conversations of {size.turns} turns"
    return Case(name, {"KV kept": all_of_them(True), "read again": all_of_them(False)}, 1.5)


def session_callers(session: Session, size: Size) -> Case:
    """Callers as in `callers`, by `session.complete`."""
    rng = np.random.default_rng(2)
    asked = [Prompt(i, rng.integers(3, 64, rng.integers(8, 33))) for i in range(size.callers * size.asks)]
    length = {"min_new_tokens": size.max_new_tokens // 2, "max_new_tokens": size.max_new_tokens // 2}

    async def one_by_one() -> int:
        async def caller(number: int) -> int:
            replies = [await session.complete(prompt, **length) for prompt in asked[number :: size.callers]]
            return sum(len(reply.ids) for reply in replies)

        return sum(await asyncio.gather(*(caller(number) for number in range(size.callers))))

    async def batch() -> int:
        groups = [group async for group in session.rollout.generate(asked, **length)]
        return sum(len(sample.response_ids) for group in groups for sample in group.samples)

    name = f"a session, {size.callers} callers, one answer each at a time"
    return Case(name, {"complete": one_by_one, "generate": batch}, 0.85)


def session_conversations(session: Session, size: Size) -> Case:
    """Conversations as in `conversations`, by `session.conversation`."""
    rng = np.random.default_rng(3)
    openings = rng.integers(3, 64, (size.conversations, size.prompt))
    tools = rng.integers(3, 64, (size.conversations, size.turns, size.tool))
    length = {"min_new_tokens": size.reply, "max_new_tokens": size.reply}

    async def kept(number: int) -> int:
        async with session.conversation(prompt=openings[number]) as conversation:
            for turn in range(size.turns):
                await conversation.generate(**length)
                conversation.append(tools[number, turn])
            return size.turns * size.reply

    async def again(number: int) -> int:
        ids = openings[number]
        for turn in range(size.turns):
            reply = await session.complete(ids, **length)
            ids = np.concatenate([ids, reply.ids, tools[number, turn]])
        return len(ids) - size.prompt - size.turns * size.tool

    def all_of_them(talk: Callable[[int], Awaitable[int]]) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            return sum(await asyncio.gather(*(talk(number) for number in range(size.conversations))))

        return run

    name = f"a session, {size.conversations} conversations of {size.turns} turns"
    return Case(name, {"kept": all_of_them(kept), "read again": all_of_them(again)}, 1.5)


async def measure(size: Size, rounds: int) -> list[Case]:
    """Run everything, a warm-up first."""
    with tempfile.TemporaryDirectory() as run_dir:
        return [*await of_roles(size, rounds), *await of_sessions(size, rounds, run_dir)]


async def of_roles(size: Size, rounds: int) -> list[Case]:
    """The cases of a rollout by itself."""
    async with ActorSystem.local() as system:
        rollout = await system.spawn(
            Rollout,
            name="rollout",
            model=MODEL,
            tokenizer={"characters": ALPHABET},
            max_new_tokens=size.max_new_tokens,
            max_rows=size.callers,
        )
        return await taken([callers(rollout, size), conversations(rollout, size)], rounds)


async def of_sessions(size: Size, rounds: int, run_dir: str) -> list[Case]:
    """The cases of a session."""
    rollout = {"max_rows": size.callers, "max_new_tokens": size.max_new_tokens}
    async with Session.local(
        model=MODEL, tokenizer={"characters": ALPHABET}, run_dir=f"{run_dir}/run", rollout=rollout, trace=False
    ) as session:
        return await taken([session_callers(session, size), session_conversations(session, size)], rounds)


async def taken(cases: list[Case], rounds: int) -> list[Case]:
    """Measure the cases.

    Raises:
        RuntimeError: contestants made different numbers of tokens.
    """
    for case in cases:
        made = {name: await run() for name, run in case.runs.items()}
        if len(set(made.values())) > 1:
            raise RuntimeError(f"{case.name}: not the same tokens: {made}")
        for _ in range(rounds):
            await case.turn()
    return cases


def verdict(case: Case) -> str:
    return f">= {case.bar:.2f} {'met' if statistics.median(case.ratios) >= case.bar else 'LOST'}"


def table(cases: list[Case]) -> Table:
    """The table that is printed."""
    shown = Table("work", "who", "tokens/s", "ratio", "bar")
    for case in cases:
        for number, (name, rates) in enumerate(case.rates.items()):
            first = number == 0
            last = (spread(case.ratios, 2), verdict(case)) if first else ("", "")
            shown.add_row(case.name if first else "", name, spread(rates), *last)
    return shown


def save(cases: list[Case], size: Size, load: Mapping[str, float]) -> Path:
    """Write the figures down."""
    path = RESULTS / f"{datetime.date.today().isoformat()}-session.json"
    report = {
        "machine": machine(),
        "torch": torch.__version__,
        "load_average": load,
        "size": asdict(size),
        "cases": [
            {
                "name": case.name,
                "tokens_per_s": case.rates,
                "ratio": statistics.median(case.ratios),
                "bar": case.bar,
                "verdict": verdict(case),
            }
            for case in cases
        ],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rounds of little work")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-session.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    size = Size(8, 2, 16, 3, 2, 40, 8, 10) if given.quick else Size()
    cases = asyncio.run(measure(size, 2 if given.quick else given.rounds))
    Console(width=120).print(table(cases))
    if given.save:
        print(save(cases, size, {"before": before, "after": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
