"""Limits of the card, measured on it: copies in its own memory, to and from the host, matrix products."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from benchmarks.gpu.measuring.clock import device_seconds, freed
from benchmarks.gpu.scale import Scale


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates that no measure can exceed by much."""

    memory_bytes_per_s: float
    """Bytes read and bytes written by a copy within the device's memory, together."""
    matmul_flop_per_s: float
    """Rate of a large product in the dtype of the models."""
    to_host_bytes_per_s: float
    """Into page-locked memory."""
    to_device_bytes_per_s: float
    """Out of page-locked memory."""


def limits_of(scale: Scale) -> Limits:
    """The limits of this device: measured by whoever asks first of all measures of a call, in about a second."""
    path = scale.work / f"limits-{scale.device.type}.json"
    if path.exists():
        return Limits(**json.loads(path.read_text()))
    found = measured(scale)
    scale.work.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.replace(path)
    return found


def measured(scale: Scale) -> Limits:
    """Measure them: the fastest of some rounds, after a few that warm up."""
    within, out, back = _copies(scale.device, scale.of(2 << 30, 4 << 20), scale.of(10, 3))
    freed(scale.device)
    product = _product(scale, scale.of(8192, 128))
    freed(scale.device)
    return Limits(within, product, out, back)


def _copies(device: torch.device, size: int, rounds: int) -> tuple[float, float, float]:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    within = 2 * size / min(device_seconds(lambda: target.copy_(source), device, rounds))
    out = size / min(device_seconds(lambda: host.copy_(source, non_blocking=True), device, rounds))
    back = size / min(device_seconds(lambda: target.copy_(host, non_blocking=True), device, rounds))
    return within, out, back


def _product(scale: Scale, edge: int) -> float:
    one, other = (torch.randn(edge, edge, dtype=scale.dtype, device=scale.device) for _ in range(2))
    seconds = device_seconds(lambda: one @ other, scale.device, scale.of(30, 3), warm=scale.of(10, 1))
    return 2 * edge**3 / min(seconds)
