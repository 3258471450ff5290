"""When a run ends that is told to: after the step if that comes in time, else at once, as of the step's beginning."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from rlinf.runs.loop import TrainingLoop
from rlinf.runs.saving import Leaving
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.ending import LEAVING, RESUME_ME, Preemption, Stopped


class Trainer:
    """Counts optimizer steps: one, so many seconds after a step has begun."""

    def __init__(self):
        self.steps = 0

    async def optimizer_steps(self):
        return self.steps


class Group(list):
    endpoints = ("optimizer_steps", "train")


class Checkpoints:
    def __init__(self, seconds):
        self.seconds, self.newest = seconds, None

    async def finish(self):
        pass


class Run:
    """As much of a run as its end concerns: steps that take `lasts` seconds, `learns` seconds of which at their end."""

    restartable, ahead = True, False
    workload = state = saver = property(lambda self: self)

    def __init__(self, preemption, lasts, learns=0.0, evaluates=0.0, saves=1.0):
        self.system = SimpleNamespace(preemption=preemption)
        self.lasts, self.learns, self.evaluates = list(lasts), learns, evaluates
        self.steps, self.done, self.drawn = len(self.lasts), 0, 0
        self.trainer = Trainer()
        self.roles = {"trainer": Group([self.trainer])}
        self.files = Checkpoints(saves)
        self.directory = SimpleNamespace(withdraw=self.saved_withdrawn)
        self.saved, self.saved_at = [], None
        self.leaving = Leaving(self, self, self)

    @property
    def over(self):
        return self.done >= self.steps

    async def _goes_on(self):
        return not (self.over or self.leaving.asked)

    def position(self):
        return {"drawn": self.drawn}

    async def draw(self, index):
        self.drawn += 4
        return self.lasts[index]

    def step_begins(self):
        pass

    async def take(self, seconds):
        await asyncio.sleep(seconds - self.learns)
        self.trainer.steps += 1
        await asyncio.sleep(self.learns)
        return {}

    async def step_ended(self, returned):
        self.done += 1
        if self.evaluates:
            await self.leaving.unless_given_up(asyncio.sleep(self.evaluates))
        if self.leaving.asked:
            await self.save()

    async def save(self, position=None):
        self.saved_at = self.done
        self.saved.append((self.done, (position or self.position())["drawn"]))

    def saved_withdrawn(self, step):
        self.saved.pop()

    async def run(self):
        async with self.leaving:
            await TrainingLoop._take_steps(self)


def told(after, *, grace=30.0, restartable=True, **how):
    """A run that is told to end after so many seconds: it, and when it ended after that."""

    async def main():
        ended = asyncio.Event()
        preemption = Preemption(grace, lambda why: ended.set())
        run = Run(preemption, **how)
        run.restartable = restartable
        asyncio.get_running_loop().call_later(after, preemption.ask, signal.SIGTERM)
        work = asyncio.create_task(run.run())
        out_of_time = asyncio.create_task(ended.wait())
        await asyncio.wait({work, out_of_time}, return_when=asyncio.FIRST_COMPLETED)
        out_of_time.cancel()
        if not work.done():
            work.cancel()
            return None
        await work
        return run

    run, seconds = run_virtual(main())
    return run, pytest.approx(seconds - after)


def test_a_step_that_ends_in_time_is_the_last_one():
    run, seconds = told(25, lasts=[10] * 5)
    assert (run.saved, seconds) == ([(3, 12)], 5)
    assert run.leaving.left_out is None


def test_one_that_will_not_is_given_up_at_once_and_its_beginning_is_saved():
    run, seconds = told(250, lasts=[100] * 5)
    assert (run.saved, seconds) == ([(2, 8)], 0), "what was drawn for it is drawn again"
    assert run.leaving.left_out == "step 3 was given up"


def test_one_that_takes_longer_than_the_last_is_given_up_while_there_is_time_to_save():
    run, seconds = told(25, lasts=[10, 10, 100])
    assert (run.saved, seconds) == ([(2, 8)], 30 - LEAVING - 2 * 1.0)


def test_one_whose_weights_have_changed_is_waited_for_as_long_as_there_is_time():
    run, seconds = told(295, lasts=[100] * 5, learns=10)
    assert (run.saved, seconds) == ([(3, 12)], 5)
    run, seconds = told(265, lasts=[100] * 5, learns=40)
    assert run.saved == [], "it is neither as it was nor complete"
    assert seconds == 30 - LEAVING - 2 * 1.0


def test_what_cannot_be_begun_again_is_waited_for_too():
    run, seconds = told(285, lasts=[100] * 5, restartable=False)
    assert (run.saved, seconds) == ([(3, 12)], 15)
    run, _ = told(250, lasts=[100] * 5, restartable=False)
    assert run.saved == []


def test_an_evaluation_is_given_up_and_the_step_before_it_is_saved():
    run, seconds = told(15, lasts=[10] * 5, evaluates=1000.0)
    assert (run.saved, seconds) == ([(1, 4)], 30 - LEAVING - 2 * 1.0)


def test_the_last_step_of_all_ends_the_run_as_ever():
    run, _ = told(45, lasts=[10] * 5)
    assert run.saved == [(5, 20)]
    assert run.system.preemption.complete


def test_where_no_checkpoint_was_written_yet_half_of_the_time_is_left_for_it():
    run, seconds = told(5, lasts=[1000], saves=None)
    assert (run.saved, seconds) == ([(0, 0)], (30 - LEAVING) / 2)


def test_a_program_that_does_not_end_in_time_is_ended_and_wants_to_be_started_again():
    async def main():
        ended = []
        preemption = Preemption(8.0, ended.append)
        preemption.check()
        preemption.ask(signal.SIGUSR1)
        preemption.ask(signal.SIGTERM)
        assert preemption.signal == "SIGUSR1"
        await asyncio.sleep(5.9)
        assert ended == []
        await asyncio.sleep(0.2)
        (why,) = ended
        assert isinstance(why, Stopped)
        assert why.code == RESUME_ME == 75
        with pytest.raises(SystemExit) as exit:
            preemption.check()
        assert exit.value.code == 75
        preemption.complete = True
        preemption.check()

    run_virtual(main())
