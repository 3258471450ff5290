"""What every transport must do, said once: `NAME(here)` runs on host 0 against a peer on host 1 that obeys messages.

As a program it is one rank of a torch RPC mesh: `transport_behaviours.py NAME...`.
"""

import asyncio
import os
import sys

import torch

from rlinf.runtime.transport.lane import LaneTransport, lanes_over
from rlinf.runtime.transport.link import CAST, REPLY, Link

DEADLINE = 20.0


class End:
    """One end of a lane: a receiver that obeys commands and remembers what it was told."""

    def __init__(self, transport):
        self.transport = transport
        self.peer = 1 - transport.host
        self.got = []
        self.frames = []
        self.losses = []
        self.gone = False
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.link = Link(self.peer, transport, self)

    def post(self, message):
        """Send what was said; a payload as the runtime sends one."""
        *words, last = message
        self.link.post((REPLY, 0, words, last) if isinstance(last, tuple) else (CAST, message))

    def bind(self):
        self.transport.bind(self)
        return self

    def receive(self, source, frame, respond):
        assert source == self.peer
        self.frames.append(len(frame[1]))
        self.link.receive(frame, respond)

    def lost(self, host, reason):
        self.losses.append((host, reason))
        self.link.kill()
        self.changed.set()

    def leaves_unawaited(self, message):
        raise AssertionError(message)

    def deliver(self, link, message):
        message = message[1] if message[0] == CAST else (*message[2], message[3])
        what, *rest = message
        if what == "echo":
            self.post(("echoed", *rest))
        elif what == "echo later":
            asyncio.get_running_loop().call_later(0.02, self.post, ("echoed", *rest))
        elif what == "tell":
            self.post(("told", list(self.got), list(self.frames)))
        elif what == "break":
            raise ValueError("this message cannot be delivered")
        elif what == "forget":
            self.got.clear()
            self.frames.clear()
            self.post(("forgotten",))
        elif what == "leave":
            self.leaving = asyncio.ensure_future(self.leave(*rest))
        else:
            self.got.append(message)
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ask(self, *message):
        """Send a message and wait for the next thing that arrives."""
        before = len(self.got)
        self.post(message)
        await self.until(lambda: len(self.got) > before)
        return self.got[before]

    async def forget(self):
        """Begin anew at both ends."""
        await self.ask("forget")
        self.got.clear()
        self.frames.clear()

    async def leave(self, graceful):
        await self.link.drained()
        await self.transport.close(graceful)
        self.gone = True
        self.changed.set()


