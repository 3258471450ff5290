"""A run directory has one live run: what a dead one held is taken over, what a live one holds is refused."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from rlinf.config.load import InputError
from rlinf.runs.start import locked
from rlinf.storage import directory
from rlinf.storage.directory import SILENT_AFTER, Held, Lock, Owner, held, lock_file

HOLDER = """
import os, sys, time
from pathlib import Path
from rlinf.storage.directory import Lock
lock = Lock(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:  # a child that outlives it, with its files
    os.close(1)
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock of a run directory."""
    started = []

    def start(how="alone"):
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def signed(path, owner, seconds_ago=0.0):
    """A lock file that somebody has left."""
    file = lock_file(path)
    file.write_text(json.dumps(asdict(owner)))
    os.utime(file, times=(time.time() - seconds_ago,) * 2)
    return file


def elsewhere():
    return replace(Owner.here(), host="node7", kernel="another", pid=4242)


def test_a_directory_that_a_live_run_holds_is_refused_in_one_line_that_names_it(tmp_path, holder):
    process = holder()
    with pytest.raises(InputError) as refused, locked(tmp_path / "run"):
        pass
    told = str(refused.value)
    assert "\n" not in told
    assert f"pid {process.pid} on {socket.gethostname()}, since " in told
    assert f"kill {process.pid}" in told


def test_one_that_a_killed_run_held_is_taken_over(tmp_path, holder):
    process = holder()
    process.kill()
    process.wait()
    with locked(tmp_path / "run") as lock:
        assert lock.taken_from is not None
        assert lock.taken_from.pid == process.pid
    assert list(tmp_path.iterdir()) == []


def test_children_that_a_killed_run_left_behind_do_not_hold_it(tmp_path, holder):
    process = holder("fork")
    process.kill()
    process.wait()
    with held(tmp_path / "run") as lock:
        assert lock.lost() is None


def test_within_one_process_it_is_held_once_too_and_can_be_had_again(tmp_path):
    with held(tmp_path / "run"):
        assert json.loads(lock_file(tmp_path / "run").read_text())["pid"] == os.getpid()
        with pytest.raises(Held):
            Lock(tmp_path / "run")
    with held(tmp_path / "run") as lock:
        assert lock.taken_from is None


def test_another_machine_is_believed_while_it_was_heard_of_lately(tmp_path):
    file = signed(tmp_path / "run", elsewhere(), SILENT_AFTER - 10)
    with pytest.raises(Held, match=f"4242.*node7.*last heard.*5..*{file}"):
        Lock(tmp_path / "run")
    signed(tmp_path / "run", elsewhere(), SILENT_AFTER + 1)
    with held(tmp_path / "run") as lock:
        assert lock.taken_from == elsewhere()


def test_a_process_number_that_came_again_is_not_taken_for_the_dead_owner(tmp_path):
    signed(tmp_path / "run", replace(Owner.here(), began="1"))
    with held(tmp_path / "run") as lock:
        assert lock.taken_from is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_lock_that_nobody_signed_belongs_to_nobody(tmp_path, content):
    lock_file(tmp_path / "run").write_text(content)
    with held(tmp_path / "run") as lock:
        assert lock.taken_from is None


def test_where_the_disk_knows_no_locks_the_owner_s_name_decides(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(directory, "_flock", lambda file: None)
    process = holder()
    with pytest.raises(Held, match=f"pid {process.pid}"):
        Lock(tmp_path / "run")
    process.kill()
    process.wait()
    with held(tmp_path / "run") as lock:
        assert lock.taken_from is not None


def test_a_lock_that_is_removed_is_taken_again_and_one_that_is_taken_away_is_noticed(tmp_path):
    lock = Lock(tmp_path / "run")
    lock.path.unlink()
    assert lock.lost() is None
    assert lock.path.exists()
    lock.path.unlink()
    with held(tmp_path / "run"):
        assert "taken from it" in str(lock.lost())
        lock.give_back()
        assert lock.path.exists(), "it is no longer its own"
    assert not lock.path.exists()


def test_signs_of_life_are_given_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "HEARTBEAT", 0.01)
    with held(tmp_path / "run") as lock:
        os.utime(lock.path, times=(0, 0))
        end = time.monotonic() + 20
        while lock.path.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0
