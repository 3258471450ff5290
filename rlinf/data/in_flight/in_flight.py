"""Work in flight between steps: begun for steps to come, so that it goes on while earlier steps are learned from.

Consumes the steps of a run, and weights as they are published. Produces what each step learns from, never made by
weights older than the bound. Who wakes whom: the end of one step's work begins the next one's, and wakes the flow that
waits for it. The run owns an `InFlight` and closes it however it ends; a flow asks it for its batch and publishes:

    async def embodied_async(step, env, policy, trainer):
        trajectories = await step.in_flight.next_batch(step, lambda step: act(step, env, policy), policy)
        metrics = await trainer.train(trajectories)             # acting for the next step has begun
        await step.in_flight.publish(policy, trainer.weights())
        return metrics
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from rlinf.runtime.base.tasks import cancel_all


class Numbered(Protocol):
    """A step, as far as it matters here."""

    @property
    def index(self) -> int:
        """Which, from 0."""

    @property
    def until(self) -> int | None:
        """Work may begin early for steps before this one; None: for no step."""


S = TypeVar("S", bound=Numbered)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """What a checkpoint keeps of the work of one step."""

    step: Any
    """What the work was given, such as drawn prompts."""
    version: int = 0
    """How many times weights had been published to whoever made `result`."""
    result: T | None = None
    """What came of the work; None: it was not done, and begins anew."""


@dataclass(slots=True)
class _Work(Generic[T]):
    """The work of one step, begun or only drawn."""

    step: Any
    version: int = 0
    task: asyncio.Future[T] | None = None


class InFlight(Generic[T]):
    """What was begun for the steps to come.

    When a step begins, all steps before it were learned from. So work may then begin for as many steps more as the
    weights may be versions old. Work for one step follows on that of the one before, and weights are switched only
    between the two, so that every batch is of one version. A batch that is too old all the same, because it was kept
    under a larger bound, is made anew. With a staleness of 1, which version makes a batch does not depend on how long
    anything takes; with more it does.

    Args:
        staleness: by how many published versions the weights that make a batch may be older than the newest. With 0
            nothing begins early.
        draw: draws what a step is given, by its index; called once for each index, in order. None: every step is given
            what the first one was, but for its index.
        kept: what `state` said when a checkpoint was written.
        version: how many times weights had been published then.
    """

    def __init__(
        self,
        staleness: int = 0,
        *,
        draw: Callable[[int], Awaitable[Any]] | None = None,
        kept: Iterable[Kept[T]] = (),
        version: int = 0,
    ) -> None:
        self._staleness, self._draw = staleness, draw
        self._works = {each.step.index: _Work[T](each.step, each.version, _done(each.result)) for each in kept}
        self._weights: Any = None  # published, and not loaded yet
        self.version = version
        """How many times weights were published."""

    async def step(self, index: int) -> Any:
        """What a step is given: as it was drawn when its work began early, or drawn now.

        Raises:
            ValueError: there is no `draw`.
        """
        if (work := self._works.get(index)) is None:
            if self._draw is None:
                raise ValueError(f"InFlight.step({index}): nothing says what a step is given; make it with `draw`")
            return await self._draw(index)
        if work.task is None:
            del self._works[index]
        return work.step

    async def next_batch(self, step: S, make: Callable[[S], Awaitable[T]], actor: Any) -> T:
        """What a step learns from, once all of it is made; begins to make that of the steps that may follow.

        Args:
            step: the one that begins; all before it were learned from.
            make: does the work of one step, and returns when it is complete.
            actor: the role whose weights make it; has `load`.

        Raises:
            Exception: what `make` raised for this step.
        """
        own = self._works.setdefault(step.index, _Work(step))
        if own.task is not None and own.task.done():
            too_old = self.version - own.version > self._staleness
            if own.task.cancelled() or (too_old and _made(own.task)):
                own.task = None
        end = step.index + 1 if step.until is None else min(step.until, step.index + 1 + self._staleness)
        before: asyncio.Future[T] | None = None
        for index in range(step.index, end):
            if index > step.index and index not in self._works:
                ahead = replace(step, index=index) if self._draw is None else await self._draw(index)  # type: ignore[type-var]
                self._works[index] = _Work(ahead)
            work = self._works[index]
            if work.task is None:
                work.task = asyncio.create_task(self._do(work, make, actor, before), name=f"work for step {index}")
            before = work.task
        assert own.task is not None
        try:
            found = await own.task
        except asyncio.CancelledError:
            own.task = None  # the step may be taken once more
            raise
        except Exception:
            del self._works[step.index]
            raise
        del self._works[step.index]
        return found

    async def publish(self, actor: Any, weights: Any = None) -> None:
        """Let the actor have the newest weights: at once, or before its next work if it is at work now.

        Args:
            actor: the role.
            weights: a promise of them; None where a step brought none.
        """
        if weights is not None:
            self._weights, self.version = weights, self.version + 1
        if not any(work.task is not None for work in self._works.values()):
            await self._load(actor)

    def state(self) -> tuple[Kept[T], ...]:
        """What a checkpoint keeps, in the order of steps: everything drawn and not yet handed to a step, with its batch
        if that is made. Given back as `kept`, nothing of it is lost or made twice."""
        return tuple(
            Kept(work.step, work.version, work.task.result()) if _made(work.task) else Kept(work.step)  # type: ignore[union-attr]
            for _, work in sorted(self._works.items())
        )

    async def close(self) -> None:
        """Give up work under way; what was drawn, batches that are made, and weights to be loaded are kept."""
        under_way = [work for work in self._works.values() if work.task is not None and not _made(work.task)]
        await cancel_all(work.task for work in under_way if isinstance(work.task, asyncio.Task))
        for work in under_way:
            work.task = None

    async def _do(
        self, work: _Work[T], make: Callable[[Any], Awaitable[T]], actor: Any, before: asyncio.Future[T] | None
    ) -> T:
        if before is not None:
            await asyncio.wait([before])
            if not _made(before):  # its failure is its own step's to tell; this work may begin again after that
                raise asyncio.CancelledError
        await self._load(actor)
        work.version = self.version
        return await make(work.step)

    async def _load(self, actor: Any) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            await actor.load(weights)


def _made(task: asyncio.Future[Any] | None) -> bool:
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _done(result: T | None) -> asyncio.Future[T] | None:
    """A batch that was made before."""
    if result is None:
        return None
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future
