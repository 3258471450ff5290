"""Random numbers for batches of decisions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.rng import mix
from rlinf.models.policy.base import normals, uniforms

CPU = torch.device("cpu")


def reference(seed, count):
    """SplitMix64 as published, with Python's own whole numbers."""
    word, found = (1 << 64) - 1, []
    state = seed & word
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & word
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        found.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    return found


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(1, 6))
def test_a_row_with_a_seed_draws_the_numbers_of_its_own_generator(seeds, count):
    found = uniforms(torch.tensor(seeds), len(seeds), count, CPU)
    assert found.tolist() == [reference(seed, count) for seed in seeds]


def test_seeds_must_be_one_per_row():
    with pytest.raises(ValueError, match=r"int64 \[3\].*per row.*torch.int64 \[2\]"):
        uniforms(torch.zeros(2, dtype=torch.int64), 3, 1, CPU)
    with pytest.raises(ValueError, match=r"per row"):
        uniforms(torch.zeros(3), 3, 1, CPU)


def test_a_generator_is_drawn_from_in_order():
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    found = uniforms(first, 2, 3, CPU)
    assert torch.equal(found, torch.rand(2, 3, generator=second, dtype=torch.float64))


def test_normal_numbers_are_normal():
    seeds = torch.tensor([mix(4, row) for row in range(20_000)])
    found = normals(uniforms(seeds, 20_000, 2, CPU))
    assert found.dtype == torch.float32
    assert found.mean(0).abs().max() < 0.03
    assert (found.std(0) - 1).abs().max() < 0.03
    assert abs(torch.corrcoef(found.T)[0, 1]) < 0.03
    inside = (found.abs() < 1).float().mean()
    assert abs(inside - 0.6827) < 0.01


def test_the_smallest_and_the_largest_uniform_number_are_finite_normals():
    ends = normals(torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64))
    assert ends.isfinite().all()
    assert ends[0] < -8
    assert ends[1] > 8
