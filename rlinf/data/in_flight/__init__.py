"""Work in flight between steps: what was begun for steps to come, and what is known of it."""

from rlinf.data.in_flight.in_flight import InFlight
from rlinf.data.in_flight.rules import Batch, Kept, Made, Rules

__all__ = ["Batch", "InFlight", "Kept", "Made", "Rules"]
