"""`python -m benchmarks.engine`: tokens per second of the transformers engine, beside `generate` and a bare loop.

"own forward" is the same engine without the lean forward of `model.py`, whose gain that shows.

One thread. Contestants take turns, A B C A B C …, in one process, because the machine's speed drifts; a ratio is taken
within a round, and shown are medians over the rounds with their quartiles in brackets. A row that misses its bar says
LOST and is published as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.engine_contestants import Work, by_hand, generate, model, ours, seconds
from benchmarks.real import QUESTIONS
from rlinf.engines import usual_lengths
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.drafts import IN_CACHE, LARGE, SMALL, Drafts, Prices
from rlinf.engines.transformers.engine import TransformersEngine

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Case:
    """One kind of work, and who does it."""

    name: str
    work: Work
    runs: dict[str, Callable[[], None]]
    """By contestant."""
    bars: dict[str, float] = field(default_factory=dict)
    """Our tokens per second over theirs, to reach; `generate` stands for the best of its kinds."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second by contestant, one per round."""

    def turn(self) -> None:
        """One round."""
        for name, run in self.runs.items():
            self.rates.setdefault(name, []).append(self.work.tokens / seconds(run))

    def ratios(self, peer: str) -> list[float]:
        """Ratios of our rate to that of the fastest contestant whose name begins so, one per round."""
        own = next(iter(self.rates.values()))
        named = [rates for name, rates in self.rates.items() if name.startswith(peer)]
        return [mine / theirs for mine, theirs in zip(own, max(named, key=statistics.median), strict=True)]


def cases() -> list[Case]:
    """The work of the table; random lengths and tokens are the same every time."""
    rng = np.random.default_rng(0)
    equal = Work("1M", [rng.integers(0, 512, 16) for _ in range(64)], [64] * 64)
    ragged = Work(
        "1M",
        [rng.integers(0, 512, length) for length in rng.integers(4, 29, 64)],
        rng.integers(1, 128, 64).tolist(),
    )
    groups = rng.integers(0, 20, (64, 5))
    quick = Work("0.1M", [prompt for prompt in groups for _ in range(8)], rng.choice([5, 5, 5, 6], 512).tolist())
    found = [
        Case(
            "64 equal, 16 + 64 tokens",
            equal,
            {
                "rlinf": ours(equal, 64),
                "own forward": ours(equal, 64, lean=False),
                "generate, dynamic cache": generate(equal),
                "generate, static cache": generate(equal, cache_implementation="static"),
                "by hand": by_hand(equal),
            },
            {"own forward": 1.2, "generate": 1.3, "by hand": 0.85},
        ),
        Case(
            "64 ragged, 4-28 + 1-127 tokens",
            ragged,
            {
                "rlinf": ours(ragged, 64),
                "own forward": ours(ragged, 64, lean=False),
                "generate, one padded batch": generate(ragged),
            },
            {"own forward": 1.1, "generate": 2.0},
        ),
    ]
    found += [
        Case(
            f"quickstart, 512 answers, {rows} rows",
            quick,
            {"rlinf": ours(quick, rows), "own forward": ours(quick, rows, lean=False)},
        )
        for rows in (128, 256, 512)
    ]
    return found


def spread(values: list[float], digits: int = 0) -> str:
    """Median and quartiles."""
    if len(values) < 2:
        return f"{values[0]:,.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:,.{digits}f} [{low:,.{digits}f}-{high:,.{digits}f}]"


def table(done: list[Case]) -> Table:
    """The table that is printed."""
    shown = Table("work", "who", "tokens/s", "rlinf over it", "bar")
    for case in done:
        for number, (name, rates) in enumerate(case.rates.items()):
            shown.add_row(
                case.name if number == 0 else "",
                name,
                spread(rates),
                "" if number == 0 else spread(case.ratios(name), 2),
            )
        for peer, bar in case.bars.items():
            ratios = case.ratios(peer)
            verdict = "held" if statistics.median(ratios) >= bar else "LOST"
            shown.add_row("", f"best {peer}", "", spread(ratios, 2), f">= {bar:.2f} {verdict}")
    return shown


def room(rounds: int) -> Table:
    """Compare room for the usual answer with room for the longest, where the cache is what bounds a batch.

    256 prompts of 32 tokens; answers end at random, after 128 tokens in the mean and 512 at most; the cache holds
    16 of the longest. On a GPU a step costs about as much whoever shares it, so the steps are what counts there.
    """
    rng = np.random.default_rng(0)
    sampling = Sampling(512, stop_ids=(1, 2, 3, 4))
    requests = [Request(number, rng.integers(0, 512, 32), sampling, number) for number in range(256)]
    shown = Table("room is reserved for", "steps", "rows a step", "tokens read", "put back", "processor s")
    answers: list[list[list[int]]] = []
    for what, enough in (("the longest answer", 1 << 60), ("the usual answer", usual_lengths._ENOUGH)):
        with mock.patch.object(usual_lengths, "_ENOUGH", enough):
            runs = []
            for _ in range(rounds):
                engine = TransformersEngine(model("1M"), max_rows=128, max_tokens=16 * (32 + 512))
                start = time.process_time()
                tokens = asyncio.run(_answers(engine, requests))
                runs.append((engine, time.process_time() - start))
            answers.append(tokens)
        engine, stats = runs[0][0], runs[0][0].stats
        figures = f"{stats.steps:,.0f}", f"{stats.rows / stats.steps:.1f}", f"{stats.read_tokens:,.0f}"
        shown.add_row(what, *figures, str(engine._batch.put_backs), spread([each for _, each in runs], 2))
    same = sum(a == b for a, b in zip(*answers, strict=True))
    shown.title = f"{same} of {len(requests)} answers have the same tokens"
    return shown


