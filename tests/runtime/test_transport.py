"""Transports deliver frames in order, batch what is said in a tick, and notice peers that go; all of them alike."""

from __future__ import annotations

import asyncio
import os
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.transport import torch_rpc
from rlinf.runtime.transport.link import (
    CALL,
    CAST,
    FLAGS,
    FRAMES_IN_FLIGHT,
    REPLIES,
    WANT,
    Link,
    LocalTransport,
    check_hosts,
    pack,
    unpack,
)
from tests.runtime.programs.transport_behaviours import EARLY, ENDING, LASTING, run_local


def name(behaviour):
    return behaviour.__name__


def in_one_process(copy=None):
    network = {}
    return lambda: (LocalTransport(0, network, copy), LocalTransport(1, network, copy))


@pytest.mark.parametrize("copy", [None, lambda frame: unpack(*pack(frame))], ids=["reference", "pickled"])
@pytest.mark.parametrize("behaviour", [*LASTING, *ENDING], ids=name)
def test_in_process(behaviour, copy):
    asyncio.run(run_local(behaviour, in_one_process(copy)))


@pytest.mark.parametrize("way", ["rpc", "lane"])
@pytest.mark.parametrize("behaviours", [LASTING, *([each] for each in ENDING)], ids=lambda names: name(names[0]))
def test_between_processes(behaviours, way, zygote, tmp_path):
    more = {"RLINF_TRANSPORT": way}
    if EARLY in behaviours:
        os.mkfifo(tmp_path / "spoken")
        more["SPOKEN"] = tmp_path / "spoken"
    ranks = zygote.run("transport_behaviours.py", 2, *map(name, behaviours), **more)
    assert ranks.codes() == [0, 0], ranks.everything()
    assert ranks.complained(0) == ""


# The lane itself, over a transport that does what it is told ------------------------------------------------------


class Scripted:
    """Keeps frames until the test hands them over."""

    host, hosts = 0, 2

    def __init__(self):
        self.sent = []

    def send(self, host, frame, answered):
        self.sent.append((frame, answered))


def lane(delivered=None):
    transport = Scripted()
    return Link(1, transport, Listener(delivered)), transport


class Listener:
    """A host as a link sees it."""

    def __init__(self, delivered=None):
        self.loop = asyncio.get_running_loop()
        self.delivered = [] if delivered is None else delivered
        self.unawaited = []

    def deliver(self, link, message):
        self.delivered.append(message)

    def leaves_unawaited(self, message):
        self.unawaited.append(message[1])


@given(order=st.permutations(range(6)), sizes=st.lists(st.integers(0, 3), min_size=6, max_size=6))
@settings(max_examples=60, deadline=None)
def test_frames_that_overtake_each_other_are_delivered_in_order(order, sizes):
    async def main():
        frames = [(n, [(CAST, n, part) for part in range(size)]) for n, size in enumerate(sizes)]
        delivered, answered = [], []
        link, _ = lane(delivered)
        for number in order:
            link.receive(frames[number], lambda reply, number=number: answered.append(number))
            await asyncio.sleep(0)
            held = [n for n in order[: order.index(number) + 1] if n not in answered]
            assert all(any(m not in order[: order.index(number) + 1] for m in range(n)) for n in held)
        await asyncio.sleep(0)
        assert delivered == [message for frame in frames for message in frame[1]]
        assert sorted(answered) == list(range(6))

    run_virtual(main())


def test_while_frames_are_unanswered_what_is_posted_gathers_into_the_next():
    async def main():
        link, transport = lane()
        for number in range(20):
            link.post((CAST, number))
            await asyncio.sleep(0)
        assert [len(frame[1]) for frame, _ in transport.sent] == [1] * FRAMES_IN_FLIGHT
        transport.sent[0][1](None)
        assert [len(frame[1]) for frame, _ in transport.sent][FRAMES_IN_FLIGHT:] == [20 - FRAMES_IN_FLIGHT]
        assert [frame[0] for frame, _ in transport.sent] == list(range(FRAMES_IN_FLIGHT + 1))

    run_virtual(main())


