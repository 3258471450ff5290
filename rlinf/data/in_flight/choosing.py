"""Which groups give a gradient, and dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) over groups that come as
they are finished.

`teaches` is the one definition, for what is drawn, what is counted as uniform, and what is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf.algos.apply import shaped
from rlinf.algos.parts import DynamicSampling
from rlinf.algos.spec import AlgorithmSpec
from rlinf.data.in_flight.admission import Entry
from rlinf.data.sample import Group

Teaches = Callable[[Group], bool]
"""Says of a judged group that it gives a gradient."""


def unequal(group: Group) -> bool:
    """Rewards of the group's answers differ: the definition for whoever knows no algorithm."""
    return len(set(group.rewards)) > 1


def teaches(spec: AlgorithmSpec, group: Group) -> bool:
    """A group gives a gradient: an answer of it is learned, and its rewards differ as the algorithm compares them.

    That is after shaping, so a penalty for length can make a difference where there was none, and can take one away.
    Under dynamic sampling rewards must differ before shaping, too: DAPO keeps groups of which some answers are right
    and some wrong (equation 11), whatever their lengths, for if penalties alone were learned from, a policy that finds
    nothing right would learn to write nothing. (verl's `filter_groups.metric: acc` is the same.)

    Args:
        spec: the algorithm.
        group: judged.
    """
    if spec.sampling is not None and not unequal(group):
        return False
    scored = group.scored
    if not any(sample.learned_tokens and not (spec.truncated == "mask" and sample.truncated) for sample in scored):
        return False
    return len(set(shaped_rewards(spec, group))) > 1


def shaped_rewards(spec: AlgorithmSpec, group: Group) -> list[float]:
    """Reward of each scored answer of a group, after shaping."""
    if spec.shaping is None:
        return group.rewards
    lengths = torch.tensor([sample.generated_tokens for sample in group.scored])
    found: list[float] = shaped(spec, torch.tensor(group.rewards, dtype=torch.float64), lengths).tolist()
    return found


@dataclass(slots=True, eq=False)
class Choosing:
    """What one step has looked at."""

    sampling: DynamicSampling | None
    """None takes everything."""
    wanted: int
    """Groups of a full batch."""
    teaches: Teaches = unequal
    """Which groups give a gradient."""
    offered: int = 0
    """Groups seen."""
    kept: int = 0
    """Groups taken."""
    rewards: list[float] = field(default_factory=list)
    """Of all that were seen."""
    even: list[tuple[Entry, Sequence[Any]]] = field(default_factory=list)
    """Those that give no gradient."""

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
        groups = [group for group in results if isinstance(group, Group)]
        self.rewards += [reward for group in groups for reward in group.rewards]
        if not any(map(self.teaches, groups)):
            self.even.append((entry, results))
            return False
        self.kept += 1
        return True

    def instead(self) -> list[tuple[Entry, Sequence[Any]]]:
        """What goes to the trainer where not one group gives a gradient: it learns nothing, but tells of them."""
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
