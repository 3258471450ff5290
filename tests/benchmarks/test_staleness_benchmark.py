"""`benchmarks.staleness`: what is read from a run, and how runs become a table and a verdict."""

import asyncio
import json

import pytest

from benchmarks import staleness_runs
from benchmarks.learning_runs import Ended
from benchmarks.staleness import BEGIN, END, in_page, markdown, rows, verdict
from benchmarks.staleness_runs import CORRECTIONS, Outcome, Runs, measured


def outcome(bound, seed, accuracy, correction="default"):
    return Outcome(correction, bound, seed, (), accuracy, accuracy, 0.5, float(bound), float(bound), 0.1, 0.9, 0.7)


FRESH = [outcome(0, seed, accuracy) for seed, accuracy in enumerate((0.97, 0.98, 0.99))]


@pytest.mark.parametrize(("accuracies", "met"), [((0.96, 0.99), True), ((0.96, 0.975), False), ((1.0, 1.0), True)])
def test_the_bar_is_the_seeds_spread_of_staleness_nought(accuracies, met):
    stale = [outcome(4, seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    found, words = verdict([*FRESH, *stale, outcome(4, 0, 0.1, "none"), outcome(8, 0, 0.1)])
    assert found == met
    assert "97.0 to 99.0 %" in words
    assert verdict(FRESH)[0] is None


def test_a_row_has_every_seed_and_a_failure_says_why():
    failed = Outcome("masked", 4, 0, failure="error: no memory")
    found = rows([failed, *FRESH])
    assert found[0][:4] == ("0", "default", "97.0, 98.0, 99.0", "98.0")
    assert found[0][6] == "0.00 / 0"
    assert found[1][2] == "failed: error: no memory"
    assert len({len(row) for row in found}) == 1
    page = in_page(f"before\n{BEGIN}\nold\n{END}\nafter", [*FRESH, failed])
    assert "old" not in page
    assert page.startswith("before")
    assert markdown([*FRESH, failed]) in page
    with pytest.raises(ValueError, match="needs the lines"):
        in_page("nothing", FRESH)


def test_late_numbers_are_those_of_the_last_steps_and_ages_those_of_the_whole_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": n, "reward/mean": n / 100, "staleness/max": 4.0 if n == 9 else 3.0} for n in range(1, 101)]
    for step in steps[::4]:
        step["evaluation/accuracy"] = 0.9
    path.write_text("\n".join(map(json.dumps, [{"step": 0, "evaluation/accuracy": 0.1}, *steps])))
    found = measured(path, 4)
    assert found["late_reward"] == pytest.approx(sum(range(81, 101)) / 2000)
    assert found["late_accuracy"] == pytest.approx(0.9)
    assert (found["staleness_max"], len(found["rewards"])) == (4.0, 100)


def test_runs_that_are_known_are_not_run_again_and_failed_ones_are(tmp_path, monkeypatch):
    commands = []

    async def run(command, log):
        commands.append(command)
        directory = log.with_suffix("")
        directory.mkdir()
        line = {"step": 1, "reward/mean": 0.5, "staleness/max": 1.0, "evaluation/accuracy": 0.8}
        (directory / "metrics.jsonl").write_text(json.dumps(line))
        return Ended(int(len(commands) == 1), 1.0, 1.0, "error: full\n")

    monkeypatch.setattr(staleness_runs, "run_process", run)
    wanted = [("none", 1, 0), ("default", 1, 0)]
    first = asyncio.run(Runs(tmp_path, 1, 1, lambda _: None).all(wanted))
    assert [each.failure for each in first] == ["error: full", ""]
    second = asyncio.run(Runs(tmp_path, 1, 1, lambda _: None).all(wanted))
    assert len(commands) == 3
    assert [each.failure for each in second] == ["", ""]
    assert second[1].keys == first[1].keys
    assert {f"staleness.max={1}", *CORRECTIONS["none"]} <= set(commands[0])
