"""GRPO (arXiv:2402.03300) and every other algorithm on text without a critic: sample a group of answers per prompt, and
learn from how each compares with its group. The trainer's algorithm decides which one it is (DAPO, GSPO, RLOO …)."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import Step, alternates
from rlinf.flows.text import annotate, generate, next_batch, publish_weights


@alternates
async def grpo(
    step: Step,
    rollout: Any,
    judge: Any,
    trainer: Any,
    reference: Any = None,
    teacher: Any = None,
    reward_model: Any = None,
) -> dict[str, float]:
    """One step: groups are scored and learned from while others are still being generated.

    Args:
        step: prompts, group size, and whether more prompts are drawn in place of those that teach nothing.
        rollout, judge, trainer: the roles.
        reference: the reference policy of a KL penalty, where it has a model of its own.
        teacher: the policy whose log-probs are learned, where the algorithm distils one.
        reward_model: a model that scores answers, beside the judge or instead of it.

    Returns:
        The trainer's metrics, and those of dynamic sampling.
    """

    def answers(prompts: Any) -> Any:
        groups = generate(step, rollout, prompts)
        return annotate(judge.score.map(groups), reward_model=reward_model)

    batch = next_batch(step, answers, rollout)
    groups = annotate(batch.groups, reference=reference, teacher=teacher)
    metrics: dict[str, float] = await trainer.train(groups)
    await publish_weights(step, trainer, rollout, reference)  # the one barrier
    return {**metrics, **batch.metrics}
