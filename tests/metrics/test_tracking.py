"""Trackers never hold up or end a run: not while they open, fail, hang or are missing."""

from __future__ import annotations

import builtins
import importlib.util
import json
import threading

import pytest

from rlinf.metrics import trackers as tracking
from rlinf.metrics.trackers import KINDS, TrackedRun, Tracking, missing, wanted_trackers


class Sink:
    """Takes notes; fails or hangs as told."""

    where = "nowhere"

    def __init__(self, fail=(), hang=None):
        self.seen, self.fail, self.hang, self.closed = [], fail, hang, False
        self.threads = set()

    def write(self, step, metrics):
        self.threads.add(threading.current_thread())
        if self.hang is not None:
            self.hang.wait()
        if step in self.fail:
            raise ConnectionError("no route to host\nand more")
        self.seen.append((step, metrics))

    def samples(self, step, rows):
        self.seen.append((step, list(rows)))

    def close(self):
        self.closed = True


@pytest.fixture
def about(tmp_path):
    return TrackedRun("run", tmp_path, {"steps": 3, "model": {"path": None}})


@pytest.fixture
def using(monkeypatch, about):
    """A tracking that uses a given sink, or fails to open it; and what it says."""

    def make(opened):
        said = []

        def resolve(path):
            def open_sink(about, project):
                if isinstance(opened, Exception):
                    raise opened
                return opened

            return open_sink

        monkeypatch.setattr(tracking, "resolve", resolve)
        return Tracking({"wandb": "project"}, about, said.append), said

    return make


async def test_everything_arrives_in_order_and_is_closed(using):
    sink = Sink()
    trackers, said = using(sink)
    async with trackers:
        for step in range(100):
            trackers.write(step, {"loss": step / 2, "nan": float("nan")})
        trackers.samples(99, [{"prompt": "a"}])
    assert sink.seen == [*((step, {"loss": step / 2}) for step in range(100)), (99, [{"prompt": "a"}])]
    assert sink.closed
    assert threading.main_thread() not in sink.threads
    assert said == ["wandb: nowhere"]


async def test_a_tracker_that_fails_is_told_once_and_tried_again(using):
    sink = Sink(fail={2, 3})
    trackers, said = using(sink)
    async with trackers:
        for step in range(5):
            trackers.write(step, {})
    assert [step for step, _ in sink.seen] == [0, 1, 4]
    assert len(said) == 2
    assert "wandb: ConnectionError: no" in said[1]


async def test_a_tracker_that_cannot_be_opened_does_not_end_the_run(using):
    trackers, said = using(RuntimeError("bad key"))
    async with trackers:
        trackers.write(1, {})
    assert len(said) == 1
    assert "wandb: " in said[0]
    assert "RuntimeError: bad key" in said[0]


async def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(using, monkeypatch):
    go_on = threading.Event()
    trackers, said = using(Sink(hang=go_on))
    monkeypatch.setattr(tracking, "QUEUED", 5)
    for step in range(1000):
        trackers.write(step, {"loss": 1.0})
    await trackers.close(0.05)  # which ends, though the tracker does not
    assert "left behind" in said[-1]
    go_on.set()


async def test_what_a_hanging_tracker_cannot_take_is_dropped(using, monkeypatch):
    monkeypatch.setattr(tracking, "QUEUED", 3)
    go_on = threading.Event()
    sink = Sink(hang=go_on)
    trackers, said = using(sink)
    for step in range(20):
        trackers.write(step, {})
    assert sum("3 messages behind" in line for line in said) == 1
    go_on.set()
    await trackers.close(5.0)
    assert 3 <= len(sink.seen) < 20
    assert sink.closed, "it ends although its queue had no room for the end"


