"""Stand-ins for the parts of Megatron-core 0.16.1 that only CUDA has, where there is no CUDA.

They let modules of Megatron-core make tensors on the CPU where they would on a GPU. No tensor operation is replaced, so
the arithmetic and the collectives are Megatron's own; `docs/training.md` lists the stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlinf.runtime.transport.process_groups import all_gather, reduce_scatter

_REACHING = (
    *("tensor_parallel.layers", "tensor_parallel.mappings", "tensor_parallel.utils", "tensor_parallel.random"),
    *("pipeline_parallel.schedules", "pipeline_parallel.p2p_communication"),
    *("transformer.moe.router", "transformer.moe.experts", "transformer.moe.moe_utils"),
    *("transformer.moe.token_dispatcher", "transformer.mlp", "transformer.attention"),
)
"""Modules of Megatron-core, of those used here, that ask for CUDA by name."""

_ASKED = "get_tensor_model_parallel_group_if_none"


class _Stream:
    """A stream that needs no waiting for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


class _Cuda:
    """`torch.cuda` of a machine without."""

    Stream = Event = _Stream
    current_device = staticmethod(lambda: torch.device("cpu"))
    synchronize = staticmethod(lambda *_, **__: None)
    current_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(lambda *_: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """`torch`, as those modules see it: what they make on "cuda" is made on the CPU."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _here(make: Any) -> Any:
        def made(*arguments: Any, **keywords: Any) -> Any:
            if str(keywords.get("device")).startswith("cuda"):
                keywords["device"] = "cpu"
            return make(*arguments, **keywords)

        return staticmethod(made)


for _name in ("empty", "ones", "tensor", "zeros"):
    setattr(_Torch, _name, _Torch._here(getattr(torch, _name)))


class _Memory:
    """Memory for what is gathered before a product: new each time. Megatron's is one buffer per process, which trainer
    and critic of one process would write to at the same time."""

    def get_tensor(self, shape: Any, dtype: torch.dtype, name: str, *_: Any) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=device)


@cache
def prepare() -> None:
    """Have Megatron-core work in this process; to be called before anything of it is.

    Raises:
        ValueError: it is not installed.
    """
    try:
        # each of a dozen packages for GPUs is missed aloud, and streams on CPUs
        warnings.filterwarnings("ignore", module=r"megatron\.")
        modules: dict[str, Any] = {name: importlib.import_module(f"megatron.core.{name}") for name in _REACHING}
    except ModuleNotFoundError as error:
        raise ValueError(
            f"trainer.backend=megatron: {error.name} is not installed; pip install 'rlinf[megatron]'"
        ) from None
    memory = _Memory()
    for name in ("tensor_parallel.layers", "tensor_parallel.mappings"):
        modules[name].get_global_memory_buffer = lambda: memory
        modules[name].dist_all_gather_func, modules[name].dist_reduce_scatter_func = all_gather, reduce_scatter
    for module in modules.values():
        if hasattr(module, _ASKED):
            setattr(module, _ASKED, _given)
    # nothing in our layers is random, so no generator of Megatron's needs a seed
    modules["tensor_parallel.random"].CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    modules["transformer.attention"].apply_rotary_pos_emb = turned
    experts = modules["transformer.moe.moe_utils"]
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None  # which 0.16.1 forgets to define where TransformerEngine is not installed
    if torch.cuda.is_available():
        return
    for module in modules.values():
        module.torch = _Torch("torch")
    dispatcher = modules["transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = _on_host


def _given(group: Any, *_: Any, **__: Any) -> Any:
    """The group that is given, which Megatron's own leaves out where the process has no default group."""
    return group


def turned(parts: Tensor, waves: Tensor, *_: Any, **__: Any) -> Tensor:
    """Queries or keys, [tokens, 1, heads, size], turned by their positions (RoPE, arXiv:2104.09864, eq. 34).

    Megatron's own makes cosines and sines anew in each layer and copies what it does not turn, which is nothing here.

    Args:
        parts: the queries or keys.
        waves: cosines and sines, [2, tokens, 1, 1, size].
    """
    first, second = parts.chunk(2, dim=-1)
    return parts * waves[0] + torch.cat([-second, first], dim=-1) * waves[1]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of tokens as the dispatcher wants them: Megatron's own leaves alone what is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
