"""Behavior cloning: supervised learning from demonstrations, as a warm-up of a policy that acts or as a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf.data.demonstrations import DemonstrationSet
from rlinf.data.step import ImitationStep


async def imitate(
    policy: Any, trainer: Any, path: str | Path | DemonstrationSet, *, steps: int, batch: int = 64, lr: float = 1e-3
) -> dict[str, float]:
    """Train a policy to act as in demonstrations.

    Args:
        policy, trainer: the roles.
        path: directory of demonstrations in any format, or several data sets.
        steps: optimizer steps.
        batch: decisions in each.
        lr: learning rate.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.imitate(
        path if isinstance(path, DemonstrationSet) else str(path), steps=steps, batch=batch, lr=lr
    )
    await policy.load(trainer.weights())
    return metrics


async def imitation(step: ImitationStep, trainer: Any) -> dict[str, float]:
    """One step of a run that learns from demonstrations alone: some optimizer steps.

    Args:
        step: which ones.
        trainer: the role, an `ImitationTrainer`.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.imitate_steps(step.first, step.count)
    return metrics
