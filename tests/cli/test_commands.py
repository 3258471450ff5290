"""The command `rlinf`: which commands there are, and what a wrong one is answered with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlinf.cli.commands import _parsed, _resolved_of, _saved_model, main
from rlinf.config.load import ConfigError


@pytest.mark.parametrize("given", [[], ["--help"]])
def test_help_lists_every_command(given, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(given)
    told = capsys.readouterr().out
    for command in ("train", "evaluate", "plan", "trace", "report", "config", "torchrun --nproc-per-node N -m rlinf"):
        assert command in told


def test_help_and_reading_of_runs_do_not_wait_for_torch():
    program = (
        "import sys; from contextlib import suppress; from rlinf.cli.commands import main\n"
        "for command in ('train', 'evaluate', 'plan', 'ledger', 'watch', 'trace', 'report', 'compare', 'config'):\n"
        "    with suppress(SystemExit): main([command, '--help'])\n"
        "    assert 'torch' not in sys.modules, command\n"
        "import rlinf.data.ledger\n"
        "assert 'torch' not in sys.modules, 'ledger, of a run'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=120)


@pytest.mark.parametrize(
    ("given", "said"), [("tran", "did you mean train?"), ("evalute", "did you mean evaluate?"), ("x", "there is train")]
)
def test_a_command_that_there_is_not_leads_to_one_that_there_is(given, said, capsys):
    assert main([given, "--config", "x"]) == 2
    assert f"error: rlinf {given}: no such command; {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "name", "found"),
    [
        (["evaluate", "--model", "M", "a=1", "--named", "x", "b=2"], "overrides", ["a=1", "b=2"]),
        (["evaluate", "a=1", "--model", "M"], "overrides", ["a=1"]),
        (["compare", "A", "--output", "page", "B"], "directories", ["A", "B"]),
    ],
)
def test_what_may_be_several_may_stand_on_both_sides_of_an_option(given, name, found):
    assert getattr(_parsed(given), name) == found


def test_an_option_that_there_is_not_is_refused(capsys):
    for given in (["evaluate", "--model", "M", "--nmaed", "x"], ["report", "A", "B"]):
        with pytest.raises(SystemExit, match="2"):
            main(given)
        assert "unrecognized arguments" in capsys.readouterr().err


def test_data_beside_named_benchmarks_are_refused_and_not_left_out(capsys):
    assert main(["evaluate", "--model", "tests", "--named", "aime24", "evaluation.data=x.jsonl"]) == 2
    assert "evaluation.named.NAME=FILE" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["checkpoints/step_000004/hf", "checkpoints/best/policy", "elsewhere/hf", "hf"])
def test_the_configuration_of_a_model_is_found_where_it_lies_in_a_runs_directory(tmp_path, inside):
    (tmp_path / "run" / inside).mkdir(parents=True)
    (tmp_path / "run" / "resolved.yaml").write_text("seed: 7")
    found = tmp_path / "run" / "resolved.yaml" if inside.startswith("checkpoints") else None
    assert _resolved_of(str(tmp_path / "run" / inside)) == found


@pytest.mark.parametrize("named", ["run", "run/checkpoints/latest", "run/checkpoints/latest/hf"])
def test_a_model_is_found_in_a_runs_directory_a_checkpoint_or_its_own(tmp_path, named):
    model = tmp_path / "run/checkpoints/latest/hf"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "run" / "resolved.yaml").write_text("seed: 7")
    assert _saved_model(str(tmp_path / named)) == str(model)
    assert _resolved_of(str(tmp_path / named)) == tmp_path / "run" / "resolved.yaml"
    assert _saved_model("owner/name") == "owner/name"


def test_a_runs_directory_without_a_model_is_refused_by_its_name(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert main(["evaluate", "--model", str(tmp_path), "--config", "quickstart"]) == 2
    assert "checkpoints/latest/hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "wrong"), [({"args": {"uri": "x"}}, "uri"), ({"reward": "rlinf.rewards.instructions"}, "kwargs")]
)
def test_a_benchmark_whose_reward_is_not_given_what_it_takes_is_refused_by_its_key(entry, wrong, tmp_path):
    from rlinf.runs.data import check_reward, load_data_of  # here: it imports torch
    from rlinf.runs.rules import load_config

    path = tmp_path / "facts.jsonl"
    path.write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    named = {"simpleqa": {"data": str(path), **entry}}
    config = load_config(None, [f"evaluation.named={json.dumps(named)}", "evaluation.problems=4"])
    with pytest.raises(ConfigError, match=rf"evaluation\.named\.simpleqa\.reward.*{wrong}"):
        check_reward(config, load_data_of(config), None)
