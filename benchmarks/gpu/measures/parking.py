"""Parking what a trainer of the 1.5B model holds: to the host's memory and back, the first time and later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.measuring.clock import Figures, Parts, settled, told
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.models.offload import Parking, bytes_of


def parking(scale: Scale) -> Outcome:
    """Weights and both means of AdamW, in float32."""
    parts, limits = Parts("parking", scale), limits_of(scale)
    parts.make("", lambda: moves(scale, limits))
    return parts.outcome()


def state(scale: Scale) -> Iterator[Tensor]:
    """A tensor for each weight of the model and each of its two running means."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scale.config("1.5B"))
    for weight in model.parameters():
        for value in (1.0, 0.5, 0.25):
            yield torch.full(weight.shape, value, dtype=torch.float32, device=scale.device)


def moves(scale: Scale, limits: Limits) -> Figures:
    """Seconds and rates of each way.

    Raises:
        RuntimeError: what came back is not what went.
    """
    tensors = list(state(scale))
    size = bytes_of(tensors)
    parked = Parking(tensors)
    away, back = [], []
    for _ in range(scale.of(4, 3)):
        for seconds, move in ((away, parked.park), (back, parked.unpark)):
            settled(scale.device)
            began = time.perf_counter()
            move()
            settled(scale.device)
            seconds.append(time.perf_counter() - began)
    if any(
        bool((tensor != value).any()) for tensor, value in zip(tensors, (1.0, 0.5, 0.25) * len(tensors), strict=False)
    ):
        raise RuntimeError("a tensor came back with other values than it went with")
    rates = [told(f"{name}_later_gb_per_s", [size / one / 1e9 for one in seconds[1:]]) for name, seconds in (
        ("park", away), ("unpark", back))]  # fmt: skip
    return {
        "gb": size / 1e9,
        "park_first_s": away[0],
        "unpark_first_s": back[0],
        **rates[0],
        **rates[1],
        "to_host_limit_gb_per_s": limits.to_host_bytes_per_s / 1e9,
        "to_device_limit_gb_per_s": limits.to_device_bytes_per_s / 1e9,
    }
