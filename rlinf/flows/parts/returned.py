"""What a flow returned, read as a step's metrics. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlinf.config.loading import InputError


def metrics_of(flow: Callable[..., Any], returned: Any) -> dict[str, float]:
    """A step's metrics.

    Args:
        flow: that returned them, for errors.
        returned: numbers by name, or what becomes numbers, such as tensors of one element.

    Raises:
        InputError: it is nothing of the kind.
    """
    if not isinstance(returned, Mapping):
        raise InputError(
            f"flow: {flow.__qualname__} returned {returned!r}; it must return the step's metrics, a dict of "
            "numbers by name, such as what trainer.train gives"
        )
    return {name: _number(flow, name, value) for name, value in returned.items()}


def _number(flow: Callable[..., Any], name: Any, value: Any) -> float:
    if isinstance(name, str) and isinstance(value, int | float):
        return value
    try:
        if isinstance(name, str) and not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several elements
        pass
    raise InputError(
        f"flow: {flow.__qualname__} returned the metric {name!r} = {value!r:.100}; names are texts and values single "
        "numbers"
    )
