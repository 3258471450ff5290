"""Steps of denoising, on a distribution whose velocity is known."""

import pytest
import torch
from torch.distributions import Normal

from rlinf.models.policy.vla.flow_matching import noisy_step, sde_step, step_logprob

MEAN, STD = 0.7, 0.3


def velocity(x, t):
    """E[A - e | A_t] where A ~ N(MEAN, STD^2): the regression of one normal number on another."""
    slope = (t * STD**2 - (1 - t)) / (t**2 * STD**2 + (1 - t) ** 2)
    return MEAN + slope * (x - t * MEAN)


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.8])
def test_a_walk_with_noise_ends_where_the_walk_without_ends(noise):
    random = torch.Generator().manual_seed(0)
    x, steps = torch.randn(20_000, generator=random), 200
    for number in range(steps):
        time = number / steps
        mean, std = sde_step(x, velocity(x, time), time, 1 / steps, noise)
        x = mean + std * torch.randn(len(x), generator=random)
        if number + 1 == steps // 2:  # A_t in between is distributed alike too
            assert abs(x.std() - (0.25 * STD**2 + 0.25) ** 0.5) < 0.02
            assert abs(x.mean() - 0.5 * MEAN) < 0.02
    assert abs(x.mean() - MEAN) < 0.02
    assert abs(x.std() - STD) < 0.02


def test_the_log_prob_of_a_step_is_that_of_a_normal_distribution():
    chain, after, moved = torch.randn(3, 4, 2, 5).unbind()
    for mean, std in (noisy_step(chain, moved, torch.tensor(0.2), 0.25), sde_step(chain, moved, 0.5, 0.25, 0.5)):
        torch.testing.assert_close(step_logprob(after, mean, std), Normal(mean, std).log_prob(after))


def test_the_first_step_has_a_noise_and_there_is_none_behind_the_last():
    _, std = sde_step(torch.zeros(1), torch.zeros(1), 0.0, 0.25, 0.5)
    assert std.item() == pytest.approx(0.5)  # 0.5 sqrt(1 / 0.25) sqrt(0.25)
    with pytest.raises(ValueError, match=r"time=1\.0"):
        sde_step(torch.zeros(1), torch.zeros(1), 1.0, 0.25, 0.5)
