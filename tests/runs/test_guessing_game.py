"""The episode of examples/guessing_game.py as the flow of a configured run."""

from tests.launching import launch, metrics_of


def test_the_same_episode_is_a_flow(tmp_path):
    config = "configs/guessing-game.yaml"
    tiny = ("steps=4", "algorithm.prompts_per_step=7", "log_every=1", "checkpoint.every=2", f"output_dir={tmp_path}")
    launch("--config", config, *tiny)
    found = metrics_of(tmp_path / "guessing-game")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert all(line["episodes"] == 56 and line["groups/uniform"] < 1 for line in found)
