"""A trace shows what ran, waited, travelled and was leased on all hosts, on one time line, as Perfetto reads it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import TraceError
from rlinf.runtime.observe.spans import KINDS, Tracer, best_offset
from tests.spans import call, write_trace


class Trace:
    """A trace file, read as a viewer would."""

    def __init__(self, path: Any):
        with open(path) as file:
            whole = json.load(file)
        assert whole["displayTimeUnit"] == "ms"
        names = [event for event in whole["traceEvents"] if event["ph"] == "M"]
        self.processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
        self.spans = [event for event in whole["traceEvents"] if event["ph"] == "X"]
        for span in self.spans:
            span["track"] = self.threads[span["pid"], span["tid"]].partition(" (")[0]

    def check(self) -> None:
        """Every span is in a named lane of a named process, and overlaps no other there."""
        for span in self.spans:
            assert span["pid"] in self.processes
            assert span["cat"] in KINDS
            assert span["ts"] >= 0
            assert span["dur"] >= 0
        by_lane = sorted(self.spans, key=lambda span: (span["pid"], span["tid"], span["ts"]))
        for before, after in itertools.pairwise(by_lane):
            if (before["pid"], before["tid"]) == (after["pid"], after["tid"]):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-4

    def named(self, name: str, track: str | None = None) -> list[dict[str, Any]]:
        """Spans by name and track, in order of time, and of hosts where it is the same."""
        found = [s for s in self.spans if s["name"] == name and track in (None, s["track"])]
        return sorted(found, key=lambda span: (span["ts"], span["pid"]))


def test_a_trace_that_finds_no_room_is_one_error_and_leaves_nothing(tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(TraceError, match=r"/full.*written:.*device"):
        write_trace(full, [[call("actor[0]", "work", 0.0, 1.0)]])
    assert not full.is_symlink()


def encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_two_processes_make_one_trace(zygote, tmp_path):
    ranks = zygote.run("traced.py", 2, tmp_path / "trace.json")
    assert ranks.codes() == [0, 0], ranks.everything()
    trace = Trace(tmp_path / "trace.json")
    trace.check()
    assert trace.processes == {0: "host 0", 1: "host 1"}

    outer, inner = trace.named("outer", "outside[0]"), trace.named("inner", "inside[0]")
    assert [span["pid"] for span in outer + inner] == [0, 0, 1, 1]
    assert outer[0]["tid"] != outer[1]["tid"]  # they overlap
    assert inner[0]["dur"] >= 29_000  # µs, finer than the loop's clock of whole milliseconds
    for span in inner:  # on another host, and yet within the call that made it
        assert any(encloses(caller, span) for caller in outer)
        assert span["args"]["caller"].startswith("outside[0].outer#")

    first, second = sorted(trace.named("inside[0].work") + trace.named("outside[0].work"), key=lambda span: span["ts"])
    assert {first["track"], second["track"]} == {"inside[0] lease", "outside[0] lease"}
    assert first["ts"] + first["dur"] <= second["ts"]
    assert trace.named("wait for lease", second["track"])

    stage, *calls = sorted(trace.named("score", "inside[0]"), key=lambda span: -span["dur"])
    assert len(calls) == 5
    assert all(encloses(stage, call) for call in calls)
    assert trace.named("arena", "payload")[-1]["args"] == {"bytes": 4_000_000}
    assert trace.named("wait for mail", "flow")[0]["dur"] >= 19_000


class Timed(Actor):
    @endpoint
    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def test_virtual_times_are_exact(tmp_path):
    async def main() -> None:
        async with ActorSystem.local(2) as system:
            group = await system.spawn(Timed, hosts=[0, 1], name="timed")
            await asyncio.gather(*(group[rank].work(0.25 * (rank + 1)) for rank in (0, 1, 0)))
            await system.trace(tmp_path / "trace.json")

    run_virtual(main())
    trace = Trace(tmp_path / "trace.json")
    trace.check()
    assert [(span["ts"], span["dur"], span["pid"]) for span in trace.named("work")] == [
        (0, 250_000, 0),
        (0, 250_000, 0),
        (0, 500_000, 1),
    ]


def test_spans_of_a_track_take_as_many_lanes_as_overlap(tmp_path):
    times = [(0.0, 3.0), (1.0, 2.0), (2.0, 5.0), (2.5, 2.6), (3.0, 4.0), (6.0, 6.0), (6.0, 7.0)]
    write_trace(tmp_path / "t.json", [[call("a", f"{s}", s, e) for s, e in reversed(times)]])
    trace = Trace(tmp_path / "t.json")
    trace.check()
    assert sorted(trace.threads.values()) == ["a", "a (2)", "a (3)"]


def test_hosts_with_other_clocks_are_put_on_one_time_line(tmp_path):
    hosts = [[call("a", "here", 100.0, 101.0)], [call("b", "there", 50.25, 50.5)]]
    write_trace(tmp_path / "t.json", hosts, ahead=[0.0, 50.0])
    trace = Trace(tmp_path / "t.json")
    assert [(s["name"], s["ts"], s["dur"]) for s in trace.spans] == [("here", 0, 1e6), ("there", 250_000, 250_000)]


@given(
    st.lists(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 9)), max_size=300), min_size=1, max_size=4),
    st.integers(0, 500),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_takes_the_newest_spans_of_all_hosts(tmp_path, hosts, most):
    spans = [[call("a", "x", start, start + lasts) for start, lasts in host] for host in hosts]
    write_trace(tmp_path / "t.json", spans, most=most)
    trace = Trace(tmp_path / "t.json")
    trace.check()
    there = sum(map(len, hosts))
    assert len(trace.spans) <= most
    if there <= most:
        assert len(trace.spans) == there
        return
    ends = sorted((span.end for host in spans for span in host), reverse=True)
    kept = sorted((span["ts"] + span["dur"] for span in trace.spans), reverse=True)
    first = min(span.start for host in spans for span in host)
    assert kept == pytest.approx([(end - first) * 1e6 for end in ends[: len(kept)]], abs=1e-2)
    whole = [number for number, host in enumerate(hosts) if trace.processes[number] == f"host {number}"]
    cut = {number: len(host) - sum(s["pid"] == number for s in trace.spans) for number, host in enumerate(hosts)}
    assert [number for number, left_out in cut.items() if not left_out] == whole
    for number, left_out in cut.items():
        if left_out:
            assert trace.processes[number] == f"host {number}, without its {left_out} oldest spans"


def test_a_limit_is_kept_to_within_a_64th(tmp_path):
    hosts = [[call("a", "x", float(at), at + 1.0) for at in range(number, 6400, 2)] for number in range(2)]
    write_trace(tmp_path / "t.json", hosts, most=1000)
    assert 1000 - 2 * 50 <= len(Trace(tmp_path / "t.json").spans) <= 1000


async def test_a_file_that_is_too_small_for_all_spans_says_so(tmp_path, caplog):
    async with ActorSystem.local(2) as system:
        for number in range(6400):
            system._host.tracer.span("call", "a", "x", "flow", float(number), number + 0.5)
        await system.trace(tmp_path / "t.json", most=640)
        assert not any(host.service._exports._open for host in (system, system._network.systems[1]))
    assert len(Trace(tmp_path / "t.json").spans) == 600
    assert re.search(r"t\.json .* 600 .* 6400 .* 640 ", caplog.text)


async def peak_of_a_trace(path, hosts: int, spans: int) -> int:
    """The most bytes in use while the spans of so many hosts are written."""
    async with ActorSystem.local(hosts, serialize=True) as system:
        await system.trace(path)  # makes the lanes between them
        for each in system._network.systems.values():
            for number in range(spans):
                each._host.tracer.span("call", "actor[0]", "work", "flow", float(number), number + 0.5)
        gc.collect()
        tracemalloc.start()
        try:
            await system.trace(path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


async def test_memory_does_not_grow_with_the_number_of_hosts(tmp_path):
    """Not even what a few hosts have is ever in one place, of the 60 that write here."""
    few = await peak_of_a_trace(tmp_path / "few.json", 12, 500)
    many = await peak_of_a_trace(tmp_path / "many.json", 60, 500)
    assert len(Trace(tmp_path / "many.json").spans) == 60 * 500
    assert many < 2 * few


@pytest.mark.parametrize("delays", [(0.1, 0.1), (0.3, 0.1), (0.0, 0.2)])
def test_another_clock_is_compared_to_half_the_quickest_round_trip(delays):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = itertools.count()

        async def ask() -> float:
            slow = 1.0 if next(turns) % 2 else 0.0
            await asyncio.sleep(delays[0] + slow)
            theirs = loop.time() - 1000.0
            await asyncio.sleep(delays[1])
            return theirs

        assert await best_offset(loop.time, ask) == pytest.approx(1000.0, abs=sum(delays) / 2 + 1e-9)

    run_virtual(main())


def test_only_the_latest_spans_are_kept():
    tracer = Tracer(ring=3)
    for number in range(5):
        tracer.span("call", "a", str(number), "flow", 0.0, 1.0)
    assert [span.endpoint for span in tracer.dump()] == ["2", "3", "4"]
