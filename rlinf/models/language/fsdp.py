"""A policy model spread over the ranks of a group by FSDP2: each rank owns a slice of every tensor.

In: a `PolicyModel`, a device mesh. Out: the same module, whose parameters are `DTensor`s; gradients of all ranks are
*summed* into the slices, never averaged, since the optimizer step divides once by the tokens of all ranks together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlinf.models.language.policy_model import PolicyModel, blocks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a model may be computed in; its weights and its optimizer are float32 whatever this is."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ValueError: a model cannot be trained in it.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is none of {sorted(DTYPES)}")
    return DTYPES[name]


def shard(policy: PolicyModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Spread a model over a mesh of one dimension, layer by layer.

    Args:
        policy: changed in place; may be on the meta device.
        mesh: from `system.collectives.mesh`; torch's own helpers would make groups that hang (see there).
        dtype: to compute in. Gradients are summed over ranks in float32.
    """
    mixed = dtype != torch.float32
    precision = MixedPrecisionPolicy(dtype, torch.float32) if mixed else MixedPrecisionPolicy()
    policy.computes_in = dtype
    for block in blocks(policy.model):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows neither AVG nor a factor within the sum


def local(tensor: Tensor) -> Tensor:
    """The slice of a tensor that this rank owns; the tensor itself where it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
