"""One micro-batch of the trainer under a profiler: kernels, gaps between them, launches, and what takes longest.

The back end alone, without actor, packing and optimizer step: what a step pays so many times. Nothing is compiled.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.checks.parts import policy_gradient, rows, trainer
from benchmarks.gpu.measuring.clock import Figures, Parts, settled
from benchmarks.gpu.measuring.profiled import counts, events_of, timeline, watched
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import pack

SIZES = {"large": (16_384, 512), "small": (2048, 128)}
"""Tokens, on a card and in a rehearsal: one that has a bar, and one whose products cannot hide what launching takes."""
SEQUENCES = 8


def micro_batch(scale: Scale) -> Outcome:
    """Measure the 1.5B model."""
    parts = Parts("micro_batch", scale)
    with trainer(scale, compile=False) as back:
        for name, (full, tiny) in SIZES.items():
            parts.make(name, lambda size=scale.of(full, tiny): of_size(back, size, scale), expected=4.0)
    return parts.outcome()


def of_size(back: Any, tokens: int, scale: Scale) -> Figures:
    """A micro-batch of so many tokens, the third: the first two allocate and tune."""
    each = tokens // SEQUENCES
    packed = pack(rows(scale, [(each // 4, each - each // 4)] * SEQUENCES))
    optimization = back.optimization(LearningSettings(lr=1e-6))
    for _ in range(2):
        optimization.accumulate([packed], policy_gradient)
    with watched(scale.device) as seen:
        begin = time.process_time()
        optimization.accumulate([packed], policy_gradient)
        host = time.process_time() - begin
        settled(scale.device)
    optimization.begin()
    events = events_of(seen)
    asked = counts(events, scale.device)
    waits = asked["syncs"] - (scale.device.type == "cuda")  # the one behind it is ours
    return {
        **timeline(events, scale.device),
        "host_ms": 1e3 * host,
        "launches": asked["launches"],
        "launches_per_layer": round(asked["launches"] / back.model.config.num_hidden_layers, 1),
        "syncs": waits,
        "to_host_bytes": asked["to_host_bytes"],
    }
