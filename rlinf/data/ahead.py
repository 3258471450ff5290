"""Acting that began before its step did, so that it goes on while an earlier step is learned from.

Consumes the steps of a run and weights as they are published; produces the trajectories of each step. Who wakes whom:
the end of one step's acting begins the next one's, and wakes the flow that waits for it. The run owns an `Ahead`, and
closes it however it ends; flows pass it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.data.step import EmbodiedStep

Act = Callable[["EmbodiedStep"], Awaitable[list[Any]]]


class Ahead:
    """What was begun for the steps to come.

    When a step begins, all steps before it were learned from. So acting may then begin for so many steps more as the
    weights may be versions old: the bound holds by construction. Acting of one step follows on that of the one before,
    and weights are switched only between the two, so that every trajectory is of one version. With a staleness of 1
    which version acts does not depend on how long anything takes; with more it does.

    Args:
        staleness: by how many versions the weights that act may be older than those that learn from it. With 0 nothing
            begins ahead.
    """

    def __init__(self, staleness: int = 0) -> None:
        self._staleness = staleness
        self._begun: dict[int, asyncio.Task[list[Any]]] = {}
        self._weights: Any = None  # published, and not loaded yet

    async def trajectories(self, step: EmbodiedStep, act: Act, policy: Any) -> list[Any]:
        """Those of a step, once all is acted; begins to act for the steps that may follow.

        Args:
            step: the one that begins; all before it were learned from.
            act: acts for one step, and returns its trajectories once they are complete.
            policy: the role that acts, for its weights.
        """
        end = step.index + 1 if step.until is None else min(step.until, step.index + 1 + self._staleness)
        for index in range(step.index, end):
            if index not in self._begun:
                acting = self._act(replace(step, index=index), act, policy, self._begun.get(index - 1))
                self._begun[index] = asyncio.create_task(acting, name=f"acting for step {index}")
        found = await self._begun[step.index]
        del self._begun[step.index]
        return found

    async def publish(self, policy: Any, weights: Any = None) -> None:
        """Let the policy have the newest weights: at once, or before it acts for the next step if it is acting now.

        Args:
            policy: the role.
            weights: a promise of them; None where a step brought none.
        """
        if weights is not None:
            self._weights = weights
        if not self._begun:
            await self._load(policy)

    async def close(self) -> None:
        """Give up what is under way; what was acted and not learned from is lost. Weights to be loaded are kept."""
        begun, self._begun = list(self._begun.values()), {}
        for acting in begun:
            acting.cancel()
        await asyncio.gather(*begun, return_exceptions=True)

    async def _act(self, step: EmbodiedStep, act: Act, policy: Any, before: asyncio.Task[Any] | None) -> list[Any]:
        if before is not None:
            await asyncio.wait([before])  # its failure is its own step's to tell
            before.result()
        await self._load(policy)
        return await act(step)

    async def _load(self, policy: Any) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            await policy.load(weights)
