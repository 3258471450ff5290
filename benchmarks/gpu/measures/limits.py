"""Limits of the card, as the other measures compare themselves with it."""

from __future__ import annotations

from benchmarks.gpu.measuring.limits import limits_of
from benchmarks.gpu.scale import Outcome, Scale


def limits(scale: Scale) -> Outcome:
    """Rates measured on this card; nothing to compare them with."""
    found = limits_of(scale)
    return Outcome(
        None,
        {
            "memory_gb_per_s": found.memory_bytes_per_s / 1e9,
            "matmul_tflop_per_s": found.matmul_flop_per_s / 1e12,
            "to_host_gb_per_s": found.to_host_bytes_per_s / 1e9,
            "to_device_gb_per_s": found.to_device_bytes_per_s / 1e9,
        },
        f"measured in {str(scale.dtype).removeprefix('torch.')}, the fastest of some rounds",
    )
