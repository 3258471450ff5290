"""Direct preference optimisation (arXiv:2305.18290): make the chosen answer likelier, the rejected one less likely,
relative to a reference policy."""

from __future__ import annotations

from typing import Any

from rlinf.data.step import SupervisedStep
from rlinf.flows.text import annotate_in_order


async def dpo(step: SupervisedStep, trainer: Any, reference: Any = None) -> dict[str, float]:
    """One step: pairs get the reference's log-probs, and are learned from.

    Args:
        step: the batch of pairs.
        trainer: the role, with the objective `Preference`.
        reference: the policy to hold on to; None where the trainer or the data say what it thinks.

    Returns:
        The trainer's metrics.
    """
    pairs = step.batch if reference is None else await annotate_in_order(step.batch, reference)
    metrics: dict[str, float] = await trainer.train(pairs)
    return metrics
