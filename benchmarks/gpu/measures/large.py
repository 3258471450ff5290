"""Decoding with a 7B model; and a step of a trainer that learns adapters (LoRA) of the 1.5B model."""

from __future__ import annotations

import asyncio
import importlib.util

from benchmarks.gpu.measures import decode, training
from benchmarks.gpu.measuring.clock import Figures, Parts
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.measuring.work import PATHS, engine_of
from benchmarks.gpu.scale import NotRun, Outcome, Scale
from rlinf.models.language.cost import ModelCost

LORA = {"r": 16, "alpha": 32.0, "target_modules": ["all-linear"]}


def large(scale: Scale) -> Outcome:
    """7B: 256 rows of 600 tokens. LoRA: batches as of `training`."""
    parts, limits, model = Parts("large", scale), limits_of(scale), scale.model("7B")
    shape, (rows, context) = ModelCost.of(model.config), scale.of((256, 600), (4, 24))
    for path in PATHS:
        try:
            engine = engine_of(model, scale, path, max_rows=rows)
        except NotRun as missing:
            parts.note(str(missing))
            continue
        parts.make(
            f"{path}_r{rows}_c{context}",
            lambda e=engine: decode.steps(e, shape, limits, scale, rows, context),
            expected=8.0,
        )
        del engine
    del model
    parts.make("lora", lambda: asyncio.run(adapters(scale, limits)), expected=20.0)
    return parts.outcome()


async def adapters(scale: Scale, limits: Limits) -> Figures:
    """A trainer whose base weights are frozen.

    Raises:
        NotRun: adapters need peft, and it is not there.
    """
    if importlib.util.find_spec("peft") is None:
        raise NotRun("peft is not installed")
    async with training.trainer_of(scale, lora=LORA, compile=True) as trainer:
        shape = ModelCost.of(scale.config("1.5B"))
        return await training.steps(trainer, scale.of(16384, 1024), shape, limits, scale, frozen=True)
