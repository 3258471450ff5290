"""Learning by acting: a policy and environments feed each other, and the policy learns from what came of it."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.flows.embodied_step import EmbodiedStep


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

    async def interact(rank: int, number: int) -> Any:
        simulation, decider, key = env[rank], policy[(rank * step.slices + number) % len(policy)], (rank, number)
        seen = simulation.reset(number, step.index) if step.fresh else simulation.observe(number, step.index)
        for _ in range(step.horizon):
            actions = decider.act(key, seen)
            seen = simulation.step(number, actions)
            await actions  # keeps pace; what was seen does not pass through here
        return decider.trajectory(key, seen)  # a promise: it goes from the policy to the trainer

    slices = [(rank, number) for rank in range(len(env)) for number in range(step.slices)]
    trajectories = await asyncio.gather(*(interact(*each) for each in slices))
    metrics: dict[str, float] = await trainer.train(trajectories)
    await policy.load(trainer.weights())
    return metrics
