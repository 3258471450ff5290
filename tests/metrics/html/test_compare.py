"""A page of several runs: what is on it, and that it is data."""

import json

import pytest

from rlinf.cli.commands import main
from rlinf.dashboard.report import in_lines
from rlinf.storage.files import read_lines
from tests.metrics.html.test_report import HOSTILE, run_directory


@pytest.fixture
def two(tmp_path):
    one, other = run_directory(tmp_path / "one"), run_directory(tmp_path / "other", steps=12)
    (other / "resolved.yaml").write_text((other / "resolved.yaml").read_text() + "\noptimizer: {lr: 0.5}\n")
    return one, other


def states(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(text.partition('id="state">')[2].partition("</script>")[0])["runs"]


def test_runs_are_side_by_side_with_what_is_not_the_same(two, tmp_path, capsys):
    target = tmp_path / "compare.html"
    assert main(["compare", *map(str, two), "--output", str(target)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == f"page: {target}"
    assert told.splitlines()[0].split() == ["one", "other"]
    assert any(line.startswith("seconds of a step ") for line in told.splitlines())
    assert any(line.startswith("optimizer.lr ") and line.endswith(" 0.5") for line in told.splitlines())
    one, other = states(target)
    assert (one["name"], other["name"]) == ("one", "other")
    assert ("optimizer.lr" in one["config"], other["config"]["optimizer.lr"]) == (False, 0.5)
    assert dict(one["compared"])["steps"] == "40 of 40"
    assert dict(other["compared"])["seconds of a step"] == "0.5"
    for run in (one, other):
        assert len(run["curves"]["steps"]) == len(run["curves"]["metrics"]["reward/mean"])


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path):
    for where in ("a", "b"):
        (tmp_path / where).mkdir()
        run_directory(tmp_path / where / "run")
    target = tmp_path / "compare.html"
    assert main(["compare", str(tmp_path / "a/run"), str(tmp_path / "b/run"), "--output", str(target)]) == 0
    assert [run["name"] for run in states(target)] == ["a/run", "b/run"]


def test_an_evaluation_is_told_with_the_step_after_which_it_was_made(two):
    one, other = two
    kept = [row for row in read_lines(other / "metrics.jsonl") if row["step"] < 3]
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    (line,) = (line for line in in_lines([one, other]) if line.startswith("held-out problems"))
    assert line.split("  ")[0] == "held-out problems"
    assert "75.0% after step 40" in line
    assert line.endswith("25.0% before step 1")


def test_what_a_configuration_holds_is_data(two, tmp_path):
    one, other = two
    (other / "resolved.yaml").write_text(f"name: {json.dumps(HOSTILE)}\nflow: {json.dumps(HOSTILE)}\n")
    target = tmp_path / "compare.html"
    assert main(["compare", str(one), str(other), "--output", str(target)]) == 0
    assert states(target)[1]["config"]["flow"] == HOSTILE
    assert HOSTILE not in target.read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [(["one"], "alone has nothing"), (["one", "nowhere"], "it has no metrics.jsonl"), (["one", "othr"], "/other?")],
)
def test_what_cannot_be_compared_is_told(two, tmp_path, capsys, given, said):
    assert main(["compare", *(str(tmp_path / each) for each in given)]) == 2
    assert said in capsys.readouterr().err
