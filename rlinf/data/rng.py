"""Randomness that depends on what is drawn and never on when or where.

A number or permutation is a function of a key, such as (seed, prompt, sample), so it is the same whatever else runs,
in whatever order, on however many hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ONE_AT_A_TIME = threading.RLock()
"""Held by whoever has a library draw from torch's one global generator, whose numbers another thread would change."""
_WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2^64 divided by the golden ratio."""


def mix(*key: int) -> int:
    """A number from 0 to 2^63 - 1 that depends on every part of `key` (whole numbers), well spread.

    Each part goes through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 19).
    """
    state = 0
    for part in key:
        state = _finalise((state + GAMMA + (part & _WORD)) & _WORD)
    return state >> 1


def mixed(*key: int | Sequence[int]) -> Tensor:
    """`mix` of many keys at once, int64.

    Args:
        key: whole numbers, or several of them for as many keys, [n].
    """
    state: Any = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # modulo 2^64, as it should be
        for part in key:
            words = [each & _WORD for each in part] if isinstance(part, Sequence) else part & _WORD
            state = _finalised(state + np.uint64(GAMMA) + np.array(words, np.uint64))
    return torch.from_numpy((state >> np.uint64(1)).astype(np.int64))


def permutation(count: int, *key: int) -> np.ndarray:
    """An order of `range(count)` drawn from `key` (whole numbers from 0), int64 [count]."""
    return np.random.default_rng(key).permutation(count)


def _finalised(z: Any) -> Any:
    """`_finalise` of many numbers, uint64."""
    z = (z ^ (z >> _BITS[30])) * _FACTORS[0]
    z = (z ^ (z >> _BITS[27])) * _FACTORS[1]
    return z ^ (z >> _BITS[31])


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


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


def uniforms_by_numpy(seeds: Tensor, count: int) -> Tensor:
    """The first outputs of `uniforms` from each seed, on a CPU: quicker on few numbers, and torch sees nothing of it.

    Args:
        seeds: int64 [n].
        count: outputs of each.

    Returns:
        float64 [n, count].
    """
    word = _finalised(seeds.numpy().view(np.uint64)[:, None] + _states(count))
    return torch.from_numpy((word >> _BITS[11]) * 2.0**-53)


@lru_cache
def _states(count: int) -> np.ndarray:
    """How far the state has counted at each of the first outputs, uint64."""
    return np.array([(position + 1) * GAMMA & _WORD for position in range(count)], np.uint64)


_BITS = {bits: np.uint64(bits) for bits in (11, 27, 30, 31)}
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts copy the sign bit in, so it is masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(GAMMA)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
