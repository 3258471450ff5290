"""The training loop by itself, with a toy kind of run: when it evaluates and saves, what it resumes, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.config.common import CheckpointConfig, TrackingConfig
from rlinf.config.embodied import EmbodiedConfig, TrialsConfig
from rlinf.config.load import InputError, Problem, RunFailure
from rlinf.data.in_flight import Completed, InFlight, Rules
from rlinf.data.step import EmbodiedStep
from rlinf.metrics.alarms import Alarm
from rlinf.models.language.truth import Way
from rlinf.placement.seats import RoleKind, place
from rlinf.runs.callbacks import Alarms, Callbacks, Observer, RunState
from rlinf.runs.loop import Described, TrainingLoop, Workload, out_of_memory
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import Role, only, spawn_roles
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.system.system import ActorSystem
from rlinf.storage.directory import RunDirectory, find_checkpoint
from tests.launching import metrics_of


class Policy(Actor):
    """Acts by the weights that it was given last: a number."""

    async def setup(self):
        self.weights = 0

    @endpoint
    async def act(self, index):
        return (index, self.weights)

    @endpoint
    async def load(self, weights):
        self.weights = weights

    @endpoint
    async def newest(self):
        return self.weights


class Learner(Actor):
    """Its weights are the number of batches that it has learned from."""

    async def setup(self):
        self.weights_now = 0

    @endpoint(joint=True)
    async def train(self, batch):
        index, acted_by = batch
        self.weights_now += 1
        return {"index": float(index), "staleness": float(self.weights_now - 1 - acted_by)}

    @endpoint(joint=True)
    async def weights(self):
        return self.weights_now

    @endpoint(joint=True)
    async def save(self, path):
        (Path(path) / "state").write_text(str(self.weights_now))

    @endpoint(joint=True)
    async def restore(self, path):
        self.weights_now = int(Path(path).read_text())


BREAKS: dict[int, BaseException] = {}
"""What goes wrong, by step."""


SCORES: list[float] = []
"""What the next evaluations find, where that is not the number."""


async def toy(step, policy, trainer):
    async def acted(steps):
        async for one in steps:
            yield Completed(one.index, (await policy[0].act(one.index),))

    (batch,) = await step.in_flight.next_batch(step, acted, policy).groups.collect()
    if step.index in BREAKS:
        raise BREAKS.pop(step.index)
    metrics = await trainer.train(batch)
    await step.in_flight.publish(policy, trainer.weights())
    return metrics


async def says_nothing(step):
    return None


class Toy(Workload[dict[str, float]]):
    """Evaluates the number."""

    generates = "policy"
    headline = "evaluation/score"
    evaluates_every = 2

    def __init__(self, *args):
        super().__init__(*args)
        self.in_flight = InFlight(Rules(1, between=True))

    async def spawn(self, placed, names=None):
        return await spawn_roles(
            self.run.system, placed, only({"policy": Role(Policy, {}), "trainer": Role(Learner, {})}, names)
        )

    async def draw(self, index):
        return EmbodiedStep(index, 1, until=self.quiet_after(index), in_flight=self.in_flight)

    patience = property(lambda self: self.config.trials.patience)

    async def evaluate(self):
        if SCORES:
            return {"score": float(SCORES.pop(0))}
        return {"score": 1.0 + await self.run.roles["policy"][0].newest()}

    def describe(self, evaluation):
        return Described(evaluation, f"score {evaluation['score']}")

    def conclude(self, before, after):
        yield f"{before['score']} -> {after['score']}"


def run(directory, steps, *, flow=toy, resume=False, patience=0, callbacks=(), **checkpoint):
    """Run it to its end, in one process."""
    config = EmbodiedConfig(
        name="toy", steps=steps, trace=False, metrics=TrackingConfig(live="never"),
        checkpoint=CheckpointConfig(**{"every": 3, **checkpoint}), trials=TrialsConfig(patience=patience),
    )  # fmt: skip
    kinds = (RoleKind("policy"), RoleKind("trainer", learns=True))
    prepared = RunPlan(
        flow=flow, path="toy", algorithm=None, kinds=kinds, model="toy", items=1,
        placed=place(config.placement, kinds, 1), chosen=None, held={}, callbacks=Callbacks.of(callbacks, []),
    )  # fmt: skip

    async def main():
        begun = find_checkpoint(directory) if resume else None
        place_of_run = RunDirectory.create(directory) if begun is None else RunDirectory.reopen(directory, begun.step)
        async with ActorSystem.local() as system:
            loop = TrainingLoop(system, config, prepared, place_of_run, Toy)
            await loop.run(begun)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())
    return metrics_of(directory)


def told(lines):
    names = ("step", "index", "staleness", "evaluation/score")
    return [tuple(line.get(name) for name in names) for line in lines]


WHOLE = [(1, 0, 0, None), (2, 1, 1, 3), (3, 2, 0, None), (4, 3, 0, 5), (5, 4, 0, 6)]
"""Evaluated every 2 steps, saved every 3, and both at the end: nothing is acted ahead over any of these."""


def test_it_evaluates_and_saves_with_nothing_in_flight(tmp_path, capsys):
    assert told(run(tmp_path / "toy", 5)) == WHOLE
    first = json.loads((tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["evaluation/score"]) == (0, 1.0)
    kept = {path.name: (path / "state").read_text() for path in (tmp_path / "toy" / "checkpoints").iterdir()}
    assert kept == {"step_000003": "3", "step_000005": "5", "latest": "5"}
    printed = capsys.readouterr().out
    assert "before: score 1.0" in printed
    assert "1.0 -> 6.0" in printed


@pytest.mark.parametrize("learned", [True, False])
def test_a_warm_up_that_is_all_there_is_is_saved(tmp_path, monkeypatch, learned):
    async def warm_up(self):
        return learned

    monkeypatch.setattr(Toy, "warm_up", warm_up)
    run(tmp_path / "toy", 0)
    assert (tmp_path / "toy" / "checkpoints" / "step_000000").exists() == learned
    assert told(run(tmp_path / "toy", 5, resume=learned))[-5:] == WHOLE, "which is gone on from"


@pytest.mark.parametrize(("minutes", "saved"), [(0, ["step_000004"]), (30, ["step_000004"]), (1e-9, [1, 2, 3, 4])])
def test_it_saves_when_it_has_not_for_a_while(tmp_path, minutes, saved):
    run(tmp_path / "toy", 4, every=0, keep=0, minutes=minutes)
    found = sorted(path.name for path in (tmp_path / "toy" / "checkpoints").iterdir() if path.name != "latest")
    assert found == [f"step_{step:06d}" if isinstance(step, int) else step for step in saved]


def test_it_goes_on_from_the_last_checkpoint_as_if_nothing_had_happened(tmp_path):
    BREAKS[3] = FloatingPointError("no number")
    with pytest.raises(RunFailure, match=r"step 4:.*number"):
        run(tmp_path / "toy", 5)
    assert told(run(tmp_path / "toy", 5, resume=True)) == WHOLE


def test_a_bug_in_a_flow_is_raised_as_it_is(tmp_path):
    BREAKS[1] = KeyError("bug")
    with pytest.raises(KeyError, match="bug"):
        run(tmp_path / "toy", 5)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ExceptionGroup("unhandled", [ValueError("x"), MemoryError("Unable to allocate 8.00 GiB")]),
    ],
)
def test_memory_that_is_used_up_is_said_with_its_call_and_what_to_lower(error):
    (error.exceptions[1] if isinstance(error, ExceptionGroup) else error).add_note("in trainer[1].train() on host 1")
    words = out_of_memory(error)
    assert words.startswith("out of memory in trainer[1].train()")
    assert "trainer.micro_batch_tokens" in words
    assert "rollout.max_rows" not in words
    assert "\n" not in words


def test_memory_that_a_flow_has_used_up_is_a_line_and_no_traceback(tmp_path):
    BREAKS[1] = MemoryError("Unable to allocate 8.00 GiB")
    with pytest.raises(RunFailure, match=r"step 2: out.*memory.*8.00 GiB.*trainer.micro_batch_tokens.*rollout.max"):
        run(tmp_path / "toy", 5)


@pytest.mark.parametrize("value", ["done", [1.0, 2.0], np.ones(2), None], ids=["text", "list", "array", "none"])
def test_a_metric_that_is_no_number_is_named_with_its_flow(tmp_path, value):
    async def talks(step, policy, trainer):
        return {**await toy(step, policy, trainer), "note": value}

    with pytest.raises(InputError, match=r"returned.*'note' ="):
        run(tmp_path / "toy", 2, flow=talks)


def test_metrics_may_be_any_numbers(tmp_path):
    async def counts(step, policy, trainer):
        return {**await toy(step, policy, trainer), "a": np.float32(0.5), "b": True, "c": torch.tensor(2.0)}

    run(tmp_path / "toy", 2, flow=counts)
    assert [metrics_of(tmp_path / "toy")[0][name] for name in "ab"] == [0.5, True]


def test_a_flow_must_return_metrics(tmp_path):
    with pytest.raises(InputError, match=r"says_nothing returned.*step's"):
        run(tmp_path / "toy", 5, flow=says_nothing)


@pytest.mark.parametrize("value", ["very well", b"1", [1.0, 2.0], None, torch.zeros(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    async def says_how(step, trainer):
        return {"index": 1, "how": value}

    with pytest.raises(InputError, match=r"says_how returned.*'how' ="):
        run(tmp_path / "toy", 5, flow=says_how)


def test_what_becomes_a_number_is_a_metric(tmp_path):
    async def says_much(step):
        return {"index": np.int64(3), "staleness": torch.tensor([0.5]), "flag": True}

    lines = run(tmp_path / "toy", 2, flow=says_much)
    assert [(line["index"], line["staleness"], line["flag"]) for line in lines] == [(3.0, 0.5, True)] * 2


# The best evaluation, early stopping, callbacks -----------------------------------------------------------------------


def best_of(directory):
    """What `checkpoints/best` holds, and all whole checkpoints."""
    links = {path.name: path.resolve().name for path in directory.iterdir() if path.is_symlink()}
    return links.get("best"), sorted(path.name for path in directory.iterdir() if not path.is_symlink())


def test_the_best_checkpoint_stays_beside_the_newest_ones(tmp_path, capsys):
    SCORES[:] = [9, 1, 5, 2, 3]  # before the first step, after 2, 4, 6, 7
    run(tmp_path / "toy", 7, keep=1, best="evaluation/score")
    assert best_of(tmp_path / "toy" / "checkpoints") == ("step_000004", ["step_000004", "step_000007"])
    printed = capsys.readouterr().out
    assert "evaluation/score: 5, after step 4" in printed


def test_less_is_better_where_the_configuration_says_so(tmp_path):
    SCORES[:] = [0, 4, 1, 2, 3]
    run(tmp_path / "toy", 7, keep=1, best="evaluation/score", best_mode="min")
    assert best_of(tmp_path / "toy" / "checkpoints")[0] == "step_000004"


def test_evaluations_that_are_no_better_end_the_run(tmp_path, capsys):
    SCORES[:] = [9, 1, 5, 2, 3, 3]
    lines = run(tmp_path / "toy", 50, patience=2)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    said = "stopped after step 8: evaluation/score was best after step 4: 5; no better in 2 evaluations (patience 2)"
    assert said in capsys.readouterr().out
    found = find_checkpoint(tmp_path / "toy")
    assert found is not None
    assert found.step == 8, "the last step is saved"


def test_a_resumed_run_remembers_the_best_evaluation_and_how_long_ago_it_was(tmp_path, capsys):
    SCORES[:] = [0, 7, 3]  # before, after 2 and 4
    BREAKS[6] = FloatingPointError("no number")
    with pytest.raises(RunFailure):
        run(tmp_path / "toy", 20, keep=1, best="evaluation/score", patience=3, every=5)
    assert best_of(tmp_path / "toy" / "checkpoints") == ("step_000002", ["step_000002", "step_000005"])
    SCORES[:] = [4, 4]  # after 6 and 8
    lines = run(tmp_path / "toy", 20, keep=1, best="evaluation/score", patience=3, every=5, resume=True)
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert best_of(tmp_path / "toy" / "checkpoints") == ("step_000002", ["step_000002", "step_000008"])
    assert "after step 2: 7; no better" in capsys.readouterr().out
    lines = run(tmp_path / "toy", 20, keep=1, best="evaluation/score", patience=3, every=5, resume=True)
    assert len(lines) == 8, "a run that has ended early stays ended"


def test_a_metric_that_there_is_not_is_said_at_the_first_evaluation(tmp_path):
    with pytest.raises(InputError, match=r"evaluation/scoer: evaluations.*metric.*evaluation/score"):
        run(tmp_path / "toy", 5, best="evaluation/scoer")
    assert metrics_of(tmp_path / "toy") == []


class Notes:
    """Writes down what it is told."""

    def __init__(self):
        self.heard = []

    def on_step(self, step, metrics):
        self.heard.append(("step", step, metrics["index"]))

    async def on_evaluate(self, step, evaluation):
        self.heard.append(("evaluate", step, evaluation["score"]))

    def on_checkpoint(self, path, run):
        self.heard.append(("checkpoint", path.name, (path / "state").exists() and run.directory == path.parents[1]))


def test_callbacks_are_told_of_steps_evaluations_and_whole_checkpoints(tmp_path):
    notes, counted = Notes(), []
    run(tmp_path / "toy", 3, callbacks=(notes, lambda run, **rest: counted.append(run.step)))
    assert counted == [1, 2, 3]
    first = [event for event in notes.heard if event[0] != "checkpoint"]
    assert first == [
        ("evaluate", 0, 1.0), ("step", 1, 0.0), ("step", 2, 1.0), ("evaluate", 2, 3.0), ("step", 3, 2.0),
        ("evaluate", 3, 4.0),
    ]  # fmt: skip
    assert ("checkpoint", "step_000003", True) in notes.heard


@pytest.mark.parametrize("event", ["on_step", "on_evaluate"])
def test_a_callback_ends_the_run_in_order(tmp_path, capsys, event):
    def enough(step, run):
        if step == 4:
            run.stop("it is good enough")

    lines = run(tmp_path / "toy", 50, callbacks=(SimpleNamespace(**{event: enough}),))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["evaluation/score"] == 5
    found = find_checkpoint(tmp_path / "toy")
    assert found is not None
    assert found.step == 4
    assert "step 4: it is good enough" in capsys.readouterr().out


def test_a_callback_that_raises_ends_the_run_and_is_named(tmp_path):
    class Careless:
        def on_step(self, step):
            return 1 / (step - 2)

    with pytest.raises(RunFailure, match=r"Careless\.on_step.*ZeroDivisionError.*test_loop\.py:\d+\).*2"):
        run(tmp_path / "toy", 5, callbacks=(Careless(),))

    async def fails(step, path):
        raise OSError("no room")

    with pytest.raises(RunFailure, match=r"on_checkpoint raised OSError:.*room"):
        run(tmp_path / "toy", 3, callbacks=(SimpleNamespace(on_checkpoint=fails),))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda steps: None, "takes steps; it may take step, metrics, run"),
        (SimpleNamespace(on_steps=print), "on_steps, which nothing calls; did you mean on_step"),
        (object(), "a callback is a function, or an object with any of on_step"),
        ("rlinf.flows.grpo.nothing", "has no attribute"),
    ],
)
def test_what_is_no_callback_is_said_before_the_run(wrong, said):
    problems: list[Problem] = []
    Callbacks.of([wrong], problems)
    assert said in str(problems[0])


# The directory in other hands -----------------------------------------------------------------------------------------


def removed(run):
    shutil.rmtree(run)


def moved(run):
    run.rename(run.with_name("elsewhere"))


def unmounted(run):
    moved(run)
    run.mkdir()


def without_metrics(run):
    (run / "metrics.jsonl").unlink()


def emptied(run):
    os.truncate(run / "metrics.jsonl", 0)


def replaced(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_text(text)


def without_alarms(run):
    (run / "alarms.jsonl").unlink()


def without_the_newest(run):
    shutil.rmtree(run / "checkpoints" / "step_000003")


def without_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize(
    ("harm", "named", "saved"),
    [
        (removed, "toy, .* is gone", False),
        (moved, "toy, .* is gone", False),
        (unmounted, "checkpoints, .* is gone", True),
        (without_metrics, "metrics.jsonl is gone", True),
        (emptied, "metrics.jsonl was cut", True),
        (replaced, "metrics.jsonl was cut", True),
        (without_alarms, "alarms.jsonl is gone", True),
        (without_the_newest, "latest, .* is gone", True),
        (without_checkpoints, "checkpoints, .* is gone", True),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_somebody_does_to_the_directory_of_a_run_ends_it_within_a_step(tmp_path, harm, named, saved):
    whole = asyncio.Event()  # set when the run itself counts its checkpoint as written

    async def on_checkpoint(step, path, run):
        whole.set()

    async def in_other_hands(step, policy, trainer):
        if step.index == 4:
            await whole.wait()  # one under way would make its directory anew
            harm(tmp_path / "toy")
        return await toy(step, policy, trainer)

    with pytest.raises(RunFailure, match=f"after step [56]: .*{named}"):
        run(tmp_path / "toy", 40, flow=in_other_hands, callbacks=(SimpleNamespace(on_checkpoint=on_checkpoint),))
    assert (tmp_path / "toy").exists() == saved
    if saved:
        found = find_checkpoint(tmp_path / "toy")
        assert found is not None
        assert found.step in (5, 6), "nothing of the run is lost"


class Noting(Observer):
    """Notes what it is told."""

    def __init__(self):
        self.events = []

    async def on_step(self, step, metrics):
        self.events.append(("step", step, metrics["index"]))

    async def on_evaluate(self, step, evaluation):
        self.events.append(("evaluate", step, evaluation["score"]))

    async def on_record(self, step, metrics, last):
        self.events.append(("record", step, metrics.get("evaluation/score"), last))

    async def on_checkpoint(self, step, path):
        self.events.append(("checkpoint", step, path.name))


def test_an_observer_is_told_of_a_step_then_of_its_evaluation_then_of_all_its_numbers(tmp_path, monkeypatch):
    observer = Noting()
    monkeypatch.setattr(Toy, "observers", (observer,))
    run(tmp_path / "toy", 3)
    assert observer.events == [
        ("evaluate", 0, 1.0),
        ("step", 1, 0.0), ("record", 1, None, False),
        ("step", 2, 1.0), ("evaluate", 2, 3.0), ("record", 2, 3.0, False),
        ("step", 3, 2.0), ("evaluate", 3, 4.0), ("record", 3, 4.0, True),
        ("checkpoint", 3, "step_000003"),
    ]  # fmt: skip


class TooGood:
    """Warns of a score of 3."""

    def check(self, step, metrics):
        return Alarm(f"step {step}", "too good", "look") if metrics.get("evaluation/score") == 3.0 else None


def test_an_alarm_is_a_line_and_a_row_of_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Toy, "observers", property(lambda self: [Alarms(self.run, [TooGood()])]))
    run(tmp_path / "toy", 3)
    (row,) = map(json.loads, (tmp_path / "toy" / "alarms.jsonl").read_text().splitlines())
    assert row["step"] == 2
    assert "too good" in capsys.readouterr().out


def test_how_roles_compute_is_told_where_it_is_unusual_and_an_idle_gpu_is_an_alarm():
    lines, alarms = [], []
    state = RunState(None, SimpleNamespace(name="a run"), None, None, steps=1)
    state.report = SimpleNamespace(line=lines.append)
    state.recorder = SimpleNamespace(alarm=lambda step, text, do: alarms.append((step, text, do)))
    state.computes("rollout", Way("decodes step by step: an error of 0.3", False, "step by step: an error of 0.3"))
    state.computes("trainer", Way("packed"))
    state.computes("judge", Way())
    assert lines == ["a run: rollout: decodes step by step: an error of 0.3"]
    assert list(state.ways) == ["rollout", "trainer"]
    state.alarm_of_slow_ways()
    ((step, text, do),) = alarms
    assert (step, "rollout" in text, "an error of 0.3" in text) == (0, True, True)
    assert "rollout.engine" in do
