"""What a run's rollout has begun, as its work in flight asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlinf.actors.base.in_flight import PartialGroup
from rlinf.engines.base import Completion, PartialAnswer, Request, Sampling

KINDS: tuple[type[Any], ...] = (PartialGroup, Completion, PartialAnswer, Request, Sampling)
"""Dataclasses of which half answers are made, for checkpoints."""


class RolloutKeeper:
    """Asks all ranks of the rollout.

    Args:
        rollout: the role as it is now.
    """

    def __init__(self, rollout: Callable[[], Any]) -> None:
        self._rollout = rollout

    async def version(self) -> int:
        """Of the weights in use, the oldest of all ranks."""
        return min(await self._rollout().version())

    async def partials(self) -> dict[int, Any]:
        """Groups with their answers so far, by prompt; several parts of one, one after the other."""
        found: dict[int, Any] = {}
        for groups in await self._rollout().in_flight():
            for group in groups:
                found[group.prompt.id] = (*found.get(group.prompt.id, ()), group)
        return found

    async def settled(self, ids: Sequence[int]) -> None:
        """These groups have been received."""
        await self._rollout().settled(list(ids))

    async def drop(self, ids: Sequence[int]) -> int:
        """End the answers to these prompts; how many tokens there were."""
        return sum(sum(tokens.values()) for tokens in await self._rollout().drop(list(ids)))

    async def split(self) -> None:
        """Let the complete answers of groups under way come by themselves."""
        await self._rollout().split()

    async def pause(self) -> None:
        """Stop generating."""
        await self._rollout().pause()

    async def unpause(self) -> None:
        """Generate again."""
        await self._rollout().resume()
