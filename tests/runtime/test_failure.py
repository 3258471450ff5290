"""When something fails, its first cause is what one sees; everything else ends, soon, and leaves nothing.

Here the ranks are started by hand: nobody but the runtime ends them. `test_torchrun.py` has the same under torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.programs.jobs import listening, shared_memory, until

NEVER = 1e6
"""Seconds of silence that no test waits for: what ends before has another reason."""


@pytest.fixture(autouse=True)
def nothing_in_shared_memory():
    before = shared_memory()
    yield
    assert shared_memory() <= before


def first_error(complaints):
    """The traceback's last line: what was raised, and its text."""
    assert complaints.startswith("Traceback (most recent call last):"), complaints
    return next(line for line in complaints.splitlines()[1:] if not line.startswith(" "))


def said_of_the_loss(complaints):
    """The first line, which says it all; and what comes after it."""
    line, _, rest = complaints.partition("\n")
    assert line.startswith("error: host "), complaints
    assert line.endswith(
        "The job ends; --resume auto goes on from its last checkpoint, torchrun --max-restarts N does so by itself."
    )
    return line, rest


def test_a_killed_host_fails_the_call_that_main_awaits_long_before_it_would_count_as_silent(zygote):
    ranks = zygote.run("drills.py", 3, "awaited", HOST_TIMEOUT=NEVER)
    ranks.await_line("waiting", rank=2)
    ports = listening(ranks.pids)
    ranks.kill(2)
    ranks.await_line("main left")
    assert ranks.codes() == [1, 0, -signal.SIGKILL], ranks.everything()
    line, rest = said_of_the_loss(ranks.complained(0))
    assert line.startswith(f"error: host 2 (pid {ranks.pids[2]} on ")
    assert " victim[2]: " in line
    error = first_error(rest)
    assert error.startswith(f"rlinf.runtime.base.errors.ActorDied: host 2 (pid {ranks.pids[2]} on ")
    assert "victim[2].wait" in error
    assert ranks.printed(1) == "closed victim[1]\n"
    assert ranks.complained(1) == ""
    assert not listening([1]) & ports


def test_a_killed_host_ends_the_job_though_main_waits_for_something_else(zygote):
    ranks = zygote.run("drills.py", 3, "unawaited")
    ranks.await_line("ready")
    ranks.kill(1)
    assert ranks.codes() == [1, -signal.SIGKILL, 0], ranks.everything()
    line, rest = said_of_the_loss(ranks.complained(0))
    assert line.startswith(f"error: host 1 (pid {ranks.pids[1]} on ")
    assert re.search(r"\d\d:\d\d:\d\d, .*victim\[1\]: \S", line)
    assert first_error(rest) == f"rlinf.runtime.base.errors.HostLost: {line.removeprefix('error: ')}"


def test_main_may_still_clean_up_after_a_lost_host_but_the_job_fails(zygote):
    ranks = zygote.run("drills.py", 2, "survives")
    ranks.await_line("ready")
    ranks.kill(1)
    assert ranks.codes()[0] == 1, ranks.everything()
    assert "cleaned up" in ranks.printed(0)
    assert said_of_the_loss(ranks.complained(0))[0].startswith("error: host 1 ")


def test_without_their_controller_the_other_hosts_stop_by_themselves(zygote):
    ranks = zygote.run("drills.py", 3, "busy", HOST_TIMEOUT=NEVER)
    for rank in (1, 2):
        ranks.await_line("waiting", rank)
    ranks.kill(0)
    assert ranks.codes() == [-signal.SIGKILL, 1, 1], ranks.everything()
    for rank in (1, 2):
        assert f"closed idle[{rank}]" in ranks.printed(rank)
        said = ranks.complained(rank).splitlines()
        assert said[0].startswith(f"rlinf: host {rank} ")
        assert "(host 0)" in said[0]


# Silence: power loss, a cut network, or here a stopped process, to which connections stay open ----------------------

SILENCE = 3.0
"""Seconds after which a host counts as lost, in these tests."""


