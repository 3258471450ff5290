"""Promises inside values that go by reference: find them, and put what they promised in their place.

Flows in: arguments, results and items that may hold promises in nested lists, tuples, sets, dicts and dataclasses.
Flows out: the same with values. Who wakes whom: the last of the promises wakes `resolve`.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from rlinf.runtime.base.calls import current_call, lease_here
from rlinf.runtime.base.tasks import together

ATOMS = frozenset({int, float, str, bytes, bool, type(None), torch.Tensor, np.ndarray, complex, range})


def holds_promise(value: Any) -> bool:
    """Whether a promise sits anywhere in `value`. A class that says `__plain__ = True` has none in its objects, and is
    not searched."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if kind is tuple or kind is list:  # what most calls have
        return not ATOMS.issuperset(map(type, value)) and any(map(holds_promise, value))
    if getattr(kind, "__plain__", False):
        return False
    if hasattr(kind, "__promised__"):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(kind):
        return any(holds_promise(getattr(value, name, None)) for name in kind.__dataclass_fields__)
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return False
    return not ATOMS.issuperset(map(type, value)) and any(map(holds_promise, value))


async def resolve(value: Any, *, shared: bool = False) -> Any:
    """`value` with every promise in it replaced by what it promised; containers are rebuilt only where needed.

    Args:
        shared: the promises are others' as well, so giving up waiting must not cancel their calls.
    """
    promises: list[asyncio.Future[Any]] = []
    _collect(value, promises)
    if not promises:
        return value
    calls: list[Any] = [call for promise in promises for call in getattr(promise, "promises", [promise])]
    waits = [call.host.values.note_wait(call.label) for call in calls]
    user = current_call.get()
    if user is not None:
        for call in calls:
            call.host.flows.passed(call.name, user.role, call.key)
    try:
        async with lease.waiting() if (lease := lease_here()) is not None and lease.blocked else nullcontext():
            await together([*map(asyncio.shield, promises)] if shared else promises)
    except BaseException:
        del value, promises, calls  # they lead to the error, and its traceback here
        raise
    finally:
        for over in waits:
            over()
    return _rebuilt(value)


def _collect(value: Any, promises: list[asyncio.Future[Any]]) -> None:
    if not holds_promise(value):
        return
    if isinstance(value, asyncio.Future):
        promises.append(value)
        return
    for child in _children(value):
        _collect(child, promises)


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    return value


def _rebuilt(value: Any) -> Any:
    if not holds_promise(value):
        return value
    if isinstance(value, asyncio.Future):
        return value.result()
    if dataclasses.is_dataclass(value):
        changed: Any = copy.copy(value)
        for name in value.__dataclass_fields__:
            object.__setattr__(changed, name, _rebuilt(getattr(value, name)))  # also where it is frozen
        return changed
    if isinstance(value, dict):
        changed = copy.copy(value)  # whatever kind of dict it is
        changed.update((key, _rebuilt(child)) for key, child in value.items())
        return changed
    children = [_rebuilt(child) for child in value]
    return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
