"""Layers that policies share: perceptrons with orthogonal first weights, and buffers that keep their precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

GAIN = math.sqrt(2.0)
"""Of hidden layers (Saxe et al., arXiv:1312.6120; usual in PPO, arXiv:2005.12729 section 3)."""


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
