"""Channels: queues that any actor can use by name; nothing put is lost, however users of it end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rlinf import Actor, ActorSystem, Channel, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import QueueClosed
from tests.runtime.worlds import until

BIG = 40_000
"""Elements of a tensor that stays at its producer until it is consumed."""


class User(Actor):
    """Uses channels from its host."""

    @endpoint
    async def put(self, channel: Channel, values: list[Any], key: Any = None) -> None:
        for value in values:
            await channel.put(value, key=key)

    @endpoint
    async def put_at_once(self, channel: Channel, n: int) -> int:
        """How many of `n` puts return without waiting for anything."""
        at_once = 0
        for value in range(n):
            others: list[int] = []
            asyncio.get_running_loop().call_soon(others.append, 1)
            await channel.put(value)
            at_once += not others
        return at_once

    @endpoint
    async def close_after(self, other: Any, channel: Channel, values: list[Any]) -> None:
        await other.put(channel, values)
        channel.close()

    @endpoint
    async def get(self, channel: Channel, n: int = 1, key: Any = None) -> list[Any]:
        return [await channel.get(key=key) for _ in range(n)]

    @endpoint
    async def get_batch(self, channel: Channel, weight: float) -> list[Any]:
        return await channel.get_batch(weight)

    @endpoint
    async def drain(self, channel: Channel) -> list[Any]:
        return [value async for value in channel]

    @endpoint
    async def find(self, name: str) -> Any:
        channel = await self.system.get(name)
        return await channel.get()

    @endpoint
    async def make(self, name: str) -> Channel:
        return await self.system.channel(name)

    @endpoint
    async def close(self, channel: Channel | None = None) -> None:  # type: ignore[override]
        if channel is not None:
            channel.close()

    @endpoint
    async def put_big(self, channel: Channel, n: int) -> None:
        for i in range(n):
            await channel.put(torch.full((BIG,), float(i)))

    @endpoint
    async def sum_of_next(self, channel: Channel) -> float:
        return float((await channel.get()).sum())

    @endpoint
    async def try_nowait(self, channel: Channel) -> str:
        try:
            channel.get_nowait()
        except RuntimeError as error:
            return str(error)
        return ""


async def _users(system: ActorSystem) -> Any:
    return await system.spawn(User, hosts=[0, 1], name="user")


async def _waiting_to(system: ActorSystem, channel: Channel, what: str, n: int = 1) -> None:
    async def enough() -> bool:
        return len((await channel.statistics())[f"waiting_to_{what}"]) == n

    await until(enough)


async def test_values_go_from_any_host_to_any_host_in_order(system: ActorSystem) -> None:
    users = await _users(system)
    channel = await system.channel("c")
    for producer in users:
        for consumer in users:
            await producer.put(channel, [1, "two", {"three": 3}])
            assert await consumer.get(channel, 3) == [1, "two", {"three": 3}]


async def test_a_channel_lives_on_the_host_that_made_it(system: ActorSystem) -> None:
    near, far = await _users(system)
    channel = await far.make("theirs")
    await channel.put(1)
    await near.put(channel, [2])
    assert await far.get(channel, 1) == [1]
    assert await channel.get() == 2


async def test_a_channel_is_found_by_its_name(system: ActorSystem) -> None:
    channel = await system.channel("mailbox")
    for user in await _users(system):
        await channel.put("letter")
        assert await user.find("mailbox") == "letter"


async def test_put_waits_for_space(system: ActorSystem) -> None:
    for user in await _users(system):
        channel = await system.channel(f"c{user._host}", capacity=2)
        putting = user.put(channel, [1, 2, 3, 4])
        await _waiting_to(system, channel, "put")
        assert (await channel.statistics())["queued"] == 2
        assert [await channel.get() for _ in range(4)] == [1, 2, 3, 4]
        await putting


@pytest.mark.worlds("serialize", "rpc")  # in one process a channel is handed over as it is
async def test_putting_from_elsewhere_takes_a_round_trip_only_now_and_then(system: ActorSystem) -> None:
    _, far = await _users(system)
    channel = await system.channel("c")
    assert await far.put_at_once(channel, 600) == 600 - 3  # the first, and two after 256 each
    assert [channel.get_nowait() for _ in range(600)] == list(range(600))
    channel.close()
    await until(lambda: _closed(channel))
    with pytest.raises(QueueClosed, match="closed"):
        await far.put(channel, [0])
    async with system.scope():
        short = await system.channel("short-lived")
        assert await far.put_at_once(short, 3) == 2
    with pytest.raises(QueueClosed):
        await far.put(short, [0])


@pytest.mark.parametrize("ends", ["closes", "is lost"])
def test_a_channel_closed_by_a_third_host_has_all_that_was_put_before(ends: str) -> None:
    """Though what was put is slower on its way than word of the close."""

    async def main() -> list[Any]:
        async with ActorSystem.local(3, serialize=True) as system:
            closer, producer = await system.spawn(User, hosts=[1, 2], name="user")
            channel = await system.channel("c")
            await producer.put(channel, [0])
            slow = system._network.system(2)._host.transport  # type: ignore[union-attr]
            send = slow.send

            def send_late(host: int, frame: Any, answered: Any) -> None:
                asyncio.get_running_loop().call_later(0.5 if host == 0 else 0.0, send, host, frame, answered)

            slow.send = send_late  # type: ignore[method-assign]
            await closer.close_after(producer, channel, [1, 2, 3])
            await until(lambda: _closed(channel))
            with pytest.raises(QueueClosed):
                await channel.put(4)
            if ends == "is lost":
                system.queues.lost(2, "for a test")
            return [value async for value in channel]

    assert run_virtual(main())[0] == ([0, 1, 2, 3] if ends == "closes" else [0])


async def test_every_key_is_a_queue_of_its_own_and_is_forgotten_when_empty(system: ActorSystem) -> None:
    channel = await system.channel("c")
    for user in await _users(system):
        for n in range(10):
            await user.put(channel, [n, n + 100], key=n)
        assert (await channel.statistics())["keys"] == 10
        for n in reversed(range(10)):
            assert await user.get(channel, 2, key=n) == [n, n + 100]
        assert (await channel.statistics())["keys"] == 0


async def test_get_batch_takes_as_many_as_reach_a_weight(system: ActorSystem) -> None:
    for user in await _users(system):
        channel = await system.channel(f"c{user._host}", capacity=2)
        waiting = user.get_batch(channel, 10)
        for n in (3, 4, 5, 6):
            await channel.put(n, weight=n)
        assert await waiting == [3, 4, 5]
        channel.close()
        assert await user.get_batch(channel, 100) == [6]
        assert await user.get_batch(channel, 100) == []


async def test_the_nowait_calls_answer_at_once_on_the_channels_own_host(system: ActorSystem) -> None:
    channel = await system.channel("c", capacity=1)
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()
    channel.put_nowait(1)
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(2)
    assert channel.get_nowait() == 1
    channel.put_nowait(3)
    assert channel.get_nowait() == 3
    channel.close()
    with pytest.raises(QueueClosed):
        channel.get_nowait()
    (user,) = await system.spawn(User, hosts=[1], name="user")
    if not system._host.codec.by_reference(1):
        assert "use `await get()`" in await user.try_nowait(channel)


async def test_a_closed_channel_gives_what_is_left_and_then_ends(system: ActorSystem) -> None:
    users = await _users(system)
    for user in users:
        channel = await system.channel(f"c{user._host}")
        await user.put(channel, [1, 2, 3])
        await user.close(channel)
        await until(lambda channel=channel: _closed(channel))
        with pytest.raises(QueueClosed, match="closed"):
            await user.put(channel, [4])
        assert await user.drain(channel) == [1, 2, 3]
        with pytest.raises(QueueClosed, match=r"closed.*empty"):
            await user.get(channel)


async def _closed(channel: Channel) -> bool:
    return bool((await channel.statistics())["closed"])


async def test_closing_wakes_all_who_wait(system: ActorSystem) -> None:
    near, far = await _users(system)
    empty, full = await system.channel("empty"), await system.channel("full", capacity=1)
    await full.put(0)
    getting = [near.get(empty), far.get(empty), near.drain(empty), far.drain(empty)]
    putting = [near.put(full, [1]), far.put(full, [1])]
    await _waiting_to(system, empty, "take", 4)
    await _waiting_to(system, full, "put", 2)
    empty.close()
    full.close()
    outcomes = await asyncio.gather(*getting, *putting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [QueueClosed, QueueClosed, list, list, QueueClosed, QueueClosed]


async def test_a_cancelled_get_loses_nothing(system: ActorSystem) -> None:
    channel = await system.channel("c")
    for user in await _users(system):
        for _ in range(20):
            cancelled = user.get(channel)
            cancelled.want()
            await channel.statistics()
            putting = user.put(channel, [1, 2])
            cancelled.cancel()
            await putting
            assert await user.get(channel) == [1]  # before what came after it, so it went back to its place
            assert await user.get(channel) == [2]


async def test_a_cancelled_put_is_whole_or_not_at_all(system: ActorSystem) -> None:
    for user in await _users(system):
        channel = await system.channel(f"c{user._host}", capacity=1)
        await channel.put("first")
        cancelled, other = user.put(channel, ["cancelled"]), user.put(channel, ["other"])
        await _waiting_to(system, channel, "put", 2)
        cancelled.cancel()
        await _waiting_to(system, channel, "put", 1)
        assert await channel.get() == "first"
        await other
        assert await channel.get() == "other"
        assert (await channel.statistics())["queued"] == 0


async def test_competing_consumers_get_each_value_once(system: ActorSystem) -> None:
    near, far = await _users(system)
    channel = await system.channel("c", capacity=8)
    draining = [ref.drain(channel) for ref in (near, far, near, far)]
    await asyncio.gather(near.put(channel, list(range(100))), far.put(channel, list(range(100, 200))))
    channel.close()
    got = await asyncio.gather(*draining)
    assert sorted(value for part in got for value in part) == list(range(200))


async def test_big_values_stay_at_their_producer_until_they_are_consumed(system: ActorSystem) -> None:
    near, far = await _users(system)
    channel = await system.channel("c")
    for producer in (near, far):
        for consumer in (near, far):
            await producer.put_big(channel, 3)
            assert [await consumer.sum_of_next(channel) for _ in range(3)] == [0.0, float(BIG), 2.0 * BIG]
    await far.put_big(channel, 2)  # never consumed; they must not be kept for ever


async def test_a_promise_can_be_put(system: ActorSystem) -> None:
    near, far = await _users(system)
    channel, answers = await system.channel("c"), await system.channel("answers")
    await answers.put("value")
    await channel.put(far.get(answers))
    assert await near.get(channel) == [["value"]]


async def test_a_channel_ends_with_its_scope(system: ActorSystem) -> None:
    users = await _users(system)
    async with system.scope():
        channel = await system.channel("short-lived")
        waiting = users.get(channel)
        await _waiting_to(system, channel, "take", 2)
    with pytest.raises(QueueClosed, match="short-lived"):
        await waiting
    await system.channel("short-lived")  # its name is free again


async def test_statistics_say_who_waits(system: ActorSystem) -> None:
    near, far = await _users(system)
    channel = await system.channel("c", capacity=5)
    waiting = far.get(channel)
    await _waiting_to(system, channel, "take")
    statistics = await channel.statistics()
    ((who, since),) = statistics.pop("waiting_to_take")
    assert who.startswith("user[1].get#")
    assert since <= asyncio.get_running_loop().time()
    told = {"name": "c", "capacity": 5, "queued": 0, "running": 0, "put": 0, "done": 0, "keys": 0, "closed": False}
    assert statistics == statistics | told
    assert statistics["waiting_to_put"] == []
    await near.put(channel, [1])
    await waiting
    assert (await channel.statistics())["done"] == 1


async def test_a_value_that_cannot_be_sent_stays_for_those_who_can_take_it(system: ActorSystem) -> None:
    (far,) = await system.spawn(User, hosts=[1], name="user")
    if system._host.codec.by_reference(1):
        return
    channel = await system.channel("c")
    await channel.put(lambda: "local")
    with pytest.raises(Exception, match="function"):
        await far.get(channel)
    assert (await channel.get())() == "local"


async def test_what_a_killed_consumer_waited_for_goes_to_others(system: ActorSystem) -> None:
    channel = await system.channel("c")
    for host in (0, 1):
        group = await system.spawn(User, hosts=[host], name=f"victim{host}")
        waiting = group[0].get(channel)
        await _waiting_to(system, channel, "take")
        await system.kill(group)
        await channel.put(1)
        assert await channel.get() == 1
        with pytest.raises(Exception, match="victim"):
            await waiting
