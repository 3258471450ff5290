"""How finely an actor that shares its devices takes them: the two numbers that a plan sets.

Flows in: a plan's wish, at `spawn`. Flows out: when `device_lease.py` asks for devices and offers them. Nobody is
woken.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True, slots=True)
class Granularity:
    """When an actor's device calls ask for its devices, and for how long they keep them.

    Raises:
        UserError: a number below 1.
    """

    items: int = 1
    """A call that takes a stream asks for its devices only when so many of its items are at hand, or it has ended."""
    lease_items: int | None = None
    """A call with work at hand offers its devices to those who wait after so many items, not earlier. None: a map when
    its quantum of seconds is over, any other call when it would wait."""

    def __post_init__(self) -> None:
        for name in ("items", "lease_items"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name}={value!r}: give a whole number of items, at least 1")
        if self.items is None:
            raise UserError("items=None: give a whole number of items, at least 1")
