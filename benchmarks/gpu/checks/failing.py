"""Do failures name what is wrong, soon, and leave what can be used again?"""

from __future__ import annotations

import asyncio
import time

import rlinf
from benchmarks.gpu.checks import ranks
from benchmarks.gpu.checks.device import emptied, short_of_memory
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import engine, prompts, requests
from benchmarks.gpu.checks.roles import judged, spawn_trainer
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.runtime.system.system import ActorSystem

SOON = 30.0
"""Seconds within which a failure is told."""
MEMORY = (
    Bound("error_says_memory", equals="yes"),
    Bound("error_names_requests", equals="yes"),
    Bound("seconds_to_error", most=SOON),
    Bound("answers_afterwards", least=4),
    Bound("answers_that_differ", most=0),
)
PAIR = (
    Bound("seconds", most=90.0),
    Bound("outcome", equals="trained or refused by name"),
)
"""Two imports of torch and a model count in these seconds, too."""


def out_of_memory(scale: Scale) -> Outcome:
    """An engine is asked for more than the device can hold, and afterwards for what it answered before."""
    return judge(scale, asyncio.run(_out_of_memory(scale)), MEMORY)


async def _out_of_memory(scale: Scale) -> dict[str, float | str]:
    small = requests(prompts(scale, [12, 9, 17, 10]), 8)
    large = requests(prompts(scale, [scale.of(4000, 3000)] * 256, seed=2), 8)
    async with engine(scale, max_rows=256) as made:
        before = await made.answers(small)
        said, begun = "", time.monotonic()
        with short_of_memory(scale.device):
            try:
                await made.answers(large)
            except Exception as error:
                said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            seconds = time.monotonic() - begun
        emptied(scale.device)
        after = await made.answers(small)
    print(said)
    return {
        "error_says_memory": "yes" if "memory" in said.lower() else f"no: {said[:80] or 'nothing was raised'}",
        "error_names_requests": "yes" if "request" in said else "no",
        "seconds_to_error": seconds,
        "answers_afterwards": len(after),
        "answers_that_differ": sum(
            a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(before, after, strict=True)
        ),
    }


def two_ranks(scale: Scale) -> Outcome:
    """A trainer of two ranks on one card: it trains, or is refused by a text that names the card; it never hangs."""
    ended = ranks.run(scale, "failing:one_of_two", 2, scale.limit * 0.9)
    print(ended.output)
    named = any(words in ended.output for words in ("both on GPU", "share a GPU"))
    refused = named and None not in ended.codes and any(ended.codes)
    trained = ended.codes == [0, 0] and "loss" in ended.told
    outcome = "trained or refused by name" if trained or refused else f"neither: exit {ended.codes}"
    return judge(
        scale,
        {**ended.told, "seconds": ended.seconds, "outcome": outcome, "trained": "yes" if trained else "no"},
        PAIR,
    )


def one_of_two(scale: Scale) -> None:
    """In each of two ranks."""

    async def main(system: ActorSystem) -> None:
        trainer = await spawn_trainer(system, scale, hosts=[0, 1], gradient_checkpointing=True)
        metrics = await trainer.train(judged(scale, 0))
        ranks.tell({"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]})

    rlinf.run(main)
