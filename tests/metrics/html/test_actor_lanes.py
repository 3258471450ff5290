"""Lanes show what each actor did during a step, by the rule of the metrics."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.dashboard.lanes import Trace, actor_lanes, device_lanes
from rlinf.metrics.timing import timing
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.observer import Watch
from tests.spans import step as step_of
from tests.spans import write_trace


class Rollout(Actor):
    @endpoint
    async def generate(self, count: int):
        for number in range(count):
            await asyncio.sleep(1.0)
            yield number


class Trainer(Actor):
    @endpoint
    async def train(self, numbers) -> int:
        total = 0
        async for number in numbers:
            await asyncio.sleep(0.5)
            total += number
        await asyncio.sleep(2.0)
        return total


@pytest.fixture
def traced(tmp_path):
    """A trace of three steps on two hosts, and what the metrics told of them."""

    async def main():
        async with ActorSystem.local(2, serialize=True) as system:
            rollout = await system.spawn(Rollout, hosts=[0], name="rollout")
            trainer = await system.spawn(Trainer, hosts=[1], name="trainer")
            watch = await Watch.start(system)
            told = []
            for step in (1, 2, 3):
                watch.begins()
                await trainer[0].train(rollout.generate(2 + step))
                told.append(timing(await watch.ends(f"step {step}")))
            await system.trace(tmp_path / "trace.json")
            return told

    told, _ = run_virtual(main())
    return tmp_path / "trace.json", told


def test_lanes_and_metrics_tell_the_same(traced):
    path, told = traced
    trace = Trace(path)
    assert trace.steps == [1, 2, 3]
    for step, expected in zip(actor_lanes(trace, [1, 2, 3]), told, strict=True):
        got = {name: value for name, value in step.timing.items() if name != "timing/step"}
        assert got == pytest.approx(expected, abs=1e-6)


def test_a_lane_shows_work_and_waiting(traced):
    (step,) = actor_lanes(Trace(traced[0]), [1])
    rollout, trainer = step.lanes
    assert (rollout.host, rollout.name, trainer.host, trainer.name) == (0, "rollout[0]", 1, "trainer[0]")
    assert step.seconds == pytest.approx(5.5)
    assert rollout.stretches[0].activity == "generation"
    shown = [(s.activity, round(s.start, 3), round(s.end, 3)) for s in trainer.stretches]
    assert shown[0] == ("waiting", 0.0, 1.0)
    assert shown[1] == ("training", 1.0, 1.5)
    assert shown[-1] == ("training", 3.0, 5.5)
    assert [(round(start, 3), round(end, 3)) for start, end in step.overlap()] == [(1.0, 1.5), (2.0, 2.5)]


def test_an_early_a_middle_and_the_last_step_stand_for_a_run(traced, tmp_path):
    assert Trace(traced[0]).first_middle_last() == [2, 3]
    spans = [step_of(number, float(number), number + 0.5) for number in range(1, 101)]
    write_trace(tmp_path / "long.json", [spans])
    assert Trace(tmp_path / "long.json").first_middle_last() == [2, 51, 100]
    write_trace(tmp_path / "one.json", [spans[:1]])
    assert Trace(tmp_path / "one.json").first_middle_last() == [1]


def test_what_is_not_there_is_told(traced, tmp_path):
    with pytest.raises(ValueError, match=r"step 9.*steps 1.*3"):
        actor_lanes(Trace(traced[0]), [9])
    write_trace(tmp_path / "none.json", [[]])
    with pytest.raises(ValueError, match=r"step.*flow"):
        device_lanes(tmp_path / "none.json")
    (tmp_path / "else.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"Chrome's format"):
        Trace(tmp_path / "else.json")


def test_a_trace_written_anew_by_another_program_is_read(traced, tmp_path):
    (tmp_path / "again.json").write_text(json.dumps(json.loads(traced[0].read_text()), separators=(",", ":")))
    assert actor_lanes(Trace(tmp_path / "again.json"), [1])[0].lanes == actor_lanes(Trace(traced[0]), [1])[0].lanes


def test_a_trace_whose_writer_was_killed_shows_what_it_has(traced, tmp_path):
    text = traced[0].read_text()
    (tmp_path / "cut.json").write_text(text[: text.index('"step 3"') + 20])
    assert Trace(tmp_path / "cut.json").steps == [1, 2]
