"""Commands of one call: who reads them ends before they are closed, however often it is cancelled."""

from __future__ import annotations

import asyncio

from rlinf.training.schedule import CommandStream


async def test_commands_are_closed_by_who_reads_them_once_nobody_advances_them():
    begun, may_end, ends = asyncio.Event(), asyncio.Event(), []

    async def commands():
        try:
            begun.set()
            yield await asyncio.get_running_loop().create_future()
        finally:
            await may_end.wait()  # it has things to give back
            ends.append("commands")

    stream = CommandStream(commands(), [0])

    async def read():
        try:
            await anext(stream._lead())
        finally:
            ends.append("reader")

    reader = asyncio.create_task(read())
    await begun.wait()
    for _ in range(3):  # by a signal, by the scope that closes, by the loop that ends
        reader.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert ends == []
    may_end.set()
    await asyncio.wait([reader])
    assert (ends, reader.cancelled(), stream.error) == (["commands", "reader"], True, None)
