"""The bars of agents: rows are judged by what was found, and the calculator's contestants start from the same."""

import pytest
from rich.console import Console

from benchmarks.agents import Line, table
from benchmarks.agents_training import CONFIG, Round, curve, job_of
from benchmarks.peers.grpo_job import Result
from rlinf.runs.rules import load_config


def shown(lines):
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table(lines))
    return captured.get()


@pytest.mark.parametrize(("met", "verdict"), [(True, "met"), (False, "LOST"), (None, "not run")])
def test_a_row_says_whether_it_meets_its_bar(met, verdict):
    text = shown([Line("calls", "<= 5 %", "1 % [0, 2]", met)])
    assert verdict in text
    assert "[0, 2]" in text


def test_a_ratio_is_of_the_median_steps_after_the_warm_up_and_curves_of_both_ends():
    ours = Result("ours", seconds=[9.0] * 5 + [1.0, 1.0, 5.0], rewards=[0.0] * 5 + [1.0] * 5)
    theirs = Result("theirs", seconds=[0.1] * 5 + [2.0, 3.0, 9.0], rewards=[0.5] * 10)
    found = Round(ours, theirs, {}, {})
    assert found.ratio == 3.0
    assert (curve([found], "ours"), curve([found], "theirs")) == ("0.00 to 1.00", "0.50 to 0.50")


def test_the_job_is_the_configuration_with_other_problems_per_seed(tmp_path):
    config = load_config(CONFIG)
    one, same, other = (job_of(config, tmp_path, seed, 3) for seed in (0, 0, 1))
    assert one == same
    assert one.problems != other.problems
    assert [len(step) for step in one.problems] == [config.algorithm.prompts_per_step] * 3
    assert all(str(eval(asked)) == answer for step in one.problems for asked, answer in step)
    assert (one.lr, one.group_size, one.epochs) == (config.optimizer.lr, config.algorithm.group_size, 2)
