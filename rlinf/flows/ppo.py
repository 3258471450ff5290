"""PPO (arXiv:1707.06347) for text: a critic predicts the return at every token; policy and critic learn together."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.data.step import Step, alternates
from rlinf.flows.text import annotate, generate, next_batch, publish_weights


@alternates
async def ppo(
    step: Step, rollout: Any, judge: Any, critic: Any, trainer: Any, reference: Any = None, reward_model: Any = None
) -> dict[str, float]:
    """One step: groups are scored and get values while others are still being generated; then policy and critic learn,
    at the same time where they have devices of their own.

    Args:
        step: prompts, group size, and whether only the critic learns yet.
        rollout, judge, critic, trainer: the roles.
        reference: the reference policy of a KL penalty, where it has a model of its own.
        reward_model: a model that scores answers, beside the judge or instead of it.

    Returns:
        The metrics of critic and trainer, and those of dynamic sampling.
    """

    def answers(prompts: Any) -> Any:
        groups = generate(step, rollout, prompts)
        return annotate(judge.score.map(groups), reward_model=reward_model)

    batch = next_batch(step, answers, rollout)
    groups = annotate(batch.groups, reference=reference, critic=critic)
    if step.critic_only:
        return {**await critic.train(groups), **batch.metrics}
    for_critic, for_trainer = groups.tee()
    learned = await asyncio.gather(critic.train(for_critic), trainer.train(for_trainer))
    await publish_weights(step, trainer, rollout, reference)  # the one barrier
    return {**learned[0], **learned[1], **batch.metrics}
