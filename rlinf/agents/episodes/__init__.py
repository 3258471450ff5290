"""Episodes: programs of the user's that play tasks, what became of them, and what a checkpoint keeps of open ones."""

from rlinf.agents.episodes.episode import Episode, here
from rlinf.agents.episodes.open_task import OpenTask
from rlinf.agents.episodes.playing import Episodes, LoopWatch, Outcome, Play
from rlinf.agents.episodes.tally import Gathered, Tally

__all__ = ["Episode", "Episodes", "Gathered", "LoopWatch", "OpenTask", "Outcome", "Play", "Tally", "here"]
