"""Matrices rounded to float8 as they arrive, one scale for each block of 128 x 128.

Float8 is e4m3 here: four significant bits, up to 448. A block's scale is the least power of two by which its largest
element fits, so that float8 x scale is exact in bfloat16 and in float32 alike: a model computes with what the rounded
weights stand for in its own dtype, on any device, and the way in which it does is that of full weights. Blocks and
format are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3), whose scales may be any float32.

Rounded are the weights of linear layers and of stacked experts. Left as they came are embeddings and the head, which
put their rounding straight into logits; norms and biases, which take no room; and routers, whose rounding would send
tokens to other experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 128
"""Rows and columns that share a scale, as in DeepSeek-V3 and in the servers that read its weights."""
_LARGEST = 448.0
"""Largest number of e4m3."""
_LEAST = -126
"""Exponent of the smallest scale, that of float32's smallest normal number: below it products lose bits."""
_GATES = ("gate", "router")
"""Last names of linear layers that are a model's routers where they are no module of their own."""


def round_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [outputs, inputs] to float8; what is not finite makes its block so.

    Returns:
        Elements over their scales, e4m3 [outputs, inputs], and powers of two, float32 [blocks down, blocks across].
    """
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = []
    for rows, into in zip(matrix.detach().split(BLOCK), values.split(BLOCK), strict=True):
        padded = F.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).view(len(rows), -1, BLOCK)
        largest = padded.abs().amax((0, 2)) / _LARGEST
        fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, from 0.5 up
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp(min=_LEAST)
        scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), largest)
        multiples = (padded / scale[:, None]).clamp_(-_LARGEST, _LARGEST)
        into.copy_(multiples.flatten(1)[:, : rows.shape[1]])
        scales.append(scale)
    return values, torch.stack(scales)


def unrounded(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix that `round_matrix` rounded to, float32 [outputs, inputs]."""
    every = scales.repeat_interleave(BLOCK, 0)[: len(values)].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    # Looked up in a table of all 256: on a CPU torch takes five times as long to cast them back, one by one.
    table = torch.arange(256, dtype=torch.uint8, device=values.device).view(values.dtype).float()
    return table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape).mul_(every)


def _by_block(matrix: Tensor) -> Tensor:
    """Sums of the elements of each block, [blocks]."""
    rows, columns = (-size % BLOCK for size in matrix.shape)
    padded = F.pad(matrix, (0, columns, 0, rows))
    return padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK).sum((1, 3)).flatten()


class Float8Weights:
    """The parameters of a model that are rounded, in place.

    Args:
        model: it is rounded at once.

    Raises:
        ValueError: it has none.
    """

    words = "weights of float8"
    shapes: Mapping[str, tuple[int, ...]] = {}  # of tensors that are no parameters any more

    def __init__(self, model: PreTrainedModel):
        self.names = names_of(model)
        self._squares: dict[str, tuple[float, float, float]] = {}  # changed, before, largest share of a block
        if not self.names:
            raise ValueError(f"{type(model).__name__} has no linear layers or experts to round; leave it at full")
        for name, parameter in model.named_parameters():
            if name in self.names:
                self.put(name, parameter, parameter)

    @torch.no_grad()
    def put(self, name: str, tensor: Tensor, into: Tensor) -> None:
        """Round a tensor into one of its shape, which may be itself, and see how far it is then from what came."""
        squares = []
        for matrix, target in zip(*(each.view(-1, *each.shape[-2:]) for each in (tensor, into)), strict=True):
            before = matrix.float()
            before = before.clone() if before.data_ptr() == target.data_ptr() else before
            target.copy_(unrounded(*round_matrix(matrix)))
            squares.append(torch.stack([_by_block((target - before).square_()), _by_block(before.square())]))
        changed, size = torch.cat(squares, dim=1)
        worst = (changed / size.clamp(min=torch.finfo(size.dtype).tiny)).amax()
        self._squares[name] = (float(changed.sum()), float(size.sum()), float(worst))

    @property
    def error(self) -> float:
        """How far the weights are from those that came, as a share of their size (root of the sums of squares)."""
        changed, before, _ = (sum(each) for each in zip(*self._squares.values(), strict=True))
        return (changed / before) ** 0.5 if before else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The error of all weights, and that of the block in which it is largest, by the names of metrics."""
        worst = max(share for _, _, share in self._squares.values()) ** 0.5
        return {"weights/float8_error": self.error, "weights/float8_block_error": worst}


def names_of(model: PreTrainedModel) -> frozenset[str]:
    """Parameters that are rounded: matrices of linear layers and of experts, but for the head's and the routers'."""
    from rlinf.models.language.moe import routers_of  # comes with DTensors, which take half a second

    others: set[nn.Module | None] = {model.get_output_embeddings(), *map(model.get_submodule, routers_of(model))}
    names = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module not in others and path.rpartition(".")[2] not in _GATES
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == (3 if type(module).__name__.endswith("Experts") else 2) and _multiplies(module)
    }
    return frozenset(names)


def _multiplies(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__.endswith("Experts")
