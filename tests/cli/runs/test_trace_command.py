"""`python -m rlinf trace`: a picture or tables of traces, and one message for what cannot be read or written."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from rlinf.cli import commands
from tests.spans import call, step, write_trace


def main(arguments):
    return commands.main(["trace", *arguments])


@pytest.fixture
def trace(tmp_path):
    """Two steps of a rollout."""
    path = tmp_path / "a.json"
    spans = [step(number, number, number + 1.0) for number in (1, 2)]
    spans += [call("rollout[0]", "generate", number, number + number / 4) for number in (1, 2)]
    write_trace(path, [spans])
    return path


def test_plot_writes_a_picture_and_says_where(trace, tmp_path, capsys):
    other = trace.with_name("b.json")
    other.write_bytes(trace.read_bytes())
    assert main(["plot", str(trace), str(other), "-o", str(tmp_path / "lanes.svg")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'lanes.svg'}\n"
    words = [element.text for element in ET.parse(tmp_path / "lanes.svg").iter() if element.text]
    assert {"a", "b", "step 2: 1 s, devices busy 50%"} <= set(words)


def test_plot_takes_the_step_that_is_named(trace, tmp_path):
    assert main(["plot", str(trace), "--step", "1", "-o", str(tmp_path / "lanes.svg")]) == 0
    assert "step 1: 1 s, devices busy 25%" in (tmp_path / "lanes.svg").read_text()


def test_summary_prints_shares_of_all_steps_or_of_one(trace, capsys):
    assert main(["summary", str(trace)]) == 0
    told = capsys.readouterr().out
    assert "a: all steps, 2.00 s" in told
    assert "37.5%" in told
    assert "62.5%" in told
    assert main(["summary", str(trace), "--step", "1"]) == 0
    assert "25.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no file"),
        ("\x00\x01\x02", "no trace"),
        ('{"traceEvents": 1}', "no trace"),
        ('{"traceEvents": [1, {"ph": "X", "name": "step 1", "cat": "flow"}]}', "no step"),
    ],
)
def test_what_is_no_trace_is_one_message(tmp_path, capsys, text, told):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    assert main(["summary", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert str(path) in error
    assert error.count("\n") == 1


def test_a_step_that_is_not_there_is_one_message(trace, tmp_path, capsys):
    assert main(["plot", str(trace), "--step", "7", "-o", str(tmp_path / "lanes.svg")]) == 2
    assert capsys.readouterr().err == f"error: step 7 is not in {trace}, which has steps 1 to 2\n"
    assert not (tmp_path / "lanes.svg").exists()


def test_a_place_that_cannot_be_written_to_is_one_message(trace, tmp_path, capsys):
    assert main(["plot", str(trace), "-o", str(tmp_path / "none" / "lanes.svg")]) == 2
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err
    assert main(["plot", str(trace), "-o", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_command_that_is_none_ends_with_2():
    with pytest.raises(SystemExit) as ended:
        main(["draw"])
    assert ended.value.code == 2


def test_a_foreign_trace_beside_ours_is_read_as_far_as_it_is_like_ours(trace, tmp_path):
    events = json.loads(trace.read_text())["traceEvents"]
    strange = [{"ph": "X", "pid": "gpu 0", "name": "kernel", "cat": "k", "ts": 1, "dur": 2}, {"ph": "C"}, 7]
    (tmp_path / "mixed.json").write_text(json.dumps({"traceEvents": strange + events}))
    assert main(["plot", str(tmp_path / "mixed.json"), "-o", str(tmp_path / "lanes.svg")]) == 0
    assert "devices busy 50%" in (tmp_path / "lanes.svg").read_text()