def test_a_host_that_falls_silent_ends_the_job_within_its_time(zygote):
    ranks = zygote.run("drills.py", 3, "unawaited", HOST_TIMEOUT=SILENCE)
    ranks.await_line("ready")
    ranks.kill(1, signal.SIGSTOP)
    assert ranks.codes() == [1, -signal.SIGKILL, 0], ranks.everything()
    line, _ = said_of_the_loss(ranks.complained(0))
    assert line.startswith(f"error: host 1 (pid {ranks.pids[1]} on ")
    assert re.search(r"victim\[1\]: .* \d\d:\d\d:\d\d, .* 3 s \(host_timeout\)", line)
    assert ranks.printed(2) == "closed victim[2]\n"


def test_a_controller_that_falls_silent_ends_the_others_within_their_time(zygote):
    ranks = zygote.run("drills.py", 3, "unawaited", HOST_TIMEOUT=SILENCE)
    ranks.await_line("ready")
    ranks.kill(0, signal.SIGSTOP)
    assert ranks.codes() == [-signal.SIGKILL, 1, 1], ranks.everything()
    lines = [ranks.complained(rank).splitlines() for rank in (1, 2)]
    assert [len(said) for said in lines] == [1, 1]
    causes = []
    for rank, (line,) in zip((1, 2), lines, strict=True):
        begins = f"rlinf: host {rank} stops: the controller (host 0) is gone: "
        assert line.startswith(begins)
        assert "--max-restarts" in line
        causes.append(line.removeprefix(begins))
    # whoever finds out first ends the silent one, so the other may see its process end
    assert any("has not answered" in cause for cause in causes)
    assert all("has not answered" in cause or "process has ended" in cause for cause in causes)


def test_roles_that_compute_with_a_silent_host_end_in_time_too(zygote):
    ranks = zygote.run("drills.py", 3, "sums", HOST_TIMEOUT=SILENCE)
    for rank in range(3):
        ranks.await_line("summing", rank)
    ranks.kill(2, signal.SIGSTOP)
    assert ranks.codes() == [1, 0, -signal.SIGKILL], ranks.everything()
    assert said_of_the_loss(ranks.complained(0))[0].startswith(f"error: host 2 (pid {ranks.pids[2]} on ")


def test_the_loss_counts_though_who_computes_with_the_lost_host_hears_of_it_first(zygote):
    ranks = zygote.run("drills.py", 3, "sums")
    for rank in range(3):
        ranks.await_line("summing", rank)
    ranks.kill(2)
    assert ranks.codes() == [1, 0, -signal.SIGKILL], ranks.everything()
    assert said_of_the_loss(ranks.complained(0))[0].startswith(f"error: host 2 (pid {ranks.pids[2]} on ")


def test_a_shorter_silence_costs_nothing_but_its_time(zygote):
    ranks = zygote.run("drills.py", 2, "counts", HOST_TIMEOUT=2 * SILENCE, COUNTS=2.5)
    ranks.await_line("ready")
    for rank in (1, 0):
        ranks.kill(rank, signal.SIGSTOP)
        time.sleep(0.6 * SILENCE)  # of twice as much: the machine may take longer to go on
        ranks.kill(rank, signal.SIGCONT)
        time.sleep(0.3)
    assert ranks.codes() == [0, 0], ranks.everything()
    assert ranks.printed(0) == "ready\nall counted\n"
    assert [ranks.complained(rank) for rank in (0, 1)] == ["", ""]


def test_a_host_whose_loop_and_interpreter_are_held_is_not_silent(zygote):
    ranks = zygote.run("drills.py", 2, "holds", HOST_TIMEOUT=SILENCE, HOLDS=2 * SILENCE)
    assert ranks.codes() == [0, 0], ranks.everything()
    assert ranks.printed(0) == "held\n"
    assert ranks.complained(0) == ""


def test_a_host_that_waits_costs_next_to_no_processor_time(zygote):
    ranks = zygote.run("drills.py", 2, "unawaited")
    ranks.await_line("ready")
    until(lambda: idle(ranks.pids), "a second of little work")  # what starting leaves behind is done at some time


def idle(pids):
    """Whether processes use next to nothing for a second: 20 ms at most, where a loop that polls uses all of it."""
    before = list(map(processor_seconds, pids))
    time.sleep(1.0)
    return all(processor_seconds(pid) - used <= 0.02 for pid, used in zip(pids, before, strict=True))


