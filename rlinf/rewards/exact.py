"""Rewards by comparison with the one right answer."""

from __future__ import annotations

from rlinf.rewards.base import trusted


@trusted
def exact(response: str, answer: str) -> float:
    """1.0 if the response is the answer, character for character; else 0.0."""
    return 1.0 if response == answer else 0.0
