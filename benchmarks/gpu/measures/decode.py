"""Decoding: seconds of a step by rows and context, graphed and plain, beside transformers' `generate`.

The limit is the time in which the card, at the bandwidth that was measured on it, reads every matrix once and the keys
and values of every row.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.gpu.measuring.clock import Figures, Parts, settled, told, wall_seconds
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.measuring.work import answered, engine_of, requests, since
from benchmarks.gpu.scale import NotRun, Outcome, Scale
from rlinf.models.language.cost import ModelCost

CELLS = tuple(itertools.product((512, 4096), (256, 64, 8, 512)))
"""Tokens that a row attends to, and rows; the most asked for first."""
PROMPTS = 8
"""Different prompts; the rows of one share its reading, as the answers of a group do."""


def decode(scale: Scale) -> Outcome:
    """Measure the 1.5B model; every number of rows with both contexts, the most asked for first."""
    parts, limits, model = Parts("decode", scale), limits_of(scale), scale.model("1.5B")
    shape = ModelCost.of(model.config)
    cells = scale.of(CELLS, ((16, 4), (32, 2)))
    for path, expected in (("graphed", 3.0), ("plain", 2.5)):
        try:
            engine = engine_of(model, scale, path, max_rows=max(rows for _, rows in cells))
        except NotRun as missing:
            parts.note(str(missing))
            continue
        for context, rows in cells:
            parts.make(
                f"{path}_r{rows}_c{context}",
                lambda e=engine, r=rows, c=context: steps(e, shape, limits, scale, r, c),
                expected=expected,
            )
        del engine
    for context, rows in cells:
        parts.make(
            f"generate_r{rows}_c{context}",
            lambda r=rows, c=context: generate(model, shape, limits, scale, r, c),
            expected=3.0,
        )
    return parts.outcome()


def steps(engine: Any, shape: ModelCost, limits: Limits, scale: Scale, rows: int, context: int) -> Figures:
    """Seconds of a decode step of an engine, by its own account and by the clock of who waits for the answers.

    Args:
        engine: with room for the rows.
        shape: of its model.
        limits: of the device.
        scale: where it computes.
        rows: answers at once.
        context: tokens that each attends to, on average.
    """
    long = scale.of(64, 4)
    asked = requests([max(1, context - long // 2)] * rows, long, shape.vocabulary, distinct=min(PROMPTS, rows))
    answered(engine, asked)  # first runs allocate, compile and capture
    seconds, waited = [], []
    for _ in range(scale.of(3, 2)):
        before = engine.stats
        waited += wall_seconds(lambda: answered(engine, asked), scale.device, 1, warm=0)
        seen = since(before, engine.stats)
        seconds.append(seen.seconds / seen.steps)
    limit = shape.decode_bytes(rows, context, scale.dtype.itemsize) / limits.memory_bytes_per_s
    flops = shape.forward_flops([1] * rows, rows) + shape.pairs_flops(rows * context)
    found = told("step_ms", [1e3 * one for one in seconds])
    step = float(found["step_ms"]) / 1e3
    return {
        "tokens_per_s": rows / step,
        **found,
        "limit_ms": 1e3 * limit,
        "over_limit_ratio": step / limit,
        "matmul_limit_ms": 1e3 * flops / limits.matmul_flop_per_s,
        "whole_call_tokens_per_s": rows * long / sorted(waited)[len(waited) // 2],
    }


def generate(model: Any, shape: ModelCost, limits: Limits, scale: Scale, rows: int, context: int) -> Figures:
    """Measure `model.generate` with its own cache, filled with noise, so that nothing has to be read before."""
    long = scale.of(16, 3)
    ids = torch.randint(3, shape.vocabulary, (rows, context + 1), device=scale.device)

    def run() -> None:
        torch.manual_seed(0)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=filled(model, rows, context),
                do_sample=True, top_k=0, max_new_tokens=long, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    def fill() -> None:
        filled(model, rows, context)
        settled(scale.device)

    run()
    filling = sorted(wall_seconds(fill, scale.device, 3))[1]
    found = told(
        "step_ms", [1e3 * (one - filling) / long for one in wall_seconds(run, scale.device, scale.of(3, 2), warm=0)]
    )
    limit = shape.decode_bytes(rows, context, scale.dtype.itemsize) / limits.memory_bytes_per_s
    step = float(found["step_ms"]) / 1e3
    return {"tokens_per_s": rows / step, **found, "over_limit_ratio": step / limit}


def filled(model: Any, rows: int, context: int) -> Any:
    """A cache of transformers' with `context` tokens of noise in every row."""
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache(config=model.config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        one = torch.empty(
            rows, config.num_key_value_heads, context, head, dtype=model.dtype, device=model.device
        ).normal_(std=0.5)
        cache.update(one, one.clone(), layer)
    return cache
