"""Extension of vLLM's workers that loads weights from memory shared by this machine's processes.

In: where the tensors lie. Out: a model with these weights, or the old ones and an error. It is loaded by name into
vLLM's workers, which have no rlinf; the file of rlinf that it shares needs torch alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from rlinf_draw import shared
from torch import Tensor

weights: Any = shared("rlinf.data.weights")


class Weights:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def load_buckets(self, buckets: list[dict[str, Any]]) -> None:
        """Load all weights of the model.

        Args:
            buckets: each with `path` of a file that holds it, `bytes`, `dtype` such as float32, `checksum`, and
                `tensors`: name, shape and first element of each.

        Raises:
            ValueError: a bucket is not what was sent; nothing is changed.
        """
        flat = [_mapped(bucket) for bucket in buckets]
        for number, (tensor, bucket) in enumerate(zip(flat, buckets, strict=True)):
            if weights.checksum(tensor) != bucket["checksum"]:
                raise ValueError(f"bucket {number} of {len(buckets)} was changed on its way")
        self.model_runner.reload_weights(weights_iterator=_named(flat, buckets))
        head = getattr(self.model_runner.model, "lm_head", None)
        if self.model_runner.device.type == "cpu" and hasattr(head, "cpu_linear"):
            # A head is packed for the CPU once: one that is tied would go on with the packed copy of the old weights.
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _mapped(bucket: dict[str, Any]) -> Tensor:
    """A bucket's memory as a flat tensor; writing to it would change nobody else's."""
    with open(bucket["path"], "rb") as file:
        view = mmap.mmap(file.fileno(), bucket["bytes"], access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=getattr(torch, bucket["dtype"]))


def _named(flat: list[Tensor], buckets: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for tensor, bucket in zip(flat, buckets, strict=True):
        for name, shape, first in bucket["tensors"]:
            yield name, tensor[first : first + prod(shape)].view(shape)
