"""Random numbers for a batch of decisions, from one generator or from a seed per row.

With a seed per row, what a row draws is a function of its seed alone: the same in a large batch, in slices that take
turns, or alone. That is how a pipelined rollout equals an unpipelined one.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from rlinf.data.seeds import GAMMA

Generator: TypeAlias = torch.Generator | Tensor | None
"""A generator; a seed per row, int64 [N], best of `data.seeds.mix`; or None for torch's global generator."""


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
        return _counted(generator.to(device), count)
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


def _counted(seeds: Tensor, count: int) -> Tensor:
    z = seeds[:, None] + torch.arange(1, count + 1, device=seeds.device) * _signed(GAMMA)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts copy the sign bit in, so it is masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