async def messages_arrive_in_the_order_in_which_they_were_posted(here):
    for number in range(2000):
        here.post(("item", number))
        here.post(("echo", number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    await here.until(lambda: len(here.got) == 2000)
    assert here.got == [("echoed", number) for number in range(2000)]
    _, got, _ = await here.ask("tell")
    assert got == [("item", number) for number in range(2000)]


async def all_messages_of_a_tick_leave_in_one_frame(here):
    for number in range(50):
        here.post(("item", number))
    _, got, frames = await here.ask("tell")
    assert len(got) == 50
    assert frames in ([51], [50, 1])  # `ask` posts in the same tick or the next


async def what_is_said_while_a_frame_is_delivered_rides_on_its_response(here):
    assert await here.ask("echo", 1) == ("echoed", 1)
    assert here.frames == []  # nothing came but responses
    assert await here.ask("echo later", 2) == ("echoed", 2)
    assert here.frames == [1]


async def both_sides_may_speak_at_once(here):
    here.post(("echo later", "theirs"))
    for number in range(500):
        here.post(("echo", number))
        await asyncio.sleep(0.0002)
    await here.until(lambda: len(here.got) == 501)
    assert [message[1] for message in here.got if message[1] != "theirs"] == list(range(500))


async def tensors_arrive_as_they_were(here):
    sent = [torch.arange(100_000), torch.randn(3, 5), torch.zeros(0)]
    payload = (b"blob", (), tuple(sent))
    _, (blob, refs, parts) = await here.ask("echo", payload)
    assert (blob, refs) == (b"blob", ())
    assert all(torch.equal(back, tensor) for back, tensor in zip(parts, sent, strict=True))


async def a_message_that_cannot_be_delivered_does_not_take_others_along(here):
    for message in [("item", 1), ("break",), ("item", 2)]:
        here.post(message)
    assert (await here.ask("tell"))[1] == [("item", 1), ("item", 2)]


async def drained_means_delivered(here):
    for number in range(100):
        here.post(("item", number))
    await here.link.drained()
    assert len((await here.ask("tell"))[1]) == 100


async def a_peer_that_drops_out_is_noticed_though_nothing_is_in_flight(here):
    here.transport.watch(here.peer)
    assert await here.ask("echo", 1) == ("echoed", 1)
    here.post(("leave", False))
    await here.until(lambda: here.losses)
    assert [host for host, _ in here.losses] == [here.peer]
    assert here.losses[0][1]


async def a_peer_that_leaves_in_order_is_not_lost(here):
    here.transport.watch(here.peer)
    assert await here.ask("echo", 1) == ("echoed", 1)
    here.post(("leave", True))
    await here.link.drained()
    await here.transport.close(True)
    assert here.losses == []


async def sending_to_a_peer_that_is_gone_tells_so_and_waits_for_nothing(here):
    assert await here.ask("echo", 1) == ("echoed", 1)
    here.post(("leave", False))
    await here.link.drained()
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while not here.losses and asyncio.get_running_loop().time() < deadline:
        here.post(("item", 2))
        await asyncio.sleep(0.01)
    assert here.losses
    here.post(("item", 3))
    await asyncio.wait_for(here.link.drained(), DEADLINE)


async def a_peer_may_speak_before_this_host_listens(here):
    """The peer has sent `early` messages before `here` was bound (see `run_local` and the end of this file)."""
    await here.until(lambda: len(here.got) >= 10)
    assert here.got == [("early", number) for number in range(10)]


EARLY = a_peer_may_speak_before_this_host_listens
LASTING = [
    messages_arrive_in_the_order_in_which_they_were_posted,
    all_messages_of_a_tick_leave_in_one_frame,
    what_is_said_while_a_frame_is_delivered_rides_on_its_response,
    both_sides_may_speak_at_once,
    tensors_arrive_as_they_were,
    a_message_that_cannot_be_delivered_does_not_take_others_along,
    drained_means_delivered,
]
"""Both ends are there after these, so that several may follow each other."""
ENDING = [
    a_peer_that_drops_out_is_noticed_though_nothing_is_in_flight,
    a_peer_that_leaves_in_order_is_not_lost,
    sending_to_a_peer_that_is_gone_tells_so_and_waits_for_nothing,
    EARLY,
]


def speak_early(there):
    for number in range(10):
        there.post(("early", number))


async def run_local(behaviour, open_transports):
    """Run a behaviour with both ends in this loop."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of the message that breaks
    first, second = open_transports()
    here, there = End(first), End(second).bind()
    if behaviour is EARLY:
        speak_early(there)
        for _ in range(5):
            await asyncio.sleep(0)
    await behaviour(here.bind())
    await second.close(False)
    await first.close(False)


async def neighbours(end):
    """Both ends are on one machine: wait until the lane between them is made, if there is to be one. It may be over
    already, if the other end is much quicker."""
    if not isinstance(end.transport, LaneTransport):
        return
    async with asyncio.timeout(DEADLINE):
        while end.peer == 0 and await end.transport._inner.ask_offer(0) is None:  # it does not listen yet
            await asyncio.sleep(0.001)
        end.transport.neighbours([end.peer])
        while end.peer not in end.transport._lanes and not end.losses and not end.gone:
            await asyncio.sleep(0.001)


async def run_rank(first, *others):
    """Run one end of behaviours, one after the other, over torch RPC or the lane beside it."""
    from rlinf.runtime.transport.torch_rpc import RpcTransport

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    rank = int(os.environ["RANK"])
    end = End(lanes_over(RpcTransport(rank, 2)))
    if rank == 0:
        if first is EARLY:  # the peer says when it has spoken; only the kernel and torch have heard it so far
            read_end = os.open(os.environ["SPOKEN"], os.O_RDONLY)
            os.read(read_end, 1)
        end.bind()
        if first is not EARLY:
            await neighbours(end)
        await first(end)
        for behaviour in others:
            await end.forget()
            await behaviour(end)
        await end.transport.close(False)
    else:
        end.bind()
        if first is not EARLY:
            await neighbours(end)
        if first is EARLY:
            speak_early(end)
            await asyncio.sleep(0.1)
            os.write(os.open(os.environ["SPOKEN"], os.O_WRONLY), b"!")
        end.transport.watch(0)
        await end.until(lambda: end.losses or end.gone)
        if not end.gone:
            await end.transport.close(False)


if __name__ == "__main__":
    import uvloop

    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    uvloop.run(run_rank(*(globals()[name] for name in sys.argv[1:])))
