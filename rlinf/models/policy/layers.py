"""Layers that policies share: perceptrons with orthogonal first weights, and the running scale of states.

Statistics of the scale are buffers, so they are saved and published with the weights. They change in `update` alone,
never by being used: within an update of the weights they stand still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

GAIN = math.sqrt(2.0)
"""Of hidden layers (Saxe et al., arXiv:1312.6120; usual in PPO, arXiv:2005.12729 section 3)."""

_LEAST_VARIANCE = 1e-8  # a number that never varies is centred, and divided by 1e-4 at the most


def linear(inputs: int, outputs: int, gain: float = GAIN) -> nn.Linear:
    """A layer with orthogonal weights of that gain, and no offset."""
    return orthogonal(nn.Linear(inputs, outputs), gain)


def orthogonal(layer: Layer, gain: float = GAIN) -> Layer:
    """The layer, started with orthogonal weights of that gain, and no offset."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def perceptron(
    inputs: int, hidden: Sequence[int], outputs: int | None, *, gain: float, activation: Callable[[], nn.Module]
) -> nn.Sequential:
    """Layers of `hidden` units, each followed by the activation.

    Args:
        inputs: width of what comes in.
        hidden: widths of the hidden layers.
        outputs: width of a last layer without activation; None for none.
        gain: of the last layer's first weights; 0 starts it as the constant 0.
        activation: makes one.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width), activation()]
        inputs = width
    if outputs is not None:
        layers.append(linear(inputs, outputs, gain))
    return nn.Sequential(*layers)


class Exact(nn.Module):
    """A module whose buffers keep their dtype when the model around it is computed in another one."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # what `to`, `half`, `cuda` call
        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)


class RunningNorm(Exact):
    """(x - mean) / sqrt(max(variance, 1e-8)), cut off at +-limit. Before the first update: x, cut off.

    Args:
        size: numbers in a row.
        limit: what the result is cut off at; a constant that jumps for the first time would else be enormous.
    """

    count: Tensor
    """Rows seen, float64 []."""
    mean: Tensor
    """Of each number, float64 [size]."""
    squares: Tensor
    """Sum of squared distances from the mean, float64 [size]."""

    def __init__(self, size: int, limit: float = 10.0):
        super().__init__()
        self.limit = limit
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows, float32 [N, size]."""
        scale = self.variance.clamp(min=_LEAST_VARIANCE).rsqrt()
        return ((x - self.mean.to(x.dtype)) * scale.to(x.dtype)).clamp(-self.limit, self.limit)

    @property
    def variance(self) -> Tensor:
        """Of each number, float64 [size]; 1 before the first update."""
        return torch.where(self.count > 0, self.squares / self.count.clamp(min=1.0), 1.0)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take more rows in (Chan, Golub and LeVeque, 1979: sums about the old mean, moved to the new one).

        Args:
            x: [N, size].
            mask: which rows count, bool [N]; None for all.
            reduce: adds a float64 tensor of sums up over ranks; None if this is all. Ranks that hold the same
                statistics before hold the same ones after.
        """
        rows = (x if mask is None else x[mask.bool()]).double() - self.mean
        sums = torch.cat([rows.new_tensor([len(rows)]), rows.sum(0), rows.square().sum(0)])
        sums = sums if reduce is None else reduce(sums)
        count, total, squares = sums[0], *sums[1:].chunk(2)
        if count == 0:
            return
        # Old rows have sum 0 about the old mean; so do all together about the new one, `shift` further on.
        everything = self.count + count
        shift = total / everything
        self.squares += squares - everything * shift.square()
        self.squares.clamp_(min=0.0)  # rounding
        self.mean += shift
        self.count.copy_(everything)
