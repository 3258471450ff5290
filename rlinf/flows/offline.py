"""Off-policy learning from demonstrations alone: nobody acts."""

from __future__ import annotations

from typing import Any


async def offline(policy: Any, trainer: Any) -> dict[str, float]:
    """One step: the trainer takes some optimizer steps on its demonstrations, and the policy gets the new weights.

    Args:
        policy, trainer: the roles: a `PolicyActor`, and a `SacTrainer` with demonstrations.

    Returns:
        The trainer's metrics.
    """
    metrics: dict[str, float] = await trainer.study()
    await policy.load(trainer.weights())
    return metrics
