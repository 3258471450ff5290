"""The side of an engine that joined a job: answers what the job sends, by the weights that it sends.

Flows in: requests, weights, and questions about requests under way. Flows out: completions, as they come, and replies.
Who wakes whom: requests wake the one call of the engine's `batches`, which sends what it yields.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf.joining.connection import Connection
from rlinf.joining.listener import told_to_make, work_until_over
from rlinf.runtime.base.tasks import in_thread

if TYPE_CHECKING:
    from rlinf.config.text import RolloutSettings
    from rlinf.data.differences import Difference
    from rlinf.data.tokenizer import TokenizerSource
    from rlinf.data.weights import Weights
    from rlinf.engines.base import Completion, Engine, Request  # come with torch, of which hello is said without

Build = Callable[..., "Awaitable[Engine]"]
"""Makes the engine of what the job sends about it."""


async def serve(connection: Connection, build: Build, ready: Callable[[], Any], leave: asyncio.Event) -> str:
    """Answer a job's requests until it ends, or until this engine is to leave it.

    Args:
        connection: to the job.
        build: makes the engine.
        ready: called once it is there, and the job knows.
        leave: set by whoever wants it to leave; what it has begun is handed on.

    Returns:
        Why it is over, in words.

    Raises:
        JobLost: the job is gone.
        Sent: it is to join elsewhere.
        Exception: what failed in the engine, which the job has been told.
    """
    messages = connection.messages()
    made_of = await told_to_make(connection, messages)
    engine: Engine | None = None
    try:
        engine = await build(**made_of)
        side = FarSide(connection, engine)
        connection.send("ready", {"rows": engine.max_rows, "name": f"{socket.gethostname()} pid {os.getpid()}"})
        ready()
        return await side.run(messages, leave)
    except Exception as error:
        if not isinstance(error, ConnectionError):
            await connection.close("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        await connection.close()
        if engine is not None:
            await engine.close()


class FarSide:
    """An engine behind a connection.

    Args:
        connection: to the job.
        engine: answers.
    """

    def __init__(self, connection: Connection, engine: Engine):
        self._connection, self._engine = connection, engine
        self._waiting: deque[Request] = deque()  # has come, and the engine has not read it yet
        self._running: set[int] = set()  # all that have come and not ended, by id
        self._came = asyncio.Event()
        self._loading = asyncio.Lock()  # weights in the order in which they came
        self._base: Weights | None = None  # the last ones, if the next may be sent as a difference from them

    async def run(self, messages: AsyncIterator[tuple[Any, ...]], leave: asyncio.Event) -> str:
        """Serve; see `serve`."""
        return await work_until_over(self._answer(), self._hear(messages), leave, self._hand_over)

    async def _hand_over(self) -> None:
        await self._connection.close("leaving", await self._take_out({*self._running}))

    async def _answer(self) -> None:
        async with aclosing(self._engine.batches(self._requests())) as batches:
            async for completions in batches:
                self._send(completions)

    async def _requests(self) -> AsyncIterator[Request]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            self._came.clear()
            await self._came.wait()

    def _send(self, completions: Collection[Completion]) -> None:
        self._running.difference_update(one.id for one in completions)
        if completions:
            self._connection.send("completions", list(completions), self._engine.stats)

    async def _hear(self, messages: AsyncIterator[tuple[Any, ...]]) -> bool:
        """Do what the job says until the connection ends; True: it has said so."""
        ended = False
        async with asyncio.TaskGroup() as work:
            async for kind, *rest in messages:
                if kind == "end":
                    ended = True
                elif kind == "requests":
                    self._waiting.extend(rest[0])
                    self._running.update(one.id for one in rest[0])
                    self._came.set()
                else:
                    work.create_task(self._load(*rest) if kind == "weights" else self._reply(kind, *rest))
        return ended

    async def _load(self, number: int, sent: Weights | Difference) -> None:
        async with self._loading:
            weights = await in_thread(partial(sent.made_of, self._base))
            await in_thread(weights.verify)
            await self._engine.load(weights)
            self._base = weights if weights.lineage is not None and weights.lineage.stays else None
        self._connection.send("loaded", number)

    async def _reply(self, what: str, number: int, ids: Collection[int]) -> None:
        reply: Any = None
        if what == "abort":
            self._send([one.ended("abort") for one in self._withdrawn(ids)])
            await self._engine.abort(ids)
        elif what == "take_out":
            reply = await self._take_out(ids)
        elif what == "partial":
            waiting = [one for one in self._waiting if one.id in ids]
            reply = [*waiting, *(await self._engine.partial(set(ids) - {one.id for one in waiting}))]
        elif what in ("pause", "resume"):
            await getattr(self._engine, what)()
        elif what == "forget":
            await self._engine.forget(ids)
        elif what != "ping":
            raise ValueError(f"the job asks for {what!r}, which this version of rlinf does not know")
        self._connection.send("reply", number, reply)

    async def _take_out(self, ids: Collection[int]) -> list[Request]:
        out = self._withdrawn(ids)
        if self._engine.hands_over:
            out += await self._engine.take_out(ids)
        self._running.difference_update(one.id for one in out)
        return out

    def _withdrawn(self, ids: Collection[int]) -> list[Request]:
        withdrawn = [one for one in self._waiting if one.id in ids]
        self._waiting = deque(one for one in self._waiting if one.id not in ids)
        return withdrawn


async def outlined_engine(
    name: str,
    *,
    outline: Mapping[str, Any],
    max_length: int | None,
    padding: tuple[int, ...],
    tokenizer: TokenizerSource,
    settings: RolloutSettings,
) -> Engine:
    """Make an engine whose weights are yet to come from the job, without transformers and the model's files.

    Args:
        name, max_length, padding: see `EngineSetup`.
        outline: of its model; see `rlinf.engines.transformers.plain.outline`.
        tokenizer, settings: see `rlinf.actors.rollout.Rollout.setup`.
    """
    import torch  # here and below: hello is said before it is there

    from rlinf.data.tokenizer import LateTokenizer
    from rlinf.engines.base import EngineSetup, make
    from rlinf.engines.transformers.plain import PlainModel
    from rlinf.runtime.base.tensors import own_device

    dtype = getattr(torch, settings.dtype)

    @contextmanager
    def build() -> Iterator[Any]:
        yield PlainModel.on(own_device(), dtype, outline)

    setup = EngineSetup(
        name=name,
        model=outline,
        build_model=build,
        tokenizer=LateTokenizer(tokenizer),  # type: ignore[arg-type]  # to all who ask it is one
        dtype=dtype,
        drafts=settings.drafts,
        max_rows=settings.max_rows,
        max_tokens=settings.max_tokens,
        max_length=max_length,
        padding=padding,
        kv=settings.kv,
    )
    return await make(settings.engine, setup, settings.engine_args)
