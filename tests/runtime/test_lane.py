"""Lanes: who may make one, what happens where none can be made, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest
import uvloop

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.transport import lane
from rlinf.runtime.transport.lane import LaneTransport, lanes_over
from rlinf.runtime.transport.link import CAST


class Joined:
    """Stands in for torch RPC between hosts of one process: notes what goes by it."""

    def __init__(self, host, network):
        self.host, self.hosts = host, 3
        self.network = network
        network[host] = self
        self.offer = None
        self.sent = []
        self.receiver = None

    def bind(self, receiver):
        self.receiver = receiver

    def send(self, host, frame, answered):
        self.sent.append(frame)
        self.network[host].receiver.receive(self.host, frame, answered)

    def watch(self, host):
        pass

    def neighbours(self, hosts):
        pass

    async def ask_offer(self, host):
        await asyncio.sleep(0)
        return self.network[host].offer

    async def close(self, graceful):
        self.receiver = None


class End:
    """A receiver that answers every frame with its own words, or with what it was told to say."""

    def __init__(self, host, network):
        self.inner = Joined(host, network)
        self.transport = LaneTransport(self.inner)
        self.got = []
        self.losses = []
        self.transport.bind(self)

    def receive(self, source, frame, respond):
        self.got.append((source, frame))
        respond((frame[0], [(CAST, "answer", *frame[1])]))

    def lost(self, host, reason):
        self.losses.append((host, reason))

    async def say(self, host, *messages, sequence=0):
        answer = asyncio.get_running_loop().create_future()
        self.transport.send(host, (sequence, [(CAST, *message) for message in messages]), answer.set_result)
        return await asyncio.wait_for(answer, 60)

    async def on_lane_with(self, *others):
        async with asyncio.timeout(60):
            while not all(other.inner.host in self.transport._lanes for other in others):
                await asyncio.sleep(0.001)


async def three(**more):
    network = {}
    ends = [End(host, network) for host in range(3)]
    for end in ends:
        end.transport.neighbours([other.inner.host for other in ends if other is not end])
    return ends


async def closed(*ends):
    for end in ends:
        await end.transport.close(False)


def on_each_loop(test):
    """Run an `async def` test on uvloop, which hosts use, and on asyncio's own loop."""

    def run(new_loop, **fixtures):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**fixtures))

    own = list(inspect.signature(test).parameters.values())
    loop = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*own, loop])
    run.__name__ = test.__name__
    loops = [uvloop.new_event_loop, asyncio.new_event_loop]
    return pytest.mark.parametrize("new_loop", loops, ids=["uvloop", "asyncio"])(run)


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path_factory, monkeypatch):
    short = tempfile.mkdtemp(prefix="t")  # a socket's path must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    yield
    assert os.listdir(short) == [], "a lane left something behind"
    os.rmdir(short)


@on_each_loop
async def test_frames_go_by_lanes_once_they_are_made_and_nothing_is_left_in_the_file_system():
    ends = await three()
    for end in ends:
        await end.on_lane_with(*(other for other in ends if other is not end))
    assert os.listdir(os.environ["XDG_RUNTIME_DIR"]) == []  # while they are in use
    for end in ends:
        for other in ends:
            if other is not end:
                answer = await end.say(other.inner.host, ("hello", end.inner.host))
                assert answer[1] == [(CAST, "answer", (CAST, "hello", end.inner.host))]
        assert end.inner.sent == []
    await closed(*ends)


async def test_before_a_lane_is_made_and_where_a_peer_makes_none_torch_rpc_carries_the_frames():
    network = {}
    here, there = End(0, network), End(1, network)
    assert (await there.say(0, ("early",)))[1] == [(CAST, "answer", (CAST, "early"))]
    here.inner.offer = None  # as of a peer whose RLINF_TRANSPORT is rpc
    there.transport.neighbours([0])
    await asyncio.sleep(0.05)
    assert (await there.say(0, ("late",)))[1] == [(CAST, "answer", (CAST, "late"))]
    assert len(there.inner.sent) == 2
    await closed(here, there)


async def test_a_directory_that_cannot_be_made_means_no_lane(monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError("disk full")))
    network = {}
    here, there = End(0, network), End(1, network)
    here.transport.neighbours([1])
    there.transport.neighbours([0])
    assert (await there.say(0, ("hello",)))[1] == [
        (
            CAST,
            "answer",
            (
                CAST,
                "hello",
            ),
        )
    ]
    await closed(here, there)


async def test_only_this_user_can_reach_the_socket():
    network = {}
    here = End(0, network)
    path, token = here.inner.offer
    mode = stat.S_IMODE(Path(path).parent.stat().st_mode)
    assert mode == 0o700
    assert len(token) == 32
    await closed(here)


