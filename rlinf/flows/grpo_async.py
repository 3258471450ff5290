"""Asynchronous GRPO, and every other algorithm on text without a critic: answers for later steps are generated while
this one is learned from."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf.data.step import Step, ahead
from rlinf.flows.annotate import annotate, publish_weights


@ahead
async def grpo_async(
    step: Step,
    rollout: Any,
    judge: Any,
    trainer: Any,
    reference: Any = None,
    teacher: Any = None,
    reward_model: Any = None,
) -> dict[str, float]:
    """One step of `grpo`, from tokens whose weights are at most `staleness.max` versions old.

    Where rollout and trainer are on different devices, a step takes as long as the longer of generating and learning;
    where they share devices, the longest answers do not hold it up.

    Args:
        step: group size; `step.in_flight` has what was begun, and the bound.
        rollout, judge, trainer: the roles.
        reference: the reference policy of a KL penalty, where it has a model of its own.
        teacher: the policy whose log-probs are learned, where the algorithm distils one.
        reward_model: a model that scores answers, beside the judge or instead of it.

    Returns:
        The trainer's metrics, and how the batch was found.
    """

    def answers(prompts: Any) -> Any:
        groups = rollout.generate(prompts, n=step.group_size)
        return annotate(judge.score.map(groups), reward_model=reward_model)

    batch = step.in_flight.next_batch(step, answers, rollout)
    groups = annotate(batch.groups, reference=reference, teacher=teacher)
    metrics: dict[str, float] = await trainer.train(groups)
    await publish_weights(step, trainer, partial(step.in_flight.publish, rollout), reference)
    return {**metrics, **batch.metrics}
