"""Handles: items that a flow looks at and passes on, and that stay where they were made until somebody has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.streams.channel import Handle
from rlinf.runtime.streams.handles import Holding, handles


def length_of(text: str) -> tuple[str, int] | None:
    return None if text == "secret" else ("length", len(text))


class Writer(Actor):
    @endpoint(stays=length_of)
    async def write(self, texts: list[str]) -> AsyncIterator[str]:
        for text in texts:
            yield text

    @endpoint(stays=length_of)
    async def louder(self, text: str) -> str:
        return text.upper()


class Reader(Actor):
    @endpoint
    async def read(self, texts: Any) -> list[str]:
        return [text async for text in texts]

    @endpoint
    async def hold(self, texts: Any, others: list[Any]) -> tuple[list[str], int]:
        """What others make of the handles of all texts, and how many of these were not here."""
        holding = Holding(texts)
        try:
            mine = [handle async for handle in holding]
            away = sum(not handle.here for handle in mine)
            said = await asyncio.gather(*(other.all_of(mine[n :: len(others)]) for n, other in enumerate(others)))
        finally:
            holding.release()
        return sorted(text for some in said for text in some), away

    @endpoint
    async def all_of(self, some: list[Handle]) -> list[str]:
        return [await each.value() for each in some]


TEXTS = [n * "ab" for n in range(12)]


async def _actors(system: ActorSystem) -> tuple[list[Any], list[Any]]:
    writers = [await system.spawn(Writer, name=f"writer{host}", hosts=[host]) for host in (0, 1)]
    readers = [await system.spawn(Reader, name=f"reader{host}", hosts=[host]) for host in (0, 1)]
    return [one[0] for one in writers], [one[0] for one in readers]


async def test_what_a_flow_chooses_by_what_it_sees_goes_to_its_consumer_whole(system: ActorSystem) -> None:
    writers, readers = await _actors(system)
    for writer in writers:
        for reader in readers:

            async def chosen(written: Any) -> AsyncIterator[Handle]:
                async for handle in handles(written):
                    seen = handle.face
                    if (len(seen) if isinstance(seen, str) else seen[1]) % 4 == 0:
                        yield handle

            louder = writer.louder.map(writer.write(TEXTS))
            assert sorted(await reader.read(Stream.of(chosen(louder)))) == [n * "AB" for n in range(0, 12, 2)]


async def test_a_value_of_which_nothing_is_to_be_seen_can_be_had(system: ActorSystem) -> None:
    writers, _ = await _actors(system)
    for writer in writers:
        async for handle in handles(writer.write(["secret"])):
            assert handle.face == ("secret" if handle.here else None)
            assert await handle.value() == "secret"
    assert [handle.face async for handle in handles(["plain"])] == ["plain"]


async def test_held_items_are_fetched_by_others_and_forgotten_at_the_end(system: ActorSystem) -> None:
    writers, readers = await _actors(system)
    for writer in writers:
        for reader in readers:
            many = [f"{n:03}" for n in range(300)]  # more than a stream holds, though none is done before the end
            said, _ = await reader.hold(writer.louder.map(writer.write(many)), readers)
            assert said == many


async def test_a_flow_that_stops_half_way_leaves_nothing_behind(system: ActorSystem) -> None:
    writers, readers = await _actors(system)
    for writer in writers:
        written = writer.write(TEXTS)
        async for _ in handles(written):
            break
        await written.close()
        whole = asyncio.ensure_future(readers[1].hold(writer.write(TEXTS), readers))
        await asyncio.sleep(0)
        whole.cancel()
        await asyncio.gather(whole, return_exceptions=True)
