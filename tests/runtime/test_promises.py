"""Promises: values that travel from producer to consumer, and are freed when nobody can ask for them any more."""

from __future__ import annotations

import asyncio
import collections
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from rlinf import Actor, ActorSystem, endpoint
from tests.runtime.worlds import kept_on, until


@dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: Any = 0


@dataclass
class Derived:
    """A field that its constructor does not take."""

    base: Any
    double: Any = field(init=False, default=None)


class Pair(NamedTuple):
    left: Any
    right: Any


class Value:
    """Something that can be watched, and told where it is made and pickled."""

    travels = 0

    def __init__(self, n: int):
        self.n = n

    def __reduce__(self) -> Any:
        Value.travels += 1
        return Value, (self.n,)


class Maths(Actor):
    async def setup(self) -> None:
        self.gate = asyncio.Event()
        self.calls = 0
        self.made: list[weakref.ref[Value]] = []

    @endpoint
    async def value(self, n: int) -> int:
        self.calls += 1
        return n

    @endpoint
    async def gated(self, n: int) -> int:
        self.calls += 1
        await self.gate.wait()
        return n

    @endpoint
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    async def count(self) -> int:
        return self.calls

    @endpoint
    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return kwargs or (args[0] if len(args) == 1 else args)

    @endpoint
    async def add(self, *numbers: int) -> int:
        return sum(numbers)

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no value")

    @endpoint
    async def make(self, n: int) -> Value:
        value = Value(n)
        self.made.append(weakref.ref(value))
        return value

    @endpoint
    async def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.made)

    @endpoint
    async def number_of(self, value: Value) -> int:
        return value.n

    @endpoint
    async def pickled(self) -> int:
        return Value.travels

    @endpoint
    async def relay(self, other: Any, n: int) -> Any:
        return other.value(n)  # a promise as a result

    @endpoint
    async def relay_many(self, other: Any, n: int) -> Any:
        return {"both": [other.value(n), other.value(n + 1)], "plain": n}

    @endpoint
    async def relay_gated(self, other: Any) -> Any:
        return other.gated(1)

    @endpoint
    async def fan_in(self, others: Any) -> int:
        """Passes on promises that it has made itself."""
        result: int = await self.group[0].add(*[other.value(i) for i, other in enumerate(others)])
        return result


async def test_an_unawaited_promise_becomes_its_value_at_the_consumer(system: ActorSystem) -> None:
    group = await system.spawn(Maths, hosts=[0, 1, 1], name="maths")
    for producer in group:
        for consumer in group:
            assert await consumer.add(producer.value(20), 22) == 42


async def test_the_value_goes_past_the_caller(system: ActorSystem) -> None:
    producer, consumer = await system.spawn(Maths, hosts=[1, 1], name="maths")
    before = await producer.pickled()
    made = producer.make(7)
    assert await consumer.number_of(made) == 7
    assert await producer.pickled() == before  # it never left its host


async def test_chains_of_promises_need_no_awaiting_in_between(system: ActorSystem) -> None:
    group = await system.spawn(Maths, hosts=[0, 1], name="maths")
    total = group[0].value(1)
    for i in range(20):
        total = group[i % 2].add(total, 1)
    assert await total == 21


