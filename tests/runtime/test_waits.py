"""Nothing waits in silence: deadlocks and stalls are found, named and told; what makes progress is left alone."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlinf
from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.clock import Deadlock, run_virtual
from rlinf.runtime.base.errors import StallError
from rlinf.runtime.observe.perfetto import SMALL
from rlinf.runtime.observe.stalls import HostReport, Lock, Outside, Progress, Wait, find_cycles, render
from rlinf.runtime.system.host_service import Service
from rlinf.runtime.system.observer import report_host
from rlinf.runtime.system.system import reports
from tests.growth import in_one_pass


class Worker(Actor):
    async def setup(self, other: Any = None, channel: Any = None) -> None:
        self.other, self.channel = other, channel
        self.state = Lock(f"state of {self._cell.name}")

    @endpoint(device=True)
    async def work(self, seconds: float = 1.0) -> None:
        await asyncio.sleep(seconds)

    @endpoint(device=True)
    async def work_locked(self, lock: Any) -> None:
        await asyncio.sleep(1.0)
        async with lock:
            await asyncio.sleep(1.0)

    @endpoint(device=True)
    async def work_and_call(self) -> None:
        await asyncio.sleep(1.0)
        await asyncio.gather(self.other.work())  # unlike a plain await, it keeps the device meanwhile

    @endpoint
    async def wait_outside(self) -> None:
        with Outside("a licence: buy one"):
            await asyncio.get_running_loop().create_future()

    @endpoint
    async def take(self) -> Any:
        return await self.channel.get()

    @endpoint
    async def count(self, n: int) -> Any:
        async with self.state:
            for number in range(n):
                yield number

    @endpoint
    async def ask(self) -> None:
        async with self.state:
            pass

    @endpoint
    async def consume(self, numbers: Stream[int], producer: Any) -> int:
        total = 0
        async for number in numbers:
            total += number
            await producer.ask()
        return total

    @endpoint
    async def compute_often(self, times: int) -> None:
        for _ in range(times):
            await self.compute(time.sleep, 0.02)

    @endpoint
    async def compute_long(self, seconds: float) -> str:
        await self.compute(use_processor, seconds)
        return "computed"

    @endpoint
    async def wait_in_thread(self) -> None:
        await self.compute(threading.Event().wait, 60.0)

    @endpoint
    async def sleep_on(self, value: Any = None) -> Any:
        await asyncio.Event().wait()
        return value

    @endpoint
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    async def idle_for_ever(self) -> None:
        while True:
            await self.channel.get()


def use_processor(seconds: float) -> None:
    while time.thread_time() < seconds:
        pass


def deadlock(main: Any, hosts: int = 2, *, serialize: bool = False) -> str:
    """Run a program that must deadlock, in virtual time; returns what is said about it."""

    async def whole() -> None:
        async with ActorSystem.local(hosts, serialize=serialize) as system:
            await main(system)

    with pytest.raises(Deadlock) as caught:
        run_virtual(whole())
    return str(caught.value)


def cycles(report: str) -> list[str]:
    """The deadlocks that a report names, without the numbers of calls."""
    return [re.sub(r"#\d+\.\d+", "", line) for line in report.splitlines() if line.startswith("deadlock: ")]


def waits(report: str) -> set[tuple[str, str]]:
    """Who waits on what in a report, without the numbers of calls."""
    lines = re.findall(r"^  (.+?) waits on (.+?) for [0-9.]+ s", report, re.MULTILINE)
    return {(re.sub(r"#\d+\.\d+", "", who), re.sub(r"#\d+\.\d+", "", on)) for who, on in lines}


def silent(report: str) -> set[tuple[str, str]]:
    """What nobody does to which queue."""
    return set(re.findall(r"^nobody (fills|empties) (\S+), ", report, re.MULTILINE))


worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


# Deadlocks in virtual time ---------------------------------------------------------------------------------------


def test_what_is_to_come_from_outside_is_said_before_all_waits():
    async def main(system):
        a = await system.spawn(Worker, hosts=[0], name="a")
        await a[0].wait_outside()

    report = deadlock(main)
    first, second = "a[0].wait_outside waits for a licence: buy one", "waits, longest first"
    assert -1 < report.find(first) < report.find(second)


def test_a_lease_and_a_lock_in_opposite_order_are_named():
    async def main(system):
        a = await system.spawn(Worker, hosts=[0], name="a", devices=[0])
        b = await system.spawn(Worker, hosts=[0], name="b", devices=[0])
        lock = Lock("weights")
        first = asyncio.ensure_future(a[0].work_locked(lock))
        async with lock:
            await b[0].work()  # needs the device that a holds, while a waits for the lock that we hold
        await first

    (cycle,) = cycles(deadlock(main))
    assert set(cycle.removeprefix("deadlock: ").split(" -> ")) == {
        "flow",
        "b[0].work",
        "device 0",
        "a[0].work_locked",
        "lock weights",
    }


@worlds
def test_two_actors_that_call_each_other_s_devices_are_named(serialize):
    async def main(system):
        c = await system.spawn(Worker, hosts=[1], name="c", devices=[0])
        d = await system.spawn(Worker, hosts=[0], name="d", devices=[1])
        a = await system.spawn(Worker, hosts=[0], name="a", devices=[0], other=d[0])
        b = await system.spawn(Worker, hosts=[1], name="b", devices=[1], other=c[0])
        await asyncio.gather(a[0].work_and_call(), b[0].work_and_call())

    (cycle,) = cycles(deadlock(main, serialize=serialize))
    names = set(cycle.removeprefix("deadlock: ").split(" -> "))
    assert names == {"a[0].work_and_call", "d[0].work", "device 1", "b[0].work_and_call", "c[0].work", "device 0"}


def test_group_calls_that_wait_for_each_other_are_named_by_rank():
    async def main(system):
        lock = Lock("weights")
        a = await system.spawn(Worker, hosts=[0, 0], name="a", devices=[0, 1])
        b = await system.spawn(Worker, hosts=[0], name="b", devices=[1])
        first = asyncio.ensure_future(a.work_locked(lock))
        await asyncio.sleep(0)
        async with lock:
            await b[0].work()
        await first

    (cycle,) = cycles(deadlock(main))
    names = {"b[0].work", "device 1", "all ranks of a[0].work_locked", "lock weights"}
    assert names <= set(cycle.split(" -> "))


@worlds
def test_a_consumer_that_waits_for_its_producer_which_waits_for_it_is_named(serialize):
    async def main(system):
        producer = await system.spawn(Worker, hosts=[1], name="producer")
        consumer = await system.spawn(Worker, hosts=[0], name="consumer")
        await consumer[0].consume(producer[0].count.bounded(1)(5), producer[0])

    (cycle,) = cycles(deadlock(main, serialize=serialize))
    names = cycle.removeprefix("deadlock: ").split(" -> ")
    expected = {"consumer[0].consume", "producer[0].ask", "producer[0].count", "lock state of producer[0]"}
    assert expected <= set(names)
    assert any(name.startswith("space in producer[0].count@0.") for name in names)


@worlds
def test_a_channel_that_nobody_fills_is_named_with_who_waits(serialize):
    async def main(system):
        channel = await system.channel("mail")
        group = await system.spawn(Worker, hosts=[1], name="worker", channel=channel)
        await group[0].take()

    report = deadlock(main, serialize=serialize)
    assert silent(report) == {("fills", "mail")}
    assert ("flow", "worker[0].take") in waits(report)


def test_a_channel_that_nobody_empties_is_named():
    async def main(system):
        channel = await system.channel("mail", capacity=1)
        await channel.put(1)
        await channel.put(2)

    assert silent(deadlock(main)) == {("empties", "mail")}


@worlds
def test_a_call_that_waits_for_a_promised_argument_is_shown_with_whom_it_waits_for(serialize):
    async def main(system):
        group = await system.spawn(Worker, hosts=[0, 1], name="worker")
        never = group[0].sleep_on()
        await group[1].sleep_on(never)

    report = deadlock(main, serialize=serialize)
    through = "value" if serialize else "worker[1].sleep_on"
    assert {(through, "worker[0].sleep_on"), ("flow", "worker[1].sleep_on")} <= {
        (who.rpartition("/")[2], on) for who, on in waits(report)
    }


def test_a_line_of_the_program_says_where_a_call_hangs():
    async def main(system):
        group = await system.spawn(Worker, hosts=[1], name="worker")
        await group[0].sleep_on()

    report = deadlock(main, serialize=True)
    assert re.search(r"host 1, .*test_waits\.py:\d+", report)


# Stalls in real time ---------------------------------------------------------------------------------------------


def stall(main: Any, after: float = 0.2) -> str:
    """Run a program that must stall; returns the report."""
    with pytest.raises(StallError) as caught:
        rlinf.run(main, hosts=2, stall_after=after)
    return str(caught.value)


def test_a_wait_that_nothing_will_end_ends_the_program_with_the_report():
    async def main(system):
        channel = await system.channel("mail")
        group = await system.spawn(Worker, hosts=[1], name="worker", channel=channel)
        await group[0].take()

    report = stall(main)
    assert report.startswith("stall: ")
    assert ("flow", "worker[0].take") in waits(report)
    assert silent(report) == {("fills", "mail")}


async def test_a_local_system_fails_its_task_with_the_report():
    with pytest.raises(StallError, match=r"nobody fills"):  # noqa: PT012
        async with ActorSystem.local(stall_after=0.1) as system:
            channel = await system.channel("mail")
            await channel.get()
    assert not asyncio.current_task().cancelling()


def test_a_program_that_makes_progress_is_left_alone():
    async def main(system):
        idle = await system.channel("idle")
        group = await system.spawn(Worker, hosts=[0, 1], name="worker", channel=idle)
        for rank in (0, 1):
            group[rank].idle_for_ever()  # of its own accord, as servers do
        long = asyncio.ensure_future(group[1].compute_often(60))  # one long call that computes all the time
        for _ in range(12):
            await group[0].compute_often(5)  # and short ones
        await long
        return "done"

    assert rlinf.run(main, hosts=2, stall_after=0.5) == "done"


def test_one_computation_may_last_longer_than_the_patience_while_it_uses_the_processor():
    async def main(system):
        group = await system.spawn(Worker, hosts=[0, 1], name="worker")
        return await group[1].compute_long(1.0)

    assert rlinf.run(main, hosts=2, stall_after=0.25) == "computed"


def test_a_thread_that_only_waits_is_a_stall_and_named():
    async def main(system):
        group = await system.spawn(Worker, hosts=[0, 1], name="worker")
        await group[1].wait_in_thread()

    report = stall(main)
    assert ("flow", "worker[1].wait_in_thread") in waits(report)
    assert "computing wait" in report


def test_a_stream_that_flows_is_left_alone():
    async def main(system):
        group = await system.spawn(Worker, hosts=[0, 1], name="worker")

        async def slowly() -> Any:
            for number in range(12):
                await asyncio.sleep(0.05)
                yield number

        return len(await group.sleepless.map(Stream.of(slowly())).collect())

    async def sleepless(self: Any, value: Any) -> Any:
        return value

    Worker.sleepless = endpoint(sleepless)
    Worker.endpoints = {**Worker.endpoints, "sleepless": sleepless.__endpoint__}

    async def whole() -> Any:
        async with ActorSystem.local(2, stall_after=0.2) as system:
            return await main(system)

    assert run_virtual(whole())[0] == 12


@pytest.mark.parametrize("stopped", [0.0, 1e6])
def test_a_process_that_is_stopped_for_long_has_not_stalled(monkeypatch, stopped):
    """Between two looks; and what nothing will end is a stall all the same."""

    async def main(seconds: float) -> str:
        async with ActorSystem.local(stall_after=10.0) as system:
            host, loop = system.service._cell.host, asyncio.get_running_loop()
            began, now = loop.time(), host.now
            monkeypatch.setattr(host, "now", lambda: now() + (stopped if loop.time() > began + 3.0 else 0.0))
            channel = await system.channel("orders")
            loop.call_later(seconds, channel.put_nowait, "go on")
            return await channel.get()

    assert run_virtual(main(7.0))[0] == "go on"
    with pytest.raises(StallError, match=r"nothing.*moved"):
        run_virtual(main(100.0))


async def test_a_report_may_be_had_at_any_time():
    async with ActorSystem.local(2) as system:
        assert await system.stall_report() == "nothing waits"
        group = await system.spawn(Worker, hosts=[1], name="worker")
        call = asyncio.create_task(asyncio.wait_for(group[0].sleep_on(), 10.0))
        await asyncio.sleep(0.02)
        report = await system.stall_report()
        assert "worker[0].sleep_on" in {on for who, on in waits(report) if who.startswith("flow/Task-")}
        call.cancel()


def test_a_stall_ends_a_job_of_several_processes(zygote):
    ranks = zygote.run("drills.py", 2, "stalls")
    assert ranks.codes() == [1, 0], ranks.everything()
    complaints = ranks.complained(0)
    assert re.search(r"StallError: stall: .*victim\[1\]\.wait#", complaints)
    assert re.search(r"host 1, .*drills\.py:\d+", complaints)


def test_a_host_that_does_not_answer_is_named(zygote):
    ranks = zygote.run("drills.py", 2, "stalls_blocked")
    ranks.await_line("blocking", rank=1)
    assert ranks.code(0) == 1
    assert "host 1 " in ranks.complained(0)


# Parts -----------------------------------------------------------------------------------------------------------


async def test_a_lock_may_be_wanted_by_many_at_once():
    async with ActorSystem.local():
        lock, order = Lock("state"), []

        async def use(number: int) -> None:
            async with lock:
                order.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(use(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert len(lock.waiting) == 4
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert order == [0, 1, 3, 4]
        assert lock.waiting == {}
        assert lock.holder is None


def edges(text: str) -> list[Wait]:
    return [Wait(*edge.split(">"), age=1.0) for edge in text.split()]


def report_of(*waits: Wait, notes: dict[str, str] | None = None, moves: dict[str, int] | None = None) -> HostReport:
    return HostReport(0, list(waits), notes or {}, moves or {})


def test_progress_is_any_change_in_what_the_flow_stands_on():
    progress = Progress(10.0)
    chain = [Wait("flow", "call", 100.0), Wait("call", "queue", 50.0)]
    assert progress.stopped([report_of(*chain, notes={"queue": "1 put"})], 0.0) is None
    assert progress.stopped([report_of(*chain, notes={"queue": "2 put"})], 9.0) is None
    assert progress.stopped([report_of(*chain, notes={"queue": "2 put"})], 18.0) is None
    said = progress.stopped([report_of(*chain, notes={"queue": "2 put"})], 19.0)
    assert said is not None
    assert said.startswith("stall: ")
    assert progress.stopped([report_of(*chain, notes={"queue": "2 put"}, moves={"queue": 1})], 20.0) is None


def test_waits_that_the_flow_does_not_stand_on_may_last():
    progress = Progress(10.0)
    for now in (0.0, 20.0, 40.0):
        assert progress.stopped([report_of(Wait("server", "queue", now))], now) is None


def test_a_report_tells_deadlocks_first_and_then_the_longest_waits():
    lines = render([report_of(Wait("x", "y", 2.0), *edges("a>b b>a"), notes={"a": "on host 0, running"})]).splitlines()
    assert lines[0].split(" -> ") == ["deadlock: a", "b", "a"]
    assert lines[1].split() == ["a:", *["on", "host", "0,", "running"]]
    assert waits("\n".join(lines[3:4])) == {("x", "y")}


def chain(count: int) -> list[Wait]:
    return [Wait(f"n{number}", f"n{number + 1}", 1.0) for number in range(count)]


GRAPHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=25)


def reachable(ahead: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    queue = [start]
    while queue:
        for follower in ahead.get(queue.pop(), ()):
            if follower not in found:
                found.add(follower)
                queue.append(follower)
    return found


@given(GRAPHS)
def test_each_knot_gives_one_true_cycle(graph):
    ahead: dict[int, set[int]] = {}
    for who, on in graph:
        ahead.setdefault(who, set()).add(on)
    found = find_cycles([Wait(str(who), str(on), 1.0) for who, on in graph])
    for cycle in found:
        assert len(set(cycle)) == len(cycle)
        assert all(int(on) in ahead[int(who)] for who, on in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    on_a_cycle = {name for name in ahead if name in reachable(ahead, name)}
    knots = {
        frozenset(other for other in reachable(ahead, name) if name in reachable(ahead, other)) for name in on_a_cycle
    }
    assert {next(knot for knot in knots if int(cycle[0]) in knot) for cycle in found} == knots
    assert len(found) == len(knots)


@given(GRAPHS, GRAPHS, st.dictionaries(st.integers(0, 9).map(str), st.sampled_from("ab")))
def test_a_stall_is_that_all_the_flow_stands_on_is_as_it_was(before, after, notes):
    """The picture by which that is told is a hash; here it is compared with the picture itself."""

    def picture(graph: list[tuple[int, int]], told: dict[str, str]) -> object:
        ahead: dict[int, list[int]] = {}
        for who, on in graph:
            if on not in ahead.setdefault(who, []):
                ahead[who].append(on)
        reached = {0} | reachable({who: set(ons) for who, ons in ahead.items()}, 0)
        return {name: (tuple(ahead.get(name, ())), told.get(str(name))) for name in reached}

    def report(graph: list[tuple[int, int]], told: dict[str, str]) -> HostReport:
        waits = [Wait(str(who), str(on), None) for who, on in graph]
        return report_of(Wait("flow", "0", 1.0), *waits, notes=told)

    progress = Progress(10.0)
    progress.stopped([report(before, {})], 0.0)
    told = progress.stopped([report(after, notes)], 10.0) or ""
    assert told.startswith("stall") <= (picture(before, {}) == picture(after, notes))
    if picture(before, {}) == picture(after, notes):
        assert told


def test_a_cycle_counts_from_its_youngest_wait():
    progress = Progress(10.0)
    for now, graph in ((0.0, "a>b b>c c>a"), (8.0, "a>b b>a c>a"), (12.0, "b>c a>b b>a c>a")):
        assert progress.stopped([report_of(*edges(graph))], now) is None
    said = progress.stopped([report_of(*edges("b>d d>b b>a a>b"))], 18.0)
    assert said is not None
    assert said.startswith("deadlock: ")


MANY = 30_000
REPEATED = pytest.mark.repeated


SHAPES = {
    "ring": lambda many: [*chain(many), Wait(f"n{many}", "n0", 1.0)],
    "back to the first": lambda many: [*chain(many // 2), *(Wait(f"n{n}", "n0", 1.0) for n in range(many // 2))],
    "fan": lambda many: [*chain(many // 2), *(Wait("flow", f"n{number}", 1.0) for number in range(many // 2))],
}
LOOKS = {
    "cycles": lambda waits, _: find_cycles(waits),
    "progress": lambda _, report: Progress(10.0).stopped([report], 0.0),
    "text": lambda _, report: render([report]),
}


def many_waits(shape: str, many: int) -> tuple[list[Wait], HostReport]:
    waits = SHAPES[shape](many)
    return waits, report_of(*waits, notes={f"n{number}": "running" for number in range(0, many, 2)})


@pytest.mark.parametrize("shape", ["ring", pytest.param("back to the first", marks=REPEATED), "fan"])
def test_tens_of_thousands_of_waits_are_looked_at_in_a_pass_or_two(shape):
    """A pass for every wait, or every follower, took minutes."""
    for name, look in LOOKS.items():
        assert in_one_pass(lambda size, look=look: functools.partial(look, *many_waits(shape, size)), MANY // 8), name
    waits, report = many_waits(shape, MANY)
    text = render([report])
    assert len(text) < 20_000
    assert f"  and {len(waits) - 50:,} more waits" in text.splitlines()


def test_a_report_of_many_deadlocks_hosts_and_queues_is_short():
    waits = [wait for number in range(300) for wait in edges(f"a{number}>b{number} b{number}>a{number}")]
    hosts = [HostReport(number, trouble="does not answer", silent=["nobody fills it"]) for number in range(300)]
    lines = render([report_of(*waits), *hosts]).splitlines()
    assert len(lines) < 260
    assert {"  and 250 more deadlocks", "  and 250 more hosts", "  and 250 more queues"} <= set(lines)


def test_hosts_that_do_not_answer_keep_no_others_from_being_asked(monkeypatch):
    """200 hosts are deaf, more than are asked at once; the last one is still heard, in the time for a few."""

    async def report(self: Service) -> HostReport:
        if 0 < self._cell.host.rank <= 200:
            await asyncio.get_running_loop().create_future()
        return report_host(self._cell.host, self.lease_waits())

    async def main() -> tuple[float, list[HostReport]]:
        async with ActorSystem.local(202) as system:
            monkeypatch.setattr(Service, "report", endpoint(report))
            began = system._host.now()
            return await reports(system, 2.0), system._host.now() - began

    (found, took), _ = run_virtual(main())
    assert took < 3.5
    assert [report.host for report in found] == list(range(202))
    assert [report.host for report in found if report.trouble is None] == [0, 201]


def test_only_a_few_hosts_are_asked_at_once(monkeypatch):
    running: set[int] = set()
    most = 0

    async def report(self: Service) -> HostReport:
        nonlocal most
        running.add(self._cell.host.rank)
        most = max(most, len(running))
        await asyncio.sleep(0.01)
        running.discard(self._cell.host.rank)
        return report_host(self._cell.host, self.lease_waits())

    async def main() -> str:
        async with ActorSystem.local(300) as system:
            monkeypatch.setattr(Service, "report", endpoint(report))
            return await system.stall_report()

    text, _ = run_virtual(main())
    assert text == "nothing waits"
    assert most == SMALL
