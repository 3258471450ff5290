"""The judge: gives every sample of a group its reward.

Consumes groups without rewards, produces the same groups with them.
"""

from __future__ import annotations

import dataclasses

from rlinf.data.sample import Group, Sample
from rlinf.rewards.base import Reward, RewardFunction, load_reward
from rlinf.runtime.actor import Actor, endpoint


class Judge(Actor):
    """Scores samples with a reward function."""

    async def setup(self, *, reward: RewardFunction | str = "rlinf.rewards.exact") -> None:  # type: ignore[override]
        """Find the reward function.

        Args:
            reward: `reward(response, answer, **row) -> float`, plain or async, or its dotted path.

        Raises:
            ValueError: the path leads to no function.
        """
        self._reward = Reward(load_reward(reward))

    @endpoint
    async def score(self, group: Group) -> Group:
        """The group with every sample's reward filled in.

        Raises:
            ValueError: the reward function wants a column that there is not, or returned no finite number.
        """
        if self._reward.is_async:
            values = [await self._reward(sample) for sample in group.samples]
        else:
            values = await self.compute(self._all, group.samples)
        samples = tuple(
            dataclasses.replace(
                sample, reward=self._reward.checked(value), outcome="truncated" if sample.truncated else "ok"
            )
            for sample, value in zip(group.samples, values, strict=True)
        )
        return dataclasses.replace(group, samples=samples)

    def _all(self, samples: tuple[Sample, ...]) -> list[object]:
        return [self._reward(sample) for sample in samples]
