"""`python -m benchmarks.real --model DIR`: a real model on a CPU, such as SmolLM2-135M-Instruct, beside its peers.

`grpo`: three steps of 2 prompts x 4 answers x 16 tokens, in several precisions, beside TRL's trainer in two: peak
memory of the process, with our last checkpoint written, and processor and wall seconds of a step after the first;
KEY=VALUE arguments join our configuration. `decode`: tokens per processor second of the engine at 1, 8 and 32 rows in
float32, in bfloat16 and with weights of 8 bits, prompts of 32 tokens and reading them included, beside transformers'
`generate` in float32. `trainer`: processor seconds of an optimizer step in both precisions beside a plain loop in
float32.
Contestants take turns; ratios are taken within a round. One thread each, `--threads` of them in `grpo`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.grpo_contestants import TRL
from benchmarks.grpo_ours import FLOW
from benchmarks.peers.grpo_job import Job, Result
from benchmarks.real_peers import generators, ours, plain, rows_to_learn
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine

QUESTIONS = [
    ("What is the capital city of France? Answer with one word: ", "Paris"),
    ("What is seven plus five? Answer with one number only: ", "12"),
    ("Which animal says meow? Answer with one word please: ", "cat"),
    ("What colour is the sky on a clear day? Answer: ", "blue"),
    ("How many legs does a spider have? Answer with a number: ", "8"),
    ("What is the opposite of hot? Answer with one word: ", "cold"),
]
PROMPTS, ANSWERS, TOKENS = 2, 4, 16


def job_of(model: Path) -> Job:
    """The model, data and sizes that both contestants train."""
    steps = [QUESTIONS[start : start + PROMPTS] for start in range(0, len(QUESTIONS), PROMPTS)]
    numbers = {"lr": 1e-6, "warmup_steps": 0, "betas": (0.9, 0.99), "weight_decay": 0.0, "grad_clip": 1.0}
    clip = {"clip_low": 0.2, "clip_high": 0.28, "advantage_scale": "std"}
    return Job(str(model), steps, 0, ANSWERS, 1, TOKENS, 1.0, **numbers, **clip)  # type: ignore[arg-type]


def run(words: list[str], threads: int) -> Result:
    """Figures of one command."""
    variables = os.environ | ONE_THREAD | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Result.heard(done.stdout)


def our_run(job: Job, place: Path, more: Sequence[str]) -> list[str]:
    """Our trainer, by way of the command line."""
    data = place / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "answer": right}) + "\n" for text, right in QUESTIONS))
    keys = {
        "model.path": job.model,
        "data.train": data,
        "data.shuffle": "false",
        "reward.function": "rlinf.rewards.exact.exact",
        "steps": len(job.problems),
        "flow": FLOW,
        "algorithm.prompts_per_step": PROMPTS,
        "algorithm.group_size": ANSWERS,
        "optimizer.lr": job.lr,
        "rollout.max_new_tokens": TOKENS,
        "rollout.dtype": "float32",
        "trainer.dtype": "float32",
        "placement.device_kind": "cpu",
        "evaluation.problems": 0,
        "output_dir": place,
    }
    words = [sys.executable, "-m", "benchmarks.grpo_ours", "--config", str(place / "run.yaml")]
    (place / "run.yaml").write_text("name: quickstart\n")
    return [*words, *(f"{key}={value}" for key, value in keys.items()), *more]


def their_run(job: Job, more: Sequence[str], place: Path) -> list[str]:
    """TRL's trainer, all answers of a step in one micro-batch."""
    job.write(place / "job.json")
    rows = str(PROMPTS * ANSWERS)
    return [str(TRL), "-m", "benchmarks.peers.trl_grpo", str(place / "job.json"), "--rows", rows, *more]


OURS = {
    "float32": (),
    "bfloat16": ("trainer.dtype=bfloat16", "rollout.dtype=bfloat16"),
    "int8": ("trainer.dtype=bfloat16", "rollout.weights=int8"),
}
"""Our precisions, by name: in `int8` the trainer computes in bfloat16."""
THEIRS = {"float32": (), "bfloat16": ("--bf16",)}


class Figures(NamedTuple):
    """Figures of a contestant in a round."""

    peak: float
    """MB"""
    cpu: float
    """Processor seconds of a step."""
    wall: float
    """Seconds of a step."""


