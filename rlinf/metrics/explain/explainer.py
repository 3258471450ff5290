"""The sentence of a step: its costliest cause, and the change that would help, with what it would save.

In: the `Lap` of each step, with its metrics. Out: an `Explained`, for people and for explained.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlinf.metrics.explain.causes import Cause, Causes
from rlinf.metrics.explain.idle import waited
from rlinf.placement.profiling.step_costs import Seen
from rlinf.runtime.observe.lap import Lap

WORTH = 0.03
"""Share of a step; below it nothing needs to be explained."""

TWICE = 2
"""Steps of one cause that are a habit and no accident: a run of a few steps has one that was slowest, always."""


@dataclass(frozen=True, slots=True)
class Change:
    """What would help."""

    text: str
    """A clause that says what to do, such as "set `staleness.max=1`"."""
    seconds: float
    """Of a step, that it is predicted to save; 0 where nobody can say."""


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a step took as long as it did."""

    text: str
    """One sentence."""
    cause: str
    """A name of `causes.Name`; "none" where no cause is worth a word."""
    seconds: float = 0.0
    """Of the step, that it cost."""
    change: str | None = None
    """What would help."""
    saves: float = 0.0
    """Seconds of the step that the change is predicted to save."""


class Advice(Protocol):
    """Knows the run's keys and plans: `rlinf.job.changes.Changes`, which stands above this package."""

    def change(self, cause: Cause, step: float) -> Change | None:
        """What would help against a cause, in a step of so many seconds; None where nothing is known."""


class Explainer:
    """Explains the steps of one run.

    Args:
        advice: what would help; None says causes alone.
        staleness: steps that work is begun early.
    """

    def __init__(self, advice: Advice | None = None, staleness: int = 0) -> None:
        self._advice = advice
        self._causes = Causes(staleness)

    def step(
        self, lap: Lap, devices: Mapping[str, frozenset[int]], seen: Seen, metrics: Mapping[str, float]
    ) -> Explained | None:
        """Explain a step.

        Args:
            lap: the step.
            devices: of every actor.
            seen: what was read off it.
            metrics: of the step, `lost/...` among them.

        Returns:
            None where no device worked.
        """
        if not seen.lanes or seen.seconds <= 0:
            return None
        losses = {name.removeprefix("lost/"): value for name, value in metrics.items() if name.startswith("lost/")}
        found = self._causes.found(lap, seen, waited(lap, devices, seen), losses, metrics)
        first = next((cause for cause in found if cause.seconds >= WORTH * seen.seconds), None)
        if first is None:
            return Explained("devices were at work nearly all the time", "none")
        change = None if self._advice is None else self._advice.change(first, seen.seconds)
        if change is None:
            return Explained(first.text, first.name, first.seconds)
        saves = min(change.seconds, first.seconds) if change.seconds else 0.0
        gain = f", which would save {saves / seen.seconds:.0%}".replace("%", " %") if saves else ""
        return Explained(f"{first.text}; {change.text}{gain}", first.name, first.seconds, change.text, saves)


def in_short(steps: Sequence[Explained]) -> list[str]:
    """A line on what most steps waited for, and the newest sentence that says so; none where there is nothing to say.

    Args:
        steps: of a run, in order; the first, which warms up, does not count if there are others.
    """
    told = [each for each in (steps[1:] or steps) if each.cause != "none"]
    if not told:
        return []
    names = Counter(each.cause for each in told)
    often = max(names, key=lambda name: sum(each.seconds for each in told if each.cause == name))
    if names[often] < TWICE:
        return []
    last = next(each for each in reversed(told) if each.cause == often)
    return [f"{names[often]} of {len(steps)} steps lost most to: {often}; the last of them: {last.text}"]
