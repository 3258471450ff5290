"""The trainer: tokens per second and MFU by tokens per micro-batch, with blocks compiled or not, checkpointed or not.

A whole call of the actor is timed: packing, forward and backward passes, metrics, the optimizer's step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu.measuring.clock import Figures, Parts, settled, told
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.measuring.work import groups
from benchmarks.gpu.scale import Outcome, Scale
from rlinf import ActorSystem, Stream, endpoint
from rlinf.actors.trainer import Trainer
from rlinf.models.language.cost import ModelCost

TOKENIZER = {"characters": "0123456789>"}
PROMPT, ANSWER, GROUP = 32, 480, 8
"""Tokens of a prompt and of each of its answers. The prompt is too short to be worth sharing, so that all are read."""
SIZES = (16384, 2048, 32768)
"""Tokens of a micro-batch, the one that has a bar first."""
WAYS: dict[str, dict[str, Any]] = {
    "compiled_kept": {"compile": True, "gradient_checkpointing": False},
    "compiled_again": {"compile": True, "gradient_checkpointing": True},
    "plain_kept": {"compile": False, "gradient_checkpointing": False},
    "plain_again": {"compile": False, "gradient_checkpointing": True},
}
"""Blocks compiled or as they are; activations kept, or computed again by checkpointing. The first two are what a run
does by itself, the second of them where memory is short."""


class AnySize(Trainer):
    """A trainer whose micro-batches may have another size at every call."""

    @endpoint
    async def micro_batches_of(self, tokens: int) -> None:
        """Compute so many tokens at once from now on."""
        self._packing = replace(self._packing, budget=tokens)


@asynccontextmanager
async def trainer_of(scale: Scale, size: str = "1.5B", **settings: Any) -> AsyncIterator[Any]:
    """A trainer in this process.

    Args:
        scale: where it computes, and in which dtype.
        size: of its model.
        settings: any of `TrainerSettings`, or `lora`.
    """
    # for a CPU it takes longer than all measures together, so there `auto` stands for it, which does not
    settings["compile"] = settings.get("compile", False) and scale.of(True, "auto")
    async with ActorSystem.local() as system:
        yield await system.spawn(
            AnySize, name="trainer", model=str(scale.model_dir(size)), tokenizer=TOKENIZER, lr=1e-6,
            dtype=str(scale.dtype).removeprefix("torch."), **settings,
        )  # fmt: skip


def training(scale: Scale) -> Outcome:
    """Measure the 1.5B model: micro-batches of 16k tokens first, in all four ways; then 2k and 32k."""
    parts, limits = Parts("training", scale), limits_of(scale)
    shape = ModelCost.of(scale.config("1.5B"))
    sizes = SIZES if not scale.rehearse else (1024, 512, 2048)
    for way, settings in WAYS.items():
        asyncio.run(
            in_one_way(parts, way, settings, sizes if way.endswith("kept") else sizes[:1], shape, limits, scale)
        )
    for name in parts.figures.copy():
        if name.startswith(lead := f"t{sizes[0]}_") and name.endswith("_mfu_share"):
            rate = float(parts.figures[name])
            if rate > float(parts.figures.get("best_mfu_share", 0.0)):
                parts.figures |= {"best_mfu_share": rate, "best_way": name[len(lead) : -len("_mfu_share")]}
    return parts.outcome()


async def in_one_way(
    parts: Parts,
    way: str,
    settings: Mapping[str, Any],
    sizes: Sequence[int],
    shape: ModelCost,
    limits: Limits,
    scale: Scale,
) -> None:
    """One trainer, micro-batches of several sizes."""
    async with AsyncExitStack() as stack:
        made: list[Any] = []

        async def begin() -> Figures:
            made.append(await stack.enter_async_context(trainer_of(scale, **settings)))
            return {}

        if not await parts.make_async(way, begin, expected=25.0):
            return
        for tokens in sizes:
            name, work = f"t{tokens}_{way}", partial(steps, made[0], tokens, shape, limits, scale)
            if not await parts.make_async(name, work, expected=10.0):
                return  # what ran out of memory in the middle of a pass is not fit for another


async def steps(
    trainer: Any, tokens: int, shape: ModelCost, limits: Limits, scale: Scale, *, frozen: bool = False
) -> Figures:
    """Steps of a trainer on batches of four of the largest micro-batches.

    Args:
        trainer: an `AnySize`.
        tokens: of a micro-batch.
        shape: of its model.
        limits: of the device.
        scale: where it computes.
        frozen: only adapters learn.
    """
    prompt, answer = scale.of((PROMPT, ANSWER), (8, 120))
    count = scale.of(65536, 4096) // ((prompt + answer) * GROUP)
    await trainer.micro_batches_of(tokens)
    seconds = []
    for number in range(scale.of(4, 2)):
        batch = groups(count, GROUP, prompt, answer, shape.vocabulary, seed=number)
        settled(scale.device)
        began = time.perf_counter()
        await trainer.train(Stream.of(batch))
        settled(scale.device)
        if number:  # the first allocates and compiles
            seconds.append(time.perf_counter() - began)
    found = told("step_s", seconds)
    sequences = count * GROUP
    # the last token of an answer is predicted, and never read
    flops = shape.training_flops([prompt + answer - 1] * sequences, answer * sequences, frozen=frozen)
    rate = flops / float(found["step_s"])
    return {
        "tokens_per_s": (prompt + answer) * sequences / float(found["step_s"]),
        "mfu_share": rate / limits.matmul_flop_per_s,
        "tflop_per_s": rate / 1e12,
        **found,
    }
