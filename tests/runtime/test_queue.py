"""The item queue alone: nothing lost, nothing twice, in order, within bounds, and nobody waits for what is there."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlinf.runtime.base.clock import VirtualLoop, run_virtual
from rlinf.runtime.base.errors import QueueClosed
from rlinf.runtime.streams.item_queue import ItemQueue


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in virtual time, where a hang is an error at once."""

    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def _tick(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def _values(taken: list[tuple[Hashable, Any]]) -> list[Any]:
    return [value for _, value in taken]


# One by one --------------------------------------------------------------------------------------------------------


@virtual
async def test_an_item_put_twice_under_one_id_counts_once() -> None:
    queue = ItemQueue("q")
    assert queue.put_nowait("x", id=7)
    assert queue.put_nowait("x again", id=7)
    assert _values(await queue.take("a", 2)) == ["x"]
    queue.ack("a")
    assert queue.put_nowait("x once more", id=7)
    assert queue.statistics()["put"] == 1


@virtual
async def test_a_full_queue_makes_putters_wait_in_turn() -> None:
    queue = ItemQueue("q", 2)
    done: list[int] = []

    async def put(n: int) -> None:
        await queue.put(n)
        done.append(n)

    putting = [asyncio.ensure_future(put(n)) for n in range(5)]
    await _tick()
    assert done == [0, 1]
    assert queue.statistics()["waiting_to_put"]
    await queue.take("a")
    await _tick()
    assert done == [0, 1]  # taken is not done
    queue.ack("a")
    await _tick()
    assert done == [0, 1, 2]
    late = asyncio.ensure_future(put(99))
    for _ in range(5):
        await queue.take("a")
        queue.ack("a")
        await _tick()
    assert done == [0, 1, 2, 3, 4, 99]
    await asyncio.gather(*putting, late)


@virtual
async def test_a_spare_wish_waits_until_others_have_enough() -> None:
    queue = ItemQueue("q")
    queue.put_nowait(0)
    await queue.take("busy")
    spare = asyncio.ensure_future(queue.take("ahead", 10, spare=True))
    await _tick()
    queue.put_nowait(1)
    await _tick()
    assert not spare.done()  # it is what the busy one will want
    queue.put_nowait(2)
    assert _values(await spare) == [1]  # the oldest, as one is left for the other
    spare = asyncio.ensure_future(queue.take("ahead", 10, spare=True))
    await _tick()
    assert not spare.done()
    queue.insist("ahead")
    assert _values(await spare) == [2]


@virtual
async def test_closing_wakes_putters_and_failing_wakes_everybody() -> None:
    queue = ItemQueue("q", 1)
    queue.put_nowait(0)
    putting = asyncio.ensure_future(queue.put(1))
    await _tick()
    queue.close()
    with pytest.raises(QueueClosed, match=r"closed while"):
        await putting
    with pytest.raises(QueueClosed, match=r"q.*closed"):
        queue.put_nowait(2)
    assert _values(await queue.take("a")) == [0]

    queue = ItemQueue("r", 1)
    taking = asyncio.ensure_future(queue.take("a"))
    await _tick()
    queue.fail(KeyError("broken"))
    with pytest.raises(KeyError):
        await taking
    with pytest.raises(KeyError):
        await queue.put(1)


@virtual
async def test_the_end_is_told_once() -> None:
    for end in (ItemQueue.close, ItemQueue.abandon):
        queue = ItemQueue("q")
        told: list[int] = []
        queue.on_end.append(lambda told=told: told.append(1))  # type: ignore[misc]
        end(queue)
        queue.close()
        queue.abandon()
        assert told == [1]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_queue_without_room_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=r"capacity.*least 1"):
        ItemQueue("q", capacity)


WISHES = st.tuples(
    st.sampled_from(["a", "b"]),
    st.one_of(st.tuples(st.integers(1, 4), st.none()), st.tuples(st.just(1), st.sampled_from([2.0, 3.0, 7.5]))),
    st.integers(1, 4),
)
"""Key, (least, weight), most."""