def drafts(rounds: int, directory: Path | None, sizes: Sequence[int], temperature: float) -> Table:
    """Compare the engine with and without drafts from history over two epochs, by processor time, epoch by epoch.

    Prompts have four answers each, with other seeds in the second epoch. Without a directory: models
    of 1 M random weights, whose answers are noise, and the same with an embedding so large that they repeat themselves.
    With one: questions put to that model, 48 tokens at most.
    """
    shown = Table("work", "epoch", "tokens/s", "with drafts over it", "tokens a row and step", "right", "same answers")
    works: list[tuple[str, Callable[[], PreTrainedModel], list[np.ndarray], int]] = []
    if directory is None:
        rng = np.random.default_rng(0)
        for name, scale in (("noise", 1.0), ("repeats itself", 3.5)):
            some = [rng.integers(0, 512, 16) for _ in range(16)]
            works += [(f"{name}, {rows} rows", partial(scaled, scale), some, rows) for rows in sizes]
        sampling = Sampling(64, temperature)
    else:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        made = partial(AutoModelForCausalLM.from_pretrained, directory, dtype=torch.float32)
        some = [np.array(asked(tokenizer, text)) for text, _ in QUESTIONS]
        works = [(f"{directory.name}, {rows} rows", made, some, rows) for rows in sizes]
        sampling = Sampling(48, temperature, stop_ids=(tokenizer.eos_token_id,))
    for name, make, some, rows in works:
        plain, drafted = (TransformersEngine(make(), max_rows=rows, drafts=flag) for flag in (False, True))
        asyncio.run(_answers(plain, [Request(0, some[0], Sampling(8), 0)]))
        turns: list[list[tuple[float, float, float, float, bool]]] = [[], []]
        for number in range(rounds):
            drafted._batch._rows.drafts = history = Drafts(history_prices(drafted))
            for epoch in range(2):
                seeds = 1000 * (2 * number + epoch)
                requests = [Request(i, some[i // 4], sampling, seeds + i) for i in range(4 * len(some))]
                read, right, steps = history.reads, history.right, drafted.stats.rows
                times, answers = [], []
                for engine in (plain, drafted) if number % 2 else (drafted, plain):
                    start = time.process_time()
                    answers.append(asyncio.run(_answers(engine, requests)))
                    times.append(time.process_time() - start)
                without, with_ = times if number % 2 else times[::-1]
                tokens = sum(map(len, answers[0]))
                a_step = tokens / max(1.0, drafted.stats.rows - steps)
                share = (history.right - right) / max(1, history.reads - read)
                turns[epoch].append((tokens / without, without / with_, a_step, share, answers[0] == answers[1]))
        for epoch, some_turns in enumerate(turns):
            rates, ratios, steps_, shares, same = zip(*some_turns, strict=True)
            figures = spread(list(rates), 1), spread(list(ratios), 2), spread(list(steps_), 2), spread(list(shares), 2)
            shown.add_row(name if not epoch else "", str(epoch + 1), *figures, f"{sum(same)} of {len(same)} rounds")
    return shown


def scaled(scale: float) -> PreTrainedModel:
    """The model of 1 M weights, with an embedding so many times as large: the larger, the surer of its next token."""
    built = model("1M")
    with torch.no_grad():
        built.get_input_embeddings().weight.mul_(scale)
    return built


def asked(tokenizer: Any, text: str) -> list[int]:
    """A question as a chat."""
    messages = [{"role": "user", "content": text}]
    shown: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(shown, add_special_tokens=False).input_ids
    return ids


def history_prices(engine: TransformersEngine) -> Prices:
    """By which an engine chooses drafts."""
    return SMALL if engine._forward.weights <= IN_CACHE else LARGE


async def _answers(engine: TransformersEngine, requests: list[Request]) -> list[list[int]]:
    tokens = {each.id: each.response_ids.tolist() async for each in engine.generate(requests)}
    return [tokens[request.id] for request in requests]


def save(done: list[Case]) -> Path:
    """Write the figures down."""
    path = RESULTS / f"{datetime.date.today().isoformat()}-engine.json"
    path.write_text(
        json.dumps(
            {
                "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1},
                "torch": torch.__version__,
                "load": os.getloadavg(),
                "cases": [
                    {
                        "name": case.name,
                        "tokens": case.work.tokens,
                        "tokens_per_s": case.rates,
                        "bars": {
                            p: {"bar": b, "ratio": statistics.median(case.ratios(p))} for p, b in case.bars.items()
                        },
                    }
                    for case in done
                ],
            },
            indent=1,
        )
        + "\n"
    )
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-engine.json")
    parser.add_argument("--room", action="store_true", help="only what reserving room for the usual answer is worth")
    parser.add_argument("--temperature", type=float, default=1.0, help="of --drafts")
    parser.add_argument("--drafts", action="store_true", help="only what drafts from history are worth")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of a chat model, for --drafts")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 8, 24], help="answers decoded together, for --drafts"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.drafts:
        Console(width=140).print(drafts(1 if given.quick else 3, given.model, given.rows, given.temperature))
        return
    if given.room:
        Console(width=140).print(room(1 if given.quick else 3))
        return
    done = cases()
    for case in done:
        for run in case.runs.values():
            run()  # first runs allocate and compile
        for _ in range(2 if given.quick else given.rounds):
            case.turn()
    Console(width=140).print(table(done))
    if given.save:
        print(save(done))


if __name__ == "__main__":
    main()
