"""A trace shows what ran, waited, travelled and was leased on all hosts, on one time line, as Perfetto reads it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import TraceError
from rlinf.runtime.observe.spans import Tracer, best_offset, write_perfetto


class Trace:
    """A trace file, read as a viewer would."""

    def __init__(self, path: Any):
        with open(path) as file:
            whole = json.load(file)
        assert whole["displayTimeUnit"] == "ms"
        self.spans = [event for event in whole["traceEvents"] if event["ph"] == "X"]
        names = [event for event in whole["traceEvents"] if event["ph"] == "M"]
        self.processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
        self.threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}

    def check(self) -> None:
        """Every span is in a named lane of a named process, and overlaps no other there."""
        for span in self.spans:
            assert span["pid"] in self.processes
            assert self.threads[span["pid"], span["tid"]].startswith(span["cat"])
            assert span["ts"] >= 0
            assert span["dur"] >= 0
        by_lane = sorted(self.spans, key=lambda span: (span["pid"], span["tid"], span["ts"]))
        for before, after in itertools.pairwise(by_lane):
            if (before["pid"], before["tid"]) == (after["pid"], after["tid"]):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-4

    def named(self, name: str, track: str | None = None) -> list[dict[str, Any]]:
        """Spans by name and track, in order of time."""
        found = [s for s in self.spans if s["name"] == name and track in (None, s["cat"])]
        return sorted(found, key=lambda span: span["ts"])


def test_a_trace_that_finds_no_room_is_one_error_and_leaves_nothing(tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(TraceError, match=r"the trace .*/full could not be written: No space left on device"):
        write_perfetto(full, [(0, 0.0, [("actor[0]", "work", 0.0, 1.0, None)])])
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
    assert {first["cat"], second["cat"]} == {"inside[0] lease", "outside[0] lease"}
    assert first["ts"] + first["dur"] <= second["ts"]
    assert trace.named("wait for lease", second["cat"])

    stage, *calls = sorted(trace.named("score", "inside[0]"), key=lambda span: -span["dur"])
    assert len(calls) == 5
    assert all(encloses(stage, call) for call in calls)
    assert trace.named("arena", "payload")[-1]["args"] == {"bytes": 4_000_000}
    assert trace.named("wait for mail", "flow")[0]["dur"] >= 19_000


def test_with_tracing_off_nothing_is_recorded(zygote, tmp_path):
    ranks = zygote.run("traced.py", 2, tmp_path / "trace.json", "off")
    assert ranks.codes() == [0, 0], ranks.everything()
    assert Trace(tmp_path / "trace.json").spans == []


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
    write_perfetto(tmp_path / "t.json", [(3, 0.0, [("a", f"{s}", s, e, None) for s, e in reversed(times)])])
    trace = Trace(tmp_path / "t.json")
    trace.check()
    assert sorted(trace.threads.values()) == ["a", "a (2)", "a (3)"]


def test_hosts_with_other_clocks_are_put_on_one_time_line(tmp_path):
    dumps = [(0, 0.0, [("a", "here", 100.0, 101.0, None)]), (1, 50.0, [("b", "there", 50.25, 50.5, {"x": 1})])]
    write_perfetto(tmp_path / "t.json", dumps)
    trace = Trace(tmp_path / "t.json")
    assert [(s["name"], s["ts"], s["dur"]) for s in trace.spans] == [("here", 0, 1e6), ("there", 250_000, 250_000)]


def test_an_empty_trace_is_valid(tmp_path):
    write_perfetto(tmp_path / "t.json", [(0, 0.0, [])])
    assert Trace(tmp_path / "t.json").spans == []


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
        tracer.span("a", str(number), 0.0, 1.0)
    assert [span[1] for span in tracer.dump()] == ["2", "3", "4"]
