"""Off-policy learning of a policy that acts: it learns from the replay buffer while environments are acted in."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.data.step import EmbodiedStep
from rlinf.flows.interact import interactions


async def sac(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step: act for `step.horizon` decisions in every environment, and meanwhile learn from the steps before.

    Off-policy learning works with actions of any policy, so nothing waits for the newest weights: those that act are
    one step behind. `flows.embodied` with the same trainer learns after acting instead.

    Args:
        step: how long, in how many slices.
        env, policy, trainer: the roles: a `PolicyActor` with `keep_following`, and a `SacTrainer`.

    Returns:
        The trainer's metrics.
    """
    learned, *lived = await asyncio.gather(trainer.learn(), *interactions(step, env, policy))
    metrics: dict[str, float] = await trainer.remember(lived)
    await policy.load(trainer.weights())
    return {**learned, **metrics}
