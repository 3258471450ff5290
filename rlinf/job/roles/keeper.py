"""What a run's rollout and its agents have begun, as its work in flight asks for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from rlinf.actors.base.in_flight import PartialGroup
from rlinf.agents.episodes import OpenTask
from rlinf.agents.episodes.record import Asked, Call
from rlinf.engines.base import Completion, PartialAnswer, Request, Sampling
from rlinf.flows.parts.running_session import RunningSession

KINDS: tuple[type[Any], ...] = (PartialGroup, Completion, PartialAnswer, Request, Sampling, OpenTask, Call, Asked)
"""Dataclasses of which half answers and open tasks are made, for checkpoints."""


class RolloutKeeper:
    """Asks all ranks of the rollout, and the session.

    Args:
        rollout: the role as it is now.
        session: plays episodes; None where none was needed yet.
    """

    def __init__(self, rollout: Callable[[], Any], session: Callable[[], RunningSession | None] = lambda: None) -> None:
        self._rollout, self._session = rollout, session

    async def version(self) -> int:
        """Of the weights in use, the oldest of all ranks."""
        return min(await self._rollout().version())

    async def partials(self) -> dict[int, Any]:
        """Groups with their answers so far, by prompt, several parts of one, one after the other; and tasks with what
        was said in their episodes."""
        session = self._session()
        tasks = [] if session is None else await session.in_flight()
        found: dict[int, Any] = {task.prompt.id: (task,) for task in tasks}
        for groups in await self._rollout().in_flight():
            for group in groups:
                found[group.prompt.id] = (*found.get(group.prompt.id, ()), group)
        return found

    async def settled(self, ids: Sequence[int]) -> None:
        """These groups have been received."""
        if (session := self._session()) is not None:
            session.settled(ids)
        await self._rollout().settled(list(ids))

    async def drop(self, ids: Sequence[int]) -> int:
        """End the answers to these prompts; how many tokens there were."""
        told = await self._rollout().drop(list(ids))
        tokens = sum(count for of_rank in told for count in of_rank.values())
        return tokens if (session := self._session()) is None else tokens + await session.drop(ids)

    async def split(self) -> None:
        """Let the complete answers of groups under way come by themselves."""
        await self._rollout().split()

    def rest(self, partial: tuple[Any, ...], samples: Collection[int]) -> tuple[Any, ...]:
        """What was begun of one prompt, without these answers; nothing of a group that has no others."""
        groups = [
            replace(group, done={index: one for index, one in group.done.items() if index not in samples})
            for group in partial
            if isinstance(group, PartialGroup)
        ]
        tasks = [task for task in partial if not isinstance(task, PartialGroup)]
        return (*tasks, *(group for group in groups if group.done or group.left))

    async def pause(self) -> None:
        """Stop generating."""
        await self._rollout().pause()

    async def unpause(self) -> None:
        """Generate again."""
        await self._rollout().resume()
