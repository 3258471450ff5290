"""Numbers of a robot, actions and states, between the robot's units and the scale that a model learned.

In: statistics as checkpoints store them (`rlinf.data.demonstrations` computes them). Out: linear maps in both
directions. A model that has more places than the robot has numbers pads: what stands behind the statistics passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Scale = Literal["q01_q99", "mean_std", "min_max"]
"""What becomes -1 and 1: the first and last percentile, or least and greatest; or mean 0 and deviation 1."""
_BOUNDS: Mapping[str, tuple[str, str]] = {"q01_q99": ("q01", "q99"), "min_max": ("min", "max")}


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A linear map of D numbers: normalised = (x - centre) / half."""

    centre: Tensor
    """What becomes 0, float64 [D]."""
    half: Tensor
    """Distance from it that becomes 1, float64 [D]; 0 where a number never changes, which normalises to 0."""

    @classmethod
    def of(cls, statistics: Mapping[str, Any], scale: Scale, epsilon: float = 0.0) -> Scaling:
        """The map that statistics give.

            q01_q99, min_max    normalised = 2 (x - low) / (high - low + epsilon) - 1
            mean_std            normalised = (x - mean) / (std + epsilon)

        Args:
            statistics: lists of D numbers by name, such as "q01"; "mask", if there, says which are scaled at all.
            scale: which of them.
            epsilon: added to the width, as the checkpoint's authors do: 1e-8 OpenVLA-OFT, 1e-6 openpi.

        Raises:
            ValueError: the statistics lack what the scale needs, or lengths differ.
        """
        needed = _BOUNDS.get(scale, ("mean", "std"))
        if missing := [name for name in needed if statistics.get(name) is None]:
            raise ValueError(f"statistics lack {' and '.join(missing)}, which {scale} needs: they have {[*statistics]}")
        first, second = (torch.as_tensor(statistics[name], dtype=torch.float64) for name in needed)
        mask = torch.ones_like(first, dtype=torch.bool)
        if statistics.get("mask") is not None:
            mask = torch.as_tensor(statistics["mask"], dtype=torch.bool)
        if not first.shape == second.shape == mask.shape or first.ndim != 1:
            raise ValueError(
                f"statistics of {len(first)} numbers have {len(second)} {needed[1]} and a mask of {len(mask)}"
            )
        _check_spread(statistics, scale, first, second, mask)
        if scale == "mean_std":
            centre, half = first, second + epsilon
        else:
            half = (second - first + epsilon) / 2
            centre = first + half
        return cls(torch.where(mask, centre, 0.0), torch.where(mask, half, 1.0))

    def normalised(self, x: Tensor) -> Tensor:
        """Numbers in the robot's units, [..., P] with P >= D, on the model's scale; float32."""
        scaled = (x[..., : self._size(x)].double() - self.centre.to(x.device)) / self.half.to(x.device)
        scaled = torch.where(self.half.to(x.device) != 0, scaled, 0.0)
        return torch.cat([scaled.float(), x[..., len(self.centre) :].float()], -1)

    def unnormalised(self, x: Tensor) -> Tensor:
        """The inverse of `normalised`."""
        units = x[..., : self._size(x)].double() * self.half.to(x.device) + self.centre.to(x.device)
        return torch.cat([units.float(), x[..., len(self.centre) :].float()], -1)

    def _size(self, x: Tensor) -> int:
        if x.shape[-1] < len(self.centre):
            raise ValueError(
                f"there are statistics of {len(self.centre)} numbers, but only {x.shape[-1]} numbers: of another robot?"
            )
        return len(self.centre)


def _check_spread(statistics: Mapping[str, Any], scale: Scale, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Refuse bounds that leave no number any room though some move; tell of single numbers that have none.

    Raises:
        ValueError: low equals high in every number, and the standard deviation is above 0 or unknown.
    """
    if scale == "mean_std" or low.is_meta or not mask.any():  # on meta a policy is only measured
        return
    std = statistics.get("std")
    moves = torch.as_tensor(std, dtype=torch.float64) > 0 if std is not None and len(std) == len(low) else None
    narrow = (low == high) & mask
    if bool((narrow == mask).all()) and (moves is None or bool(moves[mask].any())):
        raise ValueError(
            f"statistics: {scale} leave no number any room (low equals high in all {len(low)}), though they move"
        )
    if moves is not None and (places := (narrow & moves).nonzero().flatten().tolist()):
        logger.warning(
            "statistics: number %s moves, but its %s are one value, so that it is scaled by millions; compute them "
            "anew with `rlinf convert DATA TO --statistics`",
            ", ".join(map(str, places)), scale.replace("_", " and "),
        )  # fmt: skip


def padded(x: Tensor, size: int) -> Tensor:
    """Numbers [..., D] with zeros behind them, [..., size].

    Raises:
        ValueError: there are more than that.
    """
    if x.shape[-1] > size:
        raise ValueError(f"{x.shape[-1]} numbers do not fit into the {size} that the model takes")
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def to_unit(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Actions in the robot's units as policies emit them: the simulator's bounds become -1 and 1.

    The inverse of the environment's own scaling, and cut to the bounds as that is. A number without bounds passes.

    Args:
        actions: float32 [..., A].
        low, high: bounds, float32 [A]; infinite where there are none.
    """
    bounded = torch.isfinite(low) & torch.isfinite(high)
    middle, half = _middle(low, high, bounded)
    return torch.where(bounded, ((actions - middle) / half).clamp(-1.0, 1.0), actions)


def from_unit(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The inverse of `to_unit`: the robot's units of actions in [-1, 1]."""
    bounded = torch.isfinite(low) & torch.isfinite(high)
    middle, half = _middle(low, high, bounded)
    return torch.where(bounded, middle + half * actions.clamp(-1.0, 1.0), actions)


def _middle(low: Tensor, high: Tensor, bounded: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.where(bounded, low, -1.0), torch.where(bounded, high, 1.0)
    half = (high - low) / 2
    return (low + high) / 2, torch.where(half > 0, half, 1.0)
