"""The network of Diffusion Policy (arXiv:2303.04137), under the names of LeRobot's checkpoints.

    pictures ─▶ ResNet ─▶ key points: where each map is largest ─▶ numbers ─┐
    states ─────────────────────────────────────────────────────────────────┴─▶ condition
    noisy actions [H, A] ─▶ U-Net along time, each block moved by condition and step ─▶ noise, or actions

Norms are over groups of channels, so that a row depends on no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.resnet import BACKBONES, ResNet, group_norm

SIZES: Mapping[str, Any] = {
    "n_obs_steps": 2,
    "horizon": 16,
    "vision_backbone": "resnet18",
    "resize_shape": None,
    "crop_shape": None,
    "crop_is_random": True,
    "spatial_softmax_num_keypoints": 32,
    "use_separate_rgb_encoder_per_camera": False,
    "down_dims": [512, 1024, 2048],
    "kernel_size": 5,
    "n_groups": 8,
    "diffusion_step_embed_dim": 128,
    "use_film_scale_modulation": True,
}
"""LeRobot's defaults."""
_LAST_GROUPS = 8
"""Groups of the last norm, whatever `n_groups` says, as in LeRobot."""


class KeyPoints(nn.Module):
    """The mean place of each of some maps under its softmax, x and y from -1 to 1 (arXiv:1509.06113).

    Args:
        width: channels that come in.
        points: maps that are made of them, K.
        height, breadth: of the maps.
    """

    pos_grid: Tensor

    def __init__(self, width: int, points: int, height: int, breadth: int):
        super().__init__()
        self.nets = nn.Conv2d(width, points, 1)
        rows, columns = (torch.linspace(-1.0, 1.0, count, dtype=torch.float64) for count in (height, breadth))
        places = torch.stack([columns.repeat(height), rows.repeat_interleave(breadth)], 1)
        self.register_buffer("pos_grid", places.float())

    def forward(self, maps: Tensor) -> Tensor:
        """[M, 2 K] of [M, width, height, breadth]."""
        shares = self.nets(maps).flatten(2).float().softmax(-1)
        return (shares @ self.pos_grid.float()).flatten(1).to(maps.dtype)


