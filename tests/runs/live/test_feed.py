"""The socket of the feed: what watchers get, and that none of them can hold up or end a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat

from rlinf.runs.live import feed as feeds
from rlinf.runs.live.feed import Feed, encoded


@contextlib.asynccontextmanager
async def opened():
    """A feed that says hello and repeats what it hears."""
    feed = Feed(lambda: [{"kind": "hello"}], lambda said, answer: answer({"heard": said}))
    path = await feed.open()
    try:
        yield feed, path
    finally:
        await feed.close()
    assert not path.parent.exists()


async def connected(path):
    return await asyncio.open_unix_connection(path, limit=1 << 26)


async def read(reader):
    return json.loads(await asyncio.wait_for(reader.readline(), 30))


async def at_the_end(reader):
    """Whether it was hung up on, and everything is read."""
    try:
        return await asyncio.wait_for(reader.read(), 30) is not None
    except ConnectionError:
        return True


async def test_each_watcher_is_told_everything_and_answered_by_itself():
    async with opened() as (feed, path):
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        ends = [await connected(path) for _ in range(5)]
        assert [await read(reader) for reader, _ in ends] == [{"kind": "hello"}] * 5
        feed.tell({"kind": "status", "text": "läuft"})
        ends[3][1].write(b'{"do": "pause"}\n')
        assert [await read(reader) for reader, _ in ends] == [{"kind": "status", "text": "läuft"}] * 5
        assert await read(ends[3][0]) == {"heard": {"do": "pause"}}


async def test_garbage_is_hung_up_on_and_others_go_on():
    async with opened() as (feed, path):
        good, _ = await connected(path)
        assert await read(good) == {"kind": "hello"}
        for rubbish in (b"\xff\xfe\n", b"[1]\n", b"{\n", b"[" * 60_000 + b"\n", b"x" * (feeds.LONGEST * 3)):
            reader, writer = await connected(path)
            await read(reader)
            with contextlib.suppress(ConnectionError):
                writer.write(rubbish)
                await writer.drain()
            assert await at_the_end(reader)
        feed.tell({"n": 1})
        assert await read(good) == {"n": 1}


async def test_a_watcher_that_reads_nothing_costs_no_memory_and_hears_the_state_when_it_reads_again():
    async with opened() as (feed, path):
        reader, writer = await connected(path)
        writer.transport.pause_reading()
        await feed.watched.wait()
        (watcher,) = feed._watchers
        big = {"kind": "moment", "text": "x" * 100_000}
        for _ in range(2000):  # 200 MB, of which about one is kept
            feed.tell(big)
        assert watcher._writer.transport.get_write_buffer_size() < feeds.BEHIND + 200_000
        writer.transport.resume_reading()
        seen = []
        while not seen or seen[-1] != {"kind": "hello"} or len(seen) == 1:
            feed.tell({"kind": "tick"})
            seen.append(await read(reader))
        assert sum(each == big for each in seen) < 200


async def test_one_more_than_there_may_be_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(feeds, "MOST", 2)
    async with opened() as (_, path):
        ends = [await connected(path) for _ in range(2)]
        for reader, _ in ends:
            await read(reader)
        third, _ = await connected(path)
        assert await at_the_end(third)


async def test_who_measures_rests_while_nobody_watches():
    async with opened() as (feed, path):
        assert not feed.watched.is_set()
        reader, writer = await connected(path)
        await read(reader)
        assert feed.watched.is_set()
        (serving,) = feed._tasks
        writer.close()
        await asyncio.wait_for(asyncio.shield(serving), 30)
        assert not feed.watched.is_set()


async def test_the_last_words_arrive_though_the_feed_closes_at_once():
    async with opened() as (feed, path):
        reader, _ = await connected(path)
        await read(reader)
        feed.tell({"kind": "status", "status": "ended"})
    assert await read(reader) == {"kind": "status", "status": "ended"}
    assert await at_the_end(reader)


def test_a_long_name_of_the_temporary_directory_does_not_matter(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(feeds.tempfile, "gettempdir", lambda: str(deep))
    place = feeds.private_directory()
    assert len(os.fsencode(place.path)) < feeds.LONGEST_PATH
    place.remove()
    assert not place.path.exists()


def test_an_id_with_half_a_character_in_it_is_sent_back():
    assert json.loads(encoded({"id": "\ud800"})) == {"id": "\ud800"}
