"""Launches and waits of the host: of a decode step, graphed and plain. `micro_batch` has those of the trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.measuring.clock import Figures, Parts
from benchmarks.gpu.measuring.profiled import counted, each
from benchmarks.gpu.measuring.work import PATHS, answered, engine_of, requests
from benchmarks.gpu.scale import NotRun, Outcome, Scale


def launches(scale: Scale) -> Outcome:
    """Measure the 1.5B model."""
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
    return parts.outcome()


def decode_step(engine: Any, scale: Scale) -> Figures:
    """Count the launches of a step of 64 rows: longer answers against shorter ones."""
    config = scale.config("1.5B")
    short, rows = scale.of(32, 4), scale.of(64, 4)
    prompts = [scale.of(256, 8)] * rows
    one, other = (
        counted(lambda n=answer: answered(engine, requests(prompts, n, config.vocab_size, distinct=1)), scale.device)
        for answer in (short, 2 * short)
    )
    found = each(one, other, short)
    return {f"{kind}_per_step": value for kind, value in found.items()}
