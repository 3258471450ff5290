"""`python -m benchmarks.async_weights`: what it costs that weights change in the middle of answers.

64 answers are in flight in the `transformers` engine, each with so many tokens behind it; then weights are loaded.
Shown are milliseconds of `load` itself, and with it what comes until every answer has its next token: reading again and
one decode step. The keys and values of the old weights are kept, or read again by the new ones (`staleness.kv`).

One process, one thread. The two take turns, A B A B …, because the machine's speed drifts; shown are medians over the
rounds with their quartiles in brackets.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import statistics
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine import spread
from benchmarks.runtime import machine
from benchmarks.session import MODEL
from rlinf.data.weights import Weights
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine

RESULTS = Path(__file__).resolve().parent / "results"
ANSWERS, PROMPT = 64, 32
"""In flight, and tokens of each prompt."""
KINDS = ("keep", "reread")


def model(seed: int) -> Any:
    """A model of about a million parameters."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL, vocab_size=64))


async def switched(kind: str, behind: int, version: int, weights: Weights) -> dict[str, float]:
    """Milliseconds of one change of weights, with so many tokens behind each answer."""
    engine = TransformersEngine(model(0), max_rows=ANSWERS + 2, reread=kind == "reread")
    rng = np.random.default_rng(version)
    lengths = [behind + 64] * ANSWERS + [behind, behind + 16]  # the last two say how far all are
    asked = [
        Request(number, rng.integers(3, 64, PROMPT), Sampling(length), number) for number, length in enumerate(lengths)
    ]
    async with aclosing(engine.generate(asked)) as answers:
        await anext(answers)  # from here on nobody waits for answers, so nothing is decoded
        before, start = engine.stats, time.perf_counter()
        await engine.load(weights)
        load = time.perf_counter() - start
        await anext(answers)
        after = engine.stats
    reading = after.read_seconds - before.read_seconds
    step = (after.seconds - before.seconds) / (after.steps - before.steps)
    told = {"load": load, "reading": reading, "step": step, "next token": load + reading + step}
    return {what: 1e3 * seconds for what, seconds in told.items()}


async def main(rounds: int) -> dict[str, Any]:
    """All rows: by tokens behind each answer, contestant and what was measured, a number per round."""
    weights = Weights.pack(model(1).named_parameters(), 1)
    found: dict[str, Any] = {}
    for behind in (64, 512):
        for round in range(rounds + 1):
            for kind in KINDS:
                told = await switched(kind, behind, round, weights)
                if round:  # the first warms up
                    for what, taken in told.items():
                        found.setdefault(f"{behind}", {}).setdefault(kind, {}).setdefault(what, []).append(taken)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("tokens behind each", "kv", "load, ms", "to the next token, ms", "of it reading", "a step, ms")
    for behind, kinds in found.items():
        for kind, told in kinds.items():
            reading = f"{statistics.median(told['reading']):.1f}"
            shown = [spread(told[what], 1) for what in ("load", "next token")]
            table.add_row(behind, kind, *shown, reading, f"{statistics.median(told['step']):.1f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-async-weights.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    told = asyncio.run(main(1 if options.quick else 5))
    show(told)
    if options.save:
        path = RESULTS / f"{datetime.date.today()}-async-weights.json"
        path.write_text(json.dumps({"machine": machine(), "milliseconds": told}, indent=1) + "\n")
