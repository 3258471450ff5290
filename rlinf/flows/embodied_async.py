"""Learning by acting, where acting for the next step begins before learning from this one has ended."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import EmbodiedStep
from rlinf.flows.parts.interact import act


async def embodied_async(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step of `flows.embodied`, with what acts a bounded number of versions behind what learns.

    A step so takes as long as the longer of acting and learning, instead of both, where policy and trainer are on
    different devices. The algorithm must bear actions of an older policy: PPO and GRPO weigh them by how likely they
    have become.

    Args:
        step: how long, in how many slices; `step.in_flight` has what was begun, and the bound.
        env, policy, trainer: the roles.

    Returns:
        The trainer's metrics; `staleness/mean` says how many versions old the weights were that acted.
    """
    trajectories = await step.in_flight.next_batch(step, lambda step: act(step, env, policy), policy)
    metrics: dict[str, float] = await trainer.train(trajectories)
    await step.in_flight.publish(policy, trainer.weights())
    return metrics
