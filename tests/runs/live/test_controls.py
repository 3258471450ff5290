"""What a person may ask of a run: done between two steps, once, and told; in virtual time, with a run that counts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.dashboard.events import CONTROLS
from rlinf.runs.live.controls import Controls
from rlinf.runtime.base.clock import run_virtual

STEP, SAVING, EVALUATING = 10.0, 3.0, 2.0
"""Seconds."""


class Run:
    """As much of a run as its controls need."""

    def __init__(self, steps=6):
        self.steps, self.done, self.stopped, self.over_early = steps, 0, False, False
        self.did: list[tuple[str, int]] = []
        self.signal, self.rested, self.tasks = asyncio.Event(), 0.0, set()

    @property
    def over(self):
        return self.done >= self.steps or self.over_early or self.signal.is_set()

    def stop(self, why):
        self.stopped = True

    async def end_signal(self):
        await self.signal.wait()

    async def save(self, tell):
        step = self.done
        if ("saved", step) in self.did:
            return tell("there already", True)
        self.did.append(("saved", step))

        async def write():
            await asyncio.sleep(SAVING)
            tell(f"saved {step}", True)

        self.tasks.add(task := asyncio.create_task(write()))
        task.add_done_callback(self.tasks.discard)

    async def evaluate(self):
        if ("evaluated", self.done) not in self.did:
            await asyncio.sleep(EVALUATING)
            self.did.append(("evaluated", self.done))
        return f"evaluated {self.done}", True

    async def stop_here(self):
        self.did.append(("stopped", self.done))
        self.over_early = True

    @contextlib.contextmanager
    def resting(self, *, paused):
        assert paused
        began = asyncio.get_running_loop().time()
        yield
        self.rested += asyncio.get_running_loop().time() - began


class Told(list):
    """The answers, with when they came."""

    def __call__(self, said, well):
        self.append((asyncio.get_running_loop().time(), said, well))


def lived(*asks, steps=6, signal=None):
    """A run of steps of ten seconds, asked for things at times: it, the answers by name, how long it took."""

    async def main():
        run = Run(steps)
        controls = Controls(run, lambda: None)
        told = {what: Told() for _, what in asks}
        loop = asyncio.get_running_loop()
        for at, what in asks:
            loop.call_at(at, controls.ask, what, told[what])
        if signal is not None:
            loop.call_at(signal, run.signal.set)
        while not run.over:
            await controls.between_steps()
            if run.over:
                break
            await asyncio.sleep(STEP)
            run.done += 1
            if run.stopped:
                run.over_early = True
        await asyncio.gather(*run.tasks)
        controls.close(well=True)
        return run, told

    (run, told), seconds = run_virtual(main())
    return run, told, seconds


def test_nothing_is_done_in_the_middle_of_a_step():
    run, told, seconds = lived((15, "evaluate"), (15, "checkpoint"))
    assert run.did == [("evaluated", 2), ("saved", 2)]
    assert told == {"evaluate": [(22, "evaluated 2", True)], "checkpoint": [(25, "saved 2", True)]}
    assert seconds == 6 * STEP + EVALUATING, "the run waits for evaluations, not for checkpoints"


def test_a_paused_run_waits_until_it_may_go_on():
    run, told, seconds = lived((15, "pause"), (520, "go_on"))
    assert told == {"pause": [(20, "paused after step 2", True)], "go_on": [(520, "goes on after step 2", True)]}
    assert (run.done, run.rested, seconds) == (6, 500, 560)


def test_a_paused_run_can_be_saved_and_evaluated():
    run, told, _ = lived((15, "pause"), (100, "checkpoint"), (200, "evaluate"), (300, "checkpoint"), (400, "go_on"))
    assert run.did == [("saved", 2), ("evaluated", 2)]
    assert told["checkpoint"] == [(103, "saved 2", True), (300, "there already", True)]
    assert told["evaluate"] == [(202, "evaluated 2", True)]
    assert run.rested == 400 - 20 - EVALUATING


def test_a_paused_run_can_be_stopped():
    run, told, seconds = lived((15, "pause"), (100, "stop"))
    assert run.did == [("stopped", 2)]
    assert told["stop"] == [(100, "stopped after step 2, evaluated and saved as after the last one", True)]
    assert seconds == 100


def test_a_run_that_is_stopped_ends_with_the_step_under_way():
    run, told, seconds = lived((15, "stop"), (16, "stop"))
    assert (run.done, seconds) == (2, 20)
    assert [well for _, _, well in told["stop"]] == [True, True]


def test_a_signal_ends_a_pause():
    run, _, seconds = lived((15, "pause"), signal=77)
    assert (run.done, seconds) == (2, 77)


def test_what_is_asked_for_twice_is_done_once():
    twice = ((at, what) for at, what in zip((11, 12, 13, 14), ("evaluate", "evaluate", "pause", "pause"), strict=True))
    run, told, _ = lived(*twice, (100, "pause"), (200, "go_on"))
    assert run.did == [("evaluated", 2)]
    assert [said for _, said, _ in told["evaluate"]] == ["evaluated 2"] * 2
    paused = ["paused after step 2"] * 2 + ["it is paused already, after step 2"]
    assert [said for _, said, _ in told["pause"]] == paused


def test_a_pause_is_taken_back_before_it_came_to_it():
    run, told, seconds = lived((15, "pause"), (16, "go_on"), (17, "go_on"))
    assert [well for _, _, well in told["pause"]] == [False]
    assert [said for _, said, _ in told["go_on"]] == ["goes on: it had not come to the pause", "it is not paused"]
    assert (run.rested, seconds) == (0, 60)


def test_a_run_that_ends_before_it_comes_to_something_says_so():
    _, told, _ = lived((55, "evaluate"), (56, "checkpoint"), (57, "pause"))
    assert told["evaluate"] == [(60, "the run ended after step 6, before it came to that", False)]
    assert told["checkpoint"] == [(60, "the run is over: the checkpoint of step 6 is its last", True)]
    assert told["pause"][0][2] is False


def test_nothing_else_can_be_asked_for():
    _, told, _ = lived((15, "rm -rf"))
    assert told["rm -rf"] == [
        (15, "'rm -rf' is nothing that a run can do; there are checkpoint, evaluate, pause, go_on, stop", False)
    ]


@given(st.lists(st.tuples(st.integers(0, 80), st.sampled_from([*CONTROLS])), max_size=12))
def test_whatever_is_asked_for_is_answered_once_and_nothing_is_done_twice_after_a_step(asks):
    run, told, seconds = lived(*asks, (1000, "go_on"))
    for what in CONTROLS:
        times = [at for at, name in (*asks, (1000, "go_on")) if name == what]
        assert sum(at < seconds for at in times) <= len(told.get(what, ())) <= len(times)
    assert len(set(run.did)) == len(run.did)


@pytest.mark.parametrize("what", ["pause", "checkpoint"])
def test_a_button_that_is_pressed_without_end_fills_no_memory(what):
    _, told, _ = lived(*((15, what),) * 300, (500, "go_on"))
    assert len(told[what]) == 300
    assert sum(not well for _, _, well in told[what]) >= 44
