"""Calls: who runs them, what comes back, what cancelling and failing do. In every world."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.errors import ActorDied, RemoteError, UserError
from tests.runtime.worlds import until


class Counter(Actor):
    async def setup(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    async def add(self, n: int) -> int:
        self.value += n
        return self.value

    @endpoint
    async def who(self) -> tuple[int, int, int]:
        return (self.rank, self.world_size, self.host)


class Patient(Actor):
    """Calls that wait until they are told to go on, and notice when they are cancelled."""

    async def setup(self) -> None:
        self.go = asyncio.Event()
        self.started = 0
        self.changed = asyncio.Condition()
        self.cancelled: list[str] = []

    @endpoint
    async def wait(self, name: str = "") -> str:
        self.started += 1
        await self._tell()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            await self._tell()
            raise
        return name

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    @endpoint
    async def release(self) -> None:
        self.go.set()

    @endpoint
    async def until_started(self, n: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.started >= n)

    @endpoint
    async def until_cancelled(self, *names: str) -> list[str]:
        async with self.changed:
            await self.changed.wait_for(lambda: set(self.cancelled) >= set(names))
        return self.cancelled

    @endpoint
    async def wait_for_other(self, other: Any) -> None:
        await other.wait("inner")

    @endpoint
    async def stubborn(self) -> str:
        self.started += 1
        await self._tell()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            return "cancelled, and yet"
        return "done"


class Strange(Exception):
    """Its constructor does not fit what pickle does with its arguments."""

    def __init__(self, left: int, right: int):
        super().__init__(f"{left} and {right}")


class Failing(Actor):
    @endpoint
    async def raises(self, kind: type[Exception], text: str) -> None:
        raise kind(text)

    @endpoint
    async def raises_strange(self) -> None:
        raise Strange(1, 2)

    @endpoint
    async def raises_unpicklable(self) -> None:
        raise ValueError("holds a function", lambda: 0)

    @endpoint
    async def raises_through(self, other: Any) -> None:
        await other.raises(KeyError, "deep")

    @endpoint
    async def returns_function(self) -> Any:
        return {"fine": 1, "hook": [lambda: 0]}

    @endpoint
    async def fails_for(self, rank: int) -> int:
        if self.rank == rank:
            raise RuntimeError(f"rank {rank} fails")
        await asyncio.Event().wait()
        return 0


# Who runs a call ---------------------------------------------------------------------------------------------------


async def test_a_group_call_runs_on_every_rank_and_returns_in_rank_order(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1, 1], name="counter", start=3)
    assert await group.add(1) == [4, 4, 4]
    assert [await group[1].add(5), await group[-1].add(1), await group[0].add(0)] == [9, 5, 4]
    assert await group.who() == [(0, 3, 0), (1, 3, 1), (2, 3, 1)]


async def test_a_slice_of_a_group_is_a_group(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1, 0], name="counter")
    assert await group[1:].add(2) == [2, 2]
    assert await group.add(0) == [0, 2, 2]


async def test_each_gives_every_rank_its_own_argument(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1], name="counter")
    assert await group.each.add([1, 2]) == [1, 2]
    assert await group.add.each(n=[10, 20]) == [11, 22]


async def test_any_takes_the_rank_with_the_fewest_calls_under_way(system: ActorSystem) -> None:
    group = await system.spawn(Patient, hosts=[0, 1, 1], name="patient")
    calls = [group.any.wait(str(i)) for i in range(6)]
    await asyncio.gather(*(ref.until_started(2) for ref in group))
    await group.release()
    assert await asyncio.gather(*calls) == ["0", "1", "2", "3", "4", "5"]
    assert [ref._load for ref in group] == [0, 0, 0]


async def test_the_load_of_a_rank_falls_again_when_calls_fail_or_are_cancelled(system: ActorSystem) -> None:
    group = await system.spawn(Patient, hosts=[0, 1], name="patient")
    early = [ref.wait("early") for ref in group]
    for call in early:
        call.cancel()  # before they have left
    late = [ref.wait("late") for ref in group]
    await asyncio.gather(*(ref.until_started(1) for ref in group))
    for call in late:
        call.cancel()
    await until(lambda: [ref._load for ref in group] == [0, 0])


mood: contextvars.ContextVar[str] = contextvars.ContextVar("mood", default="none")


class First(Actor):
    """What endpoints do before they wait for the first time, in a task that none of them has begun."""

    @endpoint
    async def in_time(self, seconds: float, at_most: float) -> str:
        async with asyncio.timeout(at_most):
            if seconds:
                await asyncio.sleep(seconds)
        return "in time"

    @endpoint
    async def one_task(self, wait: bool) -> bool:
        before = asyncio.current_task()
        if wait:
            await asyncio.sleep(0.001)
        return before is not None and before is asyncio.current_task()

    @endpoint
    async def siblings(self) -> list[int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0.001, number)) for number in range(3)]
        return [task.result() for task in tasks]

    @endpoint
    async def failing_sibling(self) -> None:
        async def fails() -> None:
            raise ValueError("of a sibling")

        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(60)

    @endpoint
    async def give_up(self, wait: bool) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if wait:
            await asyncio.sleep(60)
        return "not given up"

    @endpoint
    async def in_a_mood(self, new: str, wait: bool) -> tuple[str, str]:
        before = mood.get()
        mood.set(new)
        if wait:
            await asyncio.sleep(0.001)
        return before, mood.get()


async def test_what_an_endpoint_does_before_it_waits_counts_as_its_task(system: ActorSystem) -> None:
    for first in await system.spawn(First, name="first"):
        assert await first.in_time(0, 5) == await first.in_time(0.001, 5) == "in time"
        with pytest.raises(TimeoutError):
            await first.in_time(60, 0.01)
        assert await first.one_task(False)
        assert await first.one_task(True)
        assert await first.siblings() == [0, 1, 2]
        with pytest.raises(ExceptionGroup) as group:
            await first.failing_sibling()
        assert isinstance(group.value.exceptions[0], ValueError)


async def test_an_endpoint_that_cancels_its_own_task_harms_no_other(system: ActorSystem) -> None:
    for first in await system.spawn(First, name="first"):
        assert await first.give_up(False) == "not given up"  # it never waited
        giving_up = first.give_up(True)
        with pytest.raises(asyncio.CancelledError):
            await giving_up
        assert giving_up.cancelled()
        assert await first.in_time(0.001, 5) == "in time"


async def test_context_variables_last_as_long_as_their_call(system: ActorSystem) -> None:
    for first in await system.spawn(First, name="first"):
        assert await asyncio.gather(*(first.in_a_mood(f"{n}", n % 2 == 0) for n in range(6))) == [
            ("none", f"{n}") for n in range(6)
        ]


async def test_calls_to_one_actor_start_in_the_order_in_which_they_were_made(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1], name="counter")
    for ref in group:
        assert await asyncio.gather(*(ref.add(1) for _ in range(100))) == list(range(1, 101))


# Cancelling --------------------------------------------------------------------------------------------------------


async def test_cancelling_the_awaiting_task_cancels_the_call_and_no_other(system: ActorSystem) -> None:
    for ref in await system.spawn(Patient, hosts=[0, 1], name="patient"):
        task = asyncio.ensure_future(_awaits(ref.wait("mine")))
        other = ref.wait("other")
        await ref.until_started(2)
        task.cancel()
        assert await ref.until_cancelled("mine") == ["mine"]
        await ref.release()
        assert await other == "other"
        assert task.cancelled()


async def _awaits(promise: Any) -> Any:
    return await promise


async def test_timeout_cancels_the_call(system: ActorSystem) -> None:
    for ref in await system.spawn(Patient, hosts=[0, 1], name="patient"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ref.wait("slow")
        assert await ref.until_cancelled("slow") == ["slow"]


async def test_a_failing_sibling_in_a_task_group_cancels_the_call(system: ActorSystem) -> None:
    group = await system.spawn(Patient, hosts=[0, 1], name="patient")
    failing = await system.spawn(Failing, hosts=[1], name="failing")
    for ref in group:
        with pytest.raises(ExceptionGroup) as caught:
            await _together(ref.wait("sibling"), ref.until_started(1), failing[0])
        assert [type(error) for error in caught.value.exceptions] == [ValueError]
        assert await ref.until_cancelled("sibling") == ["sibling"]


async def _together(sibling: Any, started: Any, failing: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_awaits(sibling))
        await started
        tasks.create_task(_awaits(failing.raises(ValueError, "first")))


async def test_cancelling_a_promise_before_it_has_left_is_not_a_leak(system: ActorSystem) -> None:
    for ref in await system.spawn(Patient, hosts=[0, 1], name="patient"):
        promise = ref.wait("early")
        promise.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promise


async def test_cancelling_an_unawaited_promise_cancels_its_call(system: ActorSystem) -> None:
    for ref in await system.spawn(Patient, hosts=[0, 1], name="patient"):
        promise = ref.wait("unawaited")
        await ref.until_started(1)
        promise.cancel()
        assert await ref.until_cancelled("unawaited") == ["unawaited"]


async def test_cancellation_goes_on_to_what_the_call_itself_waits_for(system: ActorSystem) -> None:
    outer, inner = await system.spawn(Patient, hosts=[1, 0], name="patient")
    promise = outer.wait_for_other(inner)
    await inner.until_started(1)
    promise.cancel()
    assert await inner.until_cancelled("inner") == ["inner"]


async def test_cancelling_a_group_call_cancels_all_ranks(system: ActorSystem) -> None:
    group = await system.spawn(Patient, hosts=[0, 1], name="patient")
    task = asyncio.ensure_future(_awaits(group.wait("all")))
    await asyncio.gather(*(ref.until_started(1) for ref in group))
    task.cancel()
    assert await group.until_cancelled("all") == [["all"], ["all"]]


async def test_the_first_rank_to_fail_cancels_the_others(system: ActorSystem) -> None:
    group = await system.spawn(Failing, hosts=[0, 1, 1], name="failing")
    for rank in range(3):
        with pytest.raises(RuntimeError, match=f"rank {rank} fails"):
            await group.fails_for(rank)


async def test_a_call_that_ignores_its_cancellation_harms_nobody(system: ActorSystem) -> None:
    for ref in await system.spawn(Patient, hosts=[0, 1], name="patient"):
        promise = ref.stubborn()
        await ref.until_started(1)
        promise.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promise


# Failing -----------------------------------------------------------------------------------------------------------


async def test_an_exception_keeps_its_type_and_says_where_it_was_raised(system: ActorSystem) -> None:
    for ref in await system.spawn(Failing, hosts=[0, 1], name="failing"):
        with pytest.raises(KeyError, match="lost key") as caught:
            await ref.raises(KeyError, "lost key")
        notes = "\n".join(caught.value.__notes__)
        assert f"in {ref._name}.raises() on host {ref._host}" in notes
        if ref._host == 1 and system._host.codec.by_reference(1) is False:
            assert "remote traceback (host 1)" in notes
            assert "raise kind(text)" in notes


async def test_an_exception_that_passes_several_actors_names_them_all(system: ActorSystem) -> None:
    outer, inner = await system.spawn(Failing, hosts=[1, 0], name="failing")
    with pytest.raises(KeyError) as caught:
        await outer.raises_through(inner)
    notes = "\n".join(caught.value.__notes__)
    assert "failing[1].raises() on host 0" in notes
    assert "failing[0].raises_through() on host 1" in notes


async def test_an_exception_that_does_not_travel_is_replaced_by_one_that_says_its_name(system: ActorSystem) -> None:
    near, far = await system.spawn(Failing, hosts=[0, 1], name="failing")
    with pytest.raises(Strange):
        await near.raises_strange()
    with pytest.raises((Strange, RemoteError), match="1 and 2"):
        await far.raises_strange()
    with pytest.raises((ValueError, RemoteError), match=r"holds.*function"):
        await far.raises_unpicklable()


async def test_a_result_that_does_not_travel_is_an_error_that_names_the_part_and_the_call(system: ActorSystem) -> None:
    (far,) = await system.spawn(Failing, hosts=[1], name="failing")
    if system._host.codec.by_reference(1):
        assert (await far.returns_function())["fine"] == 1
        return
    with pytest.raises(UserError, match=r"\['hook'\]\[0\].*function") as caught:
        await far.returns_function()
    assert "failing[0].returns_function" in "\n".join(caught.value.__notes__)


async def test_an_argument_that_cannot_be_sent_leaves_nothing_lent(system: ActorSystem) -> None:
    (near, far) = await system.spawn(Counter, hosts=[0, 1], name="counter")
    inner = near.add(1)
    if not system._host.codec.by_reference(1):
        with pytest.raises(UserError, match="lambda"):
            far.add([inner, lambda: 0])
    assert await inner == 1


async def test_wrong_arguments_are_an_error_at_the_caller(system: ActorSystem) -> None:
    for ref in await system.spawn(Counter, hosts=[0, 1], name="counter"):
        with pytest.raises(TypeError, match="add"):
            await ref.add()


async def test_a_failure_that_nobody_awaits_is_logged(system: ActorSystem) -> None:
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    previous = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        for ref in await system.spawn(Failing, hosts=[0, 1], name="failing"):
            complaints.clear()
            ref.raises(ValueError, "unseen")
            with contextlib.suppress(KeyError):
                await ref.raises(KeyError, "seen")
            await until(lambda: (gc.collect() and complaints) or complaints)
            assert [str(context["exception"]) for context in complaints] == ["unseen"]
    finally:
        loop.set_exception_handler(previous)


# Dying -------------------------------------------------------------------------------------------------------------


async def test_calls_of_a_killed_actor_fail_with_its_name(system: ActorSystem) -> None:
    for host in (0, 1):
        group = await system.spawn(Patient, hosts=[host], name=f"patient{host}")
        running = group[0].wait("x")
        await group[0].until_started(1)
        await system.kill(group)
        with pytest.raises(ActorDied, match=rf"patient{host}\[0\]"):
            await running
        with pytest.raises(ActorDied, match=rf"patient{host}\[0\]"):
            await group[0].wait("y")


async def test_killing_one_rank_leaves_the_others(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1, 1], name="counter")
    await system.kill(group[1:2])
    assert await group[0].add(1) == 1
    assert await group[2].add(1) == 1
