"""Select, replace and concatenate rows of observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlinf.envs.base import ArraySpec, Observation


def take(observation: Observation, rows: Tensor) -> Observation:
    """The rows named by `rows`, int64 [n], as a copy."""
    return {name: array[rows.to(array.device)] for name, array in observation.items()}


def placed(observation: Observation, rows: Tensor, new: Observation) -> Observation:
    """A copy of `observation` whose `rows`, int64 [n], are those of `new`."""
    result = {}
    for name, array in observation.items():
        result[name] = array.clone()
        result[name][rows.to(array.device)] = new[name]
    return result


def where(mask: Tensor, new: Observation, old: Observation) -> Observation:
    """Rows of `new` where `mask`, bool [N], is true, and of `old` elsewhere."""
    return {name: torch.where(mask.view(-1, *(1,) * (new[name].ndim - 1)), new[name], old[name]) for name in old}


def joined(parts: Sequence[Observation]) -> Observation:
    """The rows of all parts, one below the other."""
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def mistake(observation: Observation, spec: Mapping[str, ArraySpec], rows: int) -> str | None:
    """How an observation differs from its specification, for the adapter's author; None if it does not."""
    if observation.keys() != spec.keys():
        return f"it has {sorted(observation)}, and observation_spec {sorted(spec)}"
    for name, array in observation.items():
        wanted = (rows, *spec[name].shape)
        if tuple(array.shape) != wanted or array.dtype != spec[name].dtype:
            return f"{name!r} is {array.dtype} {list(array.shape)} instead of {spec[name].dtype} {list(wanted)}"
    return None
