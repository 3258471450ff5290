"""Why a program ends early: the first cause counts, and a lost host is the cause of what followed from it."""

from __future__ import annotations

import asyncio
import signal

import pytest

from rlinf import ActorSystem
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import HostLost
from rlinf.runtime.system.ending import Stopped, conduct, ending


def ends(program, *events, hosts=2):
    """How a program ends to which things happen: (seconds, what, ...) with `lost`, `stopped`; and the time it took."""

    async def main():
        async with ActorSystem.local(hosts) as system:
            loop, host = asyncio.get_running_loop(), system._host
            early, end = ending()
            do = {
                "lost": lambda number: (end(HostLost("gone")), host.lost(number, "its connection broke")),
                "stopped": lambda: end(Stopped(signal.SIGTERM)),
            }
            for seconds, what, *details in events:
                loop.call_later(seconds, do[what], *details)
            try:
                return await conduct(program(), host, early)
            except (Exception, Stopped) as error:
                return error

    return run_virtual(main())


async def for_ever():
    await asyncio.Event().wait()


async def fails_after(seconds=1.0):
    await asyncio.sleep(seconds)
    raise ConnectionError("closed by peer")


def test_a_lost_host_ends_a_program_that_waits_for_something_else(capsys):
    error, seconds = ends(for_ever, (1.0, "lost", 1))
    assert isinstance(error, HostLost)
    assert str(error).startswith("host 1 (pid ")
    assert capsys.readouterr().err == f"error: {error}\n"
    assert seconds < 3.0


def test_the_signal_that_torchrun_sends_after_a_death_does_not_hide_it():
    error, _ = ends(for_ever, (1.0, "stopped"), (1.1, "lost", 1))
    assert isinstance(error, HostLost)


def test_a_signal_alone_stops_the_program(capsys):
    error, seconds = ends(for_ever, (1.0, "stopped"))
    assert isinstance(error, Stopped)
    assert capsys.readouterr().err == "rlinf: stopped by SIGTERM\n"
    assert seconds < 2.5


def test_what_failed_because_of_the_loss_is_its_consequence_though_it_came_first():
    error, _ = ends(fails_after, (1.1, "lost", 1))
    assert isinstance(error, HostLost)
    assert isinstance(error.__cause__, ConnectionError)


def test_all_hosts_of_a_lost_machine_are_named_in_one_line(capsys):
    error, _ = ends(for_ever, *[(1.0 + number / 100, "lost", number) for number in range(1, 10)], hosts=10)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "host 6 (pid" in said
    assert " and 3 more" in said
    assert str(error) in said


def test_without_a_loss_the_program_s_own_error_is_raised_as_it_is():
    error, seconds = ends(fails_after)
    assert isinstance(error, ConnectionError)
    assert seconds == pytest.approx(1.5, abs=0.2)


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_exit_is_an_exit_at_once(hosts):
    async def leaves():
        raise SystemExit(7)

    with pytest.raises(SystemExit) as exit:
        ends(leaves, hosts=hosts)
    assert exit.value.code == 7


def test_a_value_is_returned_at_once():
    async def value():
        return 3

    result, seconds = ends(value)
    assert result == 3
    assert seconds < 0.1
