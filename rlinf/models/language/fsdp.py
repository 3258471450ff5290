"""How a model lies on the ranks that train it: in slices (FSDP2), in whole copies, or in copies of several slices.

`arrangement.py` says which ranks make up each copy; `Layout` is that as device meshes, seen from one rank.
`mistakes_in` names everything that keeps a model from being split as asked for, at once; the model may be on the meta
device.

Sharding changes a `PolicyModel` in place; where it lies in slices, its parameters are `DTensor`s. Gradients are
*summed* over ranks, never averaged, since the optimizer step divides once by the tokens of all ranks together: those of
a copy's slices by FSDP2 in every backward pass, those of the copies by the optimizer step, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from rlinf.config.learning import ParallelConfig
from rlinf.models.language.arrangement import stages_refused
from rlinf.models.language.moe import experts_of
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.tensor_parallel import Division, plan_of
from rlinf.models.language.truth import blocks
from rlinf.runtime.base.errors import WrongSetting


def mistakes_in(model: PreTrainedModel, parallel: ParallelConfig, *, adapters: bool) -> Iterator[str]:
    """Yield everything that keeps a model from being split as asked for, in words.

    Args:
        model: the plain model, such as one on the meta device.
        parallel: how a copy is to be split.
        adapters: it is to be trained by adapters.
    """
    yield from stages_refused(parallel)
    checks: tuple[tuple[Callable[[PreTrainedModel, int], Any], int], ...] = (
        (plan_of, parallel.tensor),
        (experts_of, parallel.expert),
    )
    for check, parts in checks:
        try:
            if parts > 1:
                check(model, parts)
        except ValueError as error:
            yield str(error)
    if adapters and parallel.tensor > 1:
        yield (
            f"trainer.parallel.tensor={parallel.tensor}: matrices with adapters (model.lora) are not split; "
            "trainer.parallel.context splits the tokens instead"
        )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes that a model may compute in; its weights and its optimizer are float32 whatever this is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that train one model, seen from one of them. Without any, one rank has the whole model alone."""

    ranks: DeviceMesh | None = None
    """All of them: they share the batch. None for one rank."""
    slices: DeviceMesh | None = None
    """Those whose slices make up this rank's copy; None where each tensor is whole. One rank alone has a mesh where
    FSDP2 casts each layer for it (`trainer.working_copy`)."""
    copies: DeviceMesh | None = None
    """Those that hold the same slices as this rank, one per copy; None for a single copy."""
    division: Division | None = None
    """Those that compute every micro-batch together with this rank; None where each has its own."""
    matrices: DeviceMesh | None = None
    """This rank's copy, over which each layer's matrices are split along the second dimension; None where not."""
    experts: DeviceMesh | None = None
    """The mesh of this rank's copy over which experts are split; None where they are not."""

    @property
    def first_copy(self) -> bool:
        """True if this rank's copy is the one that is saved and published."""
        return self.copies is None or self.copies.get_local_rank() == 0

    @property
    def owns_metrics(self) -> bool:
        """True on the one rank of those computing a micro-batch together whose metrics count: all of them compute the
        same."""
        return self.division is None or self.division.lead


ALONE = Layout()
"""One rank has the whole model."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ValueError: a model cannot be trained in it.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is none of {sorted(DTYPES)}")
    return DTYPES[name]


def shard(
    policy: PolicyModel,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    elsewhere: Mapping[nn.Parameter, DeviceMesh] | None = None,
) -> None:
    """Spread a model over a mesh of one dimension, layer by layer.

    Args:
        policy: changed in place; may be on the meta device.
        mesh: from `system.collectives.mesh`; torch's own helpers would make groups that hang (see there).
        dtype: to compute in. Gradients are summed over ranks in float32.
        elsewhere: parameters of which each rank has a part already, and the ranks that have the same part, over which
            it is spread.

    Raises:
        ValueError: torch is too old to spread parameters of one layer over several meshes.
    """
    mixed = dtype != torch.float32
    precision = MixedPrecisionPolicy(dtype, torch.float32) if mixed else MixedPrecisionPolicy()
    policy.computes_in = dtype
    placed = _placement(elsewhere) if elsewhere else None
    for block in blocks(policy.model):
        # what a block gets is in its dtype already, but where `truth.wide` has it otherwise
        fully_shard(
            block, mesh=mesh, mp_policy=replace(precision, cast_forward_inputs=False), shard_placement_fn=placed
        )
    fully_shard(policy, mesh=mesh, mp_policy=precision, shard_placement_fn=placed)
    sum_gradients(policy)


def _placement(elsewhere: Mapping[nn.Parameter, DeviceMesh]) -> Callable[[nn.Parameter], Any]:
    """Tells `fully_shard` over which mesh each parameter is spread."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise WrongSetting(
            f"trainer.parallel: torch {torch.__version__} cannot spread the parameters of a layer over several meshes, "
            "which tensor and expert need: install 2.13, or take context alone"
        ) from None
    # of ranks that are gathered along two dimensions torch warns once for each tensor that is published
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    about = {mesh: FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in dict.fromkeys(elsewhere.values())}
    places = {parameter: ShardPlacementResult(None, about[mesh]) for parameter, mesh in elsewhere.items()}
    return places.get


def sum_gradients(module: nn.Module) -> None:
    """Have FSDP2 sum the gradients of ranks, where it would average them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows neither AVG nor a factor within the sum
