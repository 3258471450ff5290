"""Threads of the runtime work on the device of whoever started them, and are no more than there is to wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from rlinf.runtime.base.compute_thread import ComputeThread
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.transport.groups.waiting_threads import SPARE, WaitingThreads


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


async def test_what_a_waiting_thread_ran_into_is_raised_where_it_is_awaited() -> None:
    waiting = WaitingThreads("group")

    def fail() -> None:
        raise ValueError("no such peer")

    with pytest.raises(ValueError, match="no such peer"):
        await waiting.run(fail)
    waiting.close()
