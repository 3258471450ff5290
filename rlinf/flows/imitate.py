"""Behavior cloning: supervised learning from demonstrations, as a warm-up of a policy that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any


async def imitate(
    policy: Any, trainer: Any, path: str | Path, *, steps: int, batch: int = 64, lr: float = 1e-3
) -> dict[str, float]:
    """Train a policy to act as in demonstrations.

    Args:
        policy, trainer: the roles.
        path: directory of demonstrations, of `flows.record` or of your own.
        steps: optimizer steps.
        batch: decisions in each.
        lr: learning rate.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.imitate(str(path), steps=steps, batch=batch, lr=lr)
    await policy.load(trainer.weights())
    return metrics
