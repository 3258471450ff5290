"""On-policy learning of a policy that acts: act in every environment, then learn from the trajectories; the same
inside a world model, which learns from true environments."""

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


async def model_based(
    step: EmbodiedStep, env: Any, policy: Any, trainer: Any, world: Any, world_trainer: Any
) -> dict[str, float]:
    """One round: collect true episodes, fit the world model to all so far, learn inside it. Who calls scores outside.

    Learning inside is a flow of its own, `embodied`, whose environments happen to be predictions; so the trainer knows
    nothing of it, and may be that of PPO, GRPO or SAC (MBPO, arXiv:1906.08253, algorithm 2).

    Args:
        step: how long outside, in how many slices; `step.inside` are the steps that follow inside.
        env, policy, trainer: the roles: a `PolicyActor` with `keep_following`.
        world, world_trainer: the `WorldActor` that is acted in, and the `WorldTrainer` of its model.

    Returns:
        The metrics of the true episodes and of the world model, and the trainer's of the last step inside, where those
        of episodes begin with `inside/`.
    """
    lived = await asyncio.gather(*interactions(step, env, policy))
    metrics: dict[str, float] = await world_trainer.fit(lived)
    await world.load(world_trainer.weights())
    learned: dict[str, float] = {}
    for each in step.inside:
        learned = await embodied(each, world, policy, trainer)
    return {**{name if name not in metrics else f"inside/{name}": learned[name] for name in learned}, **metrics}
