"""Which part of a value cannot be sent, for an error that says so.

Flows in: a value that did not pickle. Flows out: an error that names the part and its place. Nobody waits here.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import numpy as np
import torch

from rlinf.runtime.base.errors import RuntimeFault, UserError


def unpicklable(value: Any, error: Exception) -> Exception:
    """What to raise when pickling `value` has raised `error`."""
    if isinstance(error, RuntimeFault):  # it says itself what to do
        return error
    where, culprit = _culprit(value)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    return UserError(
        f"cannot send {where}a {kind} ({str(culprit)[:80]}) to another process: {error}. "
        "Send plain data and tensors, or classes and functions defined at the top level of a module."
    )


def _culprit(value: Any, where: str = "") -> tuple[str, Any]:
    """The smallest part of `value` that does not pickle, and where it sits, as "[0]['fn'].hook: "."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        children = [(f"[{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"[{i}]", child) for i, child in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    for step, child in children:
        if where.count("[") + where.count(".") < 8 and not _pickles(child):
            return _culprit(child, where.removesuffix(": ") + step + ": ")
    return where, value


class _Trial(pickle.Pickler):
    """Pickles all but what the real one would replace, and what would be replaced is fine."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.Tensor, np.ndarray)) or hasattr(type(obj), "__lend__"):
            return str, ()
        return NotImplemented


def _pickles(value: Any) -> bool:
    try:
        _Trial(io.BytesIO(), protocol=5).dump(value)
    except Exception:  # any failure at all means "not this one"
        return False
    return True
