"""`python -m benchmarks.real --model DIR`: a real model on one thread of a CPU, such as SmolLM2-135M-Instruct.

`grpo`: three steps of 2 prompts x 4 answers x 16 tokens, beside TRL's trainer: peak memory of the process, with our
last checkpoint written, and processor seconds of a step after the first. `decode`: tokens per processor second of the
engine at 1, 8 and 32 rows in float32 and in what else it computes in, prompts of 32 tokens and reading them included.
Contestants take turns; ratios are taken within a round.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.grpo_contestants import TRL
from benchmarks.grpo_ours import FLOW
from benchmarks.peers.grpo_job import Job, Result
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


def run(words: list[str]) -> Result:
    """Figures of one command."""
    done = subprocess.run(words, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Result.heard(done.stdout)


def ours(job: Job, place: Path) -> Result:
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
        "placement.device_kind": "cpu",
        "evaluation.problems": 0,
        "output_dir": place,
    }
    words = [sys.executable, "-m", "benchmarks.grpo_ours", "--config", str(place / "run.yaml")]
    (place / "run.yaml").write_text("name: quickstart\n")
    return run([*words, *(f"{key}={value}" for key, value in keys.items())])


def theirs(job: Job, place: Path) -> Result:
    """TRL's trainer, all answers of a step in one micro-batch."""
    job.write(place / "job.json")
    rows = str(PROMPTS * ANSWERS)
    return run([str(TRL), "-m", "benchmarks.peers.trl_grpo", str(place / "job.json"), "--rows", rows])


def grpo(model: Path, rounds: int) -> None:
    """Print a line per round, and the medians."""
    job, found = job_of(model), []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            pair = [ours(job, Path(one)), theirs(job, Path(other))] if TRL.exists() else [ours(job, Path(one))]
        found.append([(each.peak / 1e6, statistics.median(each.cpu)) for each in pair])
        print(f"round {number + 1}: peak MB and processor seconds of a step, rlinf then TRL: {found[-1]}", flush=True)
    if TRL.exists():
        for name, at in (("peak memory, of TRL's", 0), ("samples per processor second, over TRL's", 1)):
            ratios = [mine[at] / their[at] if at == 0 else their[at] / mine[at] for mine, their in found]
            print(f"{name}: {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})")


def engines(model: Path, rows: int) -> Iterator[tuple[str, TransformersEngine]]:
    """Ways in which the engine computes."""
    for dtype in (torch.float32, torch.bfloat16):
        made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        yield str(dtype).removeprefix("torch."), TransformersEngine(made, max_rows=rows)


def decoder(engine: TransformersEngine, rows: int, new: int) -> Callable[[], float]:
    """A function that answers prompts and returns the tokens per processor second."""
    rng = np.random.default_rng(0)
    requests = [Request(row, rng.integers(100, 49_000, 32), Sampling(new), row) for row in range(rows)]

    async def answer() -> int:
        return sum([len(one.response_ids) async for one in engine.generate(requests)])

    def turn() -> float:
        start = time.process_time()
        return asyncio.run(answer()) / (time.process_time() - start)

    return turn


def decode(model: Path, rounds: int) -> None:
    """Print tokens per processor second, and how much more they are than in float32."""
    torch.set_num_threads(1)
    for rows, new in ((1, 24), (8, 24), (32, 12)):
        turns = {name: decoder(engine, rows, new) for name, engine in engines(model, rows)}
        rates = [{name: turn() for name, turn in turns.items()} for _ in range(rounds + 1)][1:]
        for name in turns:
            ratios = sorted(each[name] / each["float32"] for each in rates)
            rate = statistics.median(each[name] for each in rates)
            spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{rows} rows, {name}: {rate:.1f} /s, {statistics.median(ratios):.2f} x {spread}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--only", choices=("grpo", "decode"), nargs="*", default=("grpo", "decode"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name in options.only:
        {"grpo": grpo, "decode": decode}[name](options.model.resolve(), options.rounds)
