"""Supervised training: learn what somebody else said, token by token."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import SupervisedStep


async def sft(step: SupervisedStep, trainer: Any) -> dict[str, float]:
    """One step: the mean negative log-likelihood of the learned tokens of a batch of conversations.

    Args:
        step: the batch.
        trainer: the role, with the objective `Likelihood`.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.train(step.batch)
    return metrics
