"""The environments that one worker has in one slice, seen from the process that acts on them.

In: chunks of actions. Out: `Chunk`s, also when the worker dies: then one in which all episodes that were under way are
lost, and others are begun. Who wakes whom: a call waits for the worker's answer, its death or the deadline; after a
death it waits until the worker's next life has begun new episodes.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf.envs.around.rules import Rules
from rlinf.envs.base import CannotRender
from rlinf.envs.episodes import Chunk, Start, lost_chunk, of_steps
from rlinf.envs.worker import SliceRange, Steps, unpacked
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.processes.worker import CallTimeout

logger = logging.getLogger(__name__)

MOST_LOSSES = 5
"""Losses of a worker's environments, with no episode finished between, after which it is given up: a simulator that
cannot finish one episode in so many processes needs a person."""


class EnvironmentLost(RuntimeFault):
    """A worker's simulator died, hung or gave numbers that are not finite again and again, and finished no episode
    between; or it raised."""


_FRAMES = 4
"""Of a traceback within this process, the innermost frames that are told: the simulator's own."""


def told_by(name: str, error: Exception) -> EnvironmentLost:
    """What a simulator raised, with the one traceback that leads into it; of pictures that it cannot draw, the line.

    Args:
        name: of the actor.
        error: from the worker's process, with its traceback as a note, or from a thread of this one.
    """
    if isinstance(error, CannotRender):
        return EnvironmentLost(f"{name}: {error}")
    notes: list[str] = getattr(error, "__notes__", [])
    remote = next((note for note in notes if note.startswith("raised in ")), None)
    where = remote or "".join(traceback.format_exception(error, limit=-_FRAMES))
    return EnvironmentLost(f"{name}: the simulator raised {type(error).__name__}: {error}\n{where.rstrip()}")


class Caller(Protocol):
    """Where a `Program` runs: a `Worker`, or a thread."""

    name: str

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Awaitable[Any]: ...


