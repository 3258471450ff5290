"""Adapters of answers that are decoded together: to a row's products those of its own adapters are added.

All adapters in a batch are laid side by side, so that a product with all of them and a mask stand for one product per
row: it wastes operations and saves calls, of which a step on a CPU has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.data.weights import Weights

PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers of a block by the product that computes them."""
HEAD = "lm_head"
"""The output embedding, whose product comes after those of all blocks."""


class Own(NamedTuple):
    """Narrow products that the rows of a pass add to a product."""

    down: Tensor
    """Of all adapters in the pass, [ranks, inputs]."""
    up: Tensor
    """[ranks, outputs]"""
    mask: Tensor
    """1 where the rank is of the row's own adapters, [rows, ranks]."""

    def onto(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add it to the outputs of a product, [rows, ..., outputs]."""
        mask = self.mask if inputs.dim() == 2 else self.mask[:, None]
        return outputs + ((inputs @ self.down.t()) * mask) @ self.up


class RowAdapters:
    """The adapters that an engine holds.

    Args:
        model: like a Llama.
        like: a tensor of its dtype, on its device.
    """

    def __init__(self, model: Any, like: Tensor) -> None:
        blocks = range(len(model.model.layers))
        products = [[f"model.layers.{n}.{layer}" for layer in product] for n in blocks for product in PRODUCTS]
        self._products = [{name: model.get_submodule(name) for name in product} for product in (*products, [HEAD])]
        self._layers = {name: layer for product in self._products for name, layer in product.items()}
        self._like = like
        self.versions: dict[str, int] = {}
        """Version of each, by name."""
        self._pairs: dict[str, list[tuple[Tensor, Tensor] | None]] = {}  # of every product
        self._present: tuple[tuple[str, ...], list[tuple[Tensor, Tensor, tuple[int, ...]]]] = ((), [])

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless these adapters fit the model; changes nothing."""
        from rlinf.models.language.lora import ranks_of  # comes with transformers, which takes two seconds

        ranks_of(weights, {name: (each.out_features, each.in_features) for name, each in self._layers.items()})

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Hold these from now on, in place of others of their name."""
        tensors = {name: tensor.to(self._like) for name, tensor in weights.named()}
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for product in self._products:
            downs, ups = list[Tensor](), list[Tensor]()
            for place, name in enumerate(product):
                if (down := tensors.get(f"{name}.lora_A.weight")) is None:
                    continue
                parts = [down.new_zeros(len(down), layer.out_features) for layer in product.values()]
                parts[place] = tensors[f"{name}.lora_B.weight"].t()
                downs.append(down)
                ups.append(torch.cat(parts, dim=1))
            pairs.append((torch.cat(downs), torch.cat(ups)) if downs else None)
        assert weights.adapter is not None
        self._pairs[weights.adapter], self.versions[weights.adapter] = pairs, weights.version
        self._present = ((), [])

    def unload(self, name: str) -> None:
        """Hold these no more."""
        del self._pairs[name], self.versions[name]
        self._present = ((), [])

    def of_rows(self, names: Sequence[str | None]) -> list[tuple[Own | None, ...]]:
        """Each block's additions to its products, and behind them the output embedding's; none: no row has adapters.

        Args:
            names: of each row's adapters; None for the model itself.
        """
        present = tuple(sorted({name for name in names if name is not None}))
        if not present:
            return []
        if self._present[0] != present:
            self._present = present, self._stacked(present)
        numbers = {name: number for number, name in enumerate(present)}
        rows = np.array([-1 if name is None else numbers[name] for name in names])
        masks: dict[tuple[int, ...], Tensor] = {}
        every: list[Own | None] = []
        for down, up, ranks in self._present[1]:
            if ranks not in masks:
                owners = np.repeat(np.arange(len(ranks)), ranks)
                masks[ranks] = torch.from_numpy(rows[:, None] == owners).to(self._like)
            every.append(Own(down, up, masks[ranks]) if len(down) else None)
        return [tuple(every[first : first + 4]) for first in range(0, len(every), 4)]

    def _stacked(self, present: Sequence[str]) -> list[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Matrices of every product of these adapters side by side, and the ranks of each."""
        stacked = []
        for pairs in zip(*(self._pairs[name] for name in present), strict=True):
            ranks = tuple(0 if pair is None else len(pair[0]) for pair in pairs)
            some = [pair for pair in pairs if pair is not None]
            empty = self._like.new_empty(0)
            down, up = (torch.cat(each) for each in zip(*some, strict=True)) if some else (empty, empty)
            stacked.append((down, up, ranks))
        return stacked
