"""The side of a process that joined a job to score answers: workers of its own, which do what the judge says.

Flows in: calls of workers. Flows out: which workers are free, and what they answered. Who wakes whom: a call wakes the
task of the worker that it is for; nobody else waits.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from rlinf.joining.connection import Connection
from rlinf.joining.listener import told_to_make, work_until_over
from rlinf.rewards.base import Reward
from rlinf.rewards.pool import last_words, start_all, stop_all, workers_of
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.processes.supervisor import ChildDied, Worker


async def score(connection: Connection, ready: Callable[[], Any], leave: asyncio.Event) -> str:
    """Score answers for a judge until its job ends, or until this process is to leave it.

    Args:
        connection: to the judge.
        ready: called once the workers are up, and the judge knows.
        leave: set by whoever wants it to leave.

    Returns:
        Why it is over, in words.

    Raises:
        JobLost: the job is gone.
        Sent: this process is to join elsewhere.
        UserError: a reward function cannot work here, which the judge has been told.
    """
    messages = connection.messages()
    made_of = await told_to_make(connection, messages)
    workers: list[Worker] = []
    try:
        counts = []
        for pool in made_of["pools"]:
            await in_thread(partial(_check, **pool))
            some = workers_of(pool, "reward worker", made_of["count"])
            counts.append(len(some))
            workers += some
        await start_all(workers)
        connection.send("ready", {"name": f"{socket.gethostname()} pid {os.getpid()}", "workers": counts})
        ready()
        side = FarSide(connection, workers)
        return await work_until_over(side.work(), side.hear(messages), leave, side.hand_over)
    except Exception as error:
        fault = UserError(last_words(error)) if isinstance(error, ChildDied) else error
        if not isinstance(fault, ConnectionError):
            await connection.close("failed", f"{type(fault).__name__}: {fault}")
        raise fault from error.__cause__
    finally:
        await connection.close()
        await stop_all(workers)


def _check(source: Any, args: Any) -> None:
    """See that a reward function is there and can work on this machine. Blocking.

    Raises:
        UserError: it is not, or cannot.
    """
    try:
        Reward.of(source, args, make=False).ready()
    except Exception as error:  # a module of the user's, whatever it raises, or something that is not installed
        raise UserError(f"the run's reward function cannot work here: {type(error).__name__}: {error}") from error


class FarSide:
    """Workers behind a connection.

    Args:
        connection: to the judge.
        workers: that are up.
    """

    def __init__(self, connection: Connection, workers: Sequence[Worker]) -> None:
        self._connection = connection
        self._workers = [(worker, asyncio.Queue[tuple[Any, ...]]()) for worker in workers]

    async def hear(self, messages: AsyncIterator[tuple[Any, ...]]) -> bool:
        """Read what the job sends until the connection ends; True: it has said that it does."""
        ended = False
        async for kind, *rest in messages:
            if kind == "end":
                ended = True
            elif kind == "ping":
                self._connection.send("reply", rest[0], None)
            elif kind == "call":
                self._workers[rest[0]][1].put_nowait(tuple(rest[1:]))
            else:
                raise ValueError(f"the job asks for {kind!r}, which this version of rlinf does not know")
        return ended

    async def work(self) -> None:
        """Have workers do what they are called for.

        Raises:
            ChildDied: one is given up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number, (worker, calls) in enumerate(self._workers):
                    group.create_task(self._serve(number, worker, calls))
        except* ChildDied as several:
            raise several.exceptions[0] from None

    async def _serve(self, number: int, worker: Worker, calls: asyncio.Queue[tuple[Any, ...]]) -> None:
        while True:
            await worker.ready()
            self._connection.send("free", number)
            method, args, timeout = await calls.get()
            try:
                answer = await worker.call(method, *args, timeout=timeout)
            except Exception as error:  # of the worker: what comes of its samples is the judge's business
                answer = error
            self._connection.send("answer", number, answer)

    async def hand_over(self) -> None:
        """Tell the judge that this process leaves: others score what it has."""
        await self._connection.close("leaving")
