"""Reading prompts: TFLOP/s of the engine on 8,192 tokens of prompts of many lengths, until each has its first token."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.measuring.clock import Figures, Parts, told, wall_seconds
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.measuring.work import PATHS, answered, engine_of, requests, since
from benchmarks.gpu.scale import NotRun, Outcome, Scale
from rlinf.models.language.cost import ModelCost


def prefill(scale: Scale) -> Outcome:
    """Measure the 1.5B model, as the engine reads by default, and with its plain path."""
    parts, limits, model = Parts("prefill", scale), limits_of(scale), scale.model("1.5B")
    shape = ModelCost.of(model.config)
    lengths = ragged(scale.of(8192, 96), scale.of(32, 5))
    for path in PATHS:
        try:
            engine = engine_of(model, scale, path, max_rows=len(lengths))
        except NotRun as missing:
            parts.note(str(missing))
            continue
        name = "packed" if path == "graphed" else "plain"
        parts.make(name, lambda e=engine: reading(e, shape, limits, scale, lengths), expected=2.0)
        del engine
    return parts.outcome()


def ragged(tokens: int, prompts: int) -> list[int]:
    """Lengths of prompts, from a quarter to about twice the mean, that add up to `tokens`."""
    weights = np.random.default_rng(0).uniform(0.25, 1.75, prompts)
    ends = np.round(np.cumsum(weights) / weights.sum() * tokens).astype(int)
    return np.diff(ends, prepend=0).tolist()


def reading(engine: Any, shape: ModelCost, limits: Limits, scale: Scale, lengths: list[int]) -> Figures:
    """The whole call is what counts, first tokens and bookkeeping included; beside it what the engine itself says."""
    asked = requests(lengths, 1, shape.vocabulary)
    before = engine.stats
    rounds = scale.of(7, 2)
    seconds = wall_seconds(lambda: answered(engine, asked), scale.device, rounds, warm=2)
    seen = since(before, engine.stats)
    found = told("s", seconds)
    rate = shape.forward_flops(lengths, len(lengths)) / float(found["s"])
    return {
        "tflop_per_s": rate / 1e12,
        **found,
        "tokens_per_s": sum(lengths) / float(found["s"]),
        "limit_tflop_per_s": limits.matmul_flop_per_s / 1e12,
        "reading_s": seen.read_seconds / (rounds + 2),
        "padded_share": 1.0 - sum(lengths) * (rounds + 2) / seen.read_tokens if seen.read_tokens else 0.0,
    }
