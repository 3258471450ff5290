"""Work in flight between steps: answers begun for later steps, the bound on their age, their checkpoints."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.data.in_flight.admission import Batch, Completed, Kept, Rules
    from rlinf.data.in_flight.in_flight import InFlight
    from rlinf.data.ledger import Ledger

_HOME = {
    "Batch": "in_flight.admission",
    "InFlight": "in_flight.in_flight",
    "Kept": "in_flight.admission",
    "Ledger": "ledger",
    "Completed": "in_flight.admission",
    "Rules": "in_flight.admission",
}

__all__ = ["Batch", "Completed", "InFlight", "Kept", "Ledger", "Rules"]


def __getattr__(name: str) -> Any:
    """Import public names at first use: `rlinf ledger` reads books in seconds, since it needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rlinf.data.{_HOME[name]}"), name)
