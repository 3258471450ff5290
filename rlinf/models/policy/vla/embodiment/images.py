"""Pictures of cameras as a vision encoder wants them: taken apart, turned, cropped, resized, normalised.

In: uint8 as environments show them, on any device. Out: uint8 of the encoder's size, which is small to keep, and
floats for the encoder. Only torch is needed; resizing agrees with Pillow's antialiased filters up to rounding.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Filter = Literal["bicubic", "bilinear"]

IMAGENET_MEAN, IMAGENET_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
"""What DINOv2 subtracts and divides by, of pictures in 0..1, in the bfloat16 in which OpenVLA's preprocessor stores
it."""
HALF = (0.5, 0.5, 0.5)
"""The same for SigLIP: both mean and deviation, which maps 0..1 to -1..1."""


def cameras(rgb: Tensor) -> Tensor:
    """An observation's "rgb", [N, H, W, 3 k], as pictures [N, k, 3, H, W].

    Raises:
        ValueError: the channels are not 3 for each camera.
    """
    if rgb.ndim != 4 or rgb.shape[3] % 3 or not rgb.shape[3]:
        raise ValueError(f"pictures {list(rgb.shape)} must be [N, height, width, 3 k]: 3 channels for each camera")
    rows, height, width, channels = rgb.shape
    return rgb.reshape(rows, height, width, channels // 3, 3).permute(0, 3, 4, 1, 2)


def resized(
    pictures: Tensor, size: int | tuple[int, int], filter: Filter = "bicubic", *, rounded: bool = True
) -> Tensor:
    """Pictures of another size, with antialiasing; the same pictures where they have that size already.

    Args:
        pictures: uint8 [..., 3, H, W].
        size: height and width, or one number for both.
        filter: of the interpolation.
        rounded: to the nearest of 256 levels; otherwise fractions are cut off, as some authors do.

    Returns:
        uint8 [..., 3, height, width].
    """
    height, width = (size, size) if isinstance(size, int) else size
    if tuple(pictures.shape[-2:]) == (height, width):
        return pictures
    flat = pictures.reshape(-1, *pictures.shape[-3:]).float()
    found = functional.interpolate(flat, (height, width), mode=filter, antialias=True, align_corners=False)
    return _bytes(found if rounded else found.floor()).view(*pictures.shape[:-2], height, width)


def resized_with_padding(pictures: Tensor, size: int) -> Tensor:
    """Pictures scaled to fit into a square, whatever their shape, with black bars on both sides (openpi's way).

    Args:
        pictures: uint8 [..., 3, H, W].
        size: side of the square, pixels.

    Returns:
        uint8 [..., 3, size, size].
    """
    height, width = pictures.shape[-2:]
    ratio = max(height, width) / size
    inner = (int(height / ratio), int(width / ratio))
    found = resized(pictures, inner, "bilinear")
    above, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    return functional.pad(found, (left, size - inner[1] - left, above, size - inner[0] - above))


def centre_crop(pictures: Tensor, area: float) -> Tensor:
    """The middle of pictures, enlarged to their size: what a model that trained with random crops is shown.

    Each side keeps sqrt(area) of its length. Samples lie evenly from one edge of the crop to the other, edges
    included, and are interpolated linearly, as the evaluation of OpenVLA has it.

    Args:
        pictures: uint8 [..., 3, H, W].
        area: share of the picture that stays, in (0, 1]; 1 changes nothing.

    Raises:
        ValueError: the share is none.
    """
    if not 0.0 < area <= 1.0:
        raise ValueError(f"crop={area} must be more than 0 and at most 1: the share of a picture's area that is kept")
    if area == 1.0:
        return pictures
    height, width = pictures.shape[-2:]
    flat = pictures.reshape(-1, *pictures.shape[-3:]).float()
    side = math.sqrt(area)
    rows, columns = (torch.linspace(-side, side, count, device=flat.device) for count in (height, width))
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).expand(len(flat), -1, -1, -1)
    return _bytes(functional.grid_sample(flat, grid, align_corners=True)).view(pictures.shape)


def normalised(
    pictures: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers for an encoder: (picture / 255 - mean) / std in each channel.

    Args:
        pictures: uint8 [..., 3, H, W].
        mean, std: of pictures in 0..1, a number for each channel.
        dtype: of the result; computed in float32.
    """
    centre, scale = (torch.tensor(each, device=pictures.device).view(-1, 1, 1) for each in (mean, std))
    return ((pictures.float() / 255.0 - centre) / scale).to(dtype)


def _bytes(pictures: Tensor) -> Tensor:
    return pictures.round_().clamp_(0, 255).to(torch.uint8)
