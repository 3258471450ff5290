"""A whole GRPO step of the shape of GSM8K: seconds by phase, and the share of it in which the device works.

A run as a user starts it, in one process, by `rlinf.train_async`; the figures are those of its own metrics. The paper's
shape is 256 prompts x 8 answers x 512 tokens; here it is fewer prompts, so that a few steps end within the limit.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.gpu.measuring.clock import Figures, Parts, told
from benchmarks.gpu.measuring.flops import Shape
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.scale import Outcome, Scale

PROMPTS, GROUP, ANSWER = 64, 8, 512
"""Of a step; the benchmark that is meant has 256 prompts."""
LENGTHS = (4.6, 0.35, 50, 300)
"""Tokens of GSM8K's problems in Qwen's chat template: mean and deviation of their logarithm, shortest, longest."""
PHASES = ("generation", "scoring", "training", "sync", "switching", "overlap", "other")
WEIGHTS = "weights/"
"""Beginning of the metrics that tell how weights were published."""


def step(scale: Scale) -> Outcome:
    """Of the 1.5B model."""
    parts, limits = Parts("step", scale), limits_of(scale)
    parts.make("", lambda: asyncio.run(steps(scale, limits)))
    parts.note(f"{scale.of(PROMPTS, 4)} of 256 prompts a step")
    return parts.outcome()


async def steps(scale: Scale, limits: Limits) -> Figures:
    """One step to warm up, and a few that count; what they cost beside is that no checkpoint is written at the end."""
    import rlinf  # with what reads configurations

    prompts, group, answer = scale.of((PROMPTS, GROUP, ANSWER), (4, 4, 8))
    dtype, rounds = str(scale.dtype).removeprefix("torch."), scale.of(2, 2)
    seen: list[Mapping[str, Any]] = []

    def on_step(step: int, metrics: Mapping[str, Any]) -> None:
        seen.append(metrics)
        if step == rounds + 1:
            run.cancel()

    turns = itertools.count()
    directory = scale.work / "step"
    shutil.rmtree(directory, ignore_errors=True)
    run = asyncio.ensure_future(
        rlinf.train_async(
            str(scale.model_dir("1.5B")), lambda response: float(next(turns) % 2), problems(prompts * 4, scale),
            tokenizer={"characters": "abcdefgh"}, run_dir=directory, callbacks=[on_step], steps=rounds + 2,
            prompts_per_step=prompts, group_size=group, log_every=1, lr=1e-6, seed=0,
            rollout={"max_new_tokens": answer, "max_rows": prompts * group, "dtype": dtype},
            trainer={"micro_batch_tokens": scale.of(16384, 256), "dtype": dtype},
        )
    )  # fmt: skip
    await asyncio.wait([run])
    if not run.cancelled():
        run.result()
    return figures(seen[1:], Shape.of(scale.config("1.5B")), limits, prompts * group)


def problems(count: int, scale: Scale) -> list[dict[str, str]]:
    """Prompts of random letters, a token each."""
    rng = np.random.default_rng(0)
    mean, deviation, shortest, longest = LENGTHS
    lengths = np.clip(rng.lognormal(mean, deviation, count), shortest, longest).astype(int) // scale.of(1, 10)
    return [{"prompt": "".join(rng.choice(list("abcdefgh"), length)), "answer": ""} for length in lengths]


def figures(seen: list[Mapping[str, Any]], shape: Shape, limits: Limits, rows: int) -> Figures:
    """Medians over the steps.

    Args:
        seen: metrics of each step.
        shape: of the model.
        limits: of the device.
        rows: answers of a step.
    """

    def share(*names: str) -> float:
        return statistics.median(sum(one.get(f"timing/{n}", 0.0) for n in names) / one["timing/step"] for one in seen)

    found = told("step_s", [one["timing/step"] for one in seen])
    tokens = statistics.median(one["tokens"] for one in seen)
    answers = statistics.median(one["response_tokens"] for one in seen)
    lengths = [int(tokens / rows)] * rows
    work = shape.forward_flops(lengths, int(answers)) + shape.training_flops(lengths, int(answers))
    phases = {f"{name}_s": statistics.median(one.get(f"timing/{name}", 0.0) for one in seen) for name in PHASES}
    weights = {name: statistics.median(one.get(name, 0.0) for one in seen) for name in seen[-1] if WEIGHTS in name}
    return {
        **found,
        **phases,
        **{name.replace("/", "_").replace("_seconds", "_s"): value for name, value in weights.items()},
        "busy_share": 1.0 - share("other", "switching"),
        "publish_and_switch_share": share("sync", "switching"),
        "tokens_per_s": tokens / float(found["step_s"]),
        "generated_tokens_per_s": answers / phases["generation_s"] if phases["generation_s"] else 0.0,
        "trained_tokens_per_s": tokens / phases["training_s"] if phases["training_s"] else 0.0,
        "flops_share": work / float(found["step_s"]) / limits.matmul_flop_per_s,
    }
