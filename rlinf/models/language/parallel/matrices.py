"""Tensor parallelism: the matrices of each layer split over ranks that compute its tokens together.

In: a model, and the plan of its class for this (`base_model_tp_plan` of transformers' configurations). Out: the same
modules with a part of each matrix. Between such modules every rank has tokens of its own, as without: they are gathered
where a module with split matrices begins, and where it ends its result is added up and shared out again (sequence
parallelism, arXiv:2205.05198, section 4.2.2; as many bytes are sent as by adding up alone).

So weights that are not split, such as the norms of queries and keys, see of each rank other tokens or other heads, and
their gradients are summed over all ranks by FSDP2 as everywhere else. What adds gradients up by hooks instead
(transformers' `DistributedConfig`) has to know each of them, and counts those of earlier micro-batches again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rlinf.models.language.parallel.collectives import gathered, shared_out

_COLUMNS, _ROWS = "colwise", "rowwise"
"""What plans call matrices of which each rank makes some outputs, and those of which each has some inputs."""
_WHOLE = ("replicated_with_grad_allreduce",)
"""What they call weights that stay whole."""


class TensorRanks:
    """The tensor ranks of one share of tokens.

    Args:
        mesh: two dimensions: those with the same parts, and these.
    """

    def __init__(self, mesh: DeviceMesh):
        self.alike, self.mesh = halves(mesh)
        self.group = self.mesh.get_group()
        self.apart = True
        """Each rank has tokens of its own between the modules; otherwise all have all of them, which a model's own
        forward needs, and which is for trials without gradient."""

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens, [..., tokens, width], of what one rank has."""
        if not self.apart:
            return hidden
        rows = gathered(hidden.reshape(-1, hidden.shape[-1]), self.group)
        return rows.view(*hidden.shape[:-2], -1, hidden.shape[-1])

    def leave(self, partial: Tensor) -> Tensor:
        """What one rank has of the sum over ranks, each of which has an addend for all tokens."""
        if not self.apart:
            whole = partial.detach().contiguous()
            dist.all_reduce(whole, group=self.group)
            return whole
        rows = shared_out(partial.reshape(-1, partial.shape[-1]), self.group)
        return rows.view(*partial.shape[:-2], -1, partial.shape[-1])


def halves(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Of a mesh of two dimensions the ranks beside this one along each."""
    first, second = mesh.mesh_dim_names or ()
    return mesh[first], mesh[second]


def split_matrices(model: PreTrainedModel, ranks: TensorRanks) -> Iterator[nn.Parameter]:
    """Leave this rank its part of every matrix in the plan; the parameters that were split, as `DTensor`s.

    Args:
        model: changed in place; may be on the meta device.
        ranks: over which they are split.

    Raises:
        ValueError: see `plan_of`, or adapters sit on what is split.
    """
    for parent, children in plan_of(model, ranks.mesh.size()):
        parent.register_forward_pre_hook(partial(_enter, ranks), with_kwargs=True)
        for linear, style in children:
            yield _split(linear, "weight", 0 if style == _COLUMNS else 1, ranks.mesh)
            if style == _COLUMNS and linear.bias is not None:
                yield _split(linear, "bias", 0, ranks.mesh)
            linear.forward = partial(_columns if style == _COLUMNS else partial(_rows, ranks), linear)  # type: ignore[method-assign]


def plan_of(model: PreTrainedModel, parts: int) -> list[tuple[nn.Module, list[tuple[nn.Linear, str]]]]:
    """The modules whose matrices are split, each with them.

    Args:
        model: whose configuration has the plan. Experts are not split by it: they compute a rank's own tokens.
        parts: over how many ranks.

    Raises:
        ValueError: there is no plan, or one that this cannot follow, or some number is no multiple of `parts`.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    asked = f"trainer.parallel.tensor={parts}: {name}"
    styles: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    heads = {key: getattr(config, key, None) or 0 for key in ("num_attention_heads", "num_key_value_heads")}
    uneven = [f"{key} {number}" for key, number in heads.items() if number % parts]
    found: dict[str, list[tuple[nn.Linear, str]]] = {}
    for path, module in model.base_model.named_modules():
        style = next((style for key, style in styles.items() if re.fullmatch(_pattern(key), path)), None)
        if style is None or style in _WHOLE or not any(True for _ in module.parameters()) or ".experts" in path:
            continue
        if type(module) is not nn.Linear or style not in (_COLUMNS, _ROWS):
            raise ValueError(
                f"{asked} cannot be split: {path} is a {type(module).__name__} that is to be {style}; adapters and "
                "such plans are for trainer.parallel.context, which splits the tokens instead"
            )
        split = module.out_features if style == _COLUMNS else module.in_features
        uneven += [f"{path.rpartition('.')[2]} of {split}"] if split % parts else []
        found.setdefault(path.rpartition(".")[0], []).append((module, style))
    if uneven:
        raise ValueError(f"{asked} cannot be split evenly: {', '.join(dict.fromkeys(uneven))}")
    if not found:
        raise ValueError(
            f"{asked} cannot be split: transformers has no plan for it; trainer.parallel.context needs none"
        )
    odd = [path for path, children in found.items() if {style for _, style in children} != {_COLUMNS, _ROWS}]
    if odd:
        raise ValueError(f"{asked} cannot be split: of {odd[0]} it is not said how it begins and how it ends")
    return [(model.base_model.get_submodule(path), children) for path, children in found.items()]


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"[^.]+")


def _split(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Replace a parameter by this rank's part of it, which all ranks have whole."""
    whole: nn.Parameter = getattr(module, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    made = nn.Parameter(part, requires_grad=whole.requires_grad)
    setattr(module, name, made)
    return made


def _enter(ranks: TensorRanks, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if "hidden_states" in named:
        return given, {**named, "hidden_states": ranks.enter(named["hidden_states"])}
    return (ranks.enter(given[0]), *given[1:]), named


def _columns(linear: nn.Linear, hidden: Tensor) -> Tensor:
    return F.linear(hidden, local(linear.weight), None if linear.bias is None else local(linear.bias))


def _rows(ranks: TensorRanks, linear: nn.Linear, hidden: Tensor) -> Tensor:
    found = ranks.leave(F.linear(hidden, local(linear.weight)))
    return found if linear.bias is None else found + linear.bias


def local(parameter: Tensor) -> Tensor:
    """What this rank has of a split parameter, differentiable."""
    part: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part
