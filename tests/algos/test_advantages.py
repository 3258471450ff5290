"""Group-relative advantages against the formula, written out in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos.advantages import group_relative


def by_the_formula(rewards, groups, scale):
    out = np.zeros(len(rewards))
    for i, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            continue
        mean = sum(members) / len(members)
        out[i] = rewards[i] - mean
        if scale == "std":
            variance = sum((member - mean) ** 2 for member in members) / (len(members) - 1)
            out[i] /= variance**0.5 + 1e-6
    return out


answers = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 3.7]), st.integers(-2, 3)), min_size=1, max_size=40
)


@given(answers, st.sampled_from(["std", "none"]))
def test_it_is_the_formula(answers, scale):
    rewards, groups = map(list, zip(*answers, strict=True))
    found = group_relative(torch.tensor(rewards), torch.tensor(groups), scale=scale)
    np.testing.assert_allclose(found.numpy(), by_the_formula(rewards, groups, scale), rtol=2e-5, atol=1e-6)


def test_one_right_answer_in_four_by_hand():
    found = group_relative(torch.tensor([1.0, 0, 0, 0]), torch.tensor([7, 7, 7, 7]))
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # mean 1/4, std 1/2


def test_without_the_scale_it_is_the_distance_from_the_mean():
    found = group_relative(torch.tensor([1.0, 0, 0, 0]), torch.tensor([7, 7, 7, 7]), scale="none")
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 20), st.sampled_from(["std", "none"]))
def test_equal_rewards_give_exactly_zero(reward, count, scale):
    found = group_relative(torch.full((count,), reward), torch.zeros(count, dtype=torch.int64), scale=scale)
    assert found.tolist() == [0.0] * count


def test_members_of_a_group_need_not_stand_together():
    apart = group_relative(torch.tensor([1.0, 5, 0, 7]), torch.tensor([0, 1, 0, 1]))
    together = group_relative(torch.tensor([1.0, 0, 5, 7]), torch.tensor([0, 0, 1, 1]))
    assert apart.tolist() == together[[0, 2, 1, 3]].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_whatever_comes_in_float32_comes_out(dtype):
    found = group_relative(torch.tensor([1, 0, 0, 0]).to(dtype), torch.zeros(4, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_nothing_gives_nothing():
    assert group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"rewards \[2, 2\] and groups \[4\]"):
        group_relative(torch.zeros(2, 2), torch.zeros(4))


def test_an_unknown_scale_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="meant 'none'"):
        group_relative(torch.zeros(2), torch.zeros(2), scale="nome")
