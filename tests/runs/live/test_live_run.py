"""A run and its watchers: what they see from beginning to end, and controls on a run that saves and evaluates."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time

import pytest

from rlinf.config.load import RunFailure
from rlinf.runs.loop import TrainingLoop
from rlinf.runs.saving import Saver
from rlinf.runtime.system.ending import Preemption
from rlinf.storage.directory import find_checkpoint
from tests.runs.test_loop import SCORES, WHOLE, Toy, run, told


class Watcher:
    """Connects after the first step, asks after given steps, and reads to the end."""

    def __init__(self, directory, asks=()):
        self.where, self.asks = directory / "live.json", dict(asks)
        self.heard, self.about, self.reading = [], {}, None

    async def on_step(self, step):
        if self.reading is None:
            assert stat.S_IMODE(self.where.stat().st_mode) == 0o600
            self.about = json.loads(self.where.read_text())
            self.changed = asyncio.Event()
            reader, self.writer = await asyncio.open_unix_connection(self.about["socket"])
            self.reading = asyncio.create_task(self.read(reader))
            await self.until(lambda heard: heard["kind"] == "moment")
        for what in self.asks.pop(step, ()):
            await self.ask(what)

    async def ask(self, what):
        self.writer.write(json.dumps({"do": what, "id": what}).encode() + b"\n")
        before = len(self.of("did"))
        if what not in ("pause", "stop"):
            return
        await self.until(lambda heard: what in heard.get("asked", ()) or len(self.of("did")) > before)

    async def read(self, reader):
        while line := await reader.readline():
            self.heard.append(json.loads(line))
            self.changed.set()
            await self.heard_of(self.heard[-1])
        self.writer.close()

    async def heard_of(self, message):
        pass

    async def until(self, true):
        while not any(map(true, self.heard)):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    def of(self, kind):
        return [heard for heard in self.heard if heard["kind"] == kind]

    @property
    def statuses(self):
        seen = [heard["status"] for heard in self.of("status")]
        return [status for at, status in enumerate(seen) if not at or seen[at - 1] != status]

    def said(self, what):
        return [(heard["said"], heard["ok"]) for heard in self.of("did") if heard["id"] == what]


class Patient(Watcher):
    """Once the run is paused, asks for one thing after the other, and goes on."""

    def __init__(self, directory, asks, while_paused):
        super().__init__(directory, asks)
        self.rest = [*while_paused]

    async def heard_of(self, message):
        if message["kind"] == "did" and message["id"] != "go_on" and self.rest:
            what = self.rest.pop(0)
            self.writer.write(json.dumps({"do": what, "id": what}).encode() + b"\n")


def test_a_watched_run_is_the_same_run(tmp_path):
    watcher = Watcher(tmp_path / "toy")
    assert told(run(tmp_path / "toy", 5, callbacks=(watcher,))) == WHOLE
    assert watcher.about["pid"] == os.getpid()
    assert watcher.of("roles")[0]["roles"] == [{"role": "policy", "hosts": [0]}, {"role": "trainer", "hosts": [0]}]
    assert watcher.of("roles")[0]["steps"] == 5
    assert watcher.statuses[-3:] == ["evaluating", "saving", "ended"] or watcher.statuses[-2:] == ["saving", "ended"]
    moment = watcher.of("moment")[0]
    assert {state["actor"] for state in moment["actors"]} == {"policy[0]", "trainer[0]"}
    assert moment["memory"][0]["used"] > 0
    assert not (tmp_path / "toy" / "live.json").exists()
    assert not os.path.exists(watcher.about["socket"])


def test_a_paused_run_is_saved_evaluated_and_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    watcher = Patient(tmp_path / "toy", {1: ["pause"]}, ["checkpoint", "evaluate", "checkpoint", "evaluate", "go_on"])
    lines = run(tmp_path / "toy", 5, callbacks=(watcher,))
    assert told(lines[:1] + lines[2:]) == WHOLE, "the second line is that of the evaluation"
    assert (lines[1]["step"], lines[1]["evaluation/score"]) == (1, 2.0)
    assert watcher.said("pause") == [("paused after step 1", True)]
    assert watcher.said("checkpoint") == [
        ("saved after step 1: checkpoints/step_000001", True), ("the checkpoint of step 1 is there already", True)
    ]  # fmt: skip
    assert watcher.said("evaluate") == [
        ("evaluation after step 1: score 2.0", True), ("it was evaluated after step 1 already: score 2.0", True)
    ]  # fmt: skip
    assert watcher.said("go_on") == [("goes on after step 1", True)]
    assert "paused" in watcher.statuses
    kept = {path.name: (path / "state").read_text() for path in (tmp_path / "toy" / "checkpoints").iterdir()}
    assert kept["step_000001"] == "1"
    printed = capsys.readouterr().out
    assert "saved after step 1, as it was asked to" in printed
    assert "evaluation after step 1: score 2.0" in printed


def test_a_run_that_is_stopped_ends_in_order_and_can_be_gone_on_with(tmp_path, capsys):
    watcher = Watcher(tmp_path / "toy", {2: ["stop"]})
    lines = run(tmp_path / "toy", 9, callbacks=(watcher,))
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["evaluation/score"] == 3.0
    assert watcher.said("stop") == [("stopped after step 2, evaluated and saved as after the last one", True)]
    assert "stopped after step 2: " in capsys.readouterr().out
    found = find_checkpoint(tmp_path / "toy")
    assert found is not None
    assert found.step == 2
    assert [line["step"] for line in run(tmp_path / "toy", 4, resume=True)] == [1, 2, 3, 4]


def test_a_paused_run_is_stopped_where_it_is(tmp_path):
    watcher = Patient(tmp_path / "toy", {1: ["pause"]}, ["stop"])
    lines = run(tmp_path / "toy", 9, callbacks=(watcher,))
    assert told(lines) == [WHOLE[0], (1, None, None, 2.0)]
    assert (tmp_path / "toy" / "checkpoints" / "latest" / "state").read_text() == "1"
    assert watcher.said("stop")[0][1] is True


def test_an_evaluation_that_was_asked_for_counts_for_nothing(tmp_path):
    SCORES[:] = [0, 9, 1, 1, 1]  # before, asked for after 1, after 2, 4, 5
    watcher = Patient(tmp_path / "toy", {1: ["pause"]}, ["evaluate", "go_on"])
    lines = run(tmp_path / "toy", 5, callbacks=(watcher,), patience=1)
    assert lines[-1]["step"] == 4, "1 was not better than 1; 9 was only looked at"


def test_what_fails_that_was_only_asked_for_ends_no_run(tmp_path, monkeypatch, capsys):
    evaluate, begin = Toy.evaluate, Saver.save

    async def fails(self):
        if self.run.done == 1:
            raise FloatingPointError("no number")
        return await evaluate(self)

    async def full(self, position=None):
        if self._state.done == 1:
            raise RunFailure("no room")
        await begin(self, position)

    monkeypatch.setattr(Toy, "evaluate", fails)
    monkeypatch.setattr(Saver, "save", full)
    watcher = Patient(tmp_path / "toy", {1: ["pause"]}, ["evaluate", "checkpoint", "go_on"])
    assert told(run(tmp_path / "toy", 5, callbacks=(watcher,))) == WHOLE
    assert watcher.said("evaluate") == [("the evaluation failed: no number", False)]
    assert watcher.said("checkpoint") == [("not saved: no room", False)]
    assert "the run goes on" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    finish, broken = Toy.writer, []

    async def writer(self):
        fill = await finish(self)
        if self.run.done != 1:
            return fill

        def breaks(directory):
            async def written():
                broken.append(await fill(directory))
                raise OSError(28, "No space left on device")

            return written()

        return breaks

    monkeypatch.setattr(Toy, "writer", writer)
    watcher = Patient(tmp_path / "toy", {1: ["pause"]}, ["checkpoint", "go_on"])
    assert told(run(tmp_path / "toy", 5, callbacks=(watcher,))) == WHOLE
    ((said, well),) = watcher.said("checkpoint")
    assert not well
    assert "No space left on device" in said
    assert len(broken) == 1


def test_a_signal_ends_a_paused_run_with_a_checkpoint(tmp_path, monkeypatch, capsys):
    started = TrainingLoop.started

    def preempted(self, begun=None):
        self.state.system.preemption = Preemption(30.0, lambda why: None)
        return started(self, begun)

    monkeypatch.setattr(TrainingLoop, "started", preempted)
    loops = []
    monkeypatch.setattr(Toy, "spawn", _noting(Toy.spawn, loops))

    class Told(Watcher):
        async def heard_of(self, message):
            if message["kind"] == "did":
                loops[0].system.preemption.ask(signal.SIGTERM)

    lines = run(tmp_path / "toy", 9, callbacks=(Told(tmp_path / "toy", {1: ["pause"]}),))
    assert [line["step"] for line in lines] == [1]
    assert "told to end by SIGTERM: stopped after step 1" in capsys.readouterr().out
    assert (tmp_path / "toy" / "checkpoints" / "latest" / "state").read_text() == "1"


def _noting(spawn, loops):
    async def noted(self, placed, names=None):
        loops.append(self.run)
        return await spawn(self, placed, names)

    return noted


PAUSE = 3.0
"""Seconds; long beside what the toy takes."""


def test_a_pause_is_no_time_of_the_run(tmp_path):
    class Slow(Patient):
        async def heard_of(self, message):
            if message["kind"] == "did" and message["id"] == "pause":
                await asyncio.sleep(PAUSE)
            await super().heard_of(message)

    began = time.monotonic()
    lines = run(tmp_path / "toy", 3, callbacks=(Slow(tmp_path / "toy", {1: ["pause"]}, ["go_on"]),))
    worked = time.monotonic() - began - PAUSE
    assert sum(line["timing/step"] for line in lines) < worked
    assert lines[-1]["timing/elapsed"] < worked


def test_a_watcher_that_goes_in_the_middle_or_sends_rubbish_ends_nothing(tmp_path):
    class Rude(Watcher):
        async def on_step(self, step):
            await super().on_step(step)
            if step == 2:
                self.writer.write(b"\x00\xff not json\n")
            if step == 3:
                self.writer.transport.abort()

    assert told(run(tmp_path / "toy", 5, callbacks=(Rude(tmp_path / "toy"),))) == WHOLE


def test_a_run_that_fails_leaves_no_sign_of_life(tmp_path):
    def breaks(step):
        if step == 2:
            raise ValueError("bug")

    watcher = Watcher(tmp_path / "toy")
    with pytest.raises(RunFailure, match="bug"):
        run(tmp_path / "toy", 5, callbacks=(watcher, breaks))
    assert watcher.statuses[-1] == "ended"
    assert not (tmp_path / "toy" / "live.json").exists()