class PictureEncoder(nn.Module):
    """Pictures to numbers.

    Args:
        sizes: as `SIZES`.
        side: height and width of the pictures.
    """

    def __init__(self, sizes: Mapping[str, Any], side: tuple[int, int]):
        super().__init__()
        whole = ResNet(BACKBONES[sizes["vision_backbone"]], group_norm)
        layers = [whole.conv1, whole.bn1, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        self.backbone = nn.Sequential(*layers, *(getattr(whole, f"layer{number}") for number in range(1, 5)))
        self._resize, self._crop = sizes["resize_shape"], sizes["crop_shape"]
        height, width = (math.ceil(length / 32) for length in self._crop or self._resize or side)
        self.width = 2 * sizes["spatial_softmax_num_keypoints"]
        self.pool = KeyPoints(whole.width, sizes["spatial_softmax_num_keypoints"], height, width)
        self.out = nn.Linear(self.width, self.width)

    def forward(self, pictures: Tensor, places: Tensor | None = None) -> Tensor:
        """[M, width] of normalised pictures [M, 3, h, w].

        Args:
            pictures: as they come; here they are resized, then cropped.
            places: where crops begin, as shares of the room for them, down and to the right, [M, 2]; None: the middle.
        """
        if self._resize is not None:
            pictures = functional.interpolate(
                pictures, tuple(self._resize), mode="bilinear", antialias=True, align_corners=False
            )
        if self._crop is not None:
            pictures = _cropped(pictures, self._crop, places)
        numbers: Tensor = functional.relu(self.out(self.pool(self.backbone(pictures.to(self.out.weight.dtype)))))
        return numbers


def _cropped(pictures: Tensor, size: Sequence[int], places: Tensor | None) -> Tensor:
    room = [have - want for have, want in zip(pictures.shape[-2:], size, strict=True)]
    if places is None:
        row, column = (round(each / 2.0) for each in room)
        return pictures[..., row : row + size[0], column : column + size[1]]
    first = (places * torch.tensor([each + 1 for each in room], device=places.device)).long()
    down, right = (
        first[:, axis, None] + torch.arange(size[axis], device=places.device) for axis in (0, 1)
    )  # [M, height], [M, width]
    rows = pictures.gather(2, down[:, None, :, None].expand(-1, pictures.shape[1], -1, pictures.shape[3]))
    return rows.gather(3, right[:, None, None].expand(-1, pictures.shape[1], size[0], -1))


class _Step(nn.Module):
    """A convolution along time, a norm and an activation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int):
        super().__init__()
        layer = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.block = nn.Sequential(layer, nn.GroupNorm(groups, outputs), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


class Block(nn.Module):
    """Two convolutions along time, between which the condition moves and scales channels; and a way around them.

    Args:
        inputs, outputs: channels.
        condition: its numbers.
        sizes: as `SIZES`.
    """

    def __init__(self, inputs: int, outputs: int, condition: int, sizes: Mapping[str, Any]):
        super().__init__()
        shape = sizes["kernel_size"], sizes["n_groups"]
        self._scales = bool(sizes["use_film_scale_modulation"])
        self.conv1, self.conv2 = _Step(inputs, outputs, *shape), _Step(outputs, outputs, *shape)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, outputs * (1 + self._scales)))
        self.residual_conv = nn.Identity() if inputs == outputs else nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[N, outputs, H] of [N, inputs, H]."""
        y, moved = self.conv1(x), self.cond_encoder(condition)[..., None]
        if self._scales:
            scale, moved = moved.chunk(2, 1)
            y = scale * y
        around: Tensor = self.residual_conv(x)
        return self.conv2(y + moved) + around


class _Waves(nn.Module):
    """Sines, then cosines, of numbers at falling frequencies (arXiv:1706.03762, 3.5)."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def forward(self, steps: Tensor) -> Tensor:
        half = self._size // 2
        rates = torch.exp(torch.arange(half, device=steps.device) * (-math.log(10000.0) / (half - 1)))
        angles = steps[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


class UNet(nn.Module):
    """Noise, or actions, from noisy actions.

    Args:
        numbers: of an action, A.
        condition: its numbers.
        sizes: as `SIZES`.
    """

    def __init__(self, numbers: int, condition: int, sizes: Mapping[str, Any]):
        super().__init__()
        steps, widths = sizes["diffusion_step_embed_dim"], [numbers, *sizes["down_dims"]]
        self.diffusion_step_encoder = nn.Sequential(
            _Waves(steps), nn.Linear(steps, 4 * steps), nn.Mish(), nn.Linear(4 * steps, steps)
        )
        pairs = list(pairwise(widths))

        def block(inputs: int, outputs: int) -> Block:
            return Block(inputs, outputs, steps + condition, sizes)

        self.down_modules, self.up_modules = nn.ModuleList(), nn.ModuleList()
        for number, (before, after) in enumerate(pairs, 1):
            shorter = nn.Conv1d(after, after, 3, 2, 1) if number < len(pairs) else nn.Identity()
            self.down_modules.append(nn.ModuleList([block(before, after), block(after, after), shorter]))
        self.mid_modules = nn.ModuleList([block(widths[-1], widths[-1]) for _ in range(2)])
        for before, after in reversed(pairs[1:]):
            longer = nn.ConvTranspose1d(before, before, 4, 2, 1)
            self.up_modules.append(nn.ModuleList([block(2 * after, before), block(before, before), longer]))
        first = widths[1]
        self.final_conv = nn.Sequential(
            _Step(first, first, sizes["kernel_size"], _LAST_GROUPS), nn.Conv1d(first, numbers, 1)
        )

    def forward(self, x: Tensor, steps: Tensor, condition: Tensor) -> Tensor:
        """Noise, or actions, float32 [N, H, A].

        Args:
            x: noisy actions, [N, H, A].
            steps: numbers of the noise's steps, int64 [N].
            condition: [N, numbers].
        """
        dtype: torch.dtype = next(self.final_conv.parameters()).dtype
        waves: Any = self.diffusion_step_encoder[0](steps)
        both = torch.cat([self.diffusion_step_encoder[1:](waves.to(dtype)), condition.to(dtype)], -1)
        down: Any = self.down_modules
        up: Any = self.up_modules
        x, skipped = x.to(dtype).transpose(1, 2), []
        for first, second, shorter in down:
            x = second(first(x, both), both)
            skipped.append(x)
            x = shorter(x)
        for block in self.mid_modules:
            x = block(x, both)
        for first, second, longer in up:
            x = longer(second(first(torch.cat([x, skipped.pop()], 1), both), both))
        actions: Tensor = self.final_conv(x).transpose(1, 2).float()
        return actions


class DiffusionNetwork(nn.Module):
    """The whole of it.

    Args:
        sizes: as `SIZES`.
        cameras: how many are looked at.
        side: height and width of their pictures.
        state: numbers of one state, the robot's and the world's.
        numbers: of an action, A.
    """

    def __init__(self, sizes: Mapping[str, Any], *, cameras: int, side: tuple[int, int], state: int, numbers: int):
        super().__init__()
        self.rgb_encoder: nn.Module | None = None
        width = 0
        if cameras:
            several = cameras if sizes["use_separate_rgb_encoder_per_camera"] else 1
            encoders = [PictureEncoder(sizes, side) for _ in range(several)]
            width = cameras * encoders[0].width
            self.rgb_encoder = nn.ModuleList(encoders) if sizes["use_separate_rgb_encoder_per_camera"] else encoders[0]
        self.condition = (width + state) * sizes["n_obs_steps"]
        self.unet = UNet(numbers, self.condition, sizes)

    def blocks(self) -> list[nn.Module]:
        """The U-Net's blocks."""
        return [each for each in self.unet.modules() if isinstance(each, Block)]

    def seen(self, own: Tensor, world: Tensor, pictures: Tensor | None, places: Tensor | None = None) -> Tensor:
        """The condition, [N, numbers].

        Args:
            own, world: the robot's state and the world's in K observations, [N, K, R] and [N, K, W].
            pictures: [N, K, k, 3, h, w]; None without.
            places: of crops, [N, 2], see `PictureEncoder`; None: the middle.
        """
        parts = [own]
        if self.rgb_encoder is not None and pictures is not None:
            rows, frames, count = pictures.shape[:3]
            where = None if places is None else places.repeat_interleave(frames * count, 0)
            if isinstance(self.rgb_encoder, nn.ModuleList):
                where = None if places is None else places.repeat_interleave(frames, 0)
                each = [
                    encoder(pictures[:, :, camera].flatten(0, 1), where)
                    for camera, encoder in enumerate(self.rgb_encoder)
                ]
                numbers = torch.stack(each, 1).flatten(1)
            else:
                numbers = self.rgb_encoder(pictures.flatten(0, 2), where)
            parts.append(numbers.view(rows, frames, -1).to(own.dtype))
        return torch.cat([*parts, world], -1).flatten(1)
