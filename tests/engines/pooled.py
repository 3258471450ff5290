"""Engines that have joined a job over sockets: beside its own one of the same model, or where it has none."""

import asyncio
import contextlib
from dataclasses import replace

from rlinf.config.text import RolloutSettings
from rlinf.engines.base import make
from rlinf.engines.pool.absent import Absent
from rlinf.engines.pool.far_side import outlined_engine, serve
from rlinf.engines.pool.pool import Pool
from rlinf.engines.transformers.plain import outline
from rlinf.joining.connection import connect
from tests.engines.transformers.test_engine import VOCABULARY

TOKEN = "of this job"


class Pooled(Pool):
    """With the tasks of those who joined, which end with it."""

    def __init__(self, setup, own):
        super().__init__(own, setup.compute, {}, setup.name)
        self.setup, self.sides, self.where = setup, [], ""

    async def joins(self, config=None, **settings):
        """Have one more join; returns its task and what has it leave. Of a configuration it has an outline alone."""
        leave, ready = asyncio.Event(), asyncio.Event()
        host, _, port = self.where.rpartition(":")
        connection = await connect(host, int(port), TOKEN)

        async def build(weights_come):
            if config is not None:
                assert weights_come
                more = {"max_length": None, "padding": (), "tokenizer": {"characters": "ab"}}
                how = RolloutSettings(max_rows=self.setup.max_rows, engine="transformers", dtype="float32")
                return await outlined_engine("outlined", outline=outline(config), settings=how, **more)
            return await make("transformers", replace(self.setup, **settings))

        side = asyncio.create_task(serve(connection, build, ready.set, leave))
        self.sides.append(side)
        side.connection, side.leave = connection, leave
        coming = asyncio.create_task(self._others_than({*self.members}))
        await asyncio.wait([side, coming], return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():  # one that could not be made has its error, and nobody waits for it
            coming.cancel()
            self.sides.remove(side)
            side.result()
        return side

    async def _others_than(self, known):
        while self.members <= known:
            await self._changed.wait()

    async def close(self):
        await super().close()
        for side in self.sides:
            side.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await side


async def alone(setup):
    pool = Pooled(setup, await make("transformers", setup))
    pool.where = await pool.listen("127.0.0.1:0", None, TOKEN)
    return pool


async def build(setup):
    pool = await alone(setup)
    await pool.joins()
    return pool


async def nobody(setup):
    """A job without an engine of its own, which nobody has joined yet."""
    pool = Pooled(setup, Absent("transformers", {"max_rows": setup.max_rows, "vocabulary": VOCABULARY}))
    pool.where = await pool.listen("127.0.0.1:0", None, TOKEN)
    return pool


async def joined(setup):
    """The same, joined by one."""
    pool = await nobody(setup)
    await pool.joins()
    return pool
