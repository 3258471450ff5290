"""Pictures moved at random, beside the crops of padded pictures that they stand for."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from rlinf.training.embodied.replay import shifted


@given(st.integers(0, 4), st.integers(0, 2**31))
def test_a_shift_is_a_crop_of_the_padded_picture(most, seed):
    random = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (3, 6, 5, 2), generator=random, dtype=torch.uint8)
    by = torch.randint(-most, most + 1, (3, 2), generator=random)
    padded = functional.pad(pictures.movedim(-1, 1).float(), (most,) * 4, mode="replicate")
    for row, (down, right) in enumerate(by.tolist()):
        top, left = most - down, most - right
        crop = padded[row, :, top : top + 6, left : left + 5].movedim(0, -1)
        assert torch.equal(shifted(pictures, by)[row].float(), crop)
