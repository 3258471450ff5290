"""Threads of the runtime work on the device of whoever started them, and are no more than there is to wait for."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch

from rlinf.runtime.base import tasks
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import BRIEF, ComputeThread, in_thread
from rlinf.runtime.transport.process_groups import SPARE, WaitingThreads


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as far as it matters: each thread has a current device of its own, and begins on device 0."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "device", device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(own, "device", 0))


@pytest.mark.usefixtures("device")
async def test_every_thread_computes_on_the_device_of_its_process() -> None:
    torch.cuda.set_device(3)
    compute = ComputeThread("actor", asyncio.get_running_loop())
    waiting = WaitingThreads("group")
    assert await compute.run(torch.cuda.current_device) == 3
    assert await waiting.run(torch.cuda.current_device) == 3
    assert await in_thread(torch.cuda.current_device) == 3
    compute.close()
    waiting.close()


@pytest.mark.usefixtures("device")
async def test_a_thread_leaves_cuda_alone_while_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA was initialised"))
    assert await in_thread(lambda: "computed") == "computed"


async def test_a_device_that_cannot_be_set_does_not_keep_the_work_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", broken)
    assert await in_thread(lambda: "computed") == "computed"


async def test_a_thread_that_waits_holds_up_no_other_and_is_used_again() -> None:
    waiting = WaitingThreads("group")
    release = threading.Event()
    held = waiting.run(release.wait)
    idents = [await waiting.run(threading.get_ident) for _ in range(20)]
    assert len(set(idents)) == 1
    assert not held.done()
    release.set()
    assert await held
    waiting.close()


async def test_threads_beyond_a_few_end_when_there_is_nothing_more_to_wait_for() -> None:
    waiting = WaitingThreads("group")
    barrier = threading.Barrier(20, timeout=30)  # passes when all 20 wait at once
    await asyncio.gather(*(waiting.run(barrier.wait) for _ in range(20)))
    assert waiting.threads == SPARE
    waiting.close()
    assert waiting.threads == 0


class Timed:
    """A function that takes as much processor time as it is told, by a clock of its own; where it ran, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now, self.threads = 0.0, 0.0, list[int]()
        monkeypatch.setattr(tasks.time, "thread_time", lambda: self.now)

    def __call__(self) -> int:
        self.now += self.seconds
        self.threads.append(threading.get_ident())
        return len(self.threads)


async def test_a_brief_function_runs_on_the_loop_for_as_long_as_it_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, work = ComputeThread("actor", asyncio.get_running_loop()), Timed(monkeypatch)
    for work.seconds in (BRIEF / 10, BRIEF / 10, 2 * BRIEF, 2 * BRIEF, BRIEF / 10, BRIEF / 10):
        await compute.run_briefly("work", work)
    here = [thread == threading.get_ident() for thread in work.threads]
    # the first run is measured in the thread; the third was thought to be brief; the fifth is measured again
    assert here == [False, True, True, False, False, True]
    await compute.run_briefly("other work", work)
    assert work.threads[-1] != threading.get_ident()
    compute.close()


async def test_a_brief_function_does_not_overtake_what_the_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, work = ComputeThread("actor", asyncio.get_running_loop()), Timed(monkeypatch)
    await compute.run_briefly("work", work)
    begun, release = threading.Event(), threading.Event()

    def long() -> int:
        begun.set()
        release.wait(30)
        return work()

    held = asyncio.ensure_future(compute.run(long))
    assert await asyncio.to_thread(begun.wait, 30)
    brief = asyncio.ensure_future(compute.run_briefly("work", work))
    await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(held, brief) == [2, 3]
    assert work.threads[2] == work.threads[1] != threading.get_ident()
    compute.close()


async def test_who_computes_briefly_again_and_again_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, work = ComputeThread("actor", asyncio.get_running_loop()), Timed(monkeypatch)
    await compute.run_briefly("work", work)
    others = asyncio.ensure_future(asyncio.sleep(0, "done"))
    for _ in range(3):
        await compute.run_briefly("work", work)
    assert others.done()
    compute.close()


async def test_an_error_of_a_brief_function_is_raised_where_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, work = ComputeThread("actor", asyncio.get_running_loop()), Timed(monkeypatch)
    await compute.run_briefly("work", work)

    def fail() -> None:
        raise ValueError("no such action")

    with pytest.raises(ValueError, match=r"such action"):
        await compute.run_briefly("work", fail)
    compute.close()
    with pytest.raises(ActorDied, match=r"closed before"):
        await compute.run_briefly("work", work)


async def test_a_failure_that_a_cancellation_has_overtaken_is_not_reported_as_lost() -> None:
    """Two roles are made at the same time: the first that fails is the cause, and ends the other."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    compute, begun, release = ComputeThread("actor", asyncio.get_running_loop()), threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        release.wait()
        raise ValueError("second")

    waiting = asyncio.create_task(compute.run(fails))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    compute.close()
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert told == []
