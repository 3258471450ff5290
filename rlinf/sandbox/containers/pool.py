"""A bounded number of containers for any number of episodes: a queue, deadlines, warm starts, an end whatever happens.

In: kinds of containers, and episodes that each want a fresh one. Out: a container for as long as an episode's block
lasts. Who wakes whom: the end of an episode's container wakes the first that waits.

    pool = Pool(Namespaces(), size=8)
    kind = Kind("python-3.12.tar", workdir="/repo", prepare=install)
    async with pool, pool.container(kind, seconds=600) as box:
        ...

A container is never handed from one episode to the next: what one left would be another's. What kinds have in common is
done once instead: `prepare` runs in one container, whose snapshot all others start from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.sandbox.containers.protocol import LIMITS, Container, Containers, ContainersError
from rlinf.sandbox.limits import Limits


@dataclass(frozen=True, eq=False)
class Kind:
    """Containers that start alike. Make one and use it for all episodes of it: it is equal to itself alone."""

    image: str | Path | None = None
    """See `Containers.start`, as are the others."""
    workdir: str | None = None
    env: Mapping[str, str] | None = None
    limits: Limits = LIMITS
    network: bool = False
    prepare: Callable[[Container], Awaitable[object]] | None = None
    """Does once what all of them need, in a container whose snapshot they start from."""


class Pool:
    """Containers for episodes, a bounded number at once. Belongs to one event loop; closing it closes its provider.

    Args:
        containers: their provider.
        size: containers of episodes at once; further episodes wait, the first come first.
        ahead: containers that are started before they are asked for, of the kinds that were asked for last.
    """

    def __init__(self, containers: Containers, *, size: int, ahead: int = 0):
        if size < 1 or ahead < 0:
            raise ContainersError(
                f"a pool of size={size}, ahead={ahead}: it takes a size of 1 or more, ahead 0 or more"
            )
        self._containers, self._ahead = containers, ahead
        self._places = asyncio.Semaphore(size)
        self._ready: deque[tuple[Kind, asyncio.Task[Container]]] = deque()
        self._images: dict[Kind, asyncio.Task[str]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False
        self.started = 0
        """How many containers were started."""

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def container(
        self, kind: Kind, *, seconds: float | None = None, wait: float | None = None
    ) -> AsyncIterator[Container]:
        """A fresh container while a block lasts; it is ended after it, whatever ends the block.

        Args:
            kind: what it is.
            seconds: that the block may take, after which it is cancelled.
            wait: seconds in which there must be a place for it.

        Raises:
            TimeoutError: the block took longer than `seconds`.
            ContainersError: there was no place in time, or it cannot be started.
        """
        try:
            async with asyncio.timeout(wait):
                await self._places.acquire()
        except TimeoutError:
            raise ContainersError(
                f"no container was free within {wait:g} s: a larger size= of the pool helps"
            ) from None
        box: Container | None = None
        try:
            box = await self._take(kind)
            async with asyncio.timeout(seconds) as deadline:
                yield box
        except TimeoutError as error:
            if box is not None and deadline.expired():
                raise TimeoutError(f"an episode in container {box.name} took longer than {seconds:g} s") from error
            raise
        finally:
            try:
                if box is not None:
                    await self._end(box)
            finally:
                self._places.release()

    async def close(self) -> None:
        """End all containers, and those of episodes that still run."""
        self._closed = True
        tasks = [task for _, task in self._ready] + [*self._images.values()]
        self._ready.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._endings, return_exceptions=True)
        await self._containers.close()

    async def _take(self, kind: Kind) -> Container:
        """A container that is ready, or one that is started now."""
        if self._closed:
            raise ContainersError("the pool of containers is closed")
        entry = next((each for each in self._ready if each[0] is kind), None)
        if entry is not None:
            self._ready.remove(entry)
        self._start_ahead(kind)
        if entry is None:
            return await self._start(kind)
        try:
            return await entry[1]
        except asyncio.CancelledError:
            self._drop(entry[1])
            raise

    def _start_ahead(self, kind: Kind) -> None:
        """Start containers that will be asked for; those of kinds that no one asks for any more make room."""
        while sum(each is kind for each, _ in self._ready) < self._ahead:
            self._ready.append((kind, asyncio.create_task(self._start(kind))))
        while len(self._ready) > self._ahead:
            self._drop(self._ready.popleft()[1])

    def _drop(self, task: asyncio.Task[Container]) -> None:
        """End a container that nobody took, or keep it from starting."""

        async def drop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ContainersError):
                await (await task).end()

        self._owned(drop())

    async def _start(self, kind: Kind) -> Container:
        image = kind.image if kind.prepare is None else await self._prepared(kind)
        self.started += 1
        return await self._started(kind, image)

    async def _started(self, kind: Kind, image: str | Path | None) -> Container:
        return await self._containers.start(
            image, workdir=kind.workdir, env=kind.env, limits=kind.limits, network=kind.network
        )

    async def _prepared(self, kind: Kind) -> str:
        """The snapshot of a kind, made by whoever first asks for it; who was refused tries again."""
        task = self._images.get(kind)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._images[kind] = asyncio.create_task(self._prepare(kind))
        return await asyncio.shield(task)

    async def _prepare(self, kind: Kind) -> str:
        assert kind.prepare is not None
        box = await self._started(kind, kind.image)
        try:
            await kind.prepare(box)
            return await box.snapshot()
        finally:
            await self._end(box)

    async def _end(self, box: Container) -> None:
        """End a container even where the episode is cancelled meanwhile."""
        await asyncio.shield(self._owned(box.end()))

    def _owned(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def do() -> None:
            await work

        task = asyncio.create_task(do())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task
