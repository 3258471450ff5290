"""What a model predicts as actions of a simulator, and back: statistics, gripper, bounds, in this order.

model's numbers ─▶ robot's units ─▶ those that the simulator takes ─▶ its gripper ─▶ its bounds as -1 and 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf.models.policy.vla.embodiment.grippers import gripper, gripper_to_model, gripper_to_robot
from rlinf.models.policy.vla.embodiment.statistics import Scaling, from_unit, to_unit
from rlinf.models.policy.vla.embodiment.table import Embodiment


class RobotActions:
    """The way from a model's numbers to a simulator's actions, and back.

    Args:
        row: of the model and the simulator.
        scaling: of the model's data; None for a model without statistics, whose -1 and 1 are the simulator's bounds.
        low, high: the simulator's bounds, in its own units; empty for -1 and 1.
        relative: the model predicts so many of an action's first numbers relative to the robot's state.
    """

    def __init__(
        self,
        row: Embodiment,
        scaling: Scaling | None,
        low: Sequence[float] = (),
        high: Sequence[float] = (),
        relative: int = 0,
    ):
        gripper(row.gripper)
        self.row, self.scaling, self.relative = row, scaling, 0 if scaling is None else relative
        self._bounds = (torch.tensor(low), torch.tensor(high)) if low and scaling is not None else None

    def to_simulator(self, numbers: Tensor, state: Tensor | None = None) -> Tensor:
        """The model's numbers as a policy's actions in [-1, 1], [..., A].

        Args:
            numbers: [..., D], or [N, C, D] where actions are relative.
            state: before the chunk, in the robot's units, [N, S]; needed where actions are relative.
        """
        actions = numbers if self.scaling is None else self.scaling.unnormalised(numbers)
        actions = actions + self._start(actions, state) if self.relative else actions
        if self.row.picked is not None:
            actions = actions[..., list(self.row.picked)]
        actions = gripper_to_robot(actions, self.row.gripper)
        return actions.clamp(-1.0, 1.0) if self._bounds is None else to_unit(actions, *self._on(actions))

    def to_model(self, actions: Tensor, state: Tensor | None = None) -> Tensor:
        """The inverse; what the simulator does not take is 0 in the robot's units."""
        actions = actions if self._bounds is None else from_unit(actions, *self._on(actions))
        actions = gripper_to_model(actions, self.row.gripper)
        if self.row.picked is not None:
            whole = actions.new_zeros(*actions.shape[:-1], self.row.action_size)
            whole[..., list(self.row.picked)] = actions
            actions = whole
        actions = actions - self._start(actions, state) if self.relative else actions
        return actions if self.scaling is None else self.scaling.normalised(actions)

    def _start(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """What actions [N, C, D] are relative to, [N, 1, D]: the state, and 0 for the numbers that are absolute."""
        size = min(self.relative, actions.shape[-1])
        if state is None or state.shape[-1] < size:
            had = 0 if state is None else state.shape[-1]
            raise ValueError(f"relative actions start from {size} numbers of the robot's state, and it has {had}")
        return torch.nn.functional.pad(state[:, None, :size].to(actions), (0, actions.shape[-1] - size))

    def _on(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self._bounds or (torch.empty(0),) * 2
        if low.shape[-1] != actions.shape[-1]:
            raise ValueError(
                f"the model has {actions.shape[-1]} numbers in an action, and the simulator takes {low.shape[-1]}: "
                "another embodiment, or another checkpoint?"
            )
        return low.to(actions.device), high.to(actions.device)


def chosen_statistics(
    stats: Mapping[str, Any], row: Embodiment, wanted: str | None, key: str = "policy.settings.statistics"
) -> str | None:
    """Which of a checkpoint's statistics count.

    Args:
        stats: of the checkpoint, by data set.
        row: whose `statistics` are taken where nothing is wanted.
        wanted: name of a data set, with or without `_no_noops` behind it; None to choose.
        key: of the configuration, for errors.

    Returns:
        A key of `stats`; None if there are no statistics.

    Raises:
        ValueError: the one that is wanted is not there, or several, or none, could be meant.
    """
    if not stats and wanted is None:
        return None
    shown = ", ".join(list(stats)[:12]) + (f" and {len(stats) - 12} more" if len(stats) > 12 else "")
    if wanted is not None:
        for name in (wanted, f"{wanted}_no_noops"):
            if name in stats:
                return name
        raise ValueError(f"{key}={wanted!r} is none of the checkpoint's: {shown or 'it has no statistics'}")
    names = [*row.statistics, *(name.removesuffix("_no_noops") for name in row.statistics)]
    found = [name for name in dict.fromkeys(names) if name in stats] or list(stats)
    if len(found) == 1:
        return found[0]
    raise ValueError(f"the checkpoint has statistics of several data sets: set {key} to one of {shown}")
