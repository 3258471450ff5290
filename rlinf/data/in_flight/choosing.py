"""Which groups of a step are worth learning: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) over groups that
come as they are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.algos.parts import DynamicSampling
from rlinf.data.in_flight.admission import Entry
from rlinf.data.sample import Group


@dataclass(slots=True, eq=False)
class Choosing:
    """What one step has looked at."""

    sampling: DynamicSampling | None
    """None takes everything."""
    wanted: int
    """Groups of a full batch."""
    offered: int = 0
    """Groups seen."""
    kept: int = 0
    """Groups taken."""
    rewards: list[float] = field(default_factory=list)
    """Of all that were seen."""
    even: list[tuple[Entry, Sequence[Any]]] = field(default_factory=list)
    """Those of equal rewards, which teach nothing."""

    @property
    def over(self) -> bool:
        """So many were looked at that the batch goes on as it is."""
        return self.sampling is not None and self.offered >= self.sampling.max_rounds * self.wanted

    def keep(self, entry: Entry, results: Sequence[Any]) -> bool:
        """Whether the step learns from this."""
        self.offered += 1
        if self.sampling is None:
            self.kept += 1
            return True
        rewards = [reward for group in results if isinstance(group, Group) for reward in group.rewards]
        self.rewards += rewards
        if len(set(rewards)) < 2:
            self.even.append((entry, results))
            return False
        self.kept += 1
        return True

    def instead(self) -> list[tuple[Entry, Sequence[Any]]]:
        """What is learned from where not one group was worth it, so that the step tells of it and the run goes on."""
        if self.kept:
            return []
        chosen, self.even = self.even[: self.wanted], self.even[self.wanted :]
        return chosen

    def metrics(self) -> dict[str, float]:
        """As those of `flows.parts.dynamic_sampling`; nothing without it."""
        if self.sampling is None:
            return {}
        told = {
            "sampling/rounds": float(-(-self.offered // max(self.wanted, 1))),
            "sampling/drawn": float(self.offered),
            "sampling/dropped": float(self.offered - self.kept),
            "sampling/kept": float(self.kept),
        }
        return told | ({"sampling/reward/mean": sum(self.rewards) / len(self.rewards)} if self.rewards else {})
