"""GRPO (arXiv:2402.03300): sample a group of answers per prompt, and learn from those better than their group."""

from __future__ import annotations

from typing import Any

from rlinf.flows.step import Step


async def grpo(step: Step, rollout: Any, judge: Any, trainer: Any) -> dict[str, float]:
    """One step: groups are scored and learned from while others are still being generated.

    Args:
        step: prompts and group size.
        rollout, judge, trainer: the roles.

    Returns:
        The trainer's metrics.
    """
    samples = rollout.generate(step.prompts, n=step.group_size)
    scored = judge.score.map(samples)
    metrics: dict[str, float] = await trainer.train(scored)
    await rollout.load(trainer.weights())  # the one barrier; the weights do not pass through here
    return metrics
