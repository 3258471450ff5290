"""ResNets (arXiv:1512.03385), under the names of torchvision: how policies of LeRobot look at pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

BACKBONES: Mapping[str, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Blocks of each layer of the ResNets that there are here."""


class FrozenNorm(nn.Module):
    """A batch norm whose statistics, scale and shift stay as they are; they are buffers."""

    def __init__(self, width: int):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Normed [N, width, h, w], in the dtype of `x`; 1e-5 is torchvision's."""
        buffers: dict[str, Any] = self._buffers
        scale = buffers["weight"] * (buffers["running_var"] + 1e-5).rsqrt()
        shift = buffers["bias"] - buffers["running_mean"] * scale
        return x * scale.to(x.dtype)[:, None, None] + shift.to(x.dtype)[:, None, None]


def _convolution(inputs: int, outputs: int, side: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


Norm: TypeAlias = Callable[[int], nn.Module]
"""Makes a norm of so many channels."""


def group_norm(width: int) -> nn.GroupNorm:
    """A norm over groups of 16 channels."""
    return nn.GroupNorm(width // 16, width)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, outputs, 3, stride), norm(outputs)
        self.conv2, self.bn2 = _convolution(outputs, outputs, 3, 1), norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[N, outputs, h / stride, w / stride] of [N, inputs, h, w]."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Pictures to maps a 32nd of their size.

    Args:
        blocks: of each layer.
        norm: behind each convolution.
    """

    width = 512

    def __init__(self, blocks: tuple[int, ...], norm: Norm = FrozenNorm):
        super().__init__()
        self.conv1, self.bn1 = _convolution(3, 64, 7, 2), norm(64)
        inputs = 64
        for number, count in enumerate(blocks):
            outputs, stride = 64 * 2**number, 1 if number == 0 else 2
            first = Block(inputs, outputs, stride, norm)
            layer = nn.Sequential(first, *(Block(outputs, outputs, 1, norm) for _ in range(count - 1)))
            self.add_module(f"layer{number + 1}", layer)
            inputs = outputs

    def forward(self, pictures: Tensor) -> Tensor:
        """[N, 512, h / 32, w / 32] of [N, 3, h, w]."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(pictures))), 3, 2, 1)
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return x
