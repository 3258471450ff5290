"""`rlinf ledger DIR`: says whether a run's samples add up, whatever state the run is in."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlinf.cli.commands import main
from rlinf.data.in_flight import Kept, Ledger
from rlinf.data.in_flight.snapshot import write_kept
from rlinf.data.ledger import Entry, held_in, held_of
from rlinf.data.sample import Group, Prompt, Sample

NONE = np.empty(0, np.int64)


def kept(*ids, complete=0):
    """What a checkpoint has in flight: prompts without an answer yet, and of the last one so many complete ones."""
    entries = [Entry(number, Prompt(number, NONE), 4, 0) for number in ids]
    if complete:
        prompt, empty = entries[-1].item, np.empty(0, np.float32)
        answers = [Sample(prompt, index, NONE, empty, NONE.astype(np.int32), "", False) for index in range(complete)]
        entries[-1].result = (Group(prompt, tuple(answers)),)
    return Kept(1, tuple(entries))


@pytest.fixture
def run(tmp_path):
    """A run of two steps with a checkpoint of the first one, and what is in flight in it."""
    ledger, lines = Ledger(), []
    ledger.drawn(range(6), 4)
    ledger.trained({0: range(4), 1: range(4)}, tokens=1234)
    ledger.dropped(2, "equal rewards", tokens=60)
    lines.append(ledger.close(1, {3: 4, 4: 4, 5: 4}))
    state = ledger.state_dict()
    ledger.trained({3: range(4), 4: [0, 1, 2]}, tokens=766)
    ledger.dropped(4, "unscored", [3])
    lines.append(ledger.close(2, {5: [0, 1, 2, 3]}))
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "queue.json").write_text(json.dumps({"step": 1, "ledger": state}))
    write_kept(checkpoint, kept(3, 4, 5))
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def test_a_run_that_balances_is_a_table(run, capsys):
    assert main(["ledger", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"{run}: 2 steps, up to step 2 prompts drawn 6 samples drawn 24 trained 15 ")
    assert "dropped: equal rewards 4 dropped: unscored 1 in flight 4 in its newest checkpoint 12 of step 1" in said
    assert said.endswith("tokens trained 2,000 tokens dropped 60 balances: every sample is accounted for")


def test_it_is_json_for_programs(run, capsys):
    assert main(["ledger", "--json", str(run)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == told["trained"] + sum(told["dropped"].values()) + told["in_flight"] == 24
    assert told["checkpoint"] == {"step": 1, "in_flight": 12}
    assert (told["balances"], told["problems"]) == (True, [])


def test_a_line_that_is_being_written_does_not_count(run, capsys):
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"step": 3, "drawn": {"0-')
    assert main(["ledger", str(run)]) == 0
    assert "2 steps" in capsys.readouterr().out


def test_a_checkpoint_that_lacks_a_sample_is_found_out(run, capsys):
    write_kept(run / "checkpoints" / "step_000001", kept(3, 5, complete=3))
    assert main(["ledger", str(run)]) == 1
    said = capsys.readouterr().out
    assert "wrong: at the checkpoint of step 1: lost" in said
    assert "5 samples (prompt/sample 4/0, 4/1, 4/2, 4/3, 5/3)" in said
    assert "balances" not in said


def test_a_sample_that_is_trained_twice_is_found_out(run, capsys):
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"step": 3, "trained": {"0": "1", "0-3": "5"}}\n')
    assert main(["ledger", str(run)]) == 1
    assert "wrong: step 3: trained although they were trained or dropped before: 1 samples (prompt/sample 1/0)" in (
        capsys.readouterr().out
    )


def test_a_run_that_went_on_from_another_runs_checkpoint_begins_with_what_that_had_in_flight(run, capsys, tmp_path):
    state = json.loads((run / "checkpoints" / "step_000001" / "queue.json").read_text())["ledger"]
    again = Ledger()
    again.load_state_dict(state)
    again.trained({3: range(4), 4: range(4), 5: range(4)})
    (other := tmp_path / "other").mkdir()
    (other / "ledger.jsonl").write_text(json.dumps(again.close(2)) + "\n")
    assert main(["ledger", str(other)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "samples drawn 0 in flight at the beginning 12 from another run's checkpoint trained 12 in flight 0" in said
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text(lines[0] + json.dumps(again.close(3)) + "\n")
    assert main(["ledger", str(run)]) == 1
    assert "the line after that of step 1 is of step 3" in capsys.readouterr().out


def test_a_run_that_goes_on_with_something_else_is_found_out(run, capsys):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    other = {"step": 2, "carried": {"0-3": "3-4"}, "trained": {"0-3": "3-5"}}
    (run / "ledger.jsonl").write_text(f"{lines[0]}{json.dumps(other)}\n")
    assert main(["ledger", str(run)]) == 1
    assert "step 2: the run went on with other samples in flight than it had before" in capsys.readouterr().out


def test_what_cannot_be_added_up_is_one_line(tmp_path, run, capsys):
    (tmp_path / "empty").mkdir()
    for path, reason in (
        (tmp_path / "none", "there is no such directory"),
        (tmp_path / "empty", "has no ledger.jsonl (no run)"),
    ):
        assert main(["ledger", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert reason in said
    (run / "ledger.jsonl").write_text('{"what": 1}\n')
    assert main(["ledger", str(run)]) == 2
    assert "is no ledger that this version can read" in capsys.readouterr().err
    (run / "ledger.jsonl").write_text("")
    assert main(["ledger", str(run)]) == 0
    assert "no step is over yet" in capsys.readouterr().out


def test_what_a_checkpoint_holds_is_read_as_it_was_written(tmp_path):
    entries = kept(3, 5, 9, complete=3).entries
    split = Entry(3, entries[0].item, 2, 0, entries[2].result)  # a part of prompt 3 is complete, the rest is not
    entries[0].size = 2
    write_kept(tmp_path, Kept(1, (*entries, split)))
    assert held_in(tmp_path / "in_flight.json") == held_of((*entries, split)) == {3: 5, 5: 4, 9: [0, 1, 2]}
    (tmp_path / "in_flight.json").write_text('{"objects": [["Entry", {}]]}')
    with pytest.raises(ValueError, match="is damaged: KeyError"):
        held_in(tmp_path / "in_flight.json")
