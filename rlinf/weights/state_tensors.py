"""A trainer's state as tensors: by name, and back, for checkpoints; and whatever there is of it on the device.

Flows in: a model and its optimizer. Flows out: tensors by key (`model.NAME`, `optimizer.NAME.KEY`, `rng.DEVICE.RANK`)
that share memory with the originals, and JSON values for the rest. Nobody waits here, and nothing communicates: a
sharded tensor stays sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

LOCAL_CHOICES = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of an optimizer's groups that say how it computes on this machine, not what."""

OptimizerState = dict[nn.Parameter, tuple[str, dict[str, Tensor]]]
"""Per parameter its name and what the optimizer keeps for it."""


def reshard(model: nn.Module) -> None:
    """Have every parameter show its shard: after a forward without backward FSDP2 shows some of them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def held(module: nn.Module, *optimizers: Optimizer) -> Iterator[Tensor]:
    """The tensors themselves, as they are now: parameters, what gathered of their gradients, buffers, and what the
    optimizers remember. Some may come twice, or share their storage."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and the buffers that belong to a model's weights, under `model.NAME`."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {f"model.{name}": _flat(tensor) for name, tensor in {**dict(model.named_parameters()), **buffers}.items()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """What the optimizer keeps for each parameter, under `optimizer.NAME.KEY`.

    Raises:
        ValueError: a parameter that the model has not, or something kept that is no tensor.
    """
    tensors = {}
    for name, parameter in _named(model, optimizer):
        for key, value in kept_by(optimizer, parameter).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {type(value).__name__}: only tensors can be "
                    "saved"
                )
            tensors[f"optimizer.{name}.{key}"] = _flat(value)
    return tensors


def optimizer_groups(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The optimizer's hyperparameters and which parameters they are for, as JSON values."""
    if optimizer is None:
        return {"groups": [], "scalars": []}
    names = {parameter: name for name, parameter in _named(model, optimizer)}
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "values": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in LOCAL_CHOICES
            },
        }
        for group in optimizer.param_groups
    ]
    kept = (item for parameter in names for item in kept_by(optimizer, parameter).items())
    return {"groups": groups, "scalars": sorted({key for key, value in kept if value.dim() == 0})}


def kept_by(optimizer: Any, parameter: nn.Parameter) -> Mapping[str, Any]:
    """What an optimizer keeps of a parameter; one whose own form is no tensors says how it is saved."""
    if hasattr(optimizer, "as_saved"):
        return optimizer.as_saved(parameter)  # type: ignore[no-any-return]
    return optimizer.state.get(parameter, {})  # type: ignore[no-any-return]


def empty_state(
    model: nn.Module, optimizer: Optimizer | None, stored: Metadata, about: Mapping[str, Any]
) -> OptimizerState:
    """Uninitialised tensors for what a checkpoint has of the optimizer, sharded as the parameters are.

    Args:
        model, optimizer: the ones that will take it over; they stay as they are.
        stored: what the checkpoint's files have.
        about: what `optimizer_groups` gave.
    """
    kept: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, kind in stored.state_dict_metadata.items():
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if name.startswith("optimizer.") and isinstance(kind, TensorStorageMetadata):
            kept.setdefault(owner, {})[key] = kind
    state: OptimizerState = {}
    on_device = optimizer is not None and any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for name, parameter in _named(model, optimizer):
        like = parameter.detach()
        tensors = {}
        for key, kind in kept.get(name, {}).items():
            dtype = kind.properties.dtype
            if kind.size == like.shape and key not in about["scalars"]:
                tensors[key] = torch.empty_like(like, dtype=dtype)
            else:  # a counter: torch keeps it on the CPU unless it computes with it on the device
                tensors[key] = torch.empty(kind.size, dtype=dtype, device=like.device if on_device else "cpu")
        state[parameter] = name, tensors
    return state


def take_over(optimizer: Optimizer | None, state: OptimizerState, about: Mapping[str, Any]) -> None:
    """Have the optimizer go on with a state that `empty_state` made and that has been filled since."""
    if optimizer is None:
        return
    for parameter, (_, tensors) in state.items():
        if tensors:
            scalars = {key: value.reshape(()) for key, value in tensors.items() if key in about["scalars"]}
            if hasattr(optimizer, "take"):
                optimizer.take(parameter, {**tensors, **scalars})
            else:
                optimizer.state[parameter] = {**tensors, **scalars}
    for group, saved in zip(optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved["values"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate, decay and the like of each of an optimizer's groups, such as they are now."""
    return [
        {key: value for key, value in group.items() if key not in LOCAL_CHOICES} for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Set what `hyperparameters` gave, in place of what a checkpoint brought."""
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update(values)


def generators(rank: int, model: nn.Module) -> dict[str, Tensor]:
    """States of torch's random generators of this process, under `rng.DEVICE.RANK`: of the CPU and the model's GPU."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(first.device)
    return states


def set_generators(states: Mapping[str, Tensor], model: nn.Module) -> None:
    """Put states back that `generators` gave."""
    for key, state in states.items():
        if key.startswith("rng.cuda."):
            torch.cuda.set_rng_state(state, next(model.parameters()).device)
        else:
            torch.set_rng_state(state)


def own_part(tensor: Tensor, rank: int) -> tuple[Tensor, tuple[int, ...]] | None:
    """What a rank writes of a tensor, and where that begins in the whole; None if others write all of it.

    Args:
        tensor: plain ones are equal on all ranks, so rank 0 writes them; of sharded ones each writes its shard, and
            of shards that several ranks have the first.
        rank: of this process.

    Raises:
        ValueError: a tensor that is a sum over ranks.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, (0,) * tensor.dim()) if rank == 0 else None
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} on {mesh} is a sum over ranks: reduce it first")
    replicas = [isinstance(placement, Replicate) for placement in tensor.placements]
    local = tensor.to_local()
    if where is None or any(copied and at for copied, at in zip(replicas, where, strict=True)) or not local.numel():
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return local, tuple(chunk.offsets)


def _named(model: nn.Module, optimizer: Optimizer | None) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, in its order, with the model's names for them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    if strangers := [tuple(parameter.shape) for parameter in ordered if parameter not in names]:
        raise ValueError(
            f"the optimizer has {len(strangers)} parameters that the model has not (shapes {strangers[:3]}): make it "
            "from the model's parameters, after sharding, and save or restore while they are sharded (between steps)"
        )
    return [(names[parameter], parameter) for parameter in ordered]


def _flat(tensor: Tensor) -> Tensor:
    """The tensor, with at least one dimension: DCP cannot read one without."""
    return tensor.detach() if tensor.dim() else tensor.detach().view(1)
