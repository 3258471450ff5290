"""Programs run under torchrun: with 2 to 4 processes, quietly, to the end, with the right exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.programs.jobs import descendants, listening, shared_memory, torchrun, until

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(300)]  # each starts Python and torch several times


def finished(job, seconds=200.0):
    """Wait for the end of a job; returns its exit code, output and complaints."""
    output, complaints = job.communicate(timeout=seconds)
    return job.returncode, output, complaints


def test_two_processes_say_what_the_program_says_and_nothing_else():
    before = shared_memory()
    with torchrun("hello.py", 2) as job:
        assert finished(job) == (0, "[('hello', 0, 0), ('hello', 1, 1)]\n", "")
    assert shared_memory() <= before


def test_four_processes_do_a_bit_of_everything(tmp_path):
    with torchrun("tour.py", 4, tmp_path / "trace.json") as job:
        assert finished(job) == (0, "all as expected\n", "")


def said_of_the_loss(complaints, pid):
    """The line about host 1, before which only torchrun may have said something: what it waits for is the end."""
    before, found, rest = complaints.partition(f"error: host 1 (pid {pid} on ")
    assert found, complaints
    assert all("torch/distributed/elastic" in line for line in before.splitlines()), complaints
    return rest.partition("\n")[0]


def test_a_killed_process_ends_the_job_and_leaves_nothing():
    before = shared_memory()
    with torchrun("drills.py", 3, "unawaited") as job:
        assert job.stdout.readline() == "ready\n"
        pids = descendants(job.pid)
        ports = listening(pids)
        ranks = sorted(pid for pid in pids if environment_of(pid).get("RANK") == "1")
        os.kill(ranks[0], signal.SIGKILL)
        code, _, complaints = finished(job)
        assert code != 0
        assert " victim[1]: " in said_of_the_loss(complaints, ranks[0])
        assert not alive(pids)
        assert not listening([os.getpid()]) & ports
    assert shared_memory() <= before


@pytest.mark.repeated
def test_a_silent_process_ends_the_job_in_time_and_leaves_nothing():
    with torchrun("drills.py", 3, "unawaited", HOST_TIMEOUT="3") as job:
        assert job.stdout.readline() == "ready\n"
        pids = descendants(job.pid)
        silent = next(pid for pid in pids if environment_of(pid).get("RANK") == "1")
        os.kill(silent, signal.SIGSTOP)
        code, _, complaints = finished(job)
        assert code != 0
        assert "(host_timeout)" in said_of_the_loss(complaints, silent)
        assert not alive(pids)


@pytest.mark.parametrize(
    ("whom", "number"), [("torchrun alone", signal.SIGTERM), ("the process group", signal.SIGINT)], ids=str
)
def test_a_signal_ends_busy_and_waiting_ranks(whom, number):
    with torchrun("drills.py", 2, "busy") as job:
        said = "".join(job.stdout.readline() for _ in range(7))  # ranks may write into one another's lines
        assert said.count("computing") == 4
        assert said.count("waiting") == 2
        pids = descendants(job.pid)
        if whom == "torchrun alone":
            os.kill(job.pid, number)
        else:
            os.killpg(job.pid, number)
        until(lambda: not alive(pids), lambda: f"the end of {alive(pids)}")
        code, output, complaints = finished(job)
    assert code != 0
    assert set(output.splitlines()) == {
        f"closed {name}[{rank}]" for name in ("idle", "one", "two", "waiting") for rank in (0, 1)
    }
    assert "rlinf: stopped by" in complaints


def test_ranks_do_not_outlive_a_killed_torchrun():
    with torchrun("drills.py", 2, "unawaited") as job:
        assert job.stdout.readline() == "ready\n"
        pids = descendants(job.pid)
        os.kill(job.pid, signal.SIGKILL)
        until(lambda: not alive(pids), lambda: f"the end of {alive(pids)}")


def alive(pids):
    """Those that run."""
    running = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if not re.search(r"\) [ZX] ", file.read()):
                running.append(pid)
    return running


def environment_of(pid):
    with open(f"/proc/{pid}/environ") as file:
        return dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)


def test_a_job_that_torchrun_restarts_does_not_wait_for_the_dead():
    program = Path(__file__).parent / "programs" / "restarted.py"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # --standalone makes a new store for every start; a port makes torchrun keep one
    how = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *how, str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "met in attempt 1" in done.stdout
