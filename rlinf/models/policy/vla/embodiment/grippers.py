"""What a model says of its gripper, in the words of a simulator: which number opens, which closes.

One function each way per convention: `to_robot` for actions that a model chose, `to_model` for demonstrated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gripper:
    """One convention, for the last number of an action."""

    to_robot: Callable[[Tensor], Tensor]
    """The model's number, in its data's units, as the simulator takes it."""
    to_model: Callable[[Tensor], Tensor]
    """The simulator's number as the model's data have it."""


GRIPPERS = {
    "same": Gripper(lambda g: g, lambda a: a),
    # the data say 0 closed, 1 open; robosuite opens at -1 and closes at 1. GR00T's are the same
    "libero": Gripper(lambda g: -torch.sign(2 * g - 1), lambda a: (1 - a) / 2),
    # the same data; the WidowX of PutOnPlate opens at 1
    "maniskill": Gripper(lambda g: torch.where(g > 0.5, 1.0, -1.0), lambda a: (a + 1) / 2),
    # the data have -1 and 1 already; CALVIN takes nothing between
    "sign": Gripper(torch.sign, lambda a: a),
}
"""By name, as `table.py` names them."""


def gripper_to_robot(actions: Tensor, name: str) -> Tensor:
    """Actions [..., A] with their last number as the simulator takes it.

    Raises:
        ValueError: there is no such convention.
    """
    return torch.cat([actions[..., :-1], gripper(name).to_robot(actions[..., -1:])], -1)


def gripper_to_model(actions: Tensor, name: str) -> Tensor:
    """The inverse of `gripper_to_robot`, for demonstrated actions that open or close."""
    return torch.cat([actions[..., :-1], gripper(name).to_model(actions[..., -1:])], -1)


def gripper(name: str) -> Gripper:
    """A convention by its name.

    Raises:
        ValueError: there is none.
    """
    if name not in GRIPPERS:
        raise ValueError(f"gripper={name!r} must be one of {', '.join(GRIPPERS)}")
    return GRIPPERS[name]