@given(
    takers=st.lists(WISHES, max_size=12), puts=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1.0, 2.5])))
)
@settings(max_examples=200, deadline=None)
def test_the_oldest_whose_wish_can_be_met_is_served(takers: list[Any], puts: list[tuple[str, float]]) -> None:
    """As by going through all who wait, one after the other, for every item."""

    def count(wish: Any, there: list[tuple[int, float]]) -> int:
        _, (least, weight), most = wish
        if weight is None:
            return min(most, len(there)) if len(there) >= least else 0
        totals = itertools.accumulate(heavy for _, heavy in there)
        return next((n for n, total in enumerate(totals, 1) if total >= weight), 0)

    waiting, expected = list(enumerate(takers)), {}
    there: dict[str, list[tuple[int, float]]] = {"a": [], "b": []}
    for number, (key, weight) in enumerate(puts):
        there[key].append((number, weight))
        for who, wish in list(waiting):
            if wish[0] == key and (n := count(wish, there[key])):
                expected[who] = [number for number, _ in there[key][:n]]
                del there[key][:n]
                waiting.remove((who, wish))

    async def main() -> dict[int, list[int]]:
        queue = ItemQueue("q")
        taking = [
            asyncio.ensure_future(queue.take(f"token {who}", most, least=least, weight=weight, key=key))
            for who, (key, (least, weight), most) in enumerate(takers)
        ]
        await _tick(1)
        for number, (key, weight) in enumerate(puts):
            queue.put_nowait(number, key=key, weight=weight)
        await _tick()
        got = {who: _values(task.result()) for who, task in enumerate(taking) if task.done()}
        queue.leave(lambda token: True)
        await asyncio.gather(*taking, return_exceptions=True)
        return got

    assert run_virtual(main())[0] == expected


async def _lines_per_item(
    consumers: int, keys: int = 1, weight: float | None = None, capacity: int | None = None
) -> float:
    """Lines of Python that the queue runs for one item, with so many consumers waiting, as many to each key."""
    queue = ItemQueue("q", capacity)

    async def consume(token: int) -> None:
        while taken := await queue.take(token, weight=weight, key=token % keys):
            queue.ack(token, [id for id, _ in taken])

    async def produce(items: int, key: int) -> None:
        for n in range(items):
            await queue.put(n, key=key)
            await asyncio.sleep(0)

    lines = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if "/streams/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    consuming = [asyncio.ensure_future(consume(token)) for token in range(consumers)]
    await _tick()
    items = 4 * keys
    before, _ = sys.gettrace(), sys.settrace(count)
    try:
        await asyncio.gather(*(produce(4, key) for key in range(keys)))
        await _tick()
    finally:
        sys.settrace(before)
    assert queue.put_count == items
    queue.close()
    await _tick()
    await asyncio.gather(*consuming)
    assert queue.done_count == items
    return lines / items


@virtual
async def test_an_item_costs_the_same_however_many_consumers_wait() -> None:
    for how in ({}, {"weight": 2.0}, {"capacity": 2}):
        few, many = await _lines_per_item(2, **how), await _lines_per_item(1000, **how)
        assert many < 1.5 * few, f"{how}: {many} lines instead of {few}"
    few, many = await _lines_per_item(2, keys=2), await _lines_per_item(500, keys=250)
    assert many < 1.5 * few


@virtual
async def test_putters_of_many_keys_that_nobody_needs_cost_nothing() -> None:
    async def lines(keys: int) -> int:
        queue = ItemQueue("q", 1)
        queue.put_nowait(0, key="first")
        putting = [asyncio.ensure_future(queue.put(n, key=n)) for n in range(keys)]
        taking = [asyncio.ensure_future(queue.take(-n, key=-n)) for n in range(1, keys)]
        await _tick()
        ran = 0

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal ran
            ran += event == "line"
            return count

        before, _ = sys.gettrace(), sys.settrace(count)
        try:
            await queue.take("t", key="first")
            queue.requeue("t")
            waiting = asyncio.ensure_future(queue.take("u", key=0))
            await waiting  # let in beyond the capacity
        finally:
            sys.settrace(before)
        queue.abandon()
        await asyncio.gather(*putting, *taking, return_exceptions=True)
        return ran

    assert await lines(500) < 1.5 * await lines(2)


# All together ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Take:
    """A take under way, or done, and what it wished for."""

    token: str
    key: str | None
    most: int
    least: int
    weight: float | None
    task: asyncio.Task[Any] | None = None
    got: list[Any] | None = None
    reported: bool = False


@dataclass(eq=False)
class Put:
    value: int
    key: str | None
    weight: float
    task: asyncio.Task[None] | None = None
    cancelled: bool = False


@dataclass
class Model:
    """What must be true of any queue: where every item is."""

    accepted: list[Put] = field(default_factory=list)
    available: list[Put] = field(default_factory=list)
    held: dict[str, list[Put]] = field(default_factory=dict)
    done: list[Put] = field(default_factory=list)


ALL_KEYS = (None, "k", "l")
KEYS = st.sampled_from([None, None, "k", "l"])
TOKENS = st.sampled_from(["a", "b", "c", "d"])
HURRY = st.sampled_from([False, False, False, True])
"""Whether the next thing happens before the loop has come to rest."""


