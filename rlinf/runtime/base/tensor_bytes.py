"""A tensor's memory as bytes."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes, uint8 [bytes], on its device; a view of its memory where that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # a single element counts as contiguous whatever its stride (such as 0, after `expand`), and `view` refuses that
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
