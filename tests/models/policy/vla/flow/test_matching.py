"""Denoising as a stochastic policy, held against the formulas of the papers written down a second time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.models.policy.vla.flow import (
    METHODS,
    Denoising,
    Field,
    follow,
    mirrored,
    rescore,
    sample,
    sinusoids,
    training_pair,
)


def curved(x, t):
    """A field that is linear in nothing."""
    velocity = torch.sin(2.0 * x) + x.flip(-1) * t[:, None, None] - 0.3
    return Field(velocity, torch.cat([velocity, x], -1))


def learned(features):
    return 0.1 + 0.05 * torch.tanh(features[..., : features.shape[-1] // 2])


def drawn(how, rows=4, horizon=3, width=2, seed=0):
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(rows, horizon, width, generator=random, dtype=torch.float64)
    count = how.steps if how.every else 1
    noise = torch.randn(rows, count, horizon, width, generator=random, dtype=torch.float64)
    drew = torch.randint(how.can_draw, (rows,), generator=random)
    return sample(curved, how, start, noise, drew, learned if how.every else None)


def sde_step(x, v, t, d, a):
    """dx = -(v + s^2 / (2 t) (x + (1 - t) v)) d + s dw backwards in t: the ODE, and the score -noise/t of x_t."""
    s = a * math.sqrt(t / (d if t == 1.0 else 1.0 - t))
    return x - (v + s**2 / (2 * t) * (x + (1 - t) * v)) * d, s * math.sqrt(d)


@pytest.mark.parametrize("step", range(4))
def test_a_step_of_flow_sde_has_the_mean_and_variance_of_the_papers_equation(step):
    how, a, rows = Denoising("flow_sde", 4, 0.5), 0.5, 40_000
    place = torch.tensor([[0.3, -0.7], [1.1, 0.2]], dtype=torch.float64)
    random = torch.Generator().manual_seed(step)
    start = place.expand(rows, 2, 2)
    chain = sample(
        curved, how, start, torch.randn(rows, 1, 2, 2, generator=random, dtype=torch.float64), torch.full((rows,), step)
    )
    before, after = chain.states[:, step], chain.states[:, step + 1]
    assert (before == before[0]).all()  # ODE up to here
    t = 1.0 - step / 4
    mean, std = sde_step(before[0], curved(before[:1], torch.tensor([t])).velocity[0], t, 0.25, a)
    # 5 standard errors of a mean, std / sqrt(n), and of a variance, std^2 sqrt(2 / n)
    assert (after.mean(0) - mean).abs().max() < 5 * std / rows**0.5
    assert (after.var(0) - std**2).abs().max() < 5 * std**2 * (2 / rows) ** 0.5


def test_the_chain_leaves_the_marginals_of_a_gaussian_target_as_they_are():
    """Actions ~ N(m, c^2) make x_t ~ N((1 - t) m, (1 - t)^2 c^2 + t^2), with a velocity that is known and linear.

    It starts from that law at t = 0.8: the SDE's s is infinite at t = 1, where the formula replaces it.
    """
    m, c = 0.7, 0.4

    def velocity(x, t):
        variance = (1 - t) ** 2 * c**2 + t**2
        away = x - (1 - t) * m
        return away * t / variance - (m + away * (1 - t) * c**2 / variance)  # E[noise - actions | x]

    def error(steps, a):
        how, mean, variance, worst = Denoising("flow_sde", steps, a), 0.2 * m, (0.2 * c) ** 2 + 0.8**2, 0.0
        for number in range(steps // 5, steps):
            t = 1.0 - number / steps
            ends = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]  # a step is linear: two points say all
            step = torch.full((2,), number)
            found, std = how.move(ends, velocity(ends, t), step, torch.ones(2, dtype=torch.bool))
            slope = float(found[1] - found[0])
            mean, variance = slope * mean + float(found[0]), slope**2 * variance + float(std[0]) ** 2
            t -= 1.0 / steps
            worst = max(worst, abs(mean - (1 - t) * m), abs(variance - ((1 - t) ** 2 * c**2 + t**2)))
        return worst

    for a in (0.2, 0.5, 1.0):
        coarse, fine = error(200, a), error(400, a)
        assert fine < 0.005
        assert 1.9 < coarse / fine < 2.1  # Euler: the error goes with the step


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_without_noise_the_chain_is_the_ode(method):
    chain = drawn(Denoising(method, 5, 1e-7))
    torch.testing.assert_close(chain.states[:, -1], follow(curved, 5, chain.states[:, 0]), rtol=0, atol=1e-5)
    likeliest = sample(curved, Denoising(method, 5, 0.7), *(torch.zeros(2, 3, 2), torch.zeros(2, 1, 3, 2)),
                       torch.zeros(2, dtype=torch.int64))  # fmt: skip
    if method == "flow_sde":  # from 0 the first step's mean is that of the ODE, since it predicts no noise there
        torch.testing.assert_close(likeliest.states[:, -1], follow(curved, 5, torch.zeros(2, 3, 2)))


def test_flow_cps_keeps_the_noise_level_of_its_predictions():
    how, a = Denoising("flow_cps", 4, 0.6), 0.6
    x, v = torch.tensor([[[0.4]]]), torch.tensor([[[-1.2]]])
    for number in range(4):
        t, after = 1 - number / 4, 1 - (number + 1) / 4
        mean, std = how.move(x, v, torch.tensor([number]), torch.tensor([True]))
        kept = after * math.cos(a * math.pi / 2)
        expected = (1 - after) * (0.4 + 1.2 * t) + kept * (0.4 - 1.2 * (1 - t))
        assert float(mean) == pytest.approx(expected, abs=1e-6)
        assert kept**2 + float(std) ** 2 == pytest.approx(after**2, abs=1e-6)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.sampled_from(METHODS), st.integers(2, 6), st.floats(0.1, 0.9), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 4), st.integers(0, 99),
)  # fmt: skip
def test_a_chain_scored_again_is_as_likely_as_it_was_and_as_normal_distributions_say(
    method, steps, a, rows, horizon, width, seed
):
    how = Denoising(method, steps, a)
    chain = drawn(how, rows, horizon, width, seed)
    again = rescore(curved, how, chain.states, chain.drew, learned if how.every else None)
    for name in ("logprobs", "entropy", "features"):
        torch.testing.assert_close(getattr(again, name), getattr(chain, name))
    assert chain.states.shape == (rows, steps + 1, horizon, width)
    for row in range(rows):
        terms = [(-0.5 * (chain.states[row, 0] ** 2 + math.log(2 * math.pi)), None)]
        for number in range(steps) if how.every else [int(chain.drew[row])]:
            t, d = 1 - number / steps, 1 / steps
            x = chain.states[row : row + 1, number]
            field = curved(x, torch.tensor([t]))
            mean, std = x - field.velocity * d, torch.as_tensor(1.0)
            if method == "flow_noise":
                std = learned(field.features)
            elif method == "flow_sde":
                mean, std = sde_step(x, field.velocity, t, d, a)
            else:
                angle = a * math.pi / 2
                mean = mean - (t - d) * (1 - math.cos(angle)) * (x + field.velocity * (1 - t))
                std = (t - d) * math.sin(angle)
            law = torch.distributions.Normal(mean[0], torch.as_tensor(std).expand_as(mean)[0])
            terms.append((law.log_prob(chain.states[row, number + 1]), law.entropy()))
        found = [each[0] for each in terms] if how.every else [terms[1][0]]
        torch.testing.assert_close(
            chain.logprobs[row], sum(found) / len(found), rtol=1e-4, atol=1e-4, check_dtype=False
        )
        if not how.every:
            torch.testing.assert_close(chain.entropy[row], terms[1][1], rtol=1e-4, atol=1e-4, check_dtype=False)


def test_groots_time_is_the_same_chain_seen_from_the_other_end():
    """The same equations with t = 0 for noise: s = a sqrt((1 - t) / t), weights 1 - (t + d) - s^2 d / (2 (1 - t))."""
    how, a, d = Denoising("flow_sde", 4, 0.5), 0.5, 0.25

    def theirs(x, t):
        return Field(torch.cos(x) * (1 + t[:, None, None]), x)

    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(1, 3, 2)
    for number in range(4):
        t, step = number / 4, torch.tensor([number])
        v = theirs(x, torch.tensor([t])).velocity
        s = a * math.sqrt((1 - t) / (t if t else d))
        noise, actions = x - v * t, x + v * (1 - t)
        mean = (1 - (t + d) - s**2 * d / (2 * (1 - t))) * noise + (t + d) * actions
        ours, std = how.move(x, mirrored(theirs)(x, how.time(step)).velocity, step, torch.tensor([True]))
        torch.testing.assert_close(ours, mean)
        assert float(std) == pytest.approx(s * math.sqrt(d), rel=1e-6)


def test_only_the_chosen_step_draws_and_every_row_has_its_own():
    how = Denoising("flow_sde", 3, 0.5)
    start = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    chain = sample(curved, how, start, torch.ones(3, 1, 2, 2), torch.arange(3))
    for row in range(3):
        for step in range(3):
            x = chain.states[row : row + 1, step]
            ode = x - curved(x, how.time(torch.tensor([step]))).velocity / 3
            assert torch.allclose(chain.states[row : row + 1, step + 1], ode, atol=1e-5) == (step != row)


def test_training_pairs_lie_between_and_their_times_have_the_published_density():
    actions, noise = torch.randn(2, 1000, 2, 3, generator=torch.Generator().manual_seed(2)).unbind(0)
    uniform = (torch.arange(1000) + 0.5) / 1000
    x, t, v = training_pair(actions, noise, uniform)
    torch.testing.assert_close(x - t[:, None, None] * v, actions, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x + (1 - t[:, None, None]) * v, noise, rtol=1e-5, atol=1e-5)
    b = (t.double() - 0.001) / 0.999
    # Beta(1.5, 1): mean 3/5, variance 12/175; a midpoint rule of 1000 points is good to 1e-4
    assert float(b.mean()) == pytest.approx(0.6, abs=1e-4)
    assert float(b.var(correction=0)) == pytest.approx(12 / 175, abs=1e-4)


def test_times_become_waves_of_the_published_periods():
    found = sinusoids(torch.tensor([0.0, 0.25]), 4, 4e-3, 4.0)
    assert found[0].tolist() == [0, 0, 1, 1]
    assert found[1, 1].item() == pytest.approx(math.sin(2 * math.pi * 0.25 / 4), abs=1e-6)
    assert found[1, 2].item() == pytest.approx(math.cos(2 * math.pi * 0.25 / 4e-3), abs=1e-3)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (("sde", 4, 0.5), r"method='sde'.*flow_sde, flow_cps, flow_noise"),
        (("flow_cps", 1, 0.5), r"steps=1.*least 2.*flow_cps"),
        (("flow_sde", 0, 0.5), r"steps=0.*least 1"),
        (("flow_sde", 4, 0.0), r"noise_level=0.0.*more.*0"),
        (("flow_cps", 4, 1.5), r"noise_level=1.5.*most 1"),
    ],
)
def test_impossible_chains_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        Denoising(*made)


def test_times_keep_their_last_decimals_at_the_shortest_period():
    t = torch.tensor([1.0, 0.999, 0.75, 0.001])
    found = sinusoids(t, 1024, 4e-3, 4.0)
    periods = 4e-3 * (4.0 / 4e-3) ** (np.arange(512) / 511)
    angles = t.numpy().astype(np.float64)[:, None] * 2 * np.pi / periods
    np.testing.assert_allclose(found.numpy(), np.concatenate([np.sin(angles), np.cos(angles)], 1), atol=1e-6)
