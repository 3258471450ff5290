"""The examples run from an empty directory, show what they say they show, and stand in the gallery's tables."""

from __future__ import annotations

import json
import re

import pytest

from docs.pictures import gallery
from tests.launching import ROOT, launch

LONGEST, OF_DOCSTRING = 80, 6
"""Lines of an example, and of its docstring."""
LARGEST = 60_000
"""Bytes of a picture."""


def shown(name, directory):
    """What an example prints."""
    return launch(program=ROOT / "examples" / f"{name}.py", cwd=directory).stdout


def numbers(text, pattern):
    """All that a pattern's one group finds in a text, as numbers."""
    found = [float(each) for each in re.findall(pattern, text)]
    assert found, text
    return found


def test_actors_answer(tmp_path):
    said = shown("hello_actors", tmp_path)
    assert "[4, 4]" in said
    assert "100 results" in said


def test_stages_overlap(tmp_path):
    said = shown("pipeline", tmp_path)
    apart, run = numbers(said, r"other ([\d.]+) s"), numbers(said, r"this run ([\d.]+) s")
    assert run < apart


@pytest.mark.slow
def test_grpo_learns(tmp_path):
    first, last = re.search(r"reward +([\d.]+) -> ([\d.]+)", shown("grpo", tmp_path)).groups()
    assert float(last) > float(first) + 0.3
    assert (tmp_path / "outputs" / "grpo" / "report.html").is_file()


@pytest.mark.slow
def test_the_critic_foresees_and_the_policy_learns(tmp_path):
    said = shown("ppo_with_critic", tmp_path)
    assert max(numbers(said, r"foreseen +(-?\d+)%")) > 50
    rewards = numbers(said, r"reward +(\d+)%")
    assert max(rewards) > rewards[0] + 20


@pytest.mark.slow
def test_rewards_of_ones_own_rise_beside_one_that_hangs(tmp_path):
    said = shown("custom_reward", tmp_path)
    shares = numbers(said, r"divisible +([\d.]+)%")
    assert shares[-1] > shares[0] + 20
    assert "timeout" in said


@pytest.mark.slow
def test_an_advantage_by_rank_learns_beside_a_mad_judge(tmp_path):
    said = shown("custom_algorithm", tmp_path)
    shares = numbers(said, r"(?m)^ +\d+ .* +(\d+)%")
    assert shares[-1] > shares[0] + 30


@pytest.mark.slow
def test_a_flow_of_ones_own_learns(tmp_path):
    first, last = re.search(r"reward +([\d.]+) -> ([\d.]+)", shown("custom_flow", tmp_path)).groups()
    assert float(last) > float(first) + 0.3


def test_a_loop_of_ones_own_learns(tmp_path):
    rewards = numbers(shown("own_loop", tmp_path), r"reward ([\d.]+)")
    assert rewards[-1] > rewards[0] + 0.5


@pytest.mark.slow
def test_asynchronous_steps_do_not_wait_for_the_judge(tmp_path):
    said = shown("asynchronous", tmp_path)
    (plain, *_, oldest), (ahead, *_, older) = (
        re.findall(r"[\d.]+", re.search(rf"(?m)^{flow} .*", said)[0]) for flow in ("grpo", "grpo_async")
    )
    assert float(ahead) < float(plain)
    assert (oldest, older) == ("0", "1")


def test_a_point_finds_its_goal_by_sac(tmp_path):
    solved = numbers(shown("sac", tmp_path), r"actions: +(\d+) of 64")
    assert solved[0] < 10
    assert solved[-1] > 50


@pytest.mark.slow
def test_the_planner_finds_more_devices_quicker(tmp_path):
    said = shown("planner", tmp_path)
    two, many = (min(numbers(said, rf"(?m)^ *{count} devices .*?([\d.]+) s ")) for count in (2, 64))
    assert many < two


def test_1024_devices_are_rehearsed(tmp_path):
    said = shown("rehearsal", tmp_path)
    assert {"collocated", "disaggregated"} <= {*re.findall(r"(?m)^(\w+): rollout", said)}
    assert max(numbers(said, r"(\d+)% of the bound")) > 50


def test_the_gallery_has_every_example():
    assert {*gallery.names()} <= {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", gallery.names())
def test_an_example_is_short_and_says_what_it_is(name):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    said = source.partition('"""')[2].partition('"""')[0]
    assert len(source.splitlines()) <= LONGEST
    assert len([line for line in said.splitlines() if line.strip()]) <= OF_DOCSTRING
    assert f"python examples/{name}.py" in said
    assert (gallery.PICTURES / f"{name}.svg").stat().st_size <= LARGEST


def test_the_tables_are_what_the_examples_say():
    for path, text in gallery.pages(json.loads(gallery.FIGURES.read_text())):
        assert path.read_text() == text, f"{path.name}: run `python -m docs.pictures.gallery --tables`"
