"""A process ends with the code of its program, whatever its threads are stuck in."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop

import rlinf
from rlinf.runtime.base.tasks import OwnDirectory, Threads
from rlinf.runtime.system import torchrun

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


def test_the_next_directory_sweeps_away_those_of_the_dead_and_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr("rlinf.runtime.base.tasks.JUST_MADE", 0.0)
    mine, place = OwnDirectory("live", str(tmp_path)), str(tmp_path)
    code = "import sys; from rlinf.runtime.base.tasks import OwnDirectory as D; D('lane', sys.argv[1]).path / 'x'"
    kill = f"{code}; import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", kill, place]).returncode == -9
    (left,) = tmp_path.glob("rlinf-lane-*")
    (left / "feed").touch()
    for name in ("rlinf-results", "rlinf-live-backup01", "rlinf-live-17.short"):
        (tmp_path / name).mkdir()
    (tmp_path / "rlinf-live-17.abcdefgh").symlink_to(tmp_path / "rlinf-results")
    other = OwnDirectory("model", place)
    there = {path.name for path in tmp_path.iterdir()}
    link = "rlinf-live-17.abcdefgh"
    assert there == {
        mine.path.name,
        other.path.name,
        link,
        "rlinf-results",
        "rlinf-live-backup01",
        "rlinf-live-17.short",
    }
    for directory in (mine, other, other):
        directory.remove()
        assert not directory.path.exists()


def test_a_directory_that_was_just_made_is_left_to_whoever_is_about_to_take_it(tmp_path):
    (just := tmp_path / "rlinf-live-17.abcdefgh").mkdir()
    OwnDirectory("live", str(tmp_path)).remove()
    assert just.exists()


def test_directories_are_made_by_what_sweeps_away_those_of_the_dead():
    """A process that is killed removes nothing, so a temporary directory by any other name stays for ever."""
    swept_by_others = {
        "rlinf/runtime/base/tasks.py",  # where they are made
        "rlinf/sandbox/containers/namespaces.py",  # of a run, in the cache; the next one removes it
        "rlinf/sandbox/containers/protocol.py",  # beside what is unpacked, which is in somebody's directory
        "rlinf/sandbox/inside/supervise.py",  # its process outlives the run, and removes it
        "rlinf/rewards/code/runner.py",  # in a sandbox
        "rlinf/runs/start.py",  # to see that it can be made, in the place of output
    }
    makers = re.compile(r"tempfile\.(mkdtemp|TemporaryDirectory|mkstemp|NamedTemporaryFile)")
    root = Path(rlinf.__file__).parent
    files = {f"rlinf/{path.relative_to(root)}" for path in root.rglob("*.py") if makers.search(path.read_text())}
    assert files <= swept_by_others


async def _reading(begun):
    """Items of a generator that does not end when its reader is cancelled."""
    while True:
        begun.set()
        try:
            yield await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            continue


def test_a_generator_that_a_task_still_advances_is_not_closed_under_it(monkeypatch, caplog):
    monkeypatch.setattr(torchrun, "GRACE", 0.01)
    stuck = []

    async def main():
        async def read():
            async for _ in _reading(begun):
                pass

        begun = asyncio.Event()
        stuck.append(asyncio.create_task(read()))
        await begun.wait()

    torchrun._run_loop(main())
    assert not stuck.pop().done()
    assert [each.message for each in caplog.records if each.exc_info] == []