def processor_seconds(pid):
    """What a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


CLOSED = ["closed victim[0]\n", "closed victim[1]\n"]


@pytest.mark.parametrize(
    ("drill", "error", "where", "printed"),
    [
        ("raises", "ZeroDivisionError", "", CLOSED),
        ("actor_raises", "KeyError", "victim[1].fail() on host 1", CLOSED),
        ("setup_raises", "ValueError", "victim[1].setup() on host 1", [CLOSED[0], ""]),  # not set up, not closed
        ("close_raises_after_main", "ZeroDivisionError", "OSError: close", None),  # what went wrong first
        ("close_raises", "OSError", "close", None),
    ],
)
def test_the_first_error_is_shown_as_it_is_with_its_place_and_the_others_end_cleanly(
    zygote, drill, error, where, printed
):
    ranks = zygote.run("drills.py", 2, drill)
    assert ranks.codes() == [1, 0]
    complaints = ranks.complained(0)
    assert re.findall(r"^(\w+Error): ", complaints, re.MULTILINE)[-1] == error
    assert where in complaints
    if printed is not None:
        assert [ranks.printed(rank) for rank in (0, 1)] == printed
        assert ranks.complained(1) == ""


def test_exit_ends_the_system_in_order(zygote):
    ranks = zygote.run("drills.py", 2, "exits")
    assert ranks.codes() == [7, 0], ranks.everything()
    assert [ranks.printed(rank) for rank in (0, 1)] == ["closed victim[0]\n", "closed victim[1]\n"]
    assert [ranks.complained(rank) for rank in (0, 1)] == ["", ""]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_computing_and_waiting_ranks(zygote, number):
    ranks = zygote.run("drills.py", 2, "busy")
    for rank in (0, 1):
        ranks.await_line("waiting", rank)
    ranks.kill_all(number)
    assert ranks.codes() == [128 + number, 0], ranks.everything()
    for rank in (0, 1):
        closed = [line for line in ranks.printed(rank).splitlines() if line.startswith("closed")]
        assert closed == [f"closed {name}[{rank}]" for name in ("waiting", "two", "one", "idle")]
    assert ranks.complained(0).startswith(f"rlinf: stopped by {number.name}\n")


def test_a_signal_ends_a_job_of_one_process_too(zygote):
    ranks = zygote.run("drills.py", 1, "busy")
    ranks.await_line("waiting")
    ranks.kill(0, signal.SIGINT)
    assert ranks.codes() == [130], ranks.everything()
    assert ranks.printed(0).splitlines()[-4:] == [f"closed {name}[0]" for name in ("waiting", "two", "one", "idle")]
    assert ranks.complained(0).startswith("rlinf: stopped by SIGINT\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_alone_ends_all(zygote, rank):
    ranks = zygote.run("drills.py", 2, "unawaited")
    ranks.await_line("ready")
    ranks.kill(rank, signal.SIGTERM)
    assert ranks.codes() == [128 + signal.SIGTERM, 0], ranks.everything()
    assert ranks.complained(0) == "rlinf: stopped by SIGTERM\n"


def test_a_main_that_does_not_end_when_cancelled_is_left_behind(zygote):
    ranks = zygote.run("drills.py", 2, "stubborn")
    ranks.await_line("ready")
    ranks.kill_all(signal.SIGINT)
    assert ranks.codes() == [128 + signal.SIGINT, 0], ranks.everything()


def test_a_signal_reaches_ranks_though_the_loop_of_one_is_blocked(zygote):
    ranks = zygote.run("drills.py", 3, "blocked")
    ranks.await_line("blocking", rank=1)
    ranks.kill_all(signal.SIGINT)
    until(lambda: ranks.ended(0, 2), ranks.everything)
    assert "host 1 " in ranks.complained(0)


def test_ctrl_c_while_waiting_for_other_ranks_ends_at_once(zygote):
    ranks = zygote.run("drills.py", 1, "unawaited", WORLD_SIZE=2)
    until(lambda: listening(ranks.pids), "rank 0 listening for the others")
    ranks.kill(0, signal.SIGINT)
    assert ranks.codes() == [-signal.SIGINT]
