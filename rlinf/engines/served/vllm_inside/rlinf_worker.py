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

    def prepare(self) -> bool:
        """Mend what vLLM does otherwise than this program needs; called once, before the first request.

        Returns:
            Adapters may be of the model's output embedding.
        """
        # Of prompts vLLM tells what `logprobs_mode` says of drawn tokens, whose logits `rlinf_draw` has made log-probs.
        self.model_runner.model_config.logprobs_mode = "raw_logprobs"
        if self.model_runner.device.type == "cpu" and self.model_runner.lora_config is not None:
            _products_by_slot()
        unembeds = "lm_head" in getattr(self.model_runner.get_model(), "embedding_modules", ())
        if unembeds and self.model_runner.lora_config is not None:
            _spare_prompts(self.model_runner)
        return unembeds

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
        head = getattr(head, "base_layer", head)  # where it may have adapters
        if self.model_runner.device.type == "cpu" and hasattr(head, "cpu_linear"):
            # A head is packed for the CPU once: one that is tied would go on with the packed copy of the old weights.
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _products_by_slot() -> None:
    """Have vLLM's products with adapters on a CPU made slot by slot: its own copy a matrix for every token, and rows of
    the model itself, whose slot is -1, get those of the last slot."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def parts(inputs: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows = (slots == slot).nonzero()[:, 0]
                yield rows, inputs[rows].to(dtype) @ weights[slot].flatten(0, -2).to(dtype).t()

    def shrink(inputs: Tensor, weights: Tensor, outputs: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
        outputs.zero_()
        for rows, part in parts(inputs, weights, slots, outputs.dtype):
            outputs[rows] = scaling * part

    def expand(inputs: Tensor, weights: Tensor, outputs: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
        slice_of(inputs, weights, outputs, slots, 0, min(weights.shape[-2], outputs.shape[1]), add_inputs)

    def slice_of(
        inputs: Tensor, weights: Tensor, outputs: Tensor, slots: Tensor, first: int, size: int, add_inputs: bool = True
    ) -> None:
        assert add_inputs  # its layers ask for nothing else
        for rows, part in parts(inputs, weights, slots, outputs.dtype):
            outputs[rows, first : first + size] += part[:, :size]

    lora_ops.bgmv_expand_slice = slice_of
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink
    lora_ops.bgmv_expand = punica_cpu.bgmv_expand = expand


class _NoAdapters:
    """In place of vLLM's products with adapters."""

    @staticmethod
    def add_lora_logits(logits: Tensor, *_: Any) -> Tensor:
        """Add nothing."""
        return logits


def _spare_prompts(runner: Any) -> None:
    """Have the log-probs of prompts told by the model itself, whose they are here: vLLM would give their tokens the
    output embedding's adapters of as many requests, or fail where these are fewer."""
    tell = runner._get_prompt_logprobs_dict

    def told(*args: Any) -> Any:
        processor = runner.get_model().logits_processor
        products, processor.punica_wrapper = processor.punica_wrapper, _NoAdapters
        try:
            return tell(*args)
        finally:
            processor.punica_wrapper = products

    runner._get_prompt_logprobs_dict = told


def _mapped(bucket: dict[str, Any]) -> Tensor:
    """A bucket's memory as a flat tensor; writing to it would change nobody else's."""
    with open(bucket["path"], "rb") as file:
        view = mmap.mmap(file.fileno(), bucket["bytes"], access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=getattr(torch, bucket["dtype"]))


def _named(flat: list[Tensor], buckets: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for tensor, bucket in zip(flat, buckets, strict=True):
        for name, shape, first in bucket["tensors"]:
            yield name, tensor[first : first + prod(shape)].view(shape)
