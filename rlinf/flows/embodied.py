"""On-policy learning of a policy that acts: act in every environment, then learn from the trajectories."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.data.step import EmbodiedStep
from rlinf.flows.interact import interactions


async def embodied(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step: every slice of environments is acted on for `step.horizon` decisions; then the policy learns.

    Slices are coroutines side by side: while one is simulated, actions for another are computed. While the policy
    learns, the next step's episodes begin: their starts need no weights. The trainer knows whether the algorithm is PPO
    or GRPO, and the placement where each role runs.

    Args:
        step: how long, in how many slices.
        env, policy, trainer: the roles.

    Returns:
        The trainer's metrics.
    """
    beginnings: list[Any] = []
    trajectories = await asyncio.gather(*interactions(step, env, policy, beginnings))
    metrics: dict[str, float]
    metrics, *_ = await asyncio.gather(trainer.train(trajectories), *beginnings)
    await policy.load(trainer.weights())
    return metrics