STRANGE = {
    "nothing": b"",
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10,
    "half a head": b"\x20\0\0",
    "a wrong token": lane._HEAD.pack(32, lane._HELLO, 1) + b"x" * 32,
    "a frame before any token": lane._HEAD.pack(5, lane._FRAME, 0) + b"cos\n.",
    "a promise of very much": lane._HEAD.pack(1 << 40, lane._HELLO, 1),
    "a welcome": lane._HEAD.pack(0, lane._WELCOME, 1),
}


async def test_strangers_cost_nothing_and_are_not_heard(monkeypatch):
    monkeypatch.setattr(lane, "HELLO_SECONDS", 0.5)
    network = {}
    here, there = End(0, network), End(1, network)
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()

    async def stranger(says):
        with socket.socket(socket.AF_UNIX) as own:
            own.setblocking(False)
            await loop.sock_connect(own, here.inner.offer[0])
            await loop.sock_sendall(own, says)
            return await asyncio.wait_for(loop.sock_recv(own, 100), 60)  # put off at once, or after its time

    answers = await asyncio.gather(*map(stranger, STRANGE.values()))
    assert dict(zip(STRANGE, answers, strict=True)) == dict.fromkeys(STRANGE, b"")
    assert (here.got, here.losses) == ([], [])
    here.transport.neighbours([1])
    there.transport.neighbours([0])
    await there.on_lane_with(here)
    assert (await there.say(0, ("hello",)))[1] == [
        (
            CAST,
            "answer",
            (
                CAST,
                "hello",
            ),
        )
    ]
    await closed(here, there)


@on_each_loop
async def test_a_welcome_read_late_for_imports_on_a_busy_machine_still_makes_the_lane(monkeypatch):
    monkeypatch.setattr(lane, "HELLO_SECONDS", 0.05)
    network = {}
    here, there = End(0, network), End(1, network)
    made = here.transport.made

    def made_and_then_busy(its_end):
        made(its_end)
        time.sleep(0.1)

    here.transport.made = made_and_then_busy
    here.transport.neighbours([1])
    there.transport.neighbours([0])
    await there.on_lane_with(here)
    assert (await there.say(0, ("hello",)))[1] == [(CAST, "answer", (CAST, "hello"))]
    assert (here.losses, there.inner.sent) == ([], [])
    await closed(here, there)


@on_each_loop
async def test_the_end_of_a_lane_without_a_farewell_is_the_peers_death_and_with_one_it_is_not():
    ends = await three()
    here, dying, leaving = ends
    await here.on_lane_with(dying, leaving)
    await dying.on_lane_with(here)
    await dying.transport.close(False)
    async with asyncio.timeout(60):
        while not here.losses:
            await asyncio.sleep(0.001)
    assert [host for host, _ in here.losses] == [1]
    await leaving.transport.close(True)
    async with asyncio.timeout(60):
        while 2 in here.transport._lanes:
            await asyncio.sleep(0.001)
    assert [host for host, _ in here.losses] == [1]
    await closed(here)


@on_each_loop
async def test_large_frames_and_many_at_once_arrive_whole():
    network = {}
    here, there = End(0, network), End(1, network)
    here.transport.neighbours([1])
    there.transport.neighbours([0])
    await there.on_lane_with(here)
    big = os.urandom(5_000_000)
    said = [there.say(0, (number, big[: number * 300_000]), sequence=number) for number in range(12)]
    answers = await asyncio.gather(*said)
    assert [answer[1] for answer in answers] == [
        [(CAST, "answer", (CAST, number, big[: number * 300_000]))] for number in range(12)
    ]
    await closed(here, there)


async def test_a_frame_that_is_too_large_for_a_lane_goes_by_torch_rpc(monkeypatch):
    network = {}
    here, there = End(0, network), End(1, network)
    here.transport.neighbours([1])
    there.transport.neighbours([0])
    await there.on_lane_with(here)
    monkeypatch.setattr(lane, "LARGEST", 1000)
    await there.say(0, ("small",))
    await there.say(0, ("x" * 2000,))
    assert len(there.inner.sent) == 1
    await closed(here, there)


def test_an_unknown_transport_is_one_message(monkeypatch):
    monkeypatch.setenv("RLINF_TRANSPORT", "smoke")
    with pytest.raises(UserError, match=r"RLINF_TRANSPORT.*'smoke'.*default\)"):
        lanes_over(Joined(0, {}))


def test_rpc_alone_when_asked_for(monkeypatch):
    monkeypatch.setenv("RLINF_TRANSPORT", "rpc")
    inner = Joined(0, {})
    assert lanes_over(inner) is inner
