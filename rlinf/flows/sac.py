"""Off-policy learning by acting: the policy learns from what is remembered while environments are acted on."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.flows.embodied_step import EmbodiedStep


async def sac(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """One step: act for `step.horizon` decisions in every environment, and meanwhile learn from the steps before.

    Off-policy learning does not mind whose actions it learns from, so nobody waits for the newest: the weights that act
    are one step behind. `flows.embodied` with the same trainer learns after acting instead.

    Args:
        step: how long, in how many slices.
        env, policy, trainer: the roles; an `OffPolicyDecider` acts, an `OffPolicyTrainer` learns.

    Returns:
        The trainer's metrics.
    """

    async def interact(rank: int, number: int) -> Any:
        simulation, decider, key = env[rank], policy[(rank * step.slices + number) % len(policy)], (rank, number)
        seen = simulation.reset(number, step.index) if step.fresh else simulation.observe(number, step.index)
        for _ in range(step.horizon):
            actions = decider.act(key, seen)
            seen = simulation.step(number, actions)
            await actions  # keeps pace; what was seen does not pass through here
        return decider.trajectory(key, seen)  # a promise: it goes from the policy to the trainer

    slices = [(rank, number) for rank in range(len(env)) for number in range(step.slices)]
    learned, *lived = await asyncio.gather(trainer.learn(), *(interact(*each) for each in slices))
    metrics: dict[str, float] = await trainer.remember(lived)
    await policy.load(trainer.weights())
    return {**learned, **metrics}
