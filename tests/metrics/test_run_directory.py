"""A run's directory: earlier runs are kept, checkpoints are whole or not there, a resumed run forgets what it undid."""

import json
import os

import pytest

from rlinf.storage.directory import RunDirectory, changes, find_checkpoint, previous_with_checkpoints


def checkpoint(directory, step, content="weights", keep=0):
    aside = directory.begin_checkpoint(step)
    (aside / "weights").write_text(content)
    (aside / "queue.json").write_text(json.dumps({"step": step}))
    return directory.finish_checkpoint(step, keep)


def names(directory):
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_an_earlier_run_of_the_same_name_is_moved_aside_not_overwritten(tmp_path):
    first = RunDirectory.create(tmp_path / "run")
    first.metrics.write_text("precious")
    assert first.moved is None
    second = RunDirectory.create(tmp_path / "run")
    assert second.moved == tmp_path / "run.previous-1"
    assert (second.moved / "metrics.jsonl").read_text() == "precious"
    second.metrics.write_text("newer")
    third = RunDirectory.create(tmp_path / "run")
    assert third.moved == tmp_path / "run.previous-2"
    third.resolved.write_text("steps: 3")
    assert RunDirectory.create(tmp_path / "run").moved is None, "a run that failed at its start left nothing to keep"


@pytest.mark.parametrize(
    ("written", "back"), [((), True), (("resolved.yaml", "environment.json"), True), (("metrics.jsonl",), False)]
)
def test_an_earlier_run_can_be_put_back_while_nothing_was_written_in_its_place(tmp_path, written, back):
    checkpoint(RunDirectory.create(tmp_path / "run"), 5)
    again = RunDirectory.create(tmp_path / "run")
    for name in written:
        (again.path / name).write_text("something")
    assert again.give_back() == back
    assert (find_checkpoint(tmp_path / "run") is not None) == back
    assert (tmp_path / "run.previous-1").exists() != back
    assert not RunDirectory(tmp_path / "run").give_back(), "no run was moved"


def test_the_newest_earlier_run_with_a_checkpoint_is_found(tmp_path):
    assert previous_with_checkpoints(tmp_path / "nowhere" / "run") is None
    checkpoint(RunDirectory.create(tmp_path / "run"), 5)
    for _ in range(2):
        RunDirectory.create(tmp_path / "run").metrics.write_text("no checkpoint")
    assert previous_with_checkpoints(tmp_path / "run") == tmp_path / "run.previous-1"
    checkpoint(RunDirectory.create(tmp_path / "run"), 5)
    RunDirectory.create(tmp_path / "run")
    assert previous_with_checkpoints(tmp_path / "run") == tmp_path / "run.previous-4"


def test_a_checkpoint_has_its_name_only_once_it_is_whole(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    aside = directory.begin_checkpoint(5)
    (aside / "weights").write_text("half")
    assert find_checkpoint(directory.path) is None
    directory.drop_checkpoint(5)
    assert names(directory) == []
    checkpoint(directory, 5)
    assert names(directory) == ["latest", "step_000005"]
    checkpoint(directory, 5, "again")
    assert (directory.latest / "weights").read_text() == "again"


def test_only_the_newest_checkpoints_stay(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for step in (5, 10, 999_999, 1_000_000):
        checkpoint(directory, step, keep=2)
    assert names(directory) == ["latest", "step_1000000", "step_999999"]
    assert os.readlink(directory.latest) == "step_1000000"


def test_the_newest_whole_checkpoint_is_found_by_the_runs_name_or_its_own(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for step in (5, 10):
        checkpoint(directory, step)
    directory.begin_checkpoint(15)
    newest = find_checkpoint(directory.path)
    assert newest is not None
    assert (newest.step, newest.run) == (10, directory.path)
    older = find_checkpoint(directory.checkpoints / "step_000005")
    assert older is not None
    assert older.step == 5
    by_link = find_checkpoint(directory.latest)
    assert by_link is not None
    assert by_link.path.name == "step_000010"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, r"nothing.*go"), ("{", "is not JSON"), ("[]", r"after.*step"), ("{}", r"after.*step")],
)
def test_what_cannot_be_gone_on_from_is_said(tmp_path, content, said):
    directory = RunDirectory.create(tmp_path / "run")
    queue = checkpoint(directory, 5) / "queue.json"
    queue.unlink()
    if content is not None:
        queue.write_text(content)
    with pytest.raises(ValueError, match=said):
        find_checkpoint(directory.path)


def test_going_on_drops_what_was_noted_later_and_a_line_that_was_cut(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for step in (5, 10):
        checkpoint(directory, step)
    lines = [json.dumps({"step": step, "x": step}) + "\n" for step in range(1, 12)]
    directory.metrics.write_text("".join(lines) + '{"step": 12, "x"')
    directory.begin_checkpoint(15)
    os.symlink("step_000010", directory.checkpoints / ".latest.partial")  # killed while `latest` was replaced
    again = RunDirectory.reopen(directory.path, 5)
    assert not [*directory.checkpoints.glob(".*")]
    assert again.metrics.read_text() == "".join(lines[:5])
    assert names(again) == ["latest", "step_000005", "superseded_step_000010"]
    assert os.readlink(again.latest) == "step_000005"
    found = find_checkpoint(again.path)
    assert found is not None
    assert found.step == 5


def test_what_was_changed_since_the_checkpoint_is_told_key_by_key(tmp_path):
    resolved = tmp_path / "resolved.yaml"
    assert changes(resolved, "steps: 3") == []
    resolved.write_text("steps: 3\noptimizer: {lr: 1.0e-6, betas: [0.9, 0.99]}\nold: 1\nempty: {}\n")
    now = "steps: 3\noptimizer: {lr: 2.0e-6, betas: [0.9, 0.99]}\nnew: {key: x}\nempty: {}\n"
    told = list(map(str, changes(resolved, now)))
    assert told == ["optimizer.lr: 1e-06 -> 2e-06", "new.key: not there -> x", "old: 1 -> not there"]


def earlier(path, metrics):
    """A run that has noted these steps, and is then followed by another of its name."""
    run = RunDirectory.create(path, previous=2)
    run.resolved.write_text("steps: 3")
    run.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in metrics))
    return run


def test_only_so_many_earlier_runs_stay_and_none_that_came_to_nothing(tmp_path):
    for number in range(4):
        earlier(tmp_path / "run", [0, 1, number])
    (tmp_path / "run.previous-mine").mkdir()
    last = earlier(tmp_path / "run", [0])
    assert last.moved == tmp_path / "run.previous-4"
    assert list(last.removed) == [tmp_path / "run.previous-2"]
    nothing = earlier(tmp_path / "run", [0])
    assert (nothing.moved, list(nothing.removed)) == (None, [tmp_path / "run"])
    checkpoint(nothing, 1)
    saved = earlier(tmp_path / "run", [0])
    assert saved.moved == tmp_path / "run.previous-5", "a checkpoint is something"
    saved.report.write_text("it was only to be evaluated")
    assert RunDirectory.create(tmp_path / "run", previous=2).moved == tmp_path / "run.previous-6"
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["run", "run.previous-5", "run.previous-6", "run.previous-mine"]


def test_what_is_no_run_of_ours_is_never_removed(tmp_path):
    for _ in range(4):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "thesis.txt").write_text("years")
        assert list(RunDirectory.create(tmp_path / "run", previous=1).removed) == []
