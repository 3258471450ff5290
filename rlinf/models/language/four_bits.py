"""Frozen matrices of 4 bits under adapters (QLoRA, Dettmers et al., arXiv:2305.14314), by bitsandbytes.

An `Nf4` stands in the place of a frozen weight: the nearest of the 16 numbers of nf4, times a float32 scale for each 64
neighbours, in 4.5 bits an element. Whoever reads it is given what it stands for, in the dtype that the model computes
in; so merging and publishing need not know of it, and an engine answers by the very base that the adapters were
trained on. A product keeps the 4 bits for its backward pass and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rlinf.runtime.base.errors import WrongSetting

NEIGHBOURS = 64
"""Elements that share a scale, as in the paper."""


class Nf4(Tensor):
    """A matrix of 4 bits, which is computed with as what it stands for; to be read, and written by `copy_` alone.

    Args:
        packed: two elements a byte, uint8 [bytes, 1], of all elements in order and zeros up to a multiple of 64.
        state: bitsandbytes' scales and dtype, of these.
        shape: of the matrix.
    """

    packed: Tensor
    state: Any

    @staticmethod
    def __new__(cls, packed: Tensor, state: Any, shape: Sequence[int]) -> Self:
        matrix: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=state.dtype, device=packed.device
        )
        matrix.packed, matrix.state = packed, state
        return matrix

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> Self:
        """Round a tensor, to be computed with in this dtype."""
        flat = tensor.detach().to(dtype).flatten()
        # as rows of 64: on CPUs bitsandbytes 0.50.2 reads matrices wrongly whose rows are 32 long
        rows = F.pad(flat, (0, -len(flat) % NEIGHBOURS)).view(-1, NEIGHBOURS)
        packed, state = _functional().quantize_4bit(rows, blocksize=NEIGHBOURS, quant_type="nf4")
        return cls.__new__(cls, packed, state, tensor.shape)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that hold it."""
        return {"packed": self.packed, "scales": self.state.absmax}

    def plain(self) -> Tensor:
        """The tensor that it stands for."""
        every: Tensor = _functional().dequantize_4bit(self.packed, self.state).flatten()
        return every[: self.shape.numel()].view(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and isinstance(args[1], Nf4) and not kwargs:
            product = _Product.apply(args[0], args[1])
            return product if len(args) < 3 or args[2] is None else product + args[2]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls.__new__(cls, first.packed, first.state, first.shape)  # type: ignore[union-attr]
        if isinstance(first, Nf4) and func._schema.is_mutable:
            if func is not torch.ops.aten.copy_.default:
                raise RuntimeError(f"{func} cannot change a matrix of 4 bits")
            for name, part in cls.of(_plain(args[1]), first.dtype).parts.items():
                first.parts[name].copy_(part)
            return first
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


class _Product(torch.autograd.Function):
    """[..., inputs] to [..., outputs], by a matrix that learns nothing."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Nf4) -> Tensor:  # type: ignore[override]
        context.weight = weight
        return F.linear(inputs, weight.plain())

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slope @ context.weight.plain(), None


def round_layer(layer: nn.Linear, dtype: torch.dtype) -> None:
    """Have a linear layer, which learns nothing, compute in this dtype with a weight of 4 bits."""
    layer.weight = nn.Parameter(Nf4.of(layer.weight, dtype), requires_grad=False)


def parts_of(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors, and in the place of each matrix of 4 bits what holds it, under its name and that of the part."""
    return {
        key: part
        for name, tensor in named.items()
        for key, part in (
            ((f"{name}.{kind}", each) for kind, each in tensor.parts.items())
            if isinstance(tensor, Nf4)
            else ((name, tensor),)
        )
    }


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Nf4) else value


def _functional() -> Any:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # on kernels that nobody asked for
    try:
        import bitsandbytes.functional as functional  # takes seconds, and few runs need it
    except ModuleNotFoundError:
        raise WrongSetting("model.lora.base=nf4: bitsandbytes is not installed; pip install 'rlinf[lora]'") from None
    return functional
