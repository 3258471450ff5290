"""Weights out of shared memory, inside a server's process: opened, checked and given to its model.

In: a manifest of one bucket, as `served/shared_memory.py` writes it. Out: the model's own `load_weights` has been
called with views of the bucket, and a word about it stands where the sender looks. Imports torch and nothing of ours,
since it runs in another environment. An exception here would end the server, so everything that goes wrong is written
down instead.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

STATUS = 4096
"""Bytes before the bucket, where the far side leaves its word: b"ok", or what went wrong."""
BLOCK, STEP, ODD = 128, -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Constants of the checksum, as in `rlinf.data.weights`."""


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """SGLang's `custom_weight_loader`: give a model the tensors of the bucket whose manifest is the only "tensor".

    Args:
        model: has `load_weights(named tensors)`.
        named: one pair, whose tensor is the manifest as JSON, uint8 [bytes].
    """
    ((_, text),) = named
    load_bucket(model.load_weights, json.loads(bytes(text.tolist())))


def load_bucket(load_weights: Callable[[list[tuple[str, Tensor]]], Any], manifest: dict[str, Any]) -> None:
    """Open, check and load one bucket, and leave word."""
    with open(manifest["path"], "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), 0)
    try:
        load_weights(tensors(memory, manifest))
        word = b"ok"
    except Exception as error:
        word = f"{type(error).__name__}: {error}".encode()[: STATUS - 1]
    before = memory[:STATUS].rstrip(b"\0")
    if not before or before == b"ok":  # of several ranks, an error is what counts
        memory[: len(word)] = word
    # `memory` is closed when the last view of it is gone


def tensors(memory: mmap.mmap, manifest: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Names and tensors of a bucket, as views.

    Raises:
        ValueError: its checksum is not the one it was packed with.
    """
    dtype = getattr(torch, manifest["dtype"])
    flat = torch.frombuffer(memory, dtype=dtype, count=manifest["elements"], offset=STATUS)
    actual = checksum(flat)
    if actual != manifest["checksum"]:
        raise ValueError(f"process {os.getpid()} reads a checksum of {actual:x} instead of {manifest['checksum']:x}")
    return [(name, flat[start : start + prod(shape)].view(shape)) for name, shape, start in manifest["slots"]]


def checksum(bucket: Tensor) -> int:
    """Checksum of a bucket, equal to that of `rlinf.data.weights.checksum`."""
    data = bucket.reshape(-1).view(torch.uint8)
    size = 8 * BLOCK
    blocks = data.numel() // size
    last = torch.zeros(size, dtype=torch.uint8)
    last[: data.numel() - blocks * size] = data[blocks * size :]
    parts = (data[: blocks * size], last)
    sums = torch.cat([part.view(torch.int64).view(-1, BLOCK).sum(dim=1) for part in parts])
    hashed = sums + torch.arange(1, len(sums) + 1) * STEP
    for shift in (32, 29):
        hashed = (hashed ^ ((hashed >> shift) & ((1 << (64 - shift)) - 1))) * ODD
    return (int(hashed.sum()) + data.numel() * STEP % (1 << 62)) % (1 << 64)
