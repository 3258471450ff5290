"""Random numbers from a counter: each depends on a seed and on which of its outputs is wanted, on nothing else."""

from __future__ import annotations

from torch import Tensor

from rlinf.data.seeds import GAMMA


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1).

    Output number `position` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 19) started from each seed: its
    state only counts, so any output can be had without those before it.

    Args:
        seeds: int64 [...].
        positions: which output of each, from 0, int64, broadcast with the seeds.

    Returns:
        float64, multiples of 2^-53.
    """
    z = seeds + (positions + 1) * _GAMMA
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts copy the sign bit in, so it is masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(GAMMA)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
