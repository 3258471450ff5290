"""Work in flight between steps: what was begun for steps to come, what is known of it, and what became of it."""

from rlinf.data.in_flight.in_flight import InFlight
from rlinf.data.in_flight.ledger import Ledger
from rlinf.data.in_flight.rules import Batch, Kept, Made, Rules

__all__ = ["Batch", "InFlight", "Kept", "Ledger", "Made", "Rules"]
