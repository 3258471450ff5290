"""Critics of actions: an ensemble of perceptrons computed side by side, and one that looks at pictures first.

In: observations with a chunk of actions, N rows. Out: what each of M critics expects, [M, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.base import Stored
from rlinf.models.policy.layers import GAIN, Exact, linear, orthogonal

_MOMENTUM = 0.99  # of running statistics, as CrossQ has it: they follow within some hundred steps
_EPSILON = 1e-3
_FREE_STEPS = 1000  # batches normalised by their own statistics alone, until the running ones mean something
_MOST_RATIO, _MOST_SHIFT = 3.0, 5.0  # of batch renormalisation, arXiv:1702.03275 section 4


class BatchRenorm(Exact):
    """Batch renormalisation of every member of an ensemble by itself (arXiv:1702.03275, algorithm 1).

        training:  y = scale * ((x - mean_B) / std_B * r + d) + offset      r = std_B / std, d = (mean_B - mean) / std,
                                                                            both cut off and without gradient
        else:      y = scale * (x - mean) / std + offset

    Args:
        count: members, M.
        width: of a row.
    """

    mean: Tensor
    """Running mean, float32 [M, 1, width]."""
    variance: Tensor
    """Running variance, float32 [M, 1, width]."""
    batches: Tensor
    """Batches seen, int64 []."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(count, 1, width))
        self.offset = nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("variance", torch.ones(count, 1, width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        """Normalise rows, float32 [M, N, width]; running statistics change only in training."""
        if not training:
            normal = (x - self.mean) * torch.rsqrt(self.variance + _EPSILON)
            return torch.addcmul(self.offset, normal, self.scale)
        variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        normal = (x - mean) * torch.rsqrt(variance + _EPSILON)
        with torch.no_grad():
            free = (self.batches < _FREE_STEPS).to(x.dtype)
            inverse = torch.rsqrt(self.variance + _EPSILON)
            ratio = (torch.sqrt(variance + _EPSILON) * inverse).clamp(1.0 / _MOST_RATIO, _MOST_RATIO)
            shift = ((mean - self.mean) * inverse).clamp(-_MOST_SHIFT, _MOST_SHIFT)
            ratio, shift = torch.lerp(ratio, torch.ones_like(ratio), free), shift * (1.0 - free)
            self.mean.lerp_(mean, 1.0 - _MOMENTUM)
            self.variance.lerp_(variance, 1.0 - _MOMENTUM)
            self.batches += 1
        return torch.addcmul(self.offset, torch.addcmul(shift, normal, ratio), self.scale)


class Ensemble(nn.Module):
    """Perceptrons of one shape with weights of their own, computed in one multiplication per layer.

    Args:
        count: how many, M.
        inputs: width of what they look at, the same for all.
        hidden: widths of the hidden layers, each followed by ReLU.
        layer_norm: normalise hidden layers before it, without a learned scale.
        batch_norm: normalise by batch renormalisation what comes in, and hidden layers after ReLU (CrossQ,
            arXiv:1902.05605).
    """

    def __init__(
        self, count: int, inputs: int, hidden: Sequence[int], *, layer_norm: bool = False, batch_norm: bool = False
    ):
        super().__init__()
        self._layer_norm = layer_norm
        widths = [inputs, *hidden, 1]
        self.weights, self.offsets = nn.ParameterList(), nn.ParameterList()
        for number, (width, following) in enumerate(pairwise(widths)):
            gain = GAIN if number < len(hidden) else 1.0
            layers = [linear(width, following, gain) for _ in range(count)]
            self.weights.append(torch.stack([layer.weight.detach().T for layer in layers]))
            self.offsets.append(torch.zeros(count, 1, following))
        self.norms = nn.ModuleList([BatchRenorm(count, width) for width in widths[:-1]] if batch_norm else [])

    def forward(self, x: Tensor, *, training: bool = False) -> Tensor:
        """What each says of each row.

        Args:
            x: float32 [N, inputs].
            training: normalise by the statistics of this batch, and let the running ones follow; only matters with
                `batch_norm`.

        Returns:
            float32 [M, N].
        """
        found = x.expand(len(self.weights[0]), *x.shape)
        last = len(self.weights) - 1
        for number, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            if self.norms:
                found = self.norms[number](found, training=training)
            found = torch.baddbmm(offset, found, weight)
            if number < last:
                found = functional.layer_norm(found, found.shape[-1:]) if self._layer_norm else found
                found = functional.relu(found)
        return found[..., 0]


class Convolutions(nn.Module):
    """What pictures show: convolutions of 3 x 3 that halve height and width each.

    Args:
        image: height, width and channels of pictures.
        channels: of each convolution.

    Attributes:
        size: numbers that a picture becomes.
    """

    def __init__(self, image: tuple[int, int, int], channels: Sequence[int]):
        super().__init__()
        height, width, seen = image
        layers: list[nn.Module] = []
        for made in channels:
            layers += [orthogonal(nn.Conv2d(seen, made, kernel_size=3, stride=2, padding=1)), nn.ReLU()]
            seen, height, width = made, -(-height // 2), -(-width // 2)
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.size = seen * height * width

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, channels] to float32 [N, size]."""
        found: Tensor = self.layers(pictures.movedim(-1, 1).float() / 255.0 - 0.5)
        return found


class Trunk(nn.Sequential):
    """Brings what pictures show down to a few numbers between -1 and 1 (SAC-AE and DrQ, arXiv:2004.13649)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(linear(inputs, outputs, 1.0), nn.LayerNorm(outputs), nn.Tanh())


class PictureCritics(nn.Module):
    """An ensemble that looks at pictures by way of convolutions of its own, which it trains.

    Args:
        eyes: the convolutions.
        features: numbers that a picture comes down to.
        ensemble: looks at these, the state and the actions.
    """

    def __init__(self, eyes: Convolutions, features: int, ensemble: Ensemble):
        super().__init__()
        self.eyes, self.trunk, self.ensemble = eyes, Trunk(eyes.size, features), ensemble

    def forward(self, judged: Stored, *, training: bool = False) -> Tensor:
        """What each says of each row, float32 [M, N].

        Args:
            judged: "rgb", uint8 [N, H, W, 3 k], and "rest", float32 [N, ...], state and actions.
            training: see `Ensemble.forward`.
        """
        shown = self.trunk(self.eyes(judged["rgb"]))
        found: Tensor = self.ensemble(torch.cat([shown, judged["rest"]], 1), training=training)
        return found
