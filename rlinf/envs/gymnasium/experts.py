"""Scripts that solve tasks of gymnasium: what records demonstrations, and answers to DAgger.

Each takes observations of N environments and gives actions in [-1, 1], float32 [N, 1, A].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_GRAVITY, _TORQUE = 10.0, 2.0  # of Pendulum-v1


def pendulum(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Pendulum-v1: pumps energy in until the pendulum could just stand, and balances it there.

    Energy above that of standing is speed^2 / 6 - g / 2 (1 - cos angle), for a rod of mass and length 1.
    """
    cosine, sine, speed = observation["state"].unbind(1)
    excess = speed.square() / 6.0 - _GRAVITY / 2.0 * (1.0 - cosine)
    pumped = -2.0 * excess * torch.where(speed >= 0.0, 1.0, -1.0)
    angle = torch.atan2(sine, cosine)
    balanced = -(10.0 * angle + 2.0 * speed)
    torque = torch.where(cosine > 0.9, balanced, pumped)
    return (torque / _TORQUE).clamp(-1.0, 1.0)[:, None, None]


def mountain_car(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """MountainCarContinuous-v0: pushes the way that the car rolls already."""
    return torch.where(observation["state"][:, 1:2] >= 0.0, 1.0, -1.0)[:, None]
