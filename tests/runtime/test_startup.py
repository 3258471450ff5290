"""Where a job listens while it runs, and what it sets before it starts."""

from __future__ import annotations

import os
import re
import socket

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.torchrun import _join
from rlinf.runtime.transport import network
from rlinf.runtime.transport.network import addresses, bind_interface, job_store
from tests.runtime.programs.jobs import listening, until

LISTENERS = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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


def test_an_interface_that_was_named_is_used(zygote):
    name, address = another_interface()
    ranks = zygote.run("drills.py", 2, "unawaited", RLINF_INTERFACE=name)
    ranks.await_line("ready")
    assert {where for where, _ in rpc_listeners(ranks)} == {address}


def another_interface():
    """Name and IPv4 address, as /proc writes it, of an interface that is not the loopback."""
    for name, address in addresses():
        if ":" not in address and not address.startswith("127."):
            return name, socket.inet_aton(address)[::-1].hex().upper()
    pytest.skip("this machine has no network interface but the loopback")


@pytest.fixture
def fresh(monkeypatch):
    for name in ("RLINF_INTERFACE", *LISTENERS, "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is set
        monkeypatch.delenv(name)
    return monkeypatch


def chosen():
    return tuple(os.environ.get(name) for name in LISTENERS)


def everywhere(name):
    return name, name, f"={name}"


def several_machines(fresh, master):
    fresh.setenv("LOCAL_WORLD_SIZE", "2")
    fresh.setenv("MASTER_ADDR", master)


def test_the_master_of_several_machines_listens_where_it_has_that_address(fresh):
    name, address = another_interface()
    several_machines(fresh, socket.inet_ntoa(bytes.fromhex(address)[::-1]))
    bind_interface(None, 4)
    assert chosen() == everywhere(name)


def test_the_route_to_the_master_decides_among_several_machines(fresh, monkeypatch):
    several_machines(fresh, "10.1.2.3")
    monkeypatch.setattr(network, "addresses", lambda: [("lo", "127.0.0.1"), ("out", "1.2.3.4"), ("in", "10.1.0.1")])
    monkeypatch.setattr(network, "_source_towards", {"10.1.2.3": "10.1.0.1"}.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "out"), (3, "in")])
    bind_interface(None, 4)
    assert chosen() == everywhere("in")


def test_a_master_whose_name_stands_for_the_loopback_there_takes_its_only_way_out(fresh, monkeypatch):
    several_machines(fresh, "head")
    monkeypatch.setattr(network, "addresses", lambda: [("lo", "127.0.0.1"), ("lo", "::1"), ("lan", "10.1.0.1")])
    monkeypatch.setattr(network, "_source_towards", {"head": "127.0.0.1"}.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "lan")])
    bind_interface(None, 4)
    assert chosen() == everywhere("lan")


def test_several_machines_do_not_start_when_two_ways_out_are_equally_likely(fresh, monkeypatch):
    several_machines(fresh, "head")
    monkeypatch.setattr(network, "addresses", lambda: [("lo", "127.0.0.1"), ("a", "10.1.0.1"), ("b", "9.9.9.9")])
    monkeypatch.setattr(network, "_source_towards", {"head": "127.0.0.1"}.__getitem__)
    with pytest.raises(UserError, match=r"MASTER_ADDR 'head'.*RLINF_INTERFACE.*:.*\(10.1.0.1\), b \(9.9.9.9\)$"):
        bind_interface(None, 4)
    assert chosen() == (None, None, None)


@pytest.mark.parametrize("master", ["", "no-such-machine.invalid"])
def test_several_machines_do_not_start_where_no_interface_can_be_found(fresh, master):
    several_machines(fresh, master)
    with pytest.raises(UserError, match="Set RLINF_INTERFACE"):
        bind_interface(None, 4)
    assert chosen() == (None, None, None)


def test_interfaces_that_the_user_set_for_each_library_are_kept_on_several_machines(fresh):
    several_machines(fresh, "no-such-machine.invalid")
    for name, value in zip(LISTENERS, ("lo", "ib0", "ib1"), strict=True):
        fresh.setenv(name, value)
    bind_interface(None, 4)
    assert chosen() == ("lo", "ib0", "ib1")


def test_what_the_program_names_counts_more_than_the_environment(fresh):
    fresh.setenv("RLINF_INTERFACE", "no such thing")
    bind_interface("lo", 4)
    assert chosen() == everywhere("lo")


def test_the_environment_counts_more_than_what_is_guessed(fresh):
    name, _ = another_interface()
    fresh.setenv("RLINF_INTERFACE", name)
    fresh.setenv("LOCAL_WORLD_SIZE", "4")
    bind_interface(None, 4)
    assert chosen() == everywhere(name)


def test_an_interface_that_is_not_there_is_an_error_that_names_those_that_are(fresh):
    with pytest.raises(UserError, match=r"network interface 'eth9'"):
        bind_interface("eth9", 4)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1"])
def test_ranks_that_meet_on_the_loopback_are_on_one_machine(fresh, address):
    fresh.setenv("MASTER_ADDR", address)
    bind_interface(None, 4)
    assert chosen() == everywhere("lo")


def test_a_gloo_interface_that_was_chosen_already_is_kept(fresh):
    fresh.setenv("GLOO_SOCKET_IFNAME", "ib0")
    fresh.setenv("LOCAL_WORLD_SIZE", "4")
    bind_interface(None, 4)
    assert chosen() == ("lo", "ib0", "=lo")


def test_processes_that_do_not_meet_are_told_in_one_line(fresh):
    def fails(rank, world):
        raise RuntimeError("connect() timed out\nException raised from somewhere (most recent call first):\n...")

    fresh.setattr("rlinf.runtime.transport.torch_rpc.RpcTransport", fails)
    fresh.setenv("MASTER_ADDR", "10.0.0.1")
    fresh.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError) as told:
        _join(1, 4)
    (line,) = str(told.value).splitlines()
    assert re.search(r"rank 1 of 4 .* 10\.0\.0\.1:29500: connect\(\) timed out\. .*RLINF_INTERFACE", line)


def test_a_job_of_one_rank_listens_nowhere(zygote):
    ranks = zygote.run("drills.py", 1, "unawaited")
    ranks.await_line("ready")
    until(lambda: ranks.printed(0) == "ready\n", "the rank to run")
    assert listening(ranks.pids) == set()


@pytest.mark.parametrize(("kept", "met"), [("False", True), ("True", False)])
def test_machines_that_count_restarts_differently_meet_unless_the_store_holds_earlier_starts(monkeypatch, kept, met):
    shared = HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(shared, 0, 1)]))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        job_store().set(f"here/{count}", "")
    assert job_store().check(["here/0"]) is met


@pytest.mark.parametrize(
    ("mode", "machines", "own"),
    [(0o700, 1, True), (0o700, 2, False), (0o750, 1, False), (0o701, 1, False), (None, 1, False)],
)
def test_on_one_machine_processes_meet_where_no_other_user_can_write(monkeypatch, tmp_path, mode, machines, own):
    torchruns, start = HashStore(), tmp_path / "job" / "attempt_0"
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(torchruns, 0, 1)]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", str(2 * machines))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    if mode is not None:
        start.mkdir(parents=True)
        start.parent.chmod(mode)
    torchruns.set("start/only/here", "a stranger")
    for port, local in (("1", 0), ("1", 1), ("2", 0)):
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(start / str(local) / "error.json"))
        met = job_store().add(f"met/{port}", 1)
        assert job_store().check(["here"]) is not own
        assert met == (2 if local else 1)
    assert job_store().check(["met/1"]) is not own, "it is another job's"