class WorkerSlice:
    """The environments that one worker has in one slice, and what must be known to begin anew if it dies."""

    def __init__(
        self, worker: Caller, part: int, span: SliceRange, rules: Rules, step_timeout: float, reset_timeout: float
    ):
        self.span = span
        self.closing = False
        self._worker = worker
        self._part = part
        self._group = rules.group_size
        self._step_timeout = step_timeout
        self._reset_timeout = reset_timeout
        self._epoch: int | None = None
        self._episode = torch.zeros(span.count, dtype=torch.int64)
        self._running = torch.zeros(span.count, dtype=torch.bool)
        self._losses = 0
        self._weights: tuple[float, ...] | None = None  # of tasks
        self._dropped = torch.zeros(span.count, dtype=torch.int64)  # episodes since one of the environment was finished
        self._owed: Start | None = None  # begun after a loss that no chunk has told of yet

    async def call(self, method: str, *args: Any) -> Any:
        """Call the program for this slice; not made up for if the worker dies."""
        return await self._worker.call(method, self._part, *args, timeout=self._reset_timeout)

    async def weigh(self, weights: Sequence[float]) -> None:
        """`Environment.weigh`, now and whenever the process is replaced."""
        self._weights = tuple(weights)
        with suppress(ChildDied, CallTimeout):  # the next step finds it out, and what follows on it weighs
            await self.call("weigh", self._weights)

    async def reset(self, epoch: int) -> Start:
        """`Environment.reset`; a death meanwhile costs the episodes of the lowest numbers."""
        self._epoch = epoch
        return self._started(await self._begin(torch.full((self.span.count,), -1), None))

    async def step(self, actions: Tensor) -> Chunk:
        """`Environment.step`, or the chunk of a loss."""
        self._check_begun()
        died: Exception | None = None
        packed: Any = "a loss was told of before"
        if self._owed is None:
            try:
                packed = await self._worker.call(
                    "step", self._part, actions.contiguous().numpy(), timeout=self._step_timeout
                )
            except (ChildDied, CallTimeout) as error:
                packed, died = str(error), error
        if isinstance(packed, str):  # why there are no episodes
            start = self._owed or await self._redraw(packed, died)
            chunk = lost_chunk(start, self._episode, self._running, actions.shape[1])
        elif isinstance(packed, Steps):
            observation = unpacked(packed.observation)
            chunk = of_steps(unpacked(packed.rewards), observation, self._episode, packed.instructions)
        else:
            chunk = unpacked(packed)
            self._count_dropped(chunk)
        self._owed = None
        self._episode, self._running = chunk.next_episode, chunk.running
        if chunk.episodes:
            self._losses = 0
        return chunk

    def _count_dropped(self, chunk: Chunk) -> None:
        """Warn of episodes that were dropped.

        Raises:
            EnvironmentLost: an environment drops all of its episodes.
        """
        for remark in chunk.remarks:
            logger.warning("an episode is dropped: %s, in %s", remark, self._worker.name)
        self._dropped += chunk.lost.cpu()
        for episode in chunk.episodes:
            self._dropped[episode.env - self.span.first] = 0
        if int(self._dropped.max()) > MOST_LOSSES:
            raise EnvironmentLost(
                f"environment {self.span.first + int(self._dropped.argmax())} ({self._worker.name}) dropped "
                f"{int(self._dropped.max())} episodes and finished none between: {chunk.remarks[-1]}"
            )

    async def save(self) -> dict[str, Any]:
        """`Environment.state_dict`, and what this side knows."""
        self._check_begun()
        while isinstance(saved := await self._saved(), str | Exception):
            died = saved if isinstance(saved, Exception) else None
            self._owed = await self._redraw(str(saved), died)
        owed = self._owed is not None
        told = {"episode": self._episode, "running": self._running, "epoch": self._epoch, "owed": owed}
        return {"environment": saved, "told": told}

    async def load(self, state: dict[str, Any]) -> Start:
        """`Environment.load_state_dict`, and what this side knew."""
        told = state["told"]
        while isinstance(found := await self.call("load", state["environment"]), str):
            self._count_loss(found)
            if self._losses > MOST_LOSSES:
                raise EnvironmentLost(f"environments {self._numbers()} cannot go on from what was saved: {found}")
        start = unpacked(found)
        self._epoch = told["epoch"]
        self._started(start)
        if told["owed"]:
            self._owed = start
        self._episode, self._running = told["episode"], told["running"]
        return start

    async def _saved(self) -> dict[str, Any] | str | Exception:
        """What the program saved, or why it could not."""
        try:
            saved: dict[str, Any] | str = await self.call("save")
        except (ChildDied, CallTimeout) as error:
            return error
        return saved

    def _started(self, start: Start) -> Start:
        self._owed = None
        self._episode = start.episode
        self._running = torch.ones_like(start.episode, dtype=torch.bool)
        return start

    async def _redraw(self, why: str, died: Exception | None) -> Start:
        """Begin new episodes after a loss, unless the pool is being closed."""
        if self.closing and died is not None:
            raise died
        self._count_loss(why)
        return await self._begin(self._episode, died)

    def _count_loss(self, why: str) -> None:
        self._losses += 1
        who, reason = self._worker.name, why.splitlines()[0]
        logger.warning("episodes of environments %s (%s) are lost: %s", self._numbers(), who, reason)

    async def _begin(self, episode: Tensor, died: Exception | None) -> Start:
        """Begin the episodes that follow on `episode`, int64 [n], in equal numbers within a group; after a death, the
        ones that follow on those."""
        while self._losses <= MOST_LOSSES:
            highest = episode.view(-1, self._group).amax(1) + 1
            episode = highest.repeat_interleave(self._group)
            try:
                if self._weights is not None:  # the process may be new
                    await self.call("weigh", self._weights)
                started = await self.call("reset", self._epoch, episode.numpy())
                if not isinstance(started, str):  # why it has none
                    start: Start = unpacked(started)
                    return start
                self._count_loss(started)
            except (ChildDied, CallTimeout) as error:
                died = error
                self._losses += 1
        raise EnvironmentLost(
            f"environments {self._numbers()} ({self._worker.name}) were lost {self._losses} times and finished no "
            f"episode between: see the last death above; the simulator crashes, or step_timeout="
            f"{self._step_timeout:g} s or reset_timeout={self._reset_timeout:g} s is too short for it"
        ) from died

    def _check_begun(self) -> None:
        if self._epoch is None:
            raise RuntimeError(f"environments {self._numbers()} have no episodes yet: await the slice's reset() first")

    def _numbers(self) -> str:
        return f"{self.span.first}-{self.span.first + self.span.count - 1}"
