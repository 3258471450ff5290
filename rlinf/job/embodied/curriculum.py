"""Which tasks are played how often: their weights follow how often they are solved.

In: metrics of a step. Out: weights of a mixture's tasks. A checkpoint keeps the rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf.config.embodied import EnvConfig, task_names


class Curriculum:
    """The weights of a mixture's tasks.

        rate = memory rate + (1 - memory) success in the step        after each step that finished episodes of the task
        weight = the task's own,  times `floor` where the rate lies outside of `low` and `high`

    Args:
        env: with `tasks` and `curriculum`.
    """

    def __init__(self, env: EnvConfig):
        self._settings = env.curriculum
        self._own = {
            name: float(task.get("weight", 1.0)) for name, task in zip(task_names(env.tasks), env.tasks, strict=True)
        }
        self.rates: dict[str, float] = {}
        """Success rate of each task that was played."""

    def heard(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, `tasks/NAME/success_once`."""
        for name in self._own:
            if (share := metrics.get(f"tasks/{name}/success_once")) is not None:
                memory = self._settings.memory
                self.rates[name] = memory * self.rates[name] + (1 - memory) * share if name in self.rates else share

    @property
    def weights(self) -> list[float]:
        """Of each task, in their order."""
        low, high, floor = self._settings.low, self._settings.high, self._settings.floor
        inside = {name: low <= self.rates.get(name, low) <= high for name in self._own}
        return [weight * (1.0 if inside[name] else floor) for name, weight in self._own.items()]

    def told(self) -> dict[str, float]:
        """The weights as metrics, `tasks/NAME/weight`, as shares."""
        total = sum(self.weights)
        return {f"tasks/{name}/weight": weight / total for name, weight in zip(self._own, self.weights, strict=True)}

    def resume(self, state: Any) -> None:
        """Go on with the rates of a checkpoint; tasks that are no more are left out."""
        if isinstance(state, Mapping):
            self.rates = {name: float(rate) for name, rate in state.items() if name in self._own}
