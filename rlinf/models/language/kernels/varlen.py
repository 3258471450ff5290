"""Causal attention over sequences laid end to end, by a kernel: torch's own, or FlashAttention's package.

In: query, key and value of all tokens, and where each sequence begins. Out: attention within each sequence, nothing
padded. Releases differ in what they take, so arguments follow from a function's signature and not from a trial: what a
kernel raises on a device is a fault of the device, and no question of the version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""What the kernels compute in."""
KernelName = Literal["flash", "varlen"]
_FAULTS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL", "can't allocate memory")
"""In texts of plain `RuntimeError`s that torch raises when a device, and no argument, is at fault."""


T = TypeVar("T")
Pair = tuple[T, T]
"""Of queries, and of keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel for sequences of several lengths."""

    words: str
    """What it is, for people."""
    attend: Callable[[Tensor, Tensor, Tensor, Pair[Tensor], Pair[int], float, int], Tensor]
    """Of query [tokens, heads, size], key and value [seen tokens, key heads, size], where the queries of each sequence
    begin and the end of the last, int32 [sequences + 1], and the same of its keys, the most queries and the most keys
    of a sequence, the scale of the scores, and how many tokens before itself a token sees at most (-1 for all):
    [tokens, heads, size]. A sequence with fewer queries than keys has its last tokens for queries."""


def kernel_of(name: KernelName, device: torch.device) -> Kernel:
    """A kernel by its name.

    Args:
        name: "varlen", torch's own; or "flash", that of `flash_attn_interface` (FlashAttention 3) on Hopper cards where
            it is installed, else that of `flash_attn` (FlashAttention 2).
        device: on which it runs.

    Raises:
        ImportError: FlashAttention's package is not installed, or does not fit this torch.
    """
    return _torch_kernel() if name == "varlen" else _flash_kernel(_hopper(device))


def device_at_fault(error: BaseException) -> bool:
    """Whether an error tells of memory that ran out, of a device or of a process group, which no other way to compute
    would mend."""
    kinds = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in _FAULTS)


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _torch_kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn  # takes time to import, and few runs need it

    # torch 2.11 checks nothing and says nothing of fewer heads of keys; from 2.12 on it has to be told
    shares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Pair[Tensor], longest: Pair[int], scale: float, left: int
    ) -> Tensor:
        more: dict[str, Any] = {}
        if query.shape[1] != key.shape[1]:
            if shares_heads:
                more["enable_gqa"] = True
            else:
                key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        return varlen_attn(  # type: ignore[return-value]  # no extras were asked for
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            *bounds,
            *longest,
            scale=scale,
            window_size=(left, 0),
            **more,
        )

    return Kernel(f"the variable-length kernel of torch {torch.__version__}", attend)


@cache
def _flash_kernel(hopper: bool) -> Kernel:
    found = None
    for package in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        try:
            found = import_module(package)
            break
        except ImportError as error:
            why = error
    if found is None:
        raise why
    function = found.flash_attn_varlen_func

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Pair[Tensor], longest: Pair[int], scale: float, left: int
    ) -> Tensor:
        out = function(
            query,
            key,
            value,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            softmax_scale=scale,
            causal=True,
            window_size=(left, 0 if left >= 0 else -1),
        )
        return out[0] if isinstance(out, tuple) else out  # early releases for Hopper give the scores' norms, too

    version = getattr(found, "__version__", "")
    return Kernel(f"FlashAttention {version}".strip() + f" ({found.__name__})", attend)
