"""Launches and waits of the host: of a decode step, graphed and plain, and of a trainer's micro-batch."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.gpu.measures.training import trainer_of
from benchmarks.gpu.measuring.clock import Figures, Parts
from benchmarks.gpu.measuring.profiled import counted, counts, each, watched
from benchmarks.gpu.measuring.work import PATHS, answered, engine_of, groups, requests
from benchmarks.gpu.scale import NotRun, Outcome, Scale
from rlinf import Stream


def launches(scale: Scale) -> Outcome:
    """Of the 1.5B model."""
    parts = Parts("launches", scale)
    model = scale.model("1.5B")
    for path in PATHS:
        try:
            engine = engine_of(model, scale, path, max_rows=scale.of(64, 4))
        except NotRun as missing:
            parts.note(str(missing))
            continue
        parts.make(path, lambda e=engine: decode_step(e, scale), expected=5.0)
        del engine
    del model
    parts.make("trainer", lambda: asyncio.run(micro_batch(scale)), expected=10.0)
    return parts.outcome()


def decode_step(engine: Any, scale: Scale) -> Figures:
    """Of a step of 64 rows: longer answers against shorter ones."""
    config = scale.config("1.5B")
    short, rows = scale.of(32, 4), scale.of(64, 4)
    prompts = [scale.of(256, 8)] * rows
    one, other = (
        counted(lambda n=answer: answered(engine, requests(prompts, n, config.vocab_size, distinct=1)), scale.device)
        for answer in (short, 2 * short)
    )
    found = each(one, other, short)
    return {f"{kind}_per_step": value for kind, value in found.items()}


async def micro_batch(scale: Scale) -> Figures:
    """Of a micro-batch of 2k tokens and its share of a layer: eight of them against four. Nothing is compiled, which
    would take longer than all the rest."""
    tokens = scale.of(2048, 512)
    answer = tokens // 8 - 8
    config = scale.config("1.5B")
    async with trainer_of(scale) as trainer:
        await trainer.micro_batches_of(tokens)
        await trainer.train(Stream.of(groups(2, 8, 8, answer, config.vocab_size)))  # allocates
        found = []
        for count in (4, 8):
            with watched(scale.device) as seen:
                await trainer.train(Stream.of(groups(count, 8, 8, answer, config.vocab_size, seed=count)))
            found.append(counts(seen, scale.device))
    per = each(*found, 4)
    layers = config.num_hidden_layers
    return {
        **{f"{kind}_per_micro_batch": value for kind, value in per.items()},
        "launches_per_layer": round(per["launches"] / layers, 1),
    }
