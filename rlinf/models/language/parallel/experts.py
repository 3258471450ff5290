"""Expert parallelism: each rank has some experts of every layer, and tokens go where their experts are.

In: a model of transformers whose experts are stacked in one tensor per matrix. Out: the same modules with a part of
them. Every choice of a token is sent to the rank that has the chosen expert and comes back as what that made of it; how
much a choice weighs never leaves the token's rank. Ranks may have unequal numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from rlinf.models.language.parallel.collectives import exchanged
from rlinf.models.language.parallel.matrices import local

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of rows [rows, width], the experts of each, int64 [rows, chosen], and how much each weighs: [rows, width]."""


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[nn.Parameter]:
    """Leave this rank its experts; the parameters that were split, as `DTensor`s.

    Args:
        model: changed in place; may be on the meta device.
        mesh: the ranks over which they are split.

    Raises:
        ValueError: the model has no experts that can be split, or a number of them that is no multiple of the ranks'.
    """
    for experts in experts_of(model, mesh.size()):
        for name, whole in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            made = nn.Parameter(part, requires_grad=whole.requires_grad)
            setattr(experts, name, made)
            yield made
        experts.num_experts = int(experts.num_experts) // mesh.size()  # type: ignore[arg-type, assignment]
        experts.forward = partial(_sent_around, experts, experts.forward, mesh.get_group())


def experts_of(model: PreTrainedModel, parts: int) -> list[nn.Module]:
    """The modules that hold the experts of a layer each.

    Raises:
        ValueError: there is none, or their number cannot be split so.
    """
    found = [module for module in model.modules() if _stacked(module)]
    asked = f"trainer.parallel.expert={parts}: {type(model).__name__}"
    if not found:
        raise ValueError(f"{asked} has no experts that transformers stacks in one tensor")
    numbers = {int(module.num_experts) for module in found}  # type: ignore[arg-type]
    if uneven := sorted(number for number in numbers if number % parts):
        raise ValueError(f"{asked} has {uneven[0]} experts, which is no multiple of {parts}")
    return found


def _stacked(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    number = getattr(module, "num_experts", None)
    return any(each.dim() == 3 for each in own) and all(each.shape[0] == number for each in own)


def _sent_around(
    module: nn.Module, inner: Experts, group: dist.ProcessGroup, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """What `inner` gives, with the experts of all ranks; arguments as for `Experts`."""
    ranks, here = dist.get_world_size(group), int(module.num_experts)  # type: ignore[arg-type]
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    leaving = torch.bincount(flat, minlength=ranks * here)  # choices of each expert
    coming = torch.empty_like(leaving)  # of each rank, choices of each expert here
    dist.all_to_all_single(coming, leaving, group=group)
    sent, received = leaving.view(ranks, here).sum(1).tolist(), coming.view(ranks, here).sum(1).tolist()
    rows = exchanged(hidden.index_select(0, order // chosen.shape[1]), sent, received, group)
    expert = torch.arange(here, device=flat.device).repeat(ranks).repeat_interleave(coming)
    if not len(rows):  # a row that nobody gets back, since every rank's experts must have a gradient
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
    with _parts_alone(module):
        made = inner(rows, expert[:, None], weights.new_ones(len(rows), 1))
    back = exchanged(made[: sum(received)], received, sent, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    mine = back.index_select(0, place).view(*chosen.shape, -1) * weights[..., None]
    return mine.sum(dim=1).to(hidden.dtype)


@contextmanager
def _parts_alone(module: nn.Module) -> Iterator[None]:
    """Have a module compute with what this rank has of its split parameters, as plain tensors."""
    split = dict(module._parameters)
    try:
        module._parameters.update({name: local(each) for name, each in split.items() if each is not None})  # type: ignore[misc]
        yield
    finally:
        module._parameters.update(split)
