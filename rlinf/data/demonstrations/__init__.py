"""Demonstrations: episodes that somebody acted well in, read and written in several formats.

From them come decisions to learn from, batches in an order drawn from a seed, and statistics of features. All of it
blocks.
"""

from rlinf.data.demonstrations.episode import Decisions, Demonstration, Window, decisions, joined, write_demonstrations
from rlinf.data.demonstrations.load import (
    DemonstrationSet,
    first_demonstration,
    open_episodes,
    open_parts,
    read_demonstrations,
)
from rlinf.data.demonstrations.stream import DecisionStream

__all__ = [
    "DecisionStream",
    "Decisions",
    "Demonstration",
    "DemonstrationSet",
    "Window",
    "decisions",
    "first_demonstration",
    "joined",
    "open_episodes",
    "open_parts",
    "read_demonstrations",
    "write_demonstrations",
]
