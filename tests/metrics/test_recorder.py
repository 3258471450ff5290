"""A step leaves its line, with its time and where that went; and so do its samples."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.trackers import TrackedRun, Tracking
from rlinf.placement.costs import Ledger, MeasuredRun
from rlinf.placement.profile import load
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.observer import Watch
from rlinf.storage.files import read_lines


class Rollout(Actor):
    @endpoint
    async def generate(self) -> None:
        await asyncio.sleep(3.0)


class Trainer(Actor):
    @endpoint
    async def train(self) -> dict[str, float]:
        await asyncio.sleep(2.0)
        return {"response_tokens": 100.0, "approx_kl": 0.5}


async def two_steps(directory, ledger: Ledger | None = None) -> None:
    async with ActorSystem.local(2) as system:
        rollout = await system.spawn(Rollout, hosts=[0], name="rollout")
        trainer = await system.spawn(Trainer, hosts=[1], name="trainer")
        watch = await Watch.start(system)
        tracking = Tracking({}, TrackedRun("run", directory, {}), print)
        async with Recorder(directory, watch, tracking, 2, ledger) as recorder:
            recorder.write(0, {"evaluation/accuracy": 0.25})
            for step in (1, 2):
                recorder.step_begins()
                await rollout[0].generate()
                await asyncio.sleep(1.0)
                metrics = await recorder.step_ends(step, await trainer[0].train())
                recorder.write(step, metrics)
                recorder.samples(step, [{"prompt": "a", "reward": 1.0}])
            recorder.samples(2, [])
        await system.trace(directory / "trace.json")


def test_a_step_leaves_its_time_and_where_that_went(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "timing/elapsed": 100.0}\n')  # of an earlier process
    run_virtual(two_steps(tmp_path))
    _, before, first, second = read_lines(tmp_path / "metrics.jsonl")
    assert before == {"step": 0, "evaluation/accuracy": 0.25}
    assert first == {
        "step": 1,
        "response_tokens": 100.0,
        "kl": 0.5,
        "tokens_per_s": 100 / 6,
        "timing/step": 6.0,
        "timing/elapsed": 106.0,
        "timing/generation": 3.0,
        "timing/training": 2.0,
        "timing/overlap": 0.0,
        "timing/other": 1.0,
    }
    assert (second["step"], second["timing/elapsed"]) == (2, 112.0)
    assert list(read_lines(tmp_path / "samples.jsonl")) == [
        {"step": 1, "prompt": "a", "reward": 1.0},
        {"step": 2, "prompt": "a", "reward": 1.0},
    ]
    assert json.loads((tmp_path / "environment.json").read_text())["hosts"] == 2
    steps = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert steps.count("step 1") == steps.count("step 2") == 1, "the trace shows where steps begin and end"


def test_with_a_ledger_a_step_says_how_far_from_the_possible_it_was_and_the_run_leaves_its_profile(tmp_path):
    devices = {"rollout[0]": frozenset({0}), "trainer[0]": frozenset({1})}
    run_virtual(two_steps(tmp_path, Ledger(devices, 8, MeasuredRun("m", "x", "f"))))
    _, *steps = read_lines(tmp_path / "metrics.jsonl")
    for step in steps:
        assert step["bound/seconds"] == step["bound/area"] == pytest.approx(2.5)
        assert step["bound/efficiency"] == pytest.approx(2.5 / 6)
        lost = {name.removeprefix("lost/"): seconds for name, seconds in step.items() if name.startswith("lost/")}
        assert {name: value for name, value in lost.items() if value > 1e-9} == pytest.approx(
            {"imbalance": 2.5, "overhead": 1.0}
        )
    profile = load(tmp_path / "profile.json")
    times = {name: stage.timings[0] for name, stage in profile.stages.items()}
    assert {name: (one.batch, one.devices) for name, one in times.items()} == dict.fromkeys(
        ("rollout", "trainer"), (8, 1)
    )
    assert {name: one.seconds for name, one in times.items()} == pytest.approx({"rollout": 3.0, "trainer": 2.0})
