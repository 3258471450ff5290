"""A reward model from preference pairs (Bradley and Terry): one score of a whole answer, higher for the chosen one."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import SupervisedStep


async def reward_model(step: SupervisedStep, trainer: Any) -> dict[str, float]:
    """One step: score both answers of each pair, and learn to tell which was chosen.

    Args:
        step: the batch of pairs.
        trainer: the role, with the objective `Scores`.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.train(step.batch)
    return metrics
