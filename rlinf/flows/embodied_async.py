"""Asynchronous learning of a policy that acts: acting for the next step begins while this one is learned from."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import EmbodiedStep, ahead
from rlinf.flows.interact import acting


@ahead
async def embodied_async(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step of `flows.embodied`, acted by weights that are a bounded number of versions old.

    Where policy and trainer are on different devices, a step takes as long as the longer of acting and learning,
    instead of both. The algorithm must correct for actions of an older policy, as PPO and GRPO do by importance ratios.

    Args:
        step: how long, in how many slices; `step.in_flight` has what was begun, and the bound.
        env, policy, trainer: the roles.

    Returns:
        The trainer's metrics; `staleness/mean` says how many versions old the acting weights were.
    """
    batch = step.in_flight.next_batch(step, lambda steps: acting(steps, env, policy), policy)
    metrics: dict[str, float] = await trainer.train(await batch.groups.collect())
    await step.in_flight.publish(policy, trainer.weights())
    return metrics
