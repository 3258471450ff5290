"""Where a job listens while it runs, and what it sets before it starts."""

from __future__ import annotations

import os
import socket

import pytest

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.torchrun import _bind_interface, _join
from tests.runtime.programs.jobs import listening, until

LOOPBACKS = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as /proc writes them."""


def rpc_listeners(ranks):
    """What the ranks listen on, without the rendezvous store, which torch opens in rank 0 or in torchrun."""
    return {(address, port) for address, port in listening(ranks.pids) if port != ranks.port}


def test_with_all_hosts_on_this_machine_nothing_listens_but_on_the_loopback(zygote):
    ranks = zygote.run("drills.py", 2, "unawaited")
    ranks.await_line("ready")
    found = rpc_listeners(ranks)
    assert found, "nothing listens at all: is this looking at the right processes?"
    assert {address for address, _ in found} <= LOOPBACKS


def test_the_loopback_is_chosen_too_when_the_ranks_meet_on_it(zygote):
    ranks = zygote.run("drills.py", 2, "unawaited", LOCAL_WORLD_SIZE=1)
    ranks.await_line("ready")
    assert {address for address, _ in rpc_listeners(ranks)} <= LOOPBACKS


def test_an_interface_that_was_named_is_used(zygote):
    name, address = another_interface()
    ranks = zygote.run("drills.py", 2, "unawaited", RLINF_INTERFACE=name)
    ranks.await_line("ready")
    assert {where for where, _ in rpc_listeners(ranks)} == {address}


def another_interface():
    """Name and IPv4 address, as /proc writes it, of an interface that is not the loopback."""
    import fcntl
    import struct

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                raw = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))[20:24]  # SIOCGIFADDR
            except OSError:
                continue
        if raw[0] != 127:
            return name, raw[::-1].hex().upper()
    pytest.skip("this machine has no network interface but the loopback")


@pytest.fixture
def fresh(monkeypatch):
    for name in ("RLINF_INTERFACE", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set
        monkeypatch.delenv(name)
    return monkeypatch


def chosen():
    return os.environ.get("TP_SOCKET_IFNAME"), os.environ.get("GLOO_SOCKET_IFNAME")


def test_hosts_on_several_machines_listen_where_the_names_of_these_lead(fresh):
    fresh.setenv("LOCAL_WORLD_SIZE", "2")
    fresh.setenv("MASTER_ADDR", "10.0.0.1")
    _bind_interface(None, 4)
    assert chosen() == (None, None)


def test_what_the_program_names_counts_more_than_the_environment(fresh):
    fresh.setenv("RLINF_INTERFACE", "no such thing")
    _bind_interface("lo", 4)
    assert chosen() == ("lo", "lo")


def test_the_environment_counts_more_than_what_is_guessed(fresh):
    name, _ = another_interface()
    fresh.setenv("RLINF_INTERFACE", name)
    fresh.setenv("LOCAL_WORLD_SIZE", "4")
    _bind_interface(None, 4)
    assert chosen() == (name, name)


def test_an_interface_that_is_not_there_is_an_error_that_names_those_that_are(fresh):
    with pytest.raises(UserError, match=r"no network interface 'eth9'; it has .*lo"):
        _bind_interface("eth9", 4)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_ranks_that_meet_on_the_loopback_are_on_one_machine(fresh, address):
    fresh.setenv("MASTER_ADDR", address)
    _bind_interface(None, 4)
    assert chosen() == ("lo", "lo")


def test_a_gloo_interface_that_was_chosen_already_is_kept(fresh):
    fresh.setenv("GLOO_SOCKET_IFNAME", "ib0")
    fresh.setenv("LOCAL_WORLD_SIZE", "4")
    _bind_interface(None, 4)
    assert chosen() == ("lo", "ib0")


def test_processes_that_do_not_meet_are_told_in_one_line(fresh):
    def fails(rank, world):
        raise RuntimeError("connect() timed out\nException raised from somewhere (most recent call first):\n...")

    fresh.setattr("rlinf.runtime.transport.torch_rpc.RpcTransport", fails)
    fresh.setenv("MASTER_ADDR", "10.0.0.1")
    fresh.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError) as told:
        _join(1, 4)
    assert str(told.value) == (
        "rank 1 of 4 could not join the others, who meet at 10.0.0.1:29500: connect() timed out. Do all of them run, "
        "and can they reach each other by the interface of RLINF_INTERFACE?"
    )


def test_a_job_of_one_rank_listens_nowhere(zygote):
    ranks = zygote.run("drills.py", 1, "unawaited")
    ranks.await_line("ready")
    until(lambda: ranks.printed(0) == "ready\n", "the rank to run")
    assert listening(ranks.pids) == set()
