"""Supervised training on worked examples, as a warm-up before reinforcement learning."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any

from rlinf.data.sample import Example, Sample
from rlinf.runtime.base.progress import work


def example_of(sample: Sample) -> Example:
    """A sample as a worked example, whatever it earned."""
    return Example(sample.prompt.token_ids, sample.response_ids, sample.loss_mask, sample.prompt.images)


async def warm_up(
    batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]],
    rollout: Any,
    trainer: Any,
    *,
    lr: float = 2e-3,
) -> dict[str, float]:
    """Train on the batches, one optimizer step each, and hand the weights to the rollout.

    Args:
        batches: a list or a stream of them.
        rollout, trainer: the roles.
        lr: constant learning rate.

    Returns:
        The trainer's metrics.
    """
    with work("warming up"):
        metrics: dict[str, float] = await trainer.sft(batches, lr=lr)
        await rollout.load(trainer.weights())
    return metrics
