"""Does what is parked come back as it was, and does a micro-batch take the memory that `--dry-run` says?"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks.device import (
    COUNTS,
    emptied,
    held_bytes,
    peak_begun,
    peak_bytes,
    resident_bytes,
    synchronize,
    whole_bytes,
)
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import policy_gradient, rows, trainer
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.config.learning import LearningSettings
from rlinf.config.text import RunConfig
from rlinf.data.packing import pack
from rlinf.data.weights import checksum
from rlinf.models.offload import Parking, bytes_of
from rlinf.runtime.base.tensors import shard_of

FILLED = 0.92
"""Share of a card that roles may fill, as `--dry-run` has it."""
SLACK = 64 << 20
"""Bytes of host memory that a process may come to need for anything else meanwhile."""
PARKED = (
    Bound("tensors_that_changed", most=0),
    Bound("tensors", least=1),
    Bound("left_on_device_share", most=0.01, needs=COUNTS),
    Bound("back_over_before", least=0.99, most=1.01, needs=COUNTS),
    Bound("host_bytes_over_bytes", most=1.1, needs=COUNTS),
    Bound("pinned_over_bytes", least=1.0, most=1.1, needs=COUNTS),
)
PEAKS = (
    Bound("least_estimate_over_peak", least=1.0, needs=COUNTS),
    Bound("largest_estimate_over_peak", most=1.25, needs=COUNTS),
    Bound("steps_taken", least=1),
)


def parking(scale: Scale) -> Outcome:
    """A trainer with its optimizer, parked and unparked 20 times."""
    times = scale.of(20, 5)
    with trainer(scale) as back:
        optimization = back.optimization(LearningSettings(lr=1e-6))
        optimization.accumulate([pack(rows(scale, [(9, 8), (5, 7)]))], policy_gradient)
        optimization.step()
        emptied(scale.device)

        def held() -> Iterable[Tensor]:
            return back.held(optimization)

        before, taken = held_bytes(scale.device), bytes_of(held())
        marks = _marks(held())
        place = Parking(held)
        host, away, there = resident_bytes(), [], []
        seconds: dict[str, list[float]] = {"park": [], "unpark": []}
        most = left = 0
        for _ in range(times):
            seconds["park"].append(_clocked(scale, place.park))
            most, left = max(most, resident_bytes() - host), max(left, held_bytes(scale.device))
            away.append(place.parked)
            seconds["unpark"].append(_clocked(scale, place.unpark))
            there.append(held_bytes(scale.device))
        figures: dict[str, float] = {
            "bytes": taken,
            "tensors": len(marks),
            "tensors_that_changed": sum(a != b for a, b in zip(marks, _marks(held()), strict=True)),
            "left_on_device_share": left / taken,
            "back_over_before": max(there) / max(before, 1),
            "host_bytes_over_bytes": max(0, most - SLACK) / taken,
            "parked_over_bytes": max(away) / taken,
            "pinned_over_bytes": place.pinned / taken,
        }
        for name, found in seconds.items():
            figures |= {f"{name}_first_s": found[0], f"{name}_later_gb_s": taken / min(found[1:]) / 1e9}
    return judge(scale, figures, PARKED)


def _marks(tensors: Iterable[Tensor]) -> list[int]:
    return [checksum(shard_of(tensor.detach()).clone()) for tensor in tensors]


def _clocked(scale: Scale, work: Any) -> float:
    synchronize(scale.device)
    begun = time.perf_counter()
    work()
    synchronize(scale.device)
    return time.perf_counter() - begun


def peaks(scale: Scale) -> Outcome:
    """Peak of a training step at 16k and 32k tokens, with and without checkpointing, beside the estimate for it. A case
    that runs out of memory must have been estimated at more than roles may fill."""
    figures: dict[str, float | int | str] = {}
    ratios, steps = [], 0
    room = FILLED * whole_bytes(scale.device)
    for checkpointed in (True, False):
        with trainer(scale, gradient_checkpointing=checkpointed) as back:
            for tokens in scale.of((16_384, 32_768), (128, 256)):
                name = f"{tokens}_{'checkpointed' if checkpointed else 'kept'}"
                estimate = estimated(scale, tokens, checkpointed)
                figures[f"{name}_estimate_gb"] = estimate / 1e9
                try:
                    peak = _peak(scale, back, tokens)
                except torch.OutOfMemoryError:
                    figures[f"{name}_peak_gb"] = "did not fit"
                    ratios.append(1.0 if estimate > room else estimate / room)
                    emptied(scale.device)
                    break  # more tokens would not fit either
                steps += 1
                figures[f"{name}_peak_gb"] = peak / 1e9
                ratios.append(estimate / peak)
    found = {"least_estimate_over_peak": min(ratios), "largest_estimate_over_peak": max(ratios), "steps_taken": steps}
    return judge(scale, {**figures, **found}, PEAKS)


def estimated(scale: Scale, tokens: int, checkpointed: bool) -> int:
    """Bytes that `--dry-run` counts for a trainer alone on its device."""
    config = RunConfig()
    config.trainer.dtype = "float32" if scale.dtype == torch.float32 else "bfloat16"
    config.trainer.micro_batch_tokens, config.trainer.gradient_checkpointing = tokens, checkpointed
    from rlinf.runs.dry_run.footprint import footprints  # wants omegaconf, which other checks here do without

    seats = {role: [frozenset({0})] for role in ("trainer", "rollout")}
    return footprints(config, scale.config("1.5B"), seats)["trainer"].active_bytes


def _peak(scale: Scale, back: Any, tokens: int) -> float:
    """Bytes at the most in the second of two optimizer steps, which has the state of the first. Each has two
    micro-batches: the summed gradients of one are there while the other is computed."""
    emptied(scale.device)  # of the optimizer of the size before
    each = min(tokens, scale.of(2048, 64))
    packed = pack(rows(scale, [(each // 4, each - each // 4)] * (tokens // each)))
    optimization = back.optimization(LearningSettings(lr=1e-6))
    for _ in range(2):
        peak_begun(scale.device)
        optimization.accumulate([packed, packed], policy_gradient)
        optimization.step()
    return peak_bytes(scale.device)
