"""The game over several turns is learned, by the example's own loop and by the same episode as a flow."""

import asyncio
import statistics

import pytest

from examples import guessing_game
from tests.launching import launch, metrics_of


def rewards(run):
    return [line["reward/mean"] for line in metrics_of(run)]


@pytest.mark.slow
def test_the_example_learns_to_use_what_it_is_told(tmp_path):
    asyncio.run(guessing_game.main(steps=30, run_dir=tmp_path / "game"))
    found = rewards(tmp_path / "game")
    assert len(found) == 30
    assert statistics.mean(found[:2]) < 0.3  # as good as chance
    assert statistics.mean(found[-5:]) >= 0.5  # without what it is told, three guesses of seven come to 0.43


def test_the_same_episode_is_a_flow(tmp_path):
    config = "configs/guessing-game.yaml"
    tiny = ("steps=4", "algorithm.prompts_per_step=7", "log_every=1", "checkpoint.every=2", f"output_dir={tmp_path}")
    launch("--config", config, *tiny)
    found = metrics_of(tmp_path / "guessing-game")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert all(line["episodes"] == 56 and line["groups/uniform"] < 1 for line in found)
