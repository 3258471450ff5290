"""Asynchronous PPO for text: answers for later steps are generated while policy and critic learn from this one."""

from __future__ import annotations

import asyncio
from typing import Any

from rlinf.data.step import Step, ahead


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
        groups = judge.score.map(rollout.generate(prompts, n=step.group_size))
        return groups if reward_model is None else reward_model.score(groups)

    batch = step.in_flight.next_batch(step, answers, rollout)
    groups = batch.groups
    if reference is not None:
        groups = reference.logprobs(groups)
    valued = critic.values(groups)
    if step.critic_only:
        return {**await critic.train(valued), **batch.metrics}
    for_critic, for_trainer = valued.tee()
    learned = await asyncio.gather(critic.train(for_critic), trainer.train(for_trainer))
    weights = trainer.weights()  # they do not pass through here
    await step.in_flight.publish(rollout, weights)
    if step.moving_reference:
        await reference.follow(weights)
    return {**learned[0], **learned[1], **batch.metrics}