class QueueMachine(RuleBasedStateMachine):
    """Random puts, takes, acknowledgements, deaths and cancellations; checked whenever the loop is quiet."""

    @initialize(capacity=st.sampled_from([None, 1, 2, 4]))
    def begin(self, capacity: int | None) -> None:
        self.loop = VirtualLoop()
        self.queue = ItemQueue("q", capacity)
        self.model = Model()
        self.puts: list[Put] = []
        self.takes: list[Take] = []
        self.by_value: dict[int, Put] = {}
        self.values = itertools.count()
        self.quiet = True
        self.in_order = True
        self.beyond = 0
        self.closed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.quiet = False
        return self.loop.create_task(work)

    def pause(self, hurry: bool) -> None:
        if hurry:
            self.quiet = False
        else:
            self.settle()

    def settle(self) -> None:
        self.loop.run_until_complete(_tick(8))
        self.note_deliveries()
        self.quiet, self.in_order = True, True

    def note_deliveries(self) -> None:
        delivered: list[Put] = []
        for take in self.takes:
            if take.got is not None and not take.reported:
                take.reported = True
                items = [self.by_value[value] for value in take.got]
                assert all(item.key == take.key for item in items)
                order = [self.model.accepted.index(item) for item in items]
                assert order == sorted(order), "out of order within one take"
                self.model.held.setdefault(take.token, []).extend(items)
                delivered += items
        assert len(set(map(id, delivered))) == len(delivered), "delivered twice"
        for key in ALL_KEYS:
            mine = [put for put in self.model.available if put.key == key]
            given = [put for put in delivered if put.key == key]
            assert all(put in mine for put in given), "delivered what was not there"
            if self.in_order:
                assert set(map(id, given)) == set(map(id, mine[: len(given)])), "delivered out of order"
        self.model.available = [put for put in self.model.available if put not in delivered]

    def accept(self, put: Put) -> None:
        self.model.accepted.append(put)
        self.model.available.append(put)

    def make_put(self, key: str | None, weight: float) -> Put:
        put = Put(next(self.values), key, weight)
        self.by_value[put.value] = put
        return put

    def wished(self, key: str | None) -> bool:
        return any(take.key == key and take.task is not None and not take.task.done() for take in self.takes)

    @rule(key=KEYS, weight=st.sampled_from([1.0, 2.0]), hurry=HURRY)
    def put(self, key: str | None, weight: float, hurry: bool) -> None:
        put = self.make_put(key, weight)

        async def work() -> None:
            await self.queue.put(put.value, key=key, weight=weight)
            assert not put.cancelled, "put although it was cancelled"
            self.accept(put)

        put.task = self.spawn(work())
        self.beyond += self.wished(key)
        self.puts.append(put)
        self.pause(hurry)

    @rule(key=KEYS, force=st.booleans(), hurry=HURRY)
    def put_now(self, key: str | None, force: bool, hurry: bool) -> None:
        if self.closed:
            return
        put = self.make_put(key, 1.0)
        if self.queue.put_nowait(put.value, key=key, force=force):
            self.beyond += 1 if force else self.wished(key)
            self.accept(put)
        self.pause(hurry)

    @rule(
        token=TOKENS, key=KEYS, most=st.integers(1, 4), batch=st.booleans(),
        weight=st.sampled_from([None, None, 3.0, 5.0]), hurry=HURRY,
    )  # fmt: skip
    def take(self, token: str, key: str | None, most: int, batch: bool, weight: float | None, hurry: bool) -> None:
        take = Take(token, key, most, most if batch else 1, weight)
        self.beyond += take.least if weight is None else int(weight)

        async def work() -> None:
            got = await self.queue.take(token, most, least=take.least, key=key, weight=take.weight)
            take.got = _values(got)

        take.task = self.spawn(work())
        self.takes.append(take)
        self.pause(hurry)

    @rule(keys=st.lists(KEYS, min_size=2, max_size=8))
    def many_takers(self, keys: list[str | None]) -> None:
        for number, key in enumerate(keys):
            self.take(f"one of many {number}", key, 1, False, None, True)
        self.settle()

    @rule(token=TOKENS, most=st.integers(1, 4), insist=st.booleans())
    def take_spare(self, token: str, most: int, insist: bool) -> None:
        take = Take(token, None, most, 1, None)

        async def work() -> None:
            take.got = _values(await self.queue.take(token, most, spare=True))

        take.task = self.spawn(work())
        self.settle()
        if insist:
            self.beyond += take.least  # from here on it is a wish like any other, and may be filled beyond the capacity
            self.queue.insist(token)
        else:
            take.task.cancel()
        self.takes.append(take)
        self.in_order = False
        self.settle()

    @rule(index=st.integers(0, 20), just_served=st.booleans())
    def cancel_take(self, index: int, just_served: bool) -> None:
        waiting = [take for take in self.takes if take.task is not None and not take.task.done()]
        if waiting:
            take = waiting[index % len(waiting)]
            if just_served:
                self.settle()
                for _ in range(take.least):
                    self.put_now(take.key, True, True)
            take.task.cancel()  # type: ignore[union-attr]
            self.in_order = False
            self.settle()

    @rule(index=st.integers(0, 20), just_let_in=st.booleans(), token=TOKENS)
    def cancel_put(self, index: int, just_let_in: bool, token: str) -> None:
        waiting = [put for put in self.puts if put.task is not None and not put.task.done()]
        if waiting:
            put = waiting[index % len(waiting)]
            if just_let_in:
                self.ack(token, True, True)
            put.cancelled = not put.task.done()  # type: ignore[union-attr]
            put.task.cancel()  # type: ignore[union-attr]
            self.settle()

    @rule(token=TOKENS, some=st.booleans(), hurry=HURRY)
    def ack(self, token: str, some: bool, hurry: bool) -> None:
        self.settle()
        held = self.model.held.get(token, [])
        if some and held:
            ids = list(self.queue._running.by_token[token])[:1]
            self.queue.ack(token, ids)
            finished = [put for put in held if put.value == self.first_value(token, held)]
        else:
            self.queue.ack(token)
            finished = list(held)
        for put in finished:
            held.remove(put)
            self.model.done.append(put)
        self.pause(hurry)

    def first_value(self, token: str, held: list[Put]) -> int:
        still = {item.value for item in self.queue._running.by_token.get(token, {}).values()}
        return next(put.value for put in held if put.value not in still)

    @rule(token=TOKENS, dies=st.booleans())
    def give_back(self, token: str, dies: bool) -> None:
        self.settle()
        if dies:
            self.queue.leave(lambda held_by: held_by == token)
        else:
            self.queue.requeue(token)
        back = self.model.held.pop(token, [])
        self.model.available = sorted(self.model.available + back, key=self.model.accepted.index)
        self.settle()

    @precondition(lambda self: not self.closed and len(self.model.accepted) > 5)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True
        self.settle()

    @invariant()
    def nothing_is_lost_or_waits_in_vain(self) -> None:
        if not hasattr(self, "queue") or not self.quiet:
            return
        queue, model = self.queue, self.model
        queued = [item.value for items in queue._queued.values() for item in items]
        running = [item.value for held in queue._running.by_token.values() for item in held.values()]
        assert sorted(queued) == sorted(put.value for put in model.available)
        assert sorted(running) == sorted(put.value for held in model.held.values() for put in held)
        assert queue._size == len(queued) + len(running)
        assert queue._reserved == 0
        assert all(queue._queued.values()), "an empty key is kept"
        if queue.capacity is not None:
            assert len(queued) + len(running) <= queue.capacity + self.beyond
            waiting = any(put.task is not None and not put.task.done() for put in self.puts)
            assert not waiting or (len(queued) + len(running) >= queue.capacity and not self.closed)
        for take in self.takes:
            if take.task is not None and not take.task.done():
                self.waits_with_reason(take)

    def waits_with_reason(self, take: Take) -> None:
        there = [put for put in self.model.available if put.key == take.key]
        if take.weight is not None:
            assert sum(put.weight for put in there) < take.weight
            assert not (self.closed and there)
        else:
            assert len(there) < (1 if self.closed else take.least)
        if self.closed:
            assert any(put.key == take.key for held in self.model.held.values() for put in held)

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.settle()
        self.queue.leave(lambda token: True)
        self.queue.close()
        self.settle()
        for take in self.takes:
            if take.task is not None and take.task.done() and not take.task.cancelled():
                take.task.result()
        for put in self.puts:
            assert put.task is not None
            assert put.task.done()
            if not put.task.cancelled() and put.task.exception() is not None:
                assert isinstance(put.task.exception(), QueueClosed)
        left: list[int] = []
        for key in ALL_KEYS:
            while taken := self.loop.run_until_complete(self.queue.take("end", 3, key=key)):
                left += _values(taken)
                self.queue.ack("end")
        seen = [put.value for put in self.model.done] + left
        self.model.held.clear()
        assert sorted(seen) == sorted(put.value for put in self.model.accepted)
        self.loop.close()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.repeated
class TestQueueMachineAtLength(QueueMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=30, deadline=None)
