"""The side of a replica that joined a trainer: a trainer of its own, which computes gradients and takes no step.

Flows in: weights, micro-batches. Flows out: sums of each micro-batch. Who wakes whom: what comes wakes the one task
that computes, in the order in which it came; questions are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from rlinf.data.weights import Weights
from rlinf.joining.connection import Connection
from rlinf.joining.listener import told_to_make, work_until_over
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.system.system import ActorSystem


async def replicate(
    connection: Connection, trainer: type[Actor], ready: Callable[[], Any], leave: asyncio.Event
) -> str:
    """Compute for a trainer until its job ends, or until this replica is to leave it.

    Args:
        connection: to the trainer.
        trainer: its class.
        ready: called once the model is there, and the trainer knows.
        leave: set by whoever wants it to leave.

    Returns:
        Why it is over, in words.

    Raises:
        JobLost: the job is gone.
        Exception: what failed here, which the job has been told.
    """
    messages = connection.messages()
    made_of = await told_to_make(connection, messages)
    try:
        async with ActorSystem.local(1, trace=False) as system:
            (replica,) = await system.spawn(trainer, name="replica", **made_of)
            side = FarSide(connection, replica)
            connection.send("ready", {"name": f"{socket.gethostname()} pid {os.getpid()}"})
            ready()
            return await work_until_over(side.work(), side.hear(messages), leave, side.hand_over)
    except Exception as error:
        if not isinstance(error, ConnectionError):
            await connection.close("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        await connection.close()


class FarSide:
    """A replica behind a connection.

    Args:
        connection: to the trainer.
        replica: the actor.
    """

    def __init__(self, connection: Connection, replica: Any):
        self._connection, self._replica = connection, replica
        self._came: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    async def hear(self, messages: AsyncIterator[tuple[Any, ...]]) -> bool:
        """Read what the job sends until the connection ends; True: it has said that it does."""
        ended = False
        async for message in messages:
            if message[0] == "end":
                ended = True
            elif message[0] == "ping":
                self._connection.send("reply", message[1], None)
            else:
                self._came.put_nowait(message)
        return ended

    async def work(self) -> None:
        """Do what has come, one after the other."""
        while True:
            kind, number, *rest = await self._came.get()
            if kind == "weights":
                await in_thread(rest[0].verify)
                await self._replica.overwrite(rest[0])
                self._connection.send("loaded", number)
            elif kind == "work":
                await self._compute(number, *rest)
            else:
                raise ValueError(f"the job asks for {kind!r}, which this version of rlinf does not know")

    async def _compute(self, number: int, command: Any, version: int) -> None:
        sums, result = await self._replica.sums(command, version)
        named = ((name, tensor.cpu()) for name, tensor in sums.gradients.items())
        packed = await in_thread(lambda: Weights.pack(named, version))
        self._connection.send("computed", number, sums.loss, result)
        self._connection.send_weights(number, packed, behind=True)

    async def hand_over(self) -> None:
        """Tell the trainer that this replica leaves."""
        await self._connection.close("leaving")
