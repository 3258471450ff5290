"""One step of denoising as a draw with a log-prob: the seat of flow-matching policies (pi-RL, arXiv:2510.25889).

Such a policy starts from noise A_0 ~ N(0, 1) and walks with a velocity v, in K steps of d = 1 / K, to its actions A_1:

    A_t = t A + (1 - t) e        v(A_t, t) = E[A - e | A_t]        A_{t+d} = A_t + v d

Walked so, only the first noise is drawn, and no action has a log-prob. Both remedies make every step a normal
distribution, so that the log-prob of a chain is a sum over its steps. No policy here uses them yet.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


def noisy_step(chain: Tensor, velocity: Tensor, std: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Flow-Noise: the step of the walk, with a learned noise on top. N(A + v d, std^2)

    Args:
        chain: A_t, [..., C, A].
        velocity: v, same shape.
        std: of the noise, broadcastable; a network's, which is left out when the policy is used.
        step: d.

    Returns:
        Mean and standard deviation of A_{t+d}.
    """
    return chain + velocity * step, std.expand_as(chain)


def sde_step(chain: Tensor, velocity: Tensor, time: float, step: float, noise: float) -> tuple[Tensor, Tensor]:
    """Flow-SDE: a walk with noise whose every A_t is distributed as that of the walk without.

        N(A + [v - s^2 / (2 (1 - t)) (A - t v)] d, s^2 d)        s = noise sqrt((1 - t) / max(t, d))

    By the equation of Fokker and Planck a noise s needs the drift v + s^2 / 2 times the score; the score of A_t is
    -E[e | A_t] / (1 - t), and E[e | A_t] = A - t v. (The paper counts t from the actions to the noise.)

    Args:
        chain: A_t, [..., C, A].
        velocity: v, same shape.
        time: t, from 0 to below 1.
        step: d.
        noise: scale of the noise, 0.2 to 0.8 in the paper; at 0 it is the walk without.

    Returns:
        Mean and standard deviation of A_{t+d}, each in the shape of `chain`.

    Raises:
        ValueError: time or step is out of range.
    """
    if not (0.0 <= time < 1.0 and 0.0 < step <= 1.0):
        raise ValueError(f"sde_step: time={time} must be from 0 to below 1, and step={step} above 0 and at most 1")
    variance = noise**2 * (1.0 - time) / max(time, step)
    drift = velocity - variance / (2.0 * (1.0 - time)) * (chain - time * velocity)
    return chain + drift * step, torch.full_like(chain, math.sqrt(variance * step))


def step_logprob(after: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-prob of where a step led, nats, number by number: log N(after; mean, std^2)."""
    return -0.5 * ((after - mean) / std).square() - std.log() - _HALF_LOG_TAU
