"""Changes by `benchmarks.learning` in configs/quickstart.yaml, and why: for every recipe, and for single ones.

Recipes run as published, with the quickstart's optimizer: none is tuned to win. What stands here is what a recipe
cannot know of this task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Keys that differ from the quickstart's."""

    keys: tuple[str, ...]
    """Words of a command line, `key=value`; `{teacher}` is the directory of a model that grpo trained."""
    why: str
    """One sentence."""


EVERYWHERE = (
    Change(("sft.steps=30",), "a shorter warm-up leaves an error that is large enough to be halved"),
    Change(("trace=false", "metrics.live=never", "metrics.samples=0"), "nobody looks at the traces of so many runs"),
)
"""Changes that all runs have in common."""

CHANGES: Mapping[str, tuple[Change, ...]] = {
    "opd": (Change(("teacher.model={teacher}",), "a teacher is what it learns from: here the final model of `grpo`"),),
    "ppo": (
        Change(
            ("critic.lr=1e-3",), "a critic that begins knowing nothing has 100 steps; the default is for large models"
        ),
    ),
}
"""By recipe; one that is not named runs as published."""
