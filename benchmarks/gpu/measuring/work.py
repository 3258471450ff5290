"""Made-up work: requests for an engine, groups for a trainer. Random tokens, the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.scale import REHEARSED, NotRun, Scale
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.engines.base import Request, Sampling, StepStats
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.runtime.base.tensors import enter_device

RESERVED = 3
"""The first token ids, which stand for padding, beginning and end."""
PATHS = ("graphed", "plain")
"""How an engine decodes: by recorded steps, or as it does without them."""

RECORDED = "recorded steps"
"""Beginning of `TransformersEngine.decoding` where steps are graphs."""


async def inline(fn: Callable[..., Any], *args: Any) -> Any:
    """Blocking work in the thread that asks for it, for profilers that look at one thread."""
    return fn(*args)


def engine_of(model: Any, scale: Scale, path: str, *, max_rows: int) -> TransformersEngine:
    """An engine around a model on the device.

    Args:
        model: its weights are the engine's from now on.
        scale: where it computes.
        path: one of `PATHS`.
        max_rows: answers decoded together.

    Raises:
        NotRun: this engine has no such path here.
    """
    enter_device()  # as the runtime does: which kernels attention may use is said there
    graphs = scale.of("auto", REHEARSED) if path == "graphed" else "off"
    engine = TransformersEngine(model, compute=inline, max_rows=max_rows, graphs=graphs)
    if path == "graphed" and not engine.decoding.startswith(RECORDED):
        raise NotRun(f"no graphs: the engine decodes {engine.decoding}")
    return engine


def requests(
    lengths: Sequence[int], answer: int, vocabulary: int, *, distinct: int | None = None, seed: int = 0
) -> list[Request]:
    """Requests that only a length ends.

    Args:
        lengths: tokens of each prompt.
        answer: tokens of each answer.
        vocabulary: how many tokens there are.
        distinct: how many of the prompts differ; the others repeat them, as groups of answers do, and are read once.
        seed: of the tokens and of the sampling.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(RESERVED, vocabulary, length) for length in lengths[: distinct or len(lengths)]]
    return [
        Request(number, prompts[number % len(prompts)], Sampling(answer), seed * 100_003 + number)
        for number in range(len(lengths))
    ]


def answered(engine: TransformersEngine, asked: Sequence[Request]) -> int:
    """Have all requests answered; returns the tokens that came.

    Raises:
        RuntimeError: they are not as many as were asked for.
    """

    async def answer() -> int:
        return sum([len(completion.response_ids) async for completion in engine.generate(asked)])

    found = asyncio.run(answer())
    wanted = sum(request.sampling.max_new_tokens for request in asked)
    if found != wanted:
        raise RuntimeError(f"the engine made {found} tokens, not {wanted}")
    return found


def since(before: StepStats, after: StepStats) -> StepStats:
    """Work of an engine between two looks at its `stats`."""
    return StepStats(*(new - old for new, old in zip(after, before, strict=True)))


def groups(count: int, size: int, prompt: int, answer: int, vocabulary: int, *, seed: int = 0) -> list[Group]:
    """Judged groups of answers of equal length, half of them good.

    Args:
        count: prompts.
        size: answers to each.
        prompt, answer: tokens of each.
        vocabulary: how many tokens there are.
        seed: of the tokens.
    """
    rng = np.random.default_rng(seed)
    made = []
    for number in range(seed * count, (seed + 1) * count):
        asked = Prompt(number, rng.integers(RESERVED, vocabulary, prompt))
        samples = tuple(
            Sample(
                asked, index, rng.integers(RESERVED, vocabulary, answer),
                np.full(answer, -np.log(vocabulary), np.float32), np.zeros(answer, np.int32), "", False,
                reward=float(index % 2), outcome="ok",
            )
            for index in range(size)
        )  # fmt: skip
        made.append(Group(asked, samples))
    return made
