"""Asynchronous PPO for text: answers for later steps are generated while policy and critic learn from this one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from rlinf.data.step import Step, ahead
from rlinf.flows.annotate import annotate, publish_weights


@ahead
async def ppo_async(
    step: Step, rollout: Any, judge: Any, critic: Any, trainer: Any, reference: Any = None, reward_model: Any = None
) -> dict[str, float]:
    """One step of `ppo`, from tokens whose weights are at most `staleness.max` versions old; values are the critic's
    newest.

    Args:
        step: group size, and whether only the critic learns yet; `step.in_flight` has what was begun, and the bound.
        rollout, judge, critic, trainer: the roles.
        reference: the reference policy of a KL penalty, where it has a model of its own.
        reward_model: a model that scores answers, beside the judge or instead of it.

    Returns:
        The metrics of critic and trainer, and how the batch was found.
    """

    def answers(prompts: Any) -> Any:
        groups = rollout.generate(prompts, n=step.group_size)
        return annotate(judge.score.map(groups), reward_model=reward_model)

    batch = step.in_flight.next_batch(step, answers, rollout)
    groups = annotate(batch.groups, reference=reference, critic=critic)
    if step.critic_only:
        return {**await critic.train(groups), **batch.metrics}
    for_critic, for_trainer = groups.tee()
    learned = await asyncio.gather(critic.train(for_critic), trainer.train(for_trainer))
    await publish_weights(step, trainer, partial(step.in_flight.publish, rollout), reference)
    return {**learned[0], **learned[1], **batch.metrics}
