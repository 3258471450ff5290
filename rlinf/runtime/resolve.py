"""Promises inside values that go by reference: find them, and put what they promised in their place."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

_ATOMS = frozenset({int, float, str, bytes, bool, type(None), torch.Tensor, np.ndarray, complex, range})


def holds_promise(value: Any) -> bool:
    """Whether a promise sits anywhere in nested lists, tuples, dicts and dataclasses."""
    kind = type(value)
    if kind in _ATOMS:
        return False
    if hasattr(kind, "__promised__"):
        return True
    if kind is list or kind is tuple:
        kinds = set(map(type, value))
        return not kinds <= _ATOMS and any(holds_promise(child) for child in value)
    if kind is dict:
        kinds = set(map(type, value.values()))
        return not kinds <= _ATOMS and any(holds_promise(child) for child in value.values())
    if dataclasses.is_dataclass(kind):
        return any(holds_promise(getattr(value, name, None)) for name in kind.__dataclass_fields__)
    return False


async def resolve(value: Any) -> Any:
    """`value` with every promise in it replaced by what it promised; containers are rebuilt only where needed."""
    if not holds_promise(value):
        return value
    kind = type(value)
    if hasattr(kind, "__promised__"):
        return await value
    if kind is list or kind is tuple:
        return kind([await resolve(child) for child in value])
    if kind is dict:
        return {key: await resolve(child) for key, child in value.items()}
    changes = {name: await resolve(getattr(value, name)) for name in kind.__dataclass_fields__}
    return dataclasses.replace(value, **changes)
