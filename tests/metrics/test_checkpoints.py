"""Checkpoints are written while the run goes on, one at a time, and a failure leaves the one before."""

import asyncio
import errno
import os
import shutil
import threading

import pytest

from rlinf.config.load import RunFailure
from rlinf.storage.checkpoints import Checkpoints
from rlinf.storage.directory import RunDirectory, find_checkpoint


class Model:
    """Something to save whose writing waits until it is told to go on."""

    def __init__(self):
        self.snapshots, self.go = [], asyncio.Event()

    def save(self, path):
        self.snapshots.append(path.name)  # at the call, not when it is awaited
        return self._write(path)

    async def _write(self, path):
        await self.go.wait()
        (path / "model").write_text(path.name)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run")


async def test_the_run_goes_on_while_a_checkpoint_is_written(directory):
    checkpoints, model = Checkpoints(directory, keep=0), Model()
    await checkpoints.begin(3, model.save, {"cursor": 7})
    assert model.snapshots == [".step_000003.partial"]
    checkpoints.check()
    assert find_checkpoint(directory.path) is None
    model.go.set()
    await checkpoints.finish()
    found = find_checkpoint(directory.path)
    assert found is not None
    assert found.queue == {"step": 3, "cursor": 7}
    assert (found.path / "model").exists()


async def test_a_checkpoint_waits_for_the_one_before(directory):
    checkpoints, model = Checkpoints(directory, keep=1), Model()
    await checkpoints.begin(1, model.save, {})
    second = asyncio.create_task(checkpoints.begin(2, model.save, {}))
    await asyncio.sleep(0)
    assert len(model.snapshots) == 1
    model.go.set()
    await second
    await checkpoints.finish()
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["latest", "step_000002"]


async def test_a_run_that_is_given_up_while_a_checkpoint_gets_its_name_leaves_it_whole(directory, monkeypatch):
    checkpoints, model = Checkpoints(directory, keep=1), Model()
    named, go, finish = asyncio.Event(), threading.Event(), directory.finish_checkpoint
    loop = asyncio.get_running_loop()

    def slowly(*how):
        loop.call_soon_threadsafe(named.set)
        go.wait(60)
        return finish(*how)

    monkeypatch.setattr(directory, "finish_checkpoint", slowly)
    model.go.set()
    await checkpoints.begin(4, model.save, {})
    await named.wait()
    giving_up = asyncio.create_task(checkpoints.abandon())
    await asyncio.sleep(0)
    go.set()
    await giving_up
    found = find_checkpoint(directory.path)
    assert found is not None
    assert (found.path / "model").exists()


async def test_a_full_disk_is_said_at_the_next_step_and_the_checkpoint_before_is_whole(directory):
    checkpoints, model = Checkpoints(directory, keep=1), Model()
    model.go.set()
    await checkpoints.begin(1, model.save, {})
    await checkpoints.finish()

    async def full(path):
        (path / "model").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await checkpoints.begin(2, full, {})
    with pytest.raises(RunFailure, match=r"checkpoint.*2.*left.*last.*step_000001"):
        await checkpoints.finish()
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["latest", "step_000001"]


async def test_a_bug_in_saving_stays_what_it_is(directory):
    checkpoints = Checkpoints(directory, keep=1)

    async def wrong(path):
        raise KeyError("bug")

    await checkpoints.begin(1, wrong, {})
    for _ in range(100):
        await asyncio.sleep(0.01)
        try:
            checkpoints.check()
        except KeyError:
            return
    pytest.fail("check() never raised")


async def test_a_run_that_is_given_up_leaves_no_half_checkpoint(directory):
    checkpoints, model = Checkpoints(directory, keep=1), Model()
    await checkpoints.begin(1, model.save, {})
    await asyncio.sleep(0)
    await checkpoints.abandon()
    assert list(directory.checkpoints.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_directory_that_is_gone_is_not_made_anew_and_is_named(directory, when):
    checkpoints, model = Checkpoints(directory, keep=1), Model()
    model.go.set()

    async def written():
        if when == "meanwhile":
            await checkpoints.begin(2, model.save, {})
        shutil.rmtree(directory.path)
        if when == "before":
            await checkpoints.begin(2, model.save, {})
        await checkpoints.finish()

    with pytest.raises(RunFailure, match=f"step 2.*written.*{directory.checkpoints}:"):
        await written()
    assert not directory.path.exists()
