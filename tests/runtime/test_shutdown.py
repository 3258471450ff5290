"""A process ends with the code of its program, whatever its threads are stuck in."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import uvloop

from rlinf.runtime.base.shutdown import Threads

PROGRAMS = Path(__file__).parent / "programs"
RESUME_ME = 75


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_a_thread_that_is_stuck_in_a_collective_does_not_change_the_exit_code(zygotes):
    ranks = zygotes.run(PROGRAMS / "stuck.py", 2)
    try:
        assert ranks.codes(60.0) == [0, 0], ranks.everything()
    finally:
        ranks.end()
    assert ranks.printed(0) == "done\n"
    assert "do not return: threads member[0]" in ranks.complained(0)


@pytest.mark.parametrize("what", ["learn", "wait"])
def test_neither_does_one_that_computes_or_waits_when_the_grace_is_over(zygotes, what):
    ranks = zygotes.run(PROGRAMS / "busy.py", 0, what)
    try:
        assert ranks.codes(30.0) == [RESUME_ME], ranks.everything()
    finally:
        ranks.end()
    assert "rlinf: stopped by SIGTERM" in ranks.complained(0)


def test_blocking_work_runs_in_few_threads_that_are_used_again():
    names, threads = [], Threads()

    async def main():
        for _ in range(3):
            names.append(await asyncio.to_thread(lambda: threading.current_thread().name))
        together = threading.Barrier(3)
        await asyncio.gather(*(asyncio.to_thread(together.wait, 10.0) for _ in range(3)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.gather(*(asyncio.to_thread(pow, 2, number) for number in range(100)))

    loop = uvloop.new_event_loop()
    try:
        loop.set_default_executor(threads)
        assert loop.run_until_complete(main()) == [2**number for number in range(100)]
    finally:
        threads.shutdown()
        loop.close()
    assert len(set(names)) == 1
    with pytest.raises(RuntimeError):
        threads.submit(print)
