"""The reward of drills, in a module of its own, which the processes that score import within milliseconds."""

from __future__ import annotations

import time


def reward(response: str, answer: str) -> float:
    """The share of the answer's characters that are in the response: unequal from the first step on. It takes a while,
    so that rewards are pending when a checkpoint is written."""
    time.sleep(0.002)
    return sum(character in response for character in answer) / len(answer)


def slow(response: str, answer: str) -> float:
    """The same for long enough that a process which scores is killed while it has answers."""
    time.sleep(0.04)
    return reward(response, answer)
