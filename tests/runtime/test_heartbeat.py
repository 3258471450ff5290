"""Hosts that fall silent count as lost after a while, and no others do."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.transport.network import BEATS, Heartbeat

TIMEOUT = 60.0
BEAT = TIMEOUT / BEATS


class World:
    """Hosts that answer as they are told, seen from one that asks."""

    def __init__(self, hosts, delay=0.01):
        self.loop = asyncio.get_running_loop()
        self.alive = set(hosts)
        self.delay = delay
        self.asked = []
        self.held = []
        self.lost = {}
        self.unanswered = dict.fromkeys(hosts, 0)
        self.most_unanswered = 0
        self.late = 0.0
        wanted = lambda: set(hosts) - self.lost.keys()  # noqa: E731
        self.heartbeat = Heartbeat(TIMEOUT, wanted, self.probe, self.on_lost, lambda: self.loop.time() + self.late)
        self.running = asyncio.ensure_future(self.heartbeat.run())

    def probe(self, host, answered):
        self.asked.append((host, self.loop.time()))
        self.unanswered[host] += 1
        self.most_unanswered = max(self.most_unanswered, self.unanswered[host])
        self.loop.call_later(self.delay, self.answer, host, answered)

    def answer(self, host, answered):
        if host in self.alive:
            self.unanswered[host] -= 1
            answered()
        else:
            self.held.append(partial(self.answer, host, answered))

    def wake(self, host):
        self.alive.add(host)
        held, self.held = self.held, []
        for answer in held:
            answer()

    def on_lost(self, host, reason):
        assert host not in self.lost
        self.lost[host] = (self.loop.time(), reason)

    async def end(self):
        self.running.cancel()
        await asyncio.wait({self.running})


def test_hosts_that_answer_are_asked_once_a_beat_and_never_lost():
    async def main():
        world = World([1, 2, 3])
        await asyncio.sleep(10 * TIMEOUT)
        await world.end()
        assert world.lost == {}
        assert len(world.asked) == pytest.approx(3 * 10 * BEATS, rel=0.01)

    run_virtual(main())


def test_a_silent_host_is_lost_after_the_timeout_and_named_with_the_time_of_its_silence():
    async def main():
        world = World([1, 2])
        await asyncio.sleep(100.0)
        before = time.time() - TIMEOUT - 1
        world.alive.discard(2)
        await asyncio.sleep(TIMEOUT + BEAT + 0.1)
        await world.end()
        assert list(world.lost) == [2]
        at, reason = world.lost[2]
        assert TIMEOUT <= at - 100.0 <= TIMEOUT + BEAT
        since = time.strptime(reason.partition(" since ")[2].partition(",")[0], "%H:%M:%S")
        assert (since.tm_min * 60 + since.tm_sec - before % 3600) % 3600 < 5
        assert reason.endswith("for 60 s (host_timeout)")

    run_virtual(main())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 200.0), st.floats(0.1, 100.0)), min_size=1, max_size=6), st.floats(0.001, 20.0)
)
def test_only_silence_of_the_whole_timeout_loses_a_host_and_it_always_does(pauses, delay):
    async def main():
        world = World([1], delay)
        for awake, asleep in pauses:
            await asyncio.sleep(awake)
            world.alive.discard(1)
            begun = world.loop.time()
            await asyncio.sleep(asleep)
            world.wake(1)
            await asyncio.sleep(delay)  # for what was asked while it slept, and for what came at this very moment
            if 1 in world.lost:
                assert world.lost[1][0] - begun >= TIMEOUT - delay - 1e-3
                break
            assert asleep <= TIMEOUT + BEAT + delay, "it should have been noticed"
        await world.end()
        assert world.most_unanswered == 1

    run_virtual(main())


def test_time_in_which_this_process_did_not_run_is_nobody_s_silence():
    async def main():
        world = World([1], delay=(BEATS + 0.5) * BEAT)  # the first answer comes after the last beat but this one
        await asyncio.sleep(5.5 * BEAT)
        world.late += 1000.0  # the clock went on, we did not
        await asyncio.sleep(BEATS * BEAT)
        assert world.lost == {}
        await asyncio.sleep(TIMEOUT + 2 * BEAT)
        assert list(world.lost) == [1]
        await world.end()

    run_virtual(main())


def test_a_thousand_hosts_are_asked_without_keeping_the_loop():
    async def main():
        world = World(range(1000))
        turns = 0
        first = asyncio.get_running_loop().create_future()
        world.loop.call_soon(first.set_result, None)
        while len(world.asked) < 1000:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 50
        await world.end()

    run_virtual(main())
