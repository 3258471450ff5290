"""Trials of a run: several suites in one configuration, each counted by itself and by task."""

from __future__ import annotations

import json

import pytest

from rlinf.cli.commands import main
from rlinf.config.load import ConfigError, InputError
from rlinf.envs.environment import HELD_OUT, Episode
from rlinf.metrics.tables import success_rows, success_table
from rlinf.runs.embodied import measured, written
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import train
from tests.launching import ROOT, metrics_of

TOY = str(ROOT / "configs/embodied/toy.yaml")


def episodes(*outcomes, task=None):
    return tuple(Episode(n, 0, 0, n, 4, -1.0 * n, solved, solved, False, task) for n, solved in enumerate(outcomes))


def test_each_suite_and_each_task_is_counted_with_its_interval():
    pushed, pulled = episodes(True, False, task="push"), episodes(True, True, task="pull")
    found = measured({"": pushed + pulled, "dark": episodes(False, False, True, False)})
    assert (found["episodes"], found["success_once"]) == (4, 0.75)
    assert found["success_once/low"] == pytest.approx(0.3006, abs=1e-4)
    assert found["success_once/high"] == pytest.approx(0.9544, abs=1e-4)
    assert (found["tasks/push/success_once"], found["tasks/pull/success_once"]) == (0.5, 1.0)
    assert (found["suites/dark/episodes"], found["suites/dark/success_once"]) == (4, 0.25)
    assert not any(name.startswith("suites/dark/tasks") for name in found), "it has one task alone"
    assert [(row.suite, row.task, row.episodes) for row in success_rows(found)] == [
        ("", "", 4), ("", "pull", 2), ("", "push", 2), ("dark", "", 4)
    ]  # fmt: skip


def test_where_the_environments_of_training_are_not_tried_all_suites_together_are_told():
    found = measured({"near": episodes(True, True), "far": episodes(False, False)})
    assert (found["episodes"], found["success_once"]) == (4, 0.5)
    assert found["suites/near/success_once"] == 1.0
    silent = measured({"": episodes(None, None)})
    assert "success_once/low" not in silent
    assert list(success_table(None, silent)) == []


def test_a_table_lines_up_and_names_what_was_before():
    before = measured({"": episodes(False, False), "dark": episodes(False, False)})
    heading, first, second = success_table(before, measured({"": episodes(True, True), "dark": episodes(True, False)}))
    assert len(heading) == len(first) == len(second)
    assert first.split() == ["all", "2", "0.0%", "100.0%", "34.2%", "to", "100.0%", "-0.50"]
    assert second.split()[0] == "dark"


def test_what_is_written_has_rows_and_every_episode():
    told = json.loads(written({"": episodes(True), "dark": episodes(False, False)}, policy="here"))
    assert told["policy"] == "here"
    assert [(row["suite"], row["success"]) for row in told["rows"]] == [("", 1.0), ("dark", 0.0)]
    assert [(each["suite"], each["env"]) for each in told["episodes"]] == [("", 0), ("dark", 0), ("dark", 1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step, whose policy is tried in three suites."""
    output = tmp_path_factory.mktemp("suites")
    suites = "trials.suites={windy: {options: {wind: true}, episodes: 6}, short: {max_steps: 2}}"
    keys = ["env.options={words: true}", "trials.episodes=8", suites, "trials.seed=3", "trials.videos=1"]
    train(load_embodied(TOY, [*keys, "steps=1", "trace=false", f"output_dir={output}"]))
    return output / "toy", keys


def test_a_configuration_tries_several_suites_and_keeps_videos_of_each(run):
    directory, _ = run
    (line,) = metrics_of(directory)
    assert [line[f"evaluation/{suite}episodes"] for suite in ("", "suites/windy/", "suites/short/")] == [8, 6, 8]
    assert line["evaluation/suites/short/length"] <= 2
    assert any(name.startswith("evaluation/suites/windy/tasks/go ") for name in line)
    kept = sorted(path.parent.name for path in (directory / "videos").rglob("*-episode*"))
    assert kept == ["short", "short", "step_000000", "step_000001", "windy", "windy"]
    assert not (directory / "videos" / ".new").exists()
    assert '"suite":"windy","task":"","name":"windy","episodes":6' in (directory / "report.html").read_text()


def test_evaluate_tells_the_same_of_a_runs_directory(run, tmp_path, capsys):
    directory, keys = run
    output = tmp_path / "episodes.jsonl"
    given = ["evaluate", "--config", TOY, "--model", str(directory), "--output", str(output)]
    assert main([*given, *keys, "trials.videos=0", "seed=8"]) == 0  # trials.seed decides, not the run's seed
    assert "windy" in capsys.readouterr().out
    told = json.loads((tmp_path / "evaluation.json").read_text())
    (line,) = metrics_of(directory)
    for row in told["rows"]:
        prefix = "".join((f"suites/{row['suite']}/" * bool(row["suite"]), f"tasks/{row['task']}/" * bool(row["task"])))
        assert line[f"evaluation/{prefix}success_once"] == row["success"]
        assert line[f"evaluation/{prefix}reward/mean"] == row["total"]
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    assert len(rows) == 22
    assert all(row["seed"] >= HELD_OUT for row in rows)


WRONG = {
    "trials.suites.a.optins=3": "trials.suites.a.optins: ",
    "trials.suites.a=3": "trials.suites.a: write {options: {...}}",
    "trials.suites.a.episodes=0": "trials.suites.a.episodes: 0",
    "trials.suites.a.options=[1]": "trials.suites.a.options: [1]",
    "trials.suites={a/b: {}}": "trials.suites.a/b: this names metrics and directories",
    "trials.suites.a.options.wnd=3": "trials.suites.a.options.wnd = 3: Reach has no such option; did you mean wind?",
    "trials.suites.a.options.dims=2": "trials.suites.a: trials_a has shapes",
}


@pytest.mark.parametrize(("key", "said"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_with_a_suite_names_its_key(key, said, tmp_path):
    with pytest.raises((ConfigError, InputError)) as told:
        train(load_embodied(TOY, [key, f"output_dir={tmp_path}"]))
    assert said in str(told.value)
