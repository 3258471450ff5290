"""What strangers who find a port can do to a job, and whom a filter lets in."""

from __future__ import annotations

import socket

import pytest

from rlinf.runtime.transport.network import MANY, admit, noticing
from tests.runtime.programs.jobs import free_port, listening
from tests.runtime.programs.strangers import bother


@pytest.mark.torchrun
def test_whoever_sends_garbage_half_a_frame_or_nothing_to_any_port_costs_the_job_nothing(zygote, tmp_path):
    ranks = zygote.run("besieged.py", 3, tmp_path / "go on")
    ranks.await_line("ready")
    ports = {port for _, port in listening(ranks.pids)}
    assert len(ports) >= 4, "three of RPC and one store: is this looking at the right processes?"
    staying = [bother("127.0.0.1", port) for port in ports]
    (tmp_path / "go on").touch()
    assert ranks.codes() == [0, 0, 0], ranks.everything()
    assert "unharmed" in ranks.printed(0)
    assert any(staying), "nobody got in anywhere, not even to the store: were they at the right ports?"


@pytest.fixture
def door():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def enters(door, source="127.0.0.1"):
    """Whether somebody from this address gets a connection."""
    with socket.socket() as guest:
        guest.settimeout(0.2)
        guest.bind((source, 0))
        try:
            guest.connect(door.getsockname())
        except TimeoutError:
            return False
        return True


def test_a_filter_lets_in_its_guests_and_nobody_else(door):
    admit(door, ["127.0.0.2", "127.0.0.4"])
    sources = [f"127.0.0.{last}" for last in range(1, 6)]
    assert [enters(door, source) for source in sources] == [False, True, False, True, False]


def test_connections_that_exist_go_on_when_nobody_is_let_in_any_more(door):
    with socket.create_connection(door.getsockname()) as guest:
        inside, _ = door.accept()
        admit(door, [])
        assert not enters(door)
        for speaker, listener in ((guest, inside), (inside, guest)):
            speaker.sendall(b"still here")
            assert listener.recv(100) == b"still here"
        inside.close()


def test_more_machines_than_a_filter_holds_are_let_in_as_one_range(door):
    for machines in (MANY, MANY + 1, 20_000):
        admit(door, [socket.inet_ntoa((0x7F000102 + number).to_bytes(4, "big")) for number in range(machines)])
        assert [enters(door, source) for source in ("127.0.1.1", "127.0.1.2", "127.0.2.1")] == [False, True, True]


def test_only_sockets_that_began_to_listen_on_one_address_meanwhile_are_noticed(door):
    with noticing() as opened, socket.create_server(("127.0.0.1", free_port())) as new, socket.create_server(("", 0)):
        pass
    assert opened == []  # they are closed again
    with noticing() as opened:
        new = socket.create_server(("127.0.0.1", 0))
        everywhere = socket.create_server(("", 0))
    assert [found.getsockname() for found in opened] == [new.getsockname()]
    for listener in (new, everywhere, *opened):
        listener.close()
