"""What is measured for watchers: lanes of activities, and a host that does not answer holds up nobody."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runs.live.status import PATIENCE, Moments, lanes_of
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.observe.spans import CALLED, Busy
from rlinf.runtime.system.observer import Watch


class Rollout(Actor):
    @endpoint
    async def generate(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def test_lanes_have_the_activities_of_the_report_and_what_is_left_of_calls_is_waiting():
    parts = [
        Busy("trainer[0]", "train", ((1.0, 2.0), (2.005, 3.0))),
        Busy("trainer[0]", "onload", ((0.5, 1.0),)),
        Busy("trainer[0]", "samples", ((3.0, 3.5),)),
        Busy("trainer[0]", CALLED, ((0.0, 4.0),)),
        Busy("guard[1]", "inspect", ((1.0, 1.5),)),
    ]
    lanes = [*lanes_of(7, parts)]
    assert lanes == [
        {
            "host": 7,
            "actor": "trainer[0]",
            "stretches": [
                ["waiting", 0.0, 0.5], ["loading", 0.5, 1.0], ["training", 1.0, 3.0], ["waiting", 3.0, 4.0]
            ],
        },
        {"host": 7, "actor": "guard[1]", "stretches": [["inspect", 1.0, 1.5]]},
    ]  # fmt: skip


def looked(hosts, looks, disturb):
    """What is told in so many seconds, once a second, of a system that somebody disturbs."""

    async def main():
        async with ActorSystem.local(hosts) as system:
            group = await system.spawn(Rollout, name="rollout", hosts=range(hosts))
            watch = await Watch.start(system)
            moments, told = Moments(watch), []
            disturb(watch)
            calls = [asyncio.ensure_future(ref.generate(50.0)) for ref in group]
            for _ in range(looks):
                await asyncio.sleep(1.0)
                told.append(await moments.next())
            await moments.close()
            await asyncio.gather(*calls)
            return told

    return run_virtual(main())[0]


def test_increments_follow_each_other_without_a_hole():
    told = looked(2, 4, lambda watch: None)
    ends = [(lanes["start"], lanes["end"]) for _, lanes in told]
    assert all(before[1] == pytest.approx(after[0]) for before, after in itertools.pairwise(ends))
    for _, lanes in told:
        stretches = {(lane["host"], lane["actor"]): lane["stretches"] for lane in lanes["lanes"]}
        assert stretches == {
            (host, f"rollout[{host}]"): [["generation", lanes["start"], lanes["end"]]] for host in range(2)
        }
    assert [state["doing"] for state in told[0][0]["actors"]] == ["running generate"] * 2
    assert len(told[0][0]["memory"]) == 1, "both hosts are one process"


def test_a_host_that_does_not_answer_is_shown_as_it_was_and_catches_up():
    def slow(watch):
        answers, look_back = [], watch.look_back

        async def late(number, since):
            answers.append(number)
            if number == 1 and answers.count(1) == 2:
                await asyncio.sleep(4.7)
            return await look_back(number, since)

        watch.look_back = late

    told = looked(2, 7, slow)
    assert all(len(moment["actors"]) == 2 for moment, _ in told)
    of_late = [[lane["stretches"] for lane in lanes["lanes"] if lane["host"] == 1] for _, lanes in told]
    assert [bool(each) for each in of_late] == [True, False, False, False, True, True, True]
    ((_, start, end),) = of_late[4][0]
    assert end - start > 4.0, "what it missed telling of comes later"
    assert PATIENCE < 1.0


def test_of_many_hosts_some_are_asked_at_a_time_and_all_in_turn(monkeypatch):
    monkeypatch.setattr("rlinf.runs.live.status.MOST_ASKED", 2)
    told = looked(5, 6, lambda watch: None)
    asked = [[lane["host"] for lane in lanes["lanes"]] for _, lanes in told]
    assert all(len(each) == 2 for each in asked)
    assert all({*asked[at], *asked[at + 1], *asked[at + 2]} == {*range(5)} for at in range(4))
    assert len(told[-1][0]["actors"]) == 5
    whole = [
        stretch for _, lanes in told for lane in lanes["lanes"] if lane["host"] == 0 for stretch in lane["stretches"]
    ]
    assert all(before[2] == pytest.approx(after[1]) for before, after in itertools.pairwise(whole))


def test_a_host_that_is_lost_ends_nothing():
    def dead(watch):
        look_back = watch.look_back

        async def gone(number, since):
            if number == 1:
                raise ActorDied("host 1 is gone")
            return await look_back(number, since)

        watch.look_back = gone

    told = looked(2, 3, dead)
    assert [[state["host"] for state in moment["actors"]] for moment, _ in told] == [[0]] * 3
