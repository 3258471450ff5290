"""A rollout around an engine of one's own: runs learn with it as with ours, and do without what it cannot."""

import asyncio

import numpy as np
import pytest

from rlinf import ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.config.load import ConfigError
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.engines.transformers.model import ModelForward
from rlinf.models.language.build import build_model
from rlinf.models.offload import Parking
from rlinf.runs.rules import load_config
from rlinf.runtime.actor.actor import endpoint
from tests.actors.test_rollout import SHARED, asked, collected
from tests.engines.scripted_process import ScriptedProcess
from tests.engines.scripted_process import build as build_process
from tests.launching import QUICKSTART, launch, metrics_of

PROCESS = "tests.engines.scripted_process.build"


async def plain(setup):
    """The engine in another process, without what an engine need not have."""
    engine = await build_process(setup)
    engine.__class__ = Plain
    return engine


class Plain(ScriptedProcess):
    hands_over = sleeps = False


def alike(groups, others):
    """The same samples, up to the rounding of another engine."""
    one, other = (
        {(sample.group, sample.index): sample for group in some for sample in group.samples}
        for some in (groups, others)
    )
    assert one.keys() == other.keys()
    for key, sample in one.items():
        assert sample.response_ids.tolist() == other[key].response_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, other[key].logprobs, atol=1e-5)


@pytest.mark.repeated  # with the engine of this process by tests/runs/test_quickstart.py
def test_the_quickstarts_task_is_learned_with_an_engine_in_another_process(tmp_path):
    launch(
        "--config", QUICKSTART, f"output_dir={tmp_path}", f"rollout.engine={PROCESS}", "steps=16", "task.digits=2",
        "algorithm.prompts_per_step=32", "optimizer.lr=2e-3", "evaluation.problems=20", "checkpoint.every=0",
    )  # fmt: skip
    steps = metrics_of(tmp_path / "quickstart")
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert max(step["mismatch/max"] for step in steps) < 1e-4  # it answers with the trainer's weights, every step


@pytest.mark.parametrize(
    ("path", "text"),
    [("transfomers", "transformers"), ("tests.engines.scripted_process.bild", "build")],
)
def test_an_engine_that_is_not_there_is_told_before_anything_starts(path, text):
    with pytest.raises(ConfigError, match=rf"(?s)rollout\.engine.*{text}"):
        load_config(QUICKSTART, [f"rollout.engine={path}"])


async def test_partial_groups_go_on_in_another_rollout():
    settings = {**SHARED, "max_new_tokens": 40, "temperature": 3.0, "max_rows": 6}
    async with ActorSystem.local() as system:
        ours = await system.spawn(Rollout, name="ours", **settings)
        theirs = await system.spawn(Rollout, name="theirs", engine=PROCESS, **settings)
        expected = await collected(ours.generate(asked(4), n=3))
        stream = aiter(ours.generate(Stream.of(asked(4)), n=3))
        finished = [await anext(stream)]
        await ours.pause()
        (kept,) = await ours.in_flight()
        assert any(group.done or any(one.partial for one in group.left.values()) for group in kept)
        await ours.resume()
        rest = [group async for group in stream]
        alike([*finished, *rest], expected)
        drawn = {group.prompt.id for group in [*finished, *kept]}
        unread = [prompt for prompt in asked(4) if prompt.id not in drawn]
        again = await collected(theirs.generate(Stream.of([*kept, *unread]), n=3))
        alike([*finished, *again], expected)
        assert await ours.in_flight() == [[]]


class Parked(Rollout):
    """Counts how often its device was taken from it."""

    async def setup(self, **settings):
        self.parked = 0
        await super().setup(**settings)

    async def offload(self):
        self.parked += 1
        await super().offload()

    @endpoint
    async def times(self):
        return self.parked


@pytest.mark.parametrize("engine", [PROCESS, "tests.actors.test_rollout_engine.plain"])
async def test_engines_elsewhere_take_turns_on_a_device_whether_or_not_they_sleep(engine):
    async def coming(prompts):
        for prompt in prompts:
            await asyncio.sleep(0.02)  # longer than a device is kept that others want
            yield prompt

    settings = {**SHARED, "max_new_tokens": 12, "temperature": 3.0, "max_rows": 4}
    async with ActorSystem.local(device_memory={0: 100}) as system:
        alone = await system.spawn(Rollout, name="alone", **settings)
        expected = await collected(alone.generate(asked(4), n=2))
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "parked_bytes": 10}
        both = [await system.spawn(Parked, name=name, engine=engine, **on_one, **settings) for name in ("one", "two")]
        found = await asyncio.gather(*(collected(each.generate(Stream.of(coming(asked(4))), n=2)) for each in both))
        for groups in found:
            alike(groups, expected)
        assert sum([(await each.times())[0] for each in both]) >= 3


async def test_a_parked_rollout_takes_new_weights_in_place_of_the_old_ones(monkeypatch):
    unpark, take, seen = Parking.unpark, ModelForward._take, []

    def unparked(self, *, without=()):
        tensors = list(without)
        seen.append(("unpark without", len(tensors)))
        unpark(self, without=tensors)

    def taken(self, weights):
        seen.append(("take", weights.version))
        take(self, weights)

    monkeypatch.setattr(Parking, "unpark", unparked)
    monkeypatch.setattr(ModelForward, "_take", taken)
    settings = {**SHARED, "max_new_tokens": 12, "temperature": 3.0, "max_rows": 4}
    async with ActorSystem.local(device_memory={0: 100}) as system:
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "parked_bytes": 10}
        alone = await system.spawn(Rollout, name="alone", **settings)
        one, other = [await system.spawn(Parked, name=name, **on_one, **settings) for name in ("one", "other")]
        model = build_model(SHARED["model"], load_tokenizer(SHARED["tokenizer"]), seed=5)
        new = [Weights.pack(model.named_parameters(), version) for version in (1, 2)]
        for version, weights in enumerate(new, start=1):
            await collected(other.generate(asked(1)))  # for which the first one is parked
            await alone.load(weights)
            seen.clear()
            assert await one.load(weights) == version
            assert seen == [("unpark without", len(list(model.parameters()))), ("take", version)]
            assert await one.version() == [version]
        await one.load(new[0])  # it is there now, and copies them itself
        assert seen[2:] == [("take", 1)]
        await one.load(new[1])
        alike(await collected(one.generate(asked(2), n=2)), await collected(alone.generate(asked(2), n=2)))
