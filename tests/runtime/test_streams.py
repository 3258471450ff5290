"""Streams: items from any producers to any consumers, each to one of them; ends and errors reach both sides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.errors import ActorDied, QueueClosed, UserError
from rlinf.runtime.streams.queue_state import REMEMBERED
from tests.runtime.worlds import until

BIG = 40_000
"""Elements of a tensor that stays at its producer until it is consumed."""


class Source(Actor):
    """Makes streams, and knows how far it came and how it ended."""

    async def setup(self) -> None:
        self.made = 0
        self.ended: list[str] = []
        self.gate = asyncio.Event()

    @endpoint
    async def count_to(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            self.made += 1
            yield i

    @endpoint
    async def forever(self) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                self.made += 1
                yield i
        finally:
            self.ended.append("forever")

    @endpoint
    async def gated(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        await self.gate.wait()
        yield n

    @endpoint
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def breaks_after(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ValueError(f"broken after {n}")

    @endpoint
    async def tensors(self, n: int) -> AsyncIterator[torch.Tensor]:
        for i in range(n):
            yield torch.full((BIG,), float(i))

    @endpoint
    async def promises(self, other: Any, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield other.double(i)

    @endpoint
    async def functions(self) -> AsyncIterator[Any]:
        yield lambda: 0

    @endpoint
    async def made_so_far(self) -> int:
        return self.made

    @endpoint
    async def ends(self) -> list[str]:
        return self.ended


class Worker(Actor):
    """Consumes streams, as stages do and as endpoints do."""

    async def setup(self) -> None:
        self.seen: list[Any] = []
        self.running = self.most = 0
        self.gate = asyncio.Event()

    @endpoint
    async def double(self, n: Any) -> Any:
        self.seen.append(n)
        return 2 * n

    @endpoint
    async def double_all(self, numbers: list[int]) -> list[int]:
        self.seen.append(len(numbers))
        return [2 * n for n in numbers]

    @endpoint
    async def plus(self, n: int, *, more: int = 0) -> int:
        return n + more

    @endpoint
    async def too_few(self, numbers: list[int]) -> list[int]:
        return numbers[1:]

    @endpoint
    async def no_list(self, numbers: list[int]) -> int:
        return 1

    @endpoint
    async def repeat(self, n: int) -> AsyncIterator[int]:
        for _ in range(n):
            yield n

    @endpoint
    async def halves(self, numbers: list[int]) -> AsyncIterator[float]:
        for n in numbers:
            yield n / 2

    @endpoint
    async def slowly(self, n: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        return n

    @endpoint
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def at_once(self) -> tuple[int, int]:
        return (self.running, self.most)

    @endpoint
    async def fails_at(self, n: int, *, bad: int) -> int:
        if n == bad:
            raise ValueError(f"cannot do {n}")
        return n

    @endpoint
    async def sum_of(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    @endpoint
    async def keep(self, stream: Stream[Any]) -> list[Any]:
        got = []
        async for item in stream:
            got.append(item)
            await asyncio.sleep(0)
        return got

    @endpoint
    async def first(self, stream: Stream[Any], n: int) -> list[Any]:
        got: list[Any] = []
        async for item in stream:
            got.append(item)
            if len(got) == n:
                break
        return got

    @endpoint
    async def breaks_at(self, stream: Stream[Any], bad: int) -> None:
        async for item in stream:
            if item == bad:
                raise ValueError(f"do not like {item}")

    @endpoint
    async def hang_at(self, stream: Stream[Any], bad: int) -> list[Any]:
        async for item in stream:
            self.seen.append(item)
            if item == bad:
                await self.gate.wait()
        return self.seen

    @endpoint
    async def batches(self, stream: Stream[Any], n: int) -> list[Any]:
        return await stream.batch(n).collect()

    @endpoint
    async def close_it(self, stream: Stream[Any]) -> None:
        await stream.close()

    @endpoint
    async def what_was_seen(self) -> list[Any]:
        return self.seen


async def _roles(system: ActorSystem) -> tuple[Any, Any]:
    return await system.spawn(Source, hosts=[0, 1], name="source"), await system.spawn(
        Worker, hosts=[0, 1, 1], name="worker"
    )


async def _ended(source: Any, times: int = 1) -> bool:
    return len(await source.ends()) == times


# Where items come from ---------------------------------------------------------------------------------------------


async def test_an_async_generator_endpoint_is_a_stream_in_order(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        assert [item async for item in source.count_to(1000)] == list(range(1000))
        assert await source.count_to(0).collect() == []


async def test_a_group_of_generators_makes_one_stream(system: ActorSystem) -> None:
    sources, _ = await _roles(system)
    assert sorted(await sources.count_to(5).collect()) == sorted([*range(5), *range(5)])
    assert sorted(await sources.each.count_to([2, 3]).collect()) == [0, 0, 1, 1, 2]
    assert await sources.any.count_to(2).collect() == [0, 1]


async def test_streams_are_made_of_anything_iterable(system: ActorSystem) -> None:
    async def asynchronous() -> AsyncIterator[int]:
        for i in range(3):
            await asyncio.sleep(0)
            yield i

    for items in ([0, 1, 2], (0, 1, 2), range(3), iter([0, 1, 2]), {0: "a", 1: "b", 2: "c"}, asynchronous()):
        assert await Stream.of(items).collect() == [0, 1, 2]
    assert await Stream.of(Stream.of([0, 1, 2])).collect() == [0, 1, 2]
    assert await Stream.of([]).collect() == []
    with pytest.raises(TypeError, match="not iterable"):
        Stream.of(5)  # type: ignore[arg-type]


async def test_an_endless_iterable_is_read_only_as_far_as_it_is_consumed(system: ActorSystem) -> None:
    read = []

    def numbers() -> Any:
        for i in itertools.count():
            read.append(i)
            yield i

    assert await Stream.of(numbers()).take(10).collect() == list(range(10))
    assert len(read) < 1000
    assert await Stream.of(range(10**9)).take(3).collect() == [0, 1, 2]


async def test_leaving_a_stream_of_an_async_generator_closes_it(system: ActorSystem) -> None:
    closed = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                yield i
        finally:
            closed.set()

    async for item in Stream.of(numbers()):
        if item == 3:
            break
    await closed.wait()


async def test_a_stream_dropped_at_once_is_no_trouble(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    Stream.of(range(10))
    Stream.of(range(10)).batch(2).take(1)
    sources.count_to(10)
    workers.double.map(range(10))
    workers.double.map(sources.count_to(10))


async def test_yielded_promises_become_their_values(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        assert await source.promises(workers[1], 5).collect() == [0, 2, 4, 6, 8]


async def test_anext_takes_items_one_by_one(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        stream = source.count_to(3)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


# Where they go -----------------------------------------------------------------------------------------------------


async def test_a_stream_passed_to_an_actor_arrives_as_a_stream(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        for worker in workers:
            assert await worker.keep(source.count_to(500)) == list(range(500))


async def test_ranks_that_share_a_stream_compete_for_its_items(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        got = await workers.keep(source.count_to(300))
        assert sorted(item for part in got for item in part) == list(range(300))
        assert all(part == sorted(part) for part in got)


async def test_one_consumer_leaving_leaves_the_rest_to_the_others(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        stream = source.count_to(300)
        firsts = await asyncio.gather(*(worker.first(stream, 10) for worker in workers))
        rest = await stream.collect()
        assert sorted([item for part in firsts for item in part] + rest) == list(range(300))


async def test_a_cancelled_consumer_loses_nothing(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        stream = source.gated(2)
        items = aiter(stream)
        assert [await anext(items), await anext(items)] == [0, 1]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await anext(items)
        await source.open()
        assert [item async for item in items] == [2]


async def test_map_calls_the_endpoint_for_every_item(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        assert sorted(await workers.double.map(source.count_to(200)).collect()) == list(range(0, 400, 2))
    assert sorted(await workers.double.map(range(5)).collect()) == [0, 2, 4, 6, 8]
    assert sorted(await workers.plus.map([1, 2], more=10).collect()) == [11, 12]
    assert await workers[1].double.map([7]).collect() == [14]
    assert await workers.double.map([]).collect() == []


async def test_map_with_a_batch_gives_lists_and_takes_lists(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        assert sorted(await workers.double_all.map(source.count_to(50), batch=8).collect()) == list(range(0, 100, 2))
    sizes = [n for part in await workers.what_was_seen() for n in part]
    assert sorted(sizes, reverse=True) == [8] * 12 + [2, 2]


async def test_a_batch_may_be_larger_than_what_the_stream_holds(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        for worker in workers[:2]:
            doubled = worker.double_all.map(source.count_to.bounded(2)(1000), batch=300)
            assert sorted(await doubled.collect()) == list(range(0, 2000, 2))
        assert [len(part) for part in await source.count_to(1000).batch(400).collect()] == [400, 400, 200]


async def test_map_runs_as_many_calls_at_a_time_as_it_is_told(system: ActorSystem) -> None:
    (_, workers) = await _roles(system)
    results = workers.slowly.map(range(20), concurrency=3)
    await until(lambda: _are_running(workers, 3))
    await workers.open()
    assert sorted(await results.collect()) == list(range(20))
    assert [most for _, most in await workers.at_once()] == [3, 3, 3]


async def _are_running(workers: Any, n: int) -> bool:
    return [running for running, _ in await workers.at_once()] == [n] * len(workers)


async def test_map_over_a_generator_endpoint_makes_any_number_of_items(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        assert sorted(await workers.repeat.map(source.count_to(5)).collect()) == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
        assert sorted(await workers.halves.map(source.count_to(5), batch=2).collect()) == [0, 0.5, 1, 1.5, 2]


async def test_maps_chain_into_pipelines(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        stream = source.count_to(100)
        for _ in range(3):
            stream = workers.double.map(stream)
        assert sorted(await stream.collect()) == list(range(0, 800, 8))
        stages = workers[1].double.map(workers[0].double.map(range(9)))
        assert sorted(await workers[2].keep(stages)) == list(range(0, 36, 4))


async def test_big_items_go_straight_from_producer_to_consumer(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        for worker in workers[:2]:
            assert sorted(await worker.sum_of.map(source.tensors(5)).collect()) == [float(BIG * i) for i in range(5)]
        lists = await source.tensors(5).batch(2).collect()
        assert [[float(t[0]) for t in part] for part in lists] == [[0, 1], [2, 3], [4]]
        left, right = source.tensors(4).deal(2, weight=lambda tensor: float(tensor[0]))
        assert len(await left.collect()) == len(await workers[1].sum_of.map(right).collect()) == 2


# Transforms --------------------------------------------------------------------------------------------------------


async def test_batch_makes_lists_of_n(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        assert await source.count_to(7).batch(3).collect() == [[0, 1, 2], [3, 4, 5], [6]]
        for worker in workers[:2]:
            assert await worker.batches(source.count_to(7), 3) == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_small_last_list_ends_also_where_many_are_asked_for_ahead(system: ActorSystem) -> None:
    _, workers = await _roles(system)
    for worker in workers[:2]:
        for n in (1001, 1002, 1003):
            lists = await worker.batches(Stream.of(range(n)), 4)
            assert [item for part in lists for item in part] == list(range(n))
            assert [len(part) for part in lists] == [4] * 250 + [n - 1000]


async def test_batch_by_weight_fills_lists_up_to_the_limit(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        lists = await source.count_to(8).batch(weight=lambda n: n, limit=9).collect()
        assert lists == [[0, 1, 2, 3], [4, 5], [6], [7]]
        assert await Stream.of([20, 1, 1]).batch(weight=lambda n: n, limit=9).collect() == [[20], [1, 1]]


async def test_take_gives_the_first_n_and_stops_the_producer(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        stream = source.forever()
        assert await stream.take(5).collect() == [0, 1, 2, 3, 4]
        await until(lambda source=source: _ended(source))
        assert await source.count_to(3).take(9).collect() == [0, 1, 2]
        assert await source.count_to(3).take(0).collect() == []


async def test_tee_gives_every_stream_every_item(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        left, right = source.count_to(500).tee()
        assert await left.collect() == await right.collect() == list(range(500))
        three = source.count_to(5).tee(3)
        assert await asyncio.gather(*(w.keep(s) for w, s in zip(workers, three, strict=True))) == [[*range(5)]] * 3
        only, dropped = source.count_to(5).tee()
        del dropped
        assert await only.collect() == [0, 1, 2, 3, 4]


async def test_tee_runs_ahead_only_as_far_as_its_fastest_reader(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        left, right = source.forever().tee()
        assert await left.take(3).collect() == [0, 1, 2]
        before = -1
        while before != (before := await source.made_so_far()):
            for _ in range(20):
                await source.ends()
        assert before < 3000
        assert await right.take(2).collect() == [0, 1]
        await until(lambda source=source: _ended(source))


async def test_deal_makes_balanced_streams_of_equal_length(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        shares = source.count_to(10).deal(3, pad="pad")
        got = await asyncio.gather(*(w.keep(s) for w, s in zip(workers, shares, strict=True)))
        assert [len(part) for part in got] == [4, 4, 4]
        assert sorted(item for part in got for item in part if item != "pad") == list(range(10))
        weighed = source.count_to(100).deal(4, weight=float)
        sums = [sum(part) for part in await asyncio.gather(*(share.collect() for share in weighed))]
        assert max(sums) - min(sums) <= 99
    one_after_the_other = Stream.of(range(2000)).deal(2)
    assert [len(await share.collect()) for share in one_after_the_other] == [1000, 1000]


async def test_a_share_that_is_dropped_leaves_the_others_theirs(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        left, right = source.count_to(600).deal(2)
        del left
        assert await right.collect() == list(range(1, 600, 2))


@pytest.mark.worlds("local")
async def test_transforms_refuse_what_makes_no_sense(system: ActorSystem) -> None:
    stream = Stream.of([1])
    for call in (
        lambda: stream.batch(0), lambda: stream.batch(), lambda: stream.batch(2, weight=len, limit=2),
        lambda: stream.take(-1), lambda: stream.tee(0), lambda: stream.deal(0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"batch|take|tee|deal"):
            call()


# Ends and errors ---------------------------------------------------------------------------------------------------


async def test_a_producer_pauses_while_its_stream_is_full(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        stream = source.forever.bounded(4)()
        before = -1
        while before != (before := await source.made_so_far()):
            for _ in range(20):
                await source.ends()
        assert 4 <= before <= 16  # some more are on their way from another host
        assert await stream.take(100).collect() == list(range(100))
    results = workers[1].double.bounded(2).map(range(1000))
    assert await anext(results) == 0
    for _ in range(20):
        await workers[1].at_once()
    assert len(await workers[1].what_was_seen()) < 100


async def test_closing_or_dropping_a_stream_stops_everything_that_feeds_it(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        stream = workers.double.map(source.forever()).batch(3)
        assert len(await anext(stream)) == 3
        await stream.close()
        await until(lambda source=source: _ended(source))
        with pytest.raises(QueueClosed, match="closed"):
            await anext(stream)
        stream = workers.double.map(workers.double.map(source.forever()))
        await anext(stream)
        del stream
        await until(lambda source=source: _ended(source, 2))
        stream = source.forever()
        await workers[2].close_it(stream)
        await until(lambda source=source: _ended(source, 3))


async def test_an_error_of_the_producer_reaches_the_consumer_with_its_name(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        for stream in (
            source.breaks_after(3),
            workers.double.map(source.breaks_after(3)),
            source.breaks_after(3).batch(2),
            source.breaks_after(3).tee()[1],
        ):
            with pytest.raises(ValueError, match="broken after 3") as caught:
                await stream.collect()
            assert f"in {source._name}.breaks_after() on host {source._host}" in caught.value.__notes__
        with pytest.raises(ValueError, match="broken after 3"):
            await workers.keep(source.breaks_after(3))
    with pytest.raises(ZeroDivisionError):
        await Stream.of(1 / n for n in (2, 1, 0)).collect()


async def test_an_error_of_a_map_reaches_both_sides(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        results = workers.fails_at.map(source.forever(), bad=50)
        with pytest.raises(ValueError, match="cannot do 50") as caught:
            await results.collect()
        assert "fails_at() on host" in "\n".join(caught.value.__notes__)
        await until(lambda source=source: _ended(source))


async def test_an_error_of_a_consumer_stops_the_producer(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for source in sources:
        with pytest.raises(ValueError, match=r"like 20"):
            await workers[1].breaks_at(source.forever(), 20)
        await until(lambda source=source: _ended(source))


async def test_a_map_must_return_as_many_results_as_it_got_items(system: ActorSystem) -> None:
    _, workers = await _roles(system)
    for endpoint_, what in ((workers.too_few, "returned 3"), (workers.no_list, "returned a int")):
        with pytest.raises(UserError, match=rf"batch=4.*list of 4 items.*{what}"):
            await endpoint_.map(range(8), batch=4).collect()


async def test_an_item_that_cannot_be_sent_is_an_error_of_the_stream(system: ActorSystem) -> None:
    if system._host.codec.by_reference(1):
        return
    sources, workers = await _roles(system)
    with pytest.raises(UserError, match="function"):
        await sources[1].functions().collect()
    with pytest.raises(UserError, match="function"):
        await workers[1].double.map(Stream.of([lambda: 0])).collect()


async def test_a_stream_ends_with_its_scope(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    async with system.scope():
        stream = sources[1].forever()
        consuming = workers[1].hang_at(stream, 5)
        await until(lambda: _has_seen(workers[1], 5))
    await until(lambda: _ended(sources[1]))
    await workers.open()
    with pytest.raises(QueueClosed, match="scope ended"):
        await consuming


async def _has_seen(worker: Any, item: Any) -> bool:
    return item in await worker.what_was_seen()


async def test_a_map_forgets_the_ids_of_what_cannot_come_back(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    for items, expected in (
        (workers.double.map(sources[1].count_to(6000)), 6000),
        (workers.repeat.map([1] * 6000), 6000),
    ):
        most = count = 0
        async for _ in items:
            count += 1
            most = max(most, len(items._owned._seen))
        assert count == expected
        in_flight = 1024 + 256 + 2 * 64  # gathered by an emitter, queued at the sink, asked ahead by two ranks
        assert most <= REMEMBERED + in_flight, f"{most} ids were remembered at a time"


# Deaths ------------------------------------------------------------------------------------------------------------


async def test_what_a_killed_rank_had_in_hand_goes_to_the_others(system: ActorSystem) -> None:
    for hosts in ([0, 1], [1, 0]):
        workers = await system.spawn(Worker, hosts=hosts, name="mapper")
        results = workers.slowly.map(range(30), concurrency=4)
        await until(lambda workers=workers: _are_running(workers, 4))
        await system.kill(workers[:1])
        await workers[1].open()
        assert sorted(await results.collect()) == list(range(30))
        await system.kill(workers[1:])


async def test_a_rank_killed_amid_its_items_loses_and_repeats_nothing(system: ActorSystem) -> None:
    sources, _ = await _roles(system)
    for source, hosts in zip(sources, ([1, 0], [0, 1]), strict=True):
        for chunk, expected in ((1, list(range(0, 4000, 2))), (4, [n / 2 for n in range(2000)])):
            workers = await system.spawn(Worker, hosts=hosts, name="mapper")
            items = source.count_to(2000)
            results = workers.double.map(items) if chunk == 1 else workers.halves.map(items, batch=chunk)
            got = []
            async for result in results:
                got.append(result)
                if len(got) == 300:
                    await system.kill(workers[:1])
            assert sorted(got) == expected
            await system.kill(workers[1:])


async def test_a_map_fails_when_its_last_rank_dies(system: ActorSystem) -> None:
    workers = await system.spawn(Worker, hosts=[0, 1], name="mapper")
    results = workers.slowly.map(range(30), concurrency=4)
    await until(lambda: _are_running(workers, 4))
    await system.kill(workers)
    with pytest.raises(ActorDied, match="mapper"):
        await results.collect()


async def test_what_a_killed_consumer_had_in_hand_goes_to_the_others(system: ActorSystem) -> None:
    for host in (0, 1):
        workers = await system.spawn(Worker, hosts=[host, 0], name=f"consumer{host}")
        stream = Stream.of(range(10))
        dying = workers[0].hang_at(stream, 0)
        await until(lambda workers=workers: _has_seen(workers[0], 0))
        await system.kill(workers[:1])
        assert await workers[1].keep(stream) == list(range(10))
        with pytest.raises(ActorDied):
            await dying


async def test_a_killed_producer_fails_its_stream(system: ActorSystem) -> None:
    for host in (0, 1):
        sources = await system.spawn(Source, hosts=[host], name=f"dying{host}")
        stream = sources.gated(2)
        assert [await anext(stream), await anext(stream)] == [0, 1]
        await system.kill(sources)
        with pytest.raises(ActorDied, match=f"dying{host}"):
            await anext(stream)


async def test_statistics_tell_states_and_who_waits(system: ActorSystem) -> None:
    for source in (await _roles(system))[0]:
        stream = source.gated(2)
        items = aiter(stream)
        await anext(items)
        waiting = asyncio.ensure_future(_two_more(items))
        await until(lambda stream=stream: _waited_for(stream))
        statistics = await stream.statistics()
        assert (statistics["put"], statistics["queued"], statistics["running"]) == (2, 0, 0)
        await source.open()
        assert await waiting == [1, 2]


async def _two_more(items: Any) -> list[Any]:
    return [await anext(items), await anext(items)]


async def _waited_for(stream: Stream[Any]) -> bool:
    statistics = await stream.statistics()
    return bool(statistics["waiting_to_take"]) and bool(statistics["done"] == 2)


async def test_a_stream_can_be_stopped_while_its_consumer_hangs(system: ActorSystem) -> None:
    sources, workers = await _roles(system)
    consuming = workers[1].hang_at(sources[1].forever(), 3)
    await until(lambda: _has_seen(workers[1], 3))
    consuming.cancel()
    await until(lambda: _ended(sources[1]))
    with contextlib.suppress(asyncio.CancelledError):
        await consuming