async def test_after_a_failure_the_end_waits_only_a_moment(using, monkeypatch):
    monkeypatch.setattr(tracking, "HASTY_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "FLUSH_SECONDS", 1e6)
    go_on = threading.Event()
    trackers, _ = using(Sink(hang=go_on))
    with pytest.raises(KeyError, match="first cause"):
        await _fail(trackers)
    go_on.set()


async def _fail(trackers):
    async with trackers:
        trackers.write(1, {})
        raise KeyError("first cause")


def test_trackers_are_chosen_by_their_keys():
    assert wanted_trackers() == {}
    assert wanted_trackers(tensorboard=True, wandb="sorting") == {"tensorboard": "", "wandb": "sorting"}
    assert wanted_trackers(swanlab="s") == {"swanlab": "s"}


def test_a_missing_package_is_told_with_its_extra_and_nothing_is_imported(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "swanlab" else found(name))
    monkeypatch.setattr(builtins, "__import__", lambda *_: pytest.fail("it was imported"))
    problems = list(missing(["tensorboard", "swanlab"]))
    monkeypatch.undo()
    assert problems == [("metrics.swanlab", "the package swanlab is not installed: pip install 'rlinf[swanlab]'")]


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


async def track(name, about):
    said = []
    async with Tracking({name: "project"}, about, said.append) as trackers:
        for step in (1, 2):
            trackers.write(step, {"reward/mean": step / 4})
        trackers.samples(2, [{"prompt": "3142>", "response": "<script>\n# 1234", "reward": 1.0}])
    assert not any(line.startswith("warning") for line in said), said
    return said


@needs("tensorboard")
async def test_tensorboard_has_the_numbers_and_the_samples(about):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await track("tensorboard", about)
    events = EventAccumulator(str(about.directory / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (text,) = events.Tensors("sample 0/text_summary")
    assert b"    <script>\n    # 1234" in text.tensor_proto.string_val[0], "as a block, not as markup"


@needs("wandb")
async def test_wandb_writes_offline_and_a_resumed_run_is_the_same_one(about, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(about.directory))
    (said,) = await track("wandb", about)
    assert said.startswith("wandb: wandb sync ")
    directory = about.directory / "wandb"
    (first,) = directory.glob("offline-run-*")
    run = (directory / "run_id").read_text()
    assert first.name.endswith(run)
    (table,) = first.glob("files/media/table/*.json")
    written = json.loads(table.read_text())
    (row,) = (dict(zip(written["columns"], values, strict=True)) for values in written["data"])
    assert (row["step"], row["kind"], row["prompt"], row["reward"]) == (2, "sampled", "3142>", 1.0)
    await track("wandb", TrackedRun("run", about.directory, {}, resumed=2))
    assert (directory / "run_id").read_text() == run
    wandb.teardown()


@needs("wandb")
def test_wandb_without_a_key_is_refused_and_asks_nothing(about, monkeypatch):
    import wandb
    from wandb.errors import term

    from rlinf.metrics.sinks import WandbSink

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(about.directory))
    monkeypatch.setenv("NETRC", str(about.directory / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(term, "can_use_terminput", lambda: True)
    monkeypatch.setattr(term, "terminput", lambda *_, **__: pytest.fail("a question in the middle of a run"))
    wandb.teardown()
    with pytest.raises(PermissionError, match="WANDB_API_KEY"):
        WandbSink(about, "project")
    wandb.teardown()


@needs("wandb")
def test_samples_in_wandb_are_one_table_that_grows(about, monkeypatch):
    import wandb

    from rlinf.metrics.sinks import WandbSink

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(about.directory))
    sink = WandbSink(about, "project")
    for step, reward in ((1, 0.5), (2, None)):
        sink.samples(step, [{"prompt": "3142>", "reward": reward, "scores": {"right": 1.0, "short": 0.25}}])
        sink.samples(step, [{"prompt": "1>", "kind": "held-out", "reward": 1.0}])
        sink.write(step, {"loss": 1.0})
    sink.close()
    parts = sorted(about.directory.rglob("media/table/*.json"))
    rows = [json.loads(part.read_text())["data"] for part in parts]
    assert [len(each) for each in rows] == [2, 2], "each step adds its own rows"
    assert [[row[0], row[1], row[5], row[9]] for each in rows for row in each] == [
        [1, "sampled", 0.5, "right 1, short 0.25"], [1, "held-out", 1.0, ""],
        [2, "sampled", None, "right 1, short 0.25"], [2, "held-out", 1.0, ""],
    ]  # fmt: skip
    wandb.teardown()


@needs("swanlab")
async def test_swanlab_writes_offline(about, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    await track("swanlab", about)
    assert any((about.directory / "swanlab").iterdir())


def test_every_tracker_has_an_extra_that_installs_it():
    import tomllib
    from pathlib import Path

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for kind in KINDS.values():
        assert any(line.startswith(kind.package) for line in extras["optional-dependencies"][kind.extra])
