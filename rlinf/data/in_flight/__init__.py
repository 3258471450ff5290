"""Work in flight between steps, and the account of what became of every sample.

Prompts drawn and answers begun for steps to come, and what a checkpoint keeps of them; the ledger, and its balance.
"""

from rlinf.data.in_flight.in_flight import InFlight, Kept
from rlinf.data.in_flight.ledger import Ledger

__all__ = ["InFlight", "Kept", "Ledger"]
