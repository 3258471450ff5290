"""Reward workers of other processes: the judge's end of those that join a job while it goes on.

Flows in: connections of processes that join, and verdicts. Flows out: samples of the judge's pools. Who wakes whom: a
worker that is free wakes its runner in the pool (`RewardPool.feed`), its answer wakes the call that the runner awaits;
a process that leaves or is lost ends its runners, which put what its workers had back into the queue.

Each process that joins has as many workers as the judge by itself, of every reward function, with the same limits: it
runs them as children of its own, and what they answer is data here too, never a pickle of theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.joining.connection import Connection
from rlinf.joining.listener import Elsewhere, Joiner, Listener
from rlinf.joining.peer import SILENCE, Peer
from rlinf.rewards.pool import RewardPool

logger = logging.getLogger(__name__)


class RemoteWorker:
    """A worker of a process that joined, with the surface of one of the judge's own.

    Args:
        connection: to its process.
        number: of the worker there.
        name: for messages.
    """

    def __init__(self, connection: Connection, number: int, name: str) -> None:
        self.name = name
        self.has = 0
        """How many samples, or groups, it was given and has not answered."""
        self._connection, self._number = connection, number
        self._free = asyncio.Event()
        self._answer: asyncio.Future[Any] | None = None

    async def ready(self) -> None:
        """Wait until it is up, and has nothing to do."""
        await self._free.wait()

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """Call a method there; see `Worker.call`. Cancelled, its process has been lost."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            self._connection.send("call", self._number, method, args, timeout)
        except Exception as error:
            raise TypeError(f"arguments of {self.name}.{method}() cannot be pickled: {error}") from error
        self._free.clear()
        self.has = len(args[0])
        return await answer

    def is_free(self) -> None:
        """It is up, and may be called."""
        self._free.set()

    def answers(self, result: Any) -> None:
        """It has answered its call, by an exception if that failed."""
        answer, self._answer, self.has = self._answer, None, 0
        if answer is None or answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


class RemoteWorkers:
    """The judge's end of a process that joined.

    Args:
        connection: to it.
        about: what it says of itself: its `name`, and how many `workers` it has for each pool.
        pools: which they score for.
        silence: seconds without a word, in which it was asked for one, after which it counts as lost.
    """

    def __init__(
        self, connection: Connection, about: Mapping[str, Any], pools: Sequence[RewardPool], silence: float
    ) -> None:
        self.peer = Peer(connection, str(about["name"]), silence)
        places = [pool for pool, count in zip(pools, about["workers"], strict=True) for _ in range(count)]
        self.workers = [
            RemoteWorker(connection, number, f"worker {number} of {self.peer.name}") for number in range(len(places))
        ]
        self._runners = [pool.feed(worker) for pool, worker in zip(places, self.workers, strict=True)]

    def take(self, kind: str, *rest: Any) -> str | None:
        """Take a message; returns why it leaves, if it says that."""
        self.peer.heard(kind, *rest)
        if kind == "free":
            self.workers[rest[0]].is_free()
        elif kind == "answer":
            self.workers[rest[0]].answers(rest[1])
        elif kind == "leaving":
            return "it leaves"
        elif kind == "failed":
            return f"it failed: {rest[0]}"
        return None

    def lost(self) -> int:
        """Have others score what its workers had; returns how many samples, or groups, that were."""
        self.peer.over()
        for runner in self._runners:
            runner.cancel()
        return sum(worker.has for worker in self.workers)


class JoinedWorkers:
    """All that have joined a judge.

    Args:
        pools: of the judge, whose workers are helped.
        name: of the judge, for messages.
        count: workers for a pool of each one that joins; see `workers_of`.
        elsewhere: asked of each one that wants to join; None: it joins here.
        silence: see `RemoteWorkers`.
    """

    def __init__(
        self,
        pools: Sequence[RewardPool],
        name: str,
        count: int | None,
        elsewhere: Elsewhere | None = None,
        silence: float = SILENCE,
    ) -> None:
        self.there: set[RemoteWorkers] = set()
        """Processes that have joined."""
        self.where: str | None = None
        """Where they may."""
        self._pools, self._name, self._silence, self._closing = pools, name, silence, False
        made_of = {"pools": [pool.made_of for pool in pools], "count": count}
        self._listener = Listener(self, "reward", name, made_of, elsewhere)

    def coming(self, *, one_more: bool = False) -> int:
        """How many have joined, or are about to; see `Listener.coming`."""
        return self._listener.coming(one_more=one_more)

    def answered(self) -> int:
        """How many answers those who joined have scored since this was last asked."""
        count = sum(pool.away for pool in self._pools)
        for pool in self._pools:
            pool.away = 0
        return count

    async def listen(self, place: str, directory: str | None, token: str | None = None) -> str:
        """Let processes join; see `Listener.open`."""
        where = self.where = await self._listener.open(place, directory, token)
        if token is None:  # else whoever has it knows where this is
            logger.warning("%s: reward workers may join at %s: %s", self._name, where, self._listener.how)
        return where

    def came(self, connection: Connection, about: dict[str, Any]) -> RemoteWorkers:
        """See `Joinable`."""
        member = RemoteWorkers(connection, about, self._pools, self._silence)
        self.there.add(member)
        logger.warning(
            "%s: %s has joined with %d workers; %s",
            *(self._name, member.peer.name, len(member.workers), self._count()),
        )
        return member

    def left(self, member: Joiner | None, peer: str, reason: str) -> None:
        """See `Joinable`."""
        if self._closing:
            return
        if not isinstance(member, RemoteWorkers):
            logger.warning("%s: %s wanted to join and is gone: %s", self._name, peer, reason)
            return
        self.there.discard(member)
        logger.warning(
            "%s: %s is gone: %s; %d answers that it had to score are scored by others; %s",
            *(self._name, member.peer.name, reason, member.lost(), self._count()),
        )

    def _count(self) -> str:
        count = len(self.there)
        return f"{count} {'is' if count == 1 else 'are'} there beside the judge's own workers"

    async def close(self) -> None:
        """End with those who joined."""
        self._closing = True
        self._listener.shut()
        await asyncio.gather(*(each.peer.connection.close("end") for each in self.there), return_exceptions=True)
        await self._listener.close()
