"""Random numbers for a batch of decisions, from one generator or from a seed per row.

With a seed per row, what a row draws is a function of its seed alone: the same in a large batch, in slices that take
turns, or alone. That is how a pipelined rollout equals an unpipelined one.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from rlinf.data.rng import uniforms as counted

Generator: TypeAlias = torch.Generator | Tensor | None
"""A generator; a seed per row, int64 [N], best of `data.rng.mix`; or None for torch's global generator."""


def uniforms(generator: Generator, rows: int, count: int, device: torch.device) -> Tensor:
    """Random numbers in [0, 1).

    Args:
        generator: where they come from. Number j of a row with a seed is output j of SplitMix64 (Steele, Lea and Flood,
            OOPSLA 2014, figure 19) from that seed, whose state only counts.
        rows: N.
        count: numbers for each row.
        device: where they are needed; a generator of another device draws on its own.

    Returns:
        float64 [rows, count], multiples of 2^-53.

    Raises:
        ValueError: seeds are not int64 [rows].
    """
    if isinstance(generator, Tensor):
        if generator.shape != (rows,) or generator.dtype != torch.int64:
            raise ValueError(
                f"seeds must be int64 [{rows}], one per row, not {generator.dtype} {list(generator.shape)}"
            )
        return counted(generator.to(device)[:, None], torch.arange(count, device=device))
    source = device if generator is None else generator.device
    return torch.rand(rows, count, generator=generator, dtype=torch.float64, device=source).to(device)


def normals(noise: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones, by the inverse of their distribution function.

    Args:
        noise: in [0, 1), multiples of 2^-53, float64 of any shape.

    Returns:
        float32 in that shape, between -8.3 and 8.3: 0 counts as 2^-54.
    """
    inside = (noise + 2.0**-54).clamp(max=1.0 - 2.0**-53)  # the largest would be rounded to 1, which is at infinity
    found: Tensor = torch.special.ndtri(inside)
    return found.float()
