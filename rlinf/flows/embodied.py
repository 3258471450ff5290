"""Learning by acting: a policy and environments feed each other, and the policy learns from what came of it."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.data.step import EmbodiedStep
from rlinf.flows.parts.interact import interactions


async def embodied(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step: every slice of environments is acted on for `step.horizon` decisions; then the policy learns.

    Slices are coroutines side by side: while one is simulated, actions for another are decided. Whether the algorithm
    is PPO or GRPO the trainer knows, and where each role runs the placement.

    Args:
        step: how long, in how many slices.
        env, policy, trainer: the roles.

    Returns:
        The trainer's metrics.
    """
    trajectories = await asyncio.gather(*interactions(step, env, policy))
    metrics: dict[str, float] = await trainer.train(trajectories)
    await policy.load(trainer.weights())
    return metrics