async def test_promises_are_found_in_nested_containers_and_dataclasses(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        for consumer in (near, far):
            one = producer.value
            assert await consumer.echo([one(1), (one(2), {"a": one(3)})]) == [1, (2, {"a": 3})]
            assert await consumer.echo(Point(one(1), [one(2)])) == Point(1, [2])
            assert await consumer.echo(Pair(one(1), 2)) == Pair(1, 2)
            assert await consumer.echo(key=one(4)) == {"key": 4}
            assert await consumer.echo(collections.OrderedDict(a=one(5))) == collections.OrderedDict(a=5)
            derived = Derived(one(6))
            derived.double = one(12)
            got = await consumer.echo(derived)
            assert (got.base, got.double) == (6, 12)
            assert derived.double is not got.double  # the caller's own is not changed


async def test_a_promise_can_be_passed_to_several_calls_and_awaited(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        calls = await producer.count()
        promise = producer.value(5)
        sums = [consumer.add(promise, promise, 1) for consumer in (near, far, near, far)]
        assert await promise == 5
        assert await asyncio.gather(*sums) == [11] * 4
        assert await producer.count() == calls + 1


async def test_a_promise_can_be_passed_after_it_was_awaited(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        promise = producer.value(5)
        assert await promise == 5
        assert await promise == 5
        assert await asyncio.gather(near.add(promise, 1), far.add(promise, 1)) == [6, 6]


async def test_a_promise_can_be_awaited_long_after_the_call(system: ActorSystem) -> None:
    for ref in await system.spawn(Maths, hosts=[0, 1], name="maths"):
        promise = ref.value(5)
        await ref.value(0)
        await ref.value(0)
        assert await promise == 5
        assert await promise == 5


async def test_a_promise_can_be_awaited_by_several_tasks(system: ActorSystem) -> None:
    for ref in await system.spawn(Maths, hosts=[0, 1], name="maths"):
        promise = ref.gated(5)
        waiting = [asyncio.ensure_future(asyncio.wait_for(asyncio.shield(promise), 5)) for _ in range(3)]
        await ref.open()
        assert await asyncio.gather(*waiting, promise) == [5, 5, 5, 5]


async def test_a_pending_promise_can_be_passed_on_before_and_after_somebody_awaits_it(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        promise = producer.gated(1)
        before = far.add(promise, 1)
        awaiting = asyncio.ensure_future(asyncio.wait([promise]))
        await near.value(0)
        after = far.add(promise, 2)
        await producer.open()
        assert await asyncio.gather(before, after) == [2, 3]
        await awaiting


async def test_the_promises_of_a_group_call_can_be_passed_on_as_one(system: ActorSystem) -> None:
    group = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for consumer in group:
        assert await consumer.echo(group.value(3)) == [3, 3]
        both = group.value(4)
        assert await consumer.echo(both[1]) == 4
        assert await both == [4, 4]
        assert await consumer.echo(both) == [4, 4]


async def test_gather_wait_and_as_completed_take_promises(system: ActorSystem) -> None:
    group = await system.spawn(Maths, hosts=[0, 1], name="maths")
    assert await asyncio.gather(group[0].value(1), group[1].value(2), group.value(3)) == [1, 2, [3, 3]]
    done, pending = await asyncio.wait([group[0].value(1), group[1].value(2)])
    assert {promise.result() for promise in done} == {1, 2}
    assert not pending
    assert {await each for each in asyncio.as_completed([group[0].value(1), group[1].value(2)])} == {1, 2}
    slow = group[1].gated(9)
    done, pending = await asyncio.wait([slow, group[0].value(1)], return_when=asyncio.FIRST_COMPLETED)
    assert pending == {slow}
    await group.open()
    assert await slow == 9


async def test_the_failure_of_a_producer_is_the_failure_of_its_consumer(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        for consumer in (near, far):
            with pytest.raises(ValueError, match="no value"):
                await consumer.add(producer.fail(), 1)
            failed = producer.fail()
            with pytest.raises(ValueError, match="no value"):
                await failed
            with pytest.raises(ValueError, match="no value"):
                await consumer.add(failed)


async def test_a_cancelled_producer_cancels_its_consumer(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        for consumer in (near, far):
            promise = producer.gated(1)
            consuming = consumer.add(promise, 1)
            await until(producer.count)
            promise.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consuming


async def test_cancelling_a_consumer_leaves_the_producer_to_others(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        for consumer in (near, far):
            promise = producer.gated(1)
            cancelled, other = consumer.add(promise, 1), consumer.add(promise, 2)
            await near.value(0)
            cancelled.cancel()
            await near.value(0)
            await producer.open()
            assert await other == 3
            assert await promise == 1


async def test_a_promise_as_a_result_becomes_its_value(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for first in (near, far):
        for second in (near, far):
            assert await first.relay(second, 3) == 3
            assert await first.relay_many(second, 3) == {"both": [3, 4], "plain": 3}
            assert await near.add(first.relay(second, 1), 1) == 2


async def test_cancelling_a_call_cancels_the_promise_that_is_its_result(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    relayed = near.relay_gated(far)
    await until(far.count)
    relayed.cancel()
    # nothing_left() sees that the inner call has ended


async def test_an_actor_passes_on_promises_that_it_has_made(system: ActorSystem) -> None:
    group = await system.spawn(Maths, hosts=[1, 0, 1], name="maths")
    for ref in group:
        assert await ref.fan_in([group[1], group[2], group[0]]) == 3


async def test_a_dropped_promise_frees_its_value(system: ActorSystem) -> None:
    for ref in await system.spawn(Maths, hosts=[0, 1], name="maths"):
        promise = ref.make(1)
        await ref.value(0)
        assert await ref.alive() == 1
        del promise
        await until(lambda ref=ref: _is_zero(ref.alive()))
        assert await kept_on(system, ref._host) == 0


async def _is_zero(promise: Any) -> bool:
    return await promise == 0


async def test_a_lent_value_is_freed_when_its_consumer_is_done(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for producer in (near, far):
        for consumer in (near, far):
            assert await consumer.number_of(producer.make(3)) == 3
            await until(lambda producer=producer: _is_zero(producer.alive()))


async def test_promises_dropped_unawaited_leave_no_growth(system: ActorSystem) -> None:
    near, far = await system.spawn(Maths, hosts=[0, 1], name="maths")
    for ref in (near, far):
        for _ in range(5):
            for n in range(500):
                ref.make(n)
            await ref.value(0)
        await until(lambda ref=ref: _is_zero(ref.alive()))
        assert not system._host.sent
        assert await kept_on(system, ref._host) == 0
