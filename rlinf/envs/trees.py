"""Dicts of tensors in dicts, as simulators on GPUs keep their states in: rows of them, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tree_rows(tree: Any, rows: Tensor) -> Any:
    """Some rows of every tensor of a tree, copied; `rows` is int64 on the tensors' device."""
    return {name: tree_rows(part, rows) for name, part in tree.items()} if isinstance(tree, dict) else tree[rows]


def tree_on_cpu(tree: Any) -> Any:
    """A tree with its tensors on the CPU."""
    return {name: tree_on_cpu(part) for name, part in tree.items()} if isinstance(tree, dict) else tree.cpu()


def stacked_trees(trees: Sequence[Any], device: torch.device) -> Any:
    """The rows of several trees of one shape, one tree behind the other, on a device."""
    if isinstance(trees[0], dict):
        return {name: stacked_trees([tree[name] for tree in trees], device) for name in trees[0]}
    return torch.cat(list(trees)).to(device)
