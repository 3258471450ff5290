"""Pictures: the filters against Pillow's, the crop against plain arithmetic, the constants against bfloat16."""

import math

import numpy as np
import pytest
import torch

from rlinf.models.policy.robots import (
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    cameras,
    centre_crop,
    normalised,
    resized,
    resized_with_padding,
)


def picture(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_cameras_come_apart_in_their_order():
    rgb = picture(2, 5, 7, 6)
    found = cameras(rgb)
    assert found.shape == (2, 2, 3, 5, 7)
    assert torch.equal(found[1, 0].permute(1, 2, 0), rgb[1, :, :, :3])
    assert torch.equal(found[1, 1].permute(1, 2, 0), rgb[1, :, :, 3:])
    with pytest.raises(ValueError, match=r"3 channels.*camera"):
        cameras(picture(2, 5, 7, 4))


@pytest.mark.parametrize("filter", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(56, 28), (9, 50), (40, 30)])
def test_resizing_agrees_with_pillow(filter, size):
    image = pytest.importorskip("PIL.Image")
    smooth = torch.nn.functional.interpolate(picture(1, 3, 6, 8).float(), (40, 30), mode="bicubic")
    source = (64 + smooth.clamp(0, 255) / 2).to(torch.uint8)[0]  # so that nothing is cut off between Pillow's passes
    how = {"bicubic": image.Resampling.BICUBIC, "bilinear": image.Resampling.BILINEAR}[filter]
    expected = image.fromarray(source.permute(1, 2, 0).numpy()).resize(size[::-1], how)
    found = resized(source, size, filter)
    difference = np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected).astype(int))
    # Pillow rounds between its two passes, by 1/2, which weights of sum <= 1.25 pass on, and both round at the end, by
    # 1/2. Of whole numbers that leaves 1
    assert difference.max() <= math.floor(0.5 * 1.25 + 0.5 + 0.5)
    assert resized(source, (40, 30)) is source


def test_padding_keeps_the_proportions_and_puts_bars_on_both_sides():
    bright = torch.full((1, 3, 20, 40), 200, dtype=torch.uint8)
    found = resized_with_padding(bright, 16)
    assert found.shape == (1, 3, 16, 16)
    assert (found[:, :, 4:12] == 200).all()
    assert not found[:, :, :4].any()
    assert not found[:, :, 12:].any()
    assert torch.equal(resized_with_padding(bright.mT, 16), found.mT)


def test_the_crop_keeps_nine_tenths_of_the_area_by_the_side_s_square_root():
    # a ramp: what is sampled says where
    columns = torch.arange(201, dtype=torch.uint8).expand(1, 3, 101, 201)
    found = centre_crop(columns, 0.9)
    edge = 100 * (1 - math.sqrt(0.9))
    expected = torch.linspace(edge, 200 - edge, 201)
    assert (found[0, 0, 50].float() - expected).abs().max() <= 0.5 + 1e-3
    assert centre_crop(columns, 1.0) is columns
    with pytest.raises(ValueError, match=r"crop=0.*more.*0"):
        centre_crop(columns, 0)


def test_dino_s_constants_are_imagenet_s_in_bfloat16():
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert mean.bfloat16().tolist() == list(IMAGENET_MEAN)
    assert std.bfloat16().tolist() == list(IMAGENET_STD)


def test_normalising_maps_bytes_as_the_encoders_expect():
    pictures = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert normalised(pictures, HALF, HALF)[0, :, 0].tolist() == [[-1.0, 1.0]] * 3
    dino = normalised(pictures, IMAGENET_MEAN, IMAGENET_STD, torch.bfloat16)
    assert dino.dtype == torch.bfloat16
    torch.testing.assert_close(dino[0, 0, 0].float(), torch.tensor([-2.119658, 2.256410]), rtol=2**-8, atol=0)


def test_fractions_of_a_level_are_rounded_or_cut_off_as_a_model_was_shown():
    source = torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8).expand(3, 2, 2)  # 0.75 in the middle
    assert resized(source, 1, "bilinear").flatten().tolist() == [1, 1, 1]
    assert resized(source, 1, "bilinear", rounded=False).flatten().tolist() == [0, 0, 0]
