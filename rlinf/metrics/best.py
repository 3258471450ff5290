"""The best evaluation of a run so far, by one of its metrics: which checkpoint is kept, and when it is time to stop.

In: the metrics of each evaluation after a step. Out: whether it is the best one, and whether so many that followed were
no better that the run should end. A checkpoint keeps the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlinf.config.common import CheckpointConfig
from rlinf.config.loading import InputError
from rlinf.metrics.run_directory import RunDirectory


@dataclass(slots=True)
class Best:
    """The best evaluation so far. The one before the first step does not count: nothing is kept of it.

    Args:
        metric: which metric of evaluations is compared, such as `evaluation/accuracy`.
        mode: whether more of it is better, or less.
        patience: after so many evaluations that are no better the run should end; 0 for never.
        keep: whether a checkpoint of it is kept.
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: int = 0
    keep: bool = False
    step: int | None = None
    """After which it was; None: there is none yet."""
    value: float = math.nan
    """Of the metric, there."""
    since: int = 0
    """Evaluations after it."""

    @property
    def kept(self) -> int | None:
        """Step of the checkpoint that is kept of it, if one is."""
        return self.step if self.keep else None

    def heard(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the evaluation after a step; that after step 0 shows whether there is such a metric.

        Raises:
            InputError: there is not.
        """
        if self.metric not in metrics:
            there = ", ".join(sorted(name for name in metrics if name.startswith("evaluation/"))) or "no metric"
            raise InputError(f"checkpoint.best = {self.metric}: evaluations have no such metric; they have {there}")
        if step == 0:
            return
        value = metrics[self.metric]
        better = value > self.value if self.mode == "max" else value < self.value
        if better or (math.isnan(self.value) and not math.isnan(value)):
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1

    @property
    def exhausted(self) -> str | None:
        """Why the run should end, if it should."""
        if not self.patience or self.since < self.patience:
            return None
        best = "has never been a number" if self.step is None else f"was best after step {self.step}: {self.value:.4g}"
        return f"{self.metric} {best}; no better in {self.since} evaluations (patience {self.patience})"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        known = {} if self.step is None else {"step": self.step, "value": self.value}
        return {"metric": self.metric, "mode": self.mode, "since": self.since, **known}

    def resume(self, state: Any, directory: RunDirectory) -> None:
        """Go on from a checkpoint. Begins anew where another metric was compared, or the best checkpoint is not here.

        Args:
            state: what `state_dict` said then, or None.
            directory: of the run; `checkpoints/best` leads to the best one again.
        """
        if not isinstance(state, Mapping) or (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return
        step = state.get("step")
        if not self.keep or (step is not None and directory.keep_best(step)):
            self.step, self.value, self.since = step, state.get("value", math.nan), state["since"]

    def in_words(self) -> Iterator[str]:
        """A line on it, if there is one."""
        if self.step is not None:
            where = ", kept as checkpoints/best" if self.keep else ""
            yield f"best {self.metric}: {self.value:.4g}, after step {self.step}{where}"


def best_of(wanted: CheckpointConfig, headline: str, patience: int) -> Best | None:
    """What a run compares its evaluations by; None where its configuration does not ask for it.

    Args:
        wanted: the section `checkpoint`.
        headline: the metric where that names none.
        patience: see `Best`.
    """
    keep = wanted.best is not None
    return Best(wanted.best or headline, wanted.best_mode, patience, keep) if keep or patience else None
