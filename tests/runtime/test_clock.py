"""Virtual time is exact, waits for what is real, and says so when nothing can ever happen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.runtime.base import clock
from rlinf.runtime.base.clock import Clock, Deadlock, VirtualLoop, is_virtual, run_virtual, virtual


def running() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@pytest.mark.parametrize("start", [0.0, 1e6, 1e12])
def test_a_thousand_sleeps_end_at_exactly_their_sum(start: float) -> None:
    async def main() -> float:
        await asyncio.sleep(start)
        for _ in range(1000):
            await asyncio.sleep(0.01)
        return running().time()

    expected = 0.0 + start
    for _ in range(1000):
        expected += 0.01
    assert run_virtual(main()) == (expected, expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e9, allow_subnormal=True), max_size=30))
def test_timers_fire_at_exactly_their_time_in_order(whens: list[float]) -> None:
    fired: list[tuple[float, float]] = []

    async def main() -> None:
        loop = running()

        def fire(when: float) -> None:
            fired.append((when, loop.time()))

        for when in whens:
            loop.call_at(when, fire, when)
        await asyncio.sleep(2e9)

    run_virtual(main())
    assert fired == [(when, when) for when in sorted(whens)]


def test_timers_with_equal_deadlines_fire_in_one_iteration() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        loop = running()

        def fire(name: str) -> None:
            order.append(name)
            loop.call_soon(order.append, name + "'")

        for name in "abcdefg":
            loop.call_at(5.0, fire, name)
        await asyncio.sleep(6)
        return order

    assert run_virtual(main())[0] == [*"abcdefg", *(name + "'" for name in "abcdefg")]


def test_timers_that_were_cancelled_do_not_move_the_clock() -> None:
    async def main() -> None:
        handles = [running().call_later(100 + i, print) for i in range(500)]
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(1)

    assert run_virtual(main()) == (None, 1.0)


def test_timeouts_expire_at_their_deadline() -> None:
    async def main() -> list[float]:
        seen = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        seen.append(running().time())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 4)
        seen.append(running().time())
        async with asyncio.timeout(3):
            await asyncio.sleep(2)
        seen.append(running().time())
        done, pending = await asyncio.wait([asyncio.create_task(asyncio.sleep(s)) for s in (1, 9)], timeout=5)
        assert (len(done), len(pending)) == (1, 1)
        return [*seen, running().time()]

    assert run_virtual(main())[0] == [3, 7, 9, 14]


def test_threads_hold_virtual_time_still() -> None:
    async def main(executor: ThreadPoolExecutor) -> None:
        loop, gate = running(), threading.Event()
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(loop.time())

        ticking = asyncio.create_task(tick())
        for start in (
            lambda: asyncio.to_thread(gate.wait, 5),
            lambda: loop.run_in_executor(executor, gate.wait, 5),
        ):
            gate.clear()
            job = asyncio.ensure_future(start())
            for _ in range(20):
                await asyncio.sleep(0)
            assert "wait" in loop.outside[0] or "run" in loop.outside[0]
            threading.Timer(0.02, gate.set).start()
            assert await job is True
            assert ticks == []
        await asyncio.sleep(0.5)
        assert loop.outside == []
        await asyncio.sleep(2)
        assert ticks == [1, 2]
        ticking.cancel()

    with ThreadPoolExecutor(1) as executor:
        assert run_virtual(main(executor)) == (None, 2.5)


def test_a_thread_holds_time_even_when_its_awaiter_gave_up() -> None:
    async def main() -> None:
        gate = threading.Event()
        job = asyncio.create_task(asyncio.to_thread(gate.wait, 5))
        await asyncio.sleep(0)
        job.cancel()
        threading.Timer(0.02, gate.set).start()
        await asyncio.sleep(1)
        assert gate.is_set()

    assert run_virtual(main()) == (None, 1.0)


def test_announced_work_holds_time_until_its_last_words_are_heard() -> None:
    async def main() -> tuple[str, float]:
        loop = running()
        heard: asyncio.Future[str] = loop.create_future()
        announced = loop.external("a child")

        def child() -> None:
            time.sleep(0.02)
            loop.call_soon_threadsafe(heard.set_result, "done")
            announced.__exit__(None, None, None)

        announced.__enter__()
        thread = threading.Thread(target=child)
        thread.start()
        assert loop.outside == ["a child"]
        async with asyncio.timeout(0.001):
            word = await heard
        thread.join()
        return word, loop.time()

    assert run_virtual(main())[0] == ("done", 0.0)


def test_the_module_level_announcement_does_nothing_in_real_time() -> None:
    async def main() -> int:
        with clock.external("x"):
            return len(getattr(asyncio.get_running_loop(), "outside", []))

    assert asyncio.run(main()) == 0
    assert run_virtual(main())[0] == 1


def test_a_deadlock_names_both_waiters_of_a_lock_order_inversion() -> None:
    cleaned: list[str] = []

    async def take(first: asyncio.Lock, second: asyncio.Lock, name: str) -> None:
        try:
            async with first:
                await asyncio.sleep(1)
                async with second:
                    raise AssertionError("never")
        finally:
            cleaned.append(name)

    async def main() -> None:
        running().deadlock_report = lambda: "left and right"
        left, right = asyncio.Lock(), asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            group.create_task(take(left, right, "one"), name="one")
            group.create_task(take(right, left, "two"), name="two")

    with virtual() as virtual_clock, pytest.raises(Deadlock) as caught:
        virtual_clock.run(main())
    text = str(caught.value)
    assert "at 1 s" in text
    assert "task 'one'" in text
    assert "task 'two'" in text
    assert text.count("async with second:") == 2
    assert text.count("locks.py") == 4
    assert __file__ in text
    assert text.endswith("left and right")
    assert sorted(cleaned) == ["one", "two"]
    assert virtual_clock.time == 1.0


def test_a_deadlock_sees_through_async_generators_and_names_awaited_tasks() -> None:
    async def items() -> AsyncIterator[int]:
        await running().create_future()
        yield 1

    async def consume() -> None:
        async for _ in items():
            pass

    async def main() -> None:
        await asyncio.create_task(consume(), name="consumer")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    text = str(caught.value)
    assert "await running().create_future()" in text
    assert "for task 'consumer'" in text


def test_a_broken_report_does_not_hide_the_deadlock() -> None:
    async def main() -> None:
        running().deadlock_report = lambda: str(1 / 0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="deadlock_report failed: ZeroDivisionError"):
        run_virtual(main())


def test_a_task_that_waits_forever_when_cancelled_is_reported_not_waited_for() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    async def main(error: Exception | None) -> None:
        task = asyncio.create_task(stubborn(), name="stubborn")
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is, on purpose
        await asyncio.sleep(1)
        if error is not None:
            raise error
        del task

    with pytest.raises(Deadlock, match="stubborn"):
        run_virtual(main(None))
    with pytest.raises(ZeroDivisionError) as caught:
        run_virtual(main(ZeroDivisionError()))
    assert "task 'stubborn' waits" in caught.value.__notes__[0]


def test_exceptions_come_out_and_what_is_left_over_is_cleaned_up() -> None:
    cleaned: list[str] = []

    async def leftover() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            cleaned.append("task")

    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            cleaned.append("generator")

    generator = generate()

    async def main() -> None:
        task = asyncio.create_task(leftover())
        await anext(generator)
        await asyncio.sleep(1)
        raise KeyError("mine", task)

    with virtual() as virtual_clock:
        with pytest.raises(KeyError, match="mine"):
            virtual_clock.run(main())
        assert cleaned == ["task", "generator"]
        assert virtual_clock.time == 6


def test_one_clock_goes_on_from_run_to_run() -> None:
    async def main() -> float:
        await asyncio.sleep(2)
        return virtual_clock.time

    with virtual() as virtual_clock:
        assert virtual_clock.time == 0.0
        assert [virtual_clock.run(main()) for _ in range(3)] == [2, 4, 6]
        assert virtual_clock.time == 6
    assert Clock().time == 0.0


def test_virtual_time_cannot_be_nested() -> None:
    async def main() -> None:
        other = asyncio.sleep(1)
        with pytest.raises(RuntimeError, match=r"running event"):
            Clock().run(other)
        other.close()

    run_virtual(main())


def test_a_loop_knows_whether_it_is_virtual() -> None:
    async def main() -> bool:
        assert is_virtual(asyncio.get_running_loop()) == is_virtual()
        return is_virtual()

    assert not is_virtual()
    assert not asyncio.run(main())
    assert run_virtual(main()) == (True, 0.0)