def grpo(options: argparse.Namespace) -> None:
    """Print a line per round and contestant, then how ours compare with TRL in that round, at TRL's faster precision
    for each figure."""
    job, rounds = job_of(options.model.resolve()), list[dict[str, Figures]]()
    commands: dict[str, Callable[[Path], list[str]]] = {
        f"rlinf {name}": partial(our_run, job, more=[*OURS[name], *options.keys]) for name in options.ours
    }
    if TRL.exists():
        commands |= {f"TRL {name}": partial(their_run, job, THEIRS[name]) for name in options.theirs}
    for number in range(options.rounds):
        rounds.append({})
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as place:
                each = run(command(Path(place)), options.threads)
            figures = Figures(each.peak / 1e6, statistics.median(each.cpu), statistics.median(each.seconds))
            rounds[-1][name] = figures
            print(f"round {number + 1}, {name}: {figures}", flush=True)
    theirs = [name for name in commands if name.startswith("TRL")]
    for name in (each for each in commands if theirs and each.startswith("rlinf")):
        beside = [(each[name], [each[other] for other in theirs]) for each in rounds]
        print(f"{name}: peak memory, of TRL's: {spread([a.peak / min(b.peak for b in bs) for a, bs in beside])}")
        print(f"  samples per processor second, over: {spread([min(b.cpu for b in bs) / a.cpu for a, bs in beside])}")
        print(f"  samples per second, over: {spread([min(b.wall for b in bs) / a.wall for a, bs in beside])}")


def spread(ratios: Sequence[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"


def engines(model: Path, rows: int) -> Iterator[tuple[str, TransformersEngine]]:
    """Ways in which the engine computes."""
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.float32)):
        made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        yield name, TransformersEngine(made, max_rows=rows, weights="int8" if name == "int8" else "full")


def decoder(engine: TransformersEngine, prompts: np.ndarray, new: int) -> Callable[[], float]:
    """A function that answers prompts, int64 [rows, tokens], and returns the tokens per processor second."""
    requests = [Request(row, ids, Sampling(new), row) for row, ids in enumerate(prompts)]

    async def answer() -> int:
        return sum([len(one.response_ids) async for one in engine.generate(requests)])

    def turn() -> float:
        start = time.process_time()
        return asyncio.run(answer()) / (time.process_time() - start)

    return turn


def decode(options: argparse.Namespace) -> None:
    """Print tokens per processor second, and how much more they are than in float32, and than `generate` makes."""
    torch.set_num_threads(1)
    cases = ((1, 24), (8, 24), (32, 12))
    made = dict(engines(options.model, max(rows for rows, _ in cases)))
    for rows, new in cases:
        prompts = np.random.default_rng(0).integers(100, 49_000, (rows, 32))
        turns = {name: decoder(engine, prompts, new) for name, engine in made.items()}
        turns |= generators(options.model, prompts, new)
        rates = [{name: turn() for name, turn in turns.items()} for _ in range(options.rounds + 1)][1:]
        for name in turns:
            rate = statistics.median(each[name] for each in rates)
            beside = [spread([each[name] / each[other] for each in rates]) for other in ("float32", STATIC)]
            print(f"{rows} rows, {name}: {rate:.1f} /s, {beside[0]} float32, {beside[1]} {STATIC}", flush=True)


def trainer(options: argparse.Namespace) -> None:
    """Print processor seconds of an optimizer step of both."""
    torch.set_num_threads(1)
    rows = rows_to_learn()
    contestants = {f"rlinf {dtype}": ours(options.model, rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
    contestants["plain loop"] = plain(options.model, rows)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds + 1):
        for name, (step, _) in contestants.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    for name, (_, words) in contestants.items():
        print(f"{name} ({words}): {statistics.median(seconds[name][1:]):.2f} s a step")
    for name in contestants:
        ratios = [their / mine for mine, their in zip(seconds[name][1:], seconds["plain loop"][1:], strict=True)]
        print(f"{name}: samples per processor second, over the plain loop's: {spread(ratios)}")


STATIC = "generate, static cache"
PARTS = {"grpo": grpo, "decode": decode, "trainer": trainer}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", nargs="*", choices=OURS, default=list(OURS), help="our precisions in grpo")
    parser.add_argument("--theirs", nargs="*", choices=THEIRS, default=list(THEIRS), help="those of TRL")
    parser.add_argument("--threads", type=int, default=1, help="of each contestant of grpo")
    parser.add_argument("--keys", nargs="*", default=(), metavar="KEY=VALUE", help="more of our configuration in grpo")
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options)