def test_the_host_hears_of_calls_that_leave_before_anybody_awaits_them_and_flags_count_until_then():
    async def main():
        host, transport = Listener(), Scripted()
        link = Link(1, transport, host)
        awaited, other = [[CALL, number, 0, (), 0, "flow", None] for number in (7, 8)]
        link.post(awaited)
        link.post(other)
        awaited[FLAGS] = WANT
        assert not transport.sent
        await asyncio.sleep(0)
        assert transport.sent[0][0] == (0, [awaited, other])
        assert host.unawaited == [8]

    run_virtual(main())


def test_short_values_of_calls_share_a_message_as_long_as_nothing_comes_between():
    async def main():
        link, transport = lane()
        for number in range(4):
            link.reply(number, f"value {number}")
            if number == 1:
                link.post((CAST, "between"))
        await asyncio.sleep(0)
        first, second = (REPLIES, [0, 1], ["value 0", "value 1"]), (REPLIES, [2, 3], ["value 2", "value 3"])
        assert transport.sent[0][0] == (0, [first, (CAST, "between"), second])

    run_virtual(main())


def test_drained_waits_for_what_rides_on_a_response_too():
    async def main():
        link, transport = lane()
        responses = []
        link.post((CAST, "goodbye"))
        link.receive((0, [(CAST, "hello")]), responses.append)
        assert responses == [(0, [(CAST, "goodbye")])]
        draining = asyncio.ensure_future(link.drained())
        await asyncio.sleep(0)
        assert not draining.done()
        (frame, answered) = transport.sent[-1]
        assert frame[1] == []
        answered(None)
        await draining

    run_virtual(main())


def test_a_dead_lane_drops_everything_and_keeps_nobody_waiting():
    async def main():
        link, transport = lane()
        link.post((1,))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(link.drained())
        await asyncio.sleep(0)
        link.kill()
        await draining
        link.post((2,))
        await asyncio.sleep(0)
        assert len(transport.sent) == 1

    run_virtual(main())


def test_a_random_conversation_loses_and_repeats_nothing():
    async def main(seed):
        chance = random.Random(seed)
        got = {0: [], 1: []}
        links = {}

        class Shuffling:
            hosts = 2

            def __init__(self, host):
                self.host = host

            def send(self, host, frame, answered):
                asyncio.get_running_loop().call_later(chance.random(), self.arrive, host, frame, answered)

            def arrive(self, host, frame, answered):
                def respond(answer):
                    asyncio.get_running_loop().call_later(chance.random(), answered, answer)

                links[host].receive(frame, respond)

        for host in (0, 1):
            links[host] = Link(1 - host, Shuffling(host), Listener(got[host]))
        for number in range(300):
            links[chance.randrange(2)].post((CAST, number))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random())
        await asyncio.gather(*(link.drained() for link in links.values()))
        assert sorted(got[0] + got[1]) == [(CAST, number) for number in range(300)]
        assert got[0] == sorted(got[0])
        assert got[1] == sorted(got[1])

    for seed in range(20):
        run_virtual(main(seed))


def test_unknown_hosts_are_named_with_those_that_exist():
    assert check_hosts([0, 1], 2) is None
    assert re.search(r"host -1, 5: .* 0 to 1$", check_hosts([0, 5, -1], 2))
    assert re.search(r"host 1: .* 0 only$", check_hosts([1], 1))


@pytest.mark.parametrize("way", ["shm", "uv"])
@pytest.mark.parametrize("gpu", [False, True])
def test_no_channel_for_cuda_is_started(way, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("RLINF_RPC_TRANSPORT", way)
    options = torch_rpc._transport_options()
    torch_rpc.rpc.TensorPipeRpcBackendOptions(**options)  # refuses names that it does not know
    if gpu:
        assert options["_channels"][-1] == "basic"
        assert not [channel for channel in options["_channels"] if "cuda" in channel]
    assert options.get("_transports") == (["uv"] if way == "uv" else None)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)\nmore",
            "EOF: end of",
        ),
        ("connection reset by peer (this error originated at tensorpipe/a.cc:1)", "connection reset by peer: "),
        ("something else\nmore", "something else"),
    ],
)
def test_a_broken_connection_is_told_without_places_in_torch(reason, said):
    words = torch_rpc._described(reason)
    assert words.startswith(said)
    assert "tensorpipe" not in words
    assert "more" not in words
