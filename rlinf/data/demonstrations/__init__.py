"""Demonstrations: episodes that somebody acted well in, read and written in several formats; and what is computed of
them: decisions to learn from, batches in an order drawn from a seed, statistics of features. All of it blocks.
"""

from rlinf.data.demonstrations.episode import Decisions, Demonstration, Window, decisions, joined
from rlinf.data.demonstrations.load import first_demonstration, open_episodes, read_demonstrations
from rlinf.data.demonstrations.records import write_demonstrations

__all__ = [
    "Decisions", "Demonstration", "Window", "decisions", "first_demonstration", "joined", "open_episodes",
    "read_demonstrations", "write_demonstrations",
]  # fmt: skip
