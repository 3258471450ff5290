"""A whole GRPO step of the shape of GSM8K: seconds by phase, and the share of it in which the device works.

A run as a user starts it, in one process; the figures are those of its own metrics. The shape that is meant is 256
prompts x 8 answers x 512 tokens; here prompts are fewer, so that a few steps end within the limit.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import shutil
import statistics
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.measuring.clock import Figures, Parts, told
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.measuring.work import RESERVED
from benchmarks.gpu.scale import Outcome, Scale
from rlinf import ActorSystem, Judge, Prompt, Rollout, Trainer
from rlinf.data.step import Step
from rlinf.flows.grpo import grpo
from rlinf.metrics.timing import parts as parts_of
from rlinf.metrics.timing import timing
from rlinf.models.language.cost import ModelCost
from rlinf.runtime.system.observer import Watch

PROMPTS, GROUP, ANSWER = 64, 8, 512
"""Sizes of a step; the benchmark that is meant has 256 prompts."""
LENGTHS = (4.6, 0.35, 50, 300)
"""Tokens of GSM8K's problems in Qwen's chat template: mean and deviation of their logarithm, shortest, longest."""
PHASES = ("generation", "scoring", "training", "sync", "switching", "overlap", "other")
STEPS = 3
"""The first of them warms up."""
LETTERS = "abcdefgh"
WEIGHTS = "weights/"
"""Beginning of the metrics that tell how weights were published."""

Way = Callable[["Work"], Coroutine[Any, Any, list[Mapping[str, Any]]]]
"""Takes the steps, and returns the metrics of each."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a run."""

    scale: Scale
    prompts: int
    """Prompts of a step."""
    group: int
    """Answers to each."""
    answer: int
    """Tokens of each answer."""
    left: Callable[[], float]
    """Seconds that are left for all steps."""
    again: bool = False
    """Activations are computed again, for lack of memory."""

    @property
    def rollout(self) -> dict[str, Any]:
        """Settings of the role."""
        return {"max_new_tokens": self.answer, "max_rows": self.prompts * self.group, "dtype": self.dtype}

    @property
    def trainer(self) -> dict[str, Any]:
        """Settings of the role."""
        more = {"gradient_checkpointing": True} if self.again else {}
        return {"micro_batch_tokens": self.scale.of(16384, 256), "dtype": self.dtype, **more}

    @property
    def dtype(self) -> str:
        """In which both compute."""
        return str(self.scale.dtype).removeprefix("torch.")


def step(scale: Scale) -> Outcome:
    """Measure the 1.5B model. On a machine that cannot read configurations the roles are started by hand; a rehearsal
    does it either way. Where memory does not last, once more with activations that are computed again."""
    parts, limits, shape = Parts("step", scale), limits_of(scale), ModelCost.of(scale.config("1.5B"))
    work = Work(scale, *scale.of((PROMPTS, GROUP, ANSWER), (4, 4, 8)), left=lambda: parts.left)
    whole = importlib.util.find_spec("omegaconf") is not None

    def made(way: Way, name: str, *, again: bool = False) -> bool:
        def part() -> Figures:
            seen = asyncio.run(way(replace(work, again=again)))
            return figures(seen[1:], shape, limits, work.prompts * work.group)

        return parts.make(name, part, expected=30.0)

    if not made(run if whole else by_hand, "") and made(run if whole else by_hand, "", again=True):
        parts.note("activations computed again")
    if whole and scale.rehearse:
        made(by_hand, "by_hand", again=True)
    parts.note(f"{work.prompts} of 256 prompts a step")
    if not whole:
        parts.note("roles by hand: omegaconf is not installed")
    return parts.outcome()


async def run(work: Work) -> list[Mapping[str, Any]]:
    """A run as a user starts it; its metrics, step by step. The first step warms up. It is ended before its last step,
    which would write a checkpoint, and earlier if there is no time for one more like the last."""
    import rlinf  # with what reads configurations

    seen: list[Mapping[str, Any]] = []

    def on_step(step: int, metrics: Mapping[str, Any]) -> None:
        seen.append(metrics)
        if step == STEPS or (len(seen) > 1 and work.left() < metrics["timing/step"]):
            running.cancel()

    turns = itertools.count()
    directory = work.scale.work / "step"
    shutil.rmtree(directory, ignore_errors=True)
    running = asyncio.ensure_future(
        rlinf.train_async(
            str(work.scale.model_dir("1.5B")), lambda response: float(next(turns) % 2),
            problems(work.prompts * STEPS, work.scale), tokenizer={"characters": LETTERS}, run_dir=directory,
            callbacks=[on_step], steps=STEPS + 1, prompts_per_step=work.prompts, group_size=work.group, log_every=1,
            lr=1e-6, rollout=work.rollout, trainer=work.trainer,
        )
    )  # fmt: skip
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()
    return seen


async def by_hand(work: Work) -> list[Mapping[str, Any]]:
    """Take steps by the flow and the roles of a run, without what surrounds them."""
    made = {"model": str(work.scale.model_dir("1.5B")), "tokenizer": {"characters": LETTERS}}
    turns, seen = itertools.count(), []
    drawn = [
        Prompt(number, np.array([RESERVED + LETTERS.index(letter) for letter in each["prompt"]]))
        for number, each in enumerate(problems(work.prompts * STEPS, work.scale))
    ]
    memory = torch.cuda.get_device_properties(0).total_memory if work.scale.device.type == "cuda" else None
    async with ActorSystem.local(1, device_memory=None if memory is None else {0: memory}) as system:
        watch = await Watch.start(system)
        roles = (
            await system.spawn(Rollout, name="rollout", **work.rollout, **made),
            await system.spawn(Judge, name="judge", reward=lambda response: float(next(turns) % 2), isolate="never"),
            await system.spawn(Trainer, name="trainer", lr=1e-6, publishes=work.dtype, **work.trainer, **made),
        )
        for number in range(STEPS):
            watch.begins()
            returned = await grpo(
                Step(number, drawn[number * work.prompts : (number + 1) * work.prompts], work.group), *roles
            )
            lap = await watch.ends(f"step {number}")
            seen.append({**returned, **timing(lap), **parts_of(lap), "timing/step": lap.end - lap.start})
            if len(seen) > 1 and work.left() < lap.end - lap.start:
                break
    return seen


def problems(count: int, scale: Scale) -> list[dict[str, str]]:
    """Prompts of random letters, a token each."""
    rng = np.random.default_rng(0)
    mean, deviation, shortest, longest = LENGTHS
    lengths = np.clip(rng.lognormal(mean, deviation, count), shortest, longest).astype(int) // scale.of(1, 10)
    return [{"prompt": "".join(rng.choice(list(LETTERS), length)), "answer": ""} for length in lengths]


def figures(seen: list[Mapping[str, Any]], shape: ModelCost, limits: Limits, rows: int) -> Figures:
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
