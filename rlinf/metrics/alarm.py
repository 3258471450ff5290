"""Warn when engine and trainer disagree on the log-probs of sampled tokens.

In: a step's metrics. Out: a line to be printed, in the step in which a limit is passed; not again until it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping

MEASURES = ("mean", "max")


class MismatchAlarm:
    """Watches `mismatch/mean` and `mismatch/max`, |log-prob of the trainer - of the engine|, nats.

    Args:
        mean, max: their limits; None for none.
    """

    def __init__(self, mean: float | None, max: float | None) -> None:
        self._limits = {"mean": mean, "max": max}
        self._passed: set[str] = set()

    def heard(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to tell people about this step; None if nothing is new."""
        over = {
            name
            for name in MEASURES
            if (limit := self._limits[name]) is not None and not metrics.get(f"mismatch/{name}", 0.0) <= limit
        }
        new, self._passed = over - self._passed, over
        if not new:
            return None
        figures = " and ".join(
            f"mismatch/{name} is {metrics[f'mismatch/{name}']:.3g} nats (limit metrics.mismatch_{name} = "
            f"{self._limits[name]:g})"
            for name in MEASURES
            if name in new
        )
        return (
            f"step {step}: engine and trainer disagree about the sampled tokens: {figures}. Gradients are off by as "
            "much. Let both compute in the same precision (rollout.dtype, trainer.dtype), or correct for it "
            "(algorithm.correction.cap=2)"
        )
