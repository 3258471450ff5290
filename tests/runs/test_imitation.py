"""A run that learns from demonstrations alone, as a user starts it: recorded, converted, trained, gone on with."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.cli.commands import main
from rlinf.data.demonstrations import open_episodes
from tests.launching import launch

CONFIG = "configs/embodied/toy_imitation.yaml"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Demonstrations of the toy's script, as `rlinf record` writes them."""
    path = tmp_path_factory.mktemp("shown") / "toy"
    script = ("--expert", "rlinf.envs.toy.expert", "--episodes", "60", "--out", str(path))
    assert main(["record", "--config", CONFIG, *script]) == 0
    return path


def test_no_more_environments_are_recorded_than_episodes_are_kept(tmp_path, capsys):
    script = ("--expert", "rlinf.envs.toy.expert", "--episodes", "3", "--out", str(tmp_path / "few"))
    assert main(["record", "--config", CONFIG, *script]) == 0
    assert "3 episodes" in (said := capsys.readouterr().out)
    assert "of 3 that were played" in said


def run(output, shown, *arguments, **more):
    return launch(
        "--config", CONFIG, f"output_dir={output}", f"imitation.path={shown}", "trace=false", *arguments, **more
    )


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weights(directory):
    return load_file(directory / "checkpoints/latest/policy/policy.safetensors")


def test_a_policy_learns_from_what_was_recorded_and_a_killed_run_goes_on_bit_for_bit(recorded, tmp_path, capfd):
    said = run(tmp_path / "whole", recorded, "steps=6", "trials.every=3").stdout
    found = metrics(tmp_path / "whole/toy-imitation")
    assert [line["evaluation/held_out/loss"] > 0 for line in found if "evaluation/held_out/loss" in line] == [True] * 3
    assert found[-1]["evaluation/held_out/loss"] < found[0]["evaluation/held_out/loss"]
    assert found[-1]["evaluation/success_once"] > 0.9 > 0.5 > found[0]["evaluation/success_once"]
    assert found[-1]["imitation/epochs"] > 1
    assert "held-out loss" in said
    run(tmp_path / "parts", recorded, "steps=4", "trials.every=3")
    again = run(tmp_path / "parts", recorded, "steps=6", "trials.every=3", "--resume", "auto").stdout
    assert "going on" in again or "resum" in again
    whole, parts = weights(tmp_path / "whole/toy-imitation"), weights(tmp_path / "parts/toy-imitation")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_without_a_simulator_the_data_say_what_the_policy_must_fit(recorded, tmp_path):
    assert main(["convert", str(recorded), str(tmp_path / "lerobot"), "--format", "lerobot"]) == 0
    assert main(["convert", str(recorded), str(tmp_path / "rlds"), "--format", "rlds", "--episodes", "20"]) == 0
    path = tmp_path / "robot.yaml"
    path.write_text(
        "\n".join(
            [
                "name: robot", "steps: 2", "algorithm: {name: imitation, micro_batch: 8}", "trials: {episodes: 0}",
                "policy: {settings: {hidden: [8], chunk: 2}}",
                "imitation:", "  held_out: 0.2", "  steps: 3", "  batch: 20", "  mixture:",
                f"    sim: {{path: {tmp_path / 'lerobot'}, weight: 3, bounds: min_max}}",
                f"    real: {{path: {tmp_path / 'rlds'}}}",
            ]
        )
    )  # fmt: skip
    launch("--config", str(path), f"output_dir={tmp_path}", "trace=false")
    found = metrics(tmp_path / "robot")
    assert {"loss", "grad_norm", "lr"} <= found[-1].keys()
    assert found[-1]["evaluation/held_out/decisions"] > 0
    told = launch("--config", str(path), f"output_dir={tmp_path}", "policy.type=cnn", expect=2)
    assert "imitation: cnn" in told.stderr or "policy, imitation" in told.stderr
    told = launch("--config", str(path), "imitation.mixture.sim.path=/nowhere", "imitation.path=/nowhere", expect=2)
    assert "imitation.mixture.sim" in told.stderr
    assert "one data set" in told.stderr


def test_commands_say_what_is_wrong(recorded, tmp_path, capsys):
    for arguments, told in (
        (["convert", str(recorded), str(recorded)], "is there and not empty"),
        (["convert", str(tmp_path), str(tmp_path / "x")], "holds no demonstrations"),
        (["convert", str(recorded), str(tmp_path / "x"), "--names", "state"], "write THEIRS=OURS"),
        (["convert", str(recorded), str(tmp_path / "x"), "--names", "speed=state"], "there is no 'speed'"),
        (["record", "--config", CONFIG, "--episodes", "1", "--out", str(tmp_path / "x")], "nobody acts"),
        (
            ["record", "--config", CONFIG, "--episodes", "1", "--out", str(tmp_path / "x"), "--expert", "a.b.c"],
            "--expert a.b.c",
        ),
        (["record", "--config", "configs/quickstart.yaml", "--episodes", "1", "--out", "x"], "no section env"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert told in error
        assert "Traceback" not in error
    assert not (tmp_path / "x").exists()


def test_statistics_are_written_as_checkpoints_have_them(recorded, tmp_path, capsys):
    assert main(["convert", str(recorded), str(tmp_path), "--statistics", "openvla", "--name", "toy"]) == 0
    found = json.loads((tmp_path / "dataset_statistics.json").read_text())["toy"]
    episodes = open_episodes(recorded)
    actions = torch.cat([episodes.read(place).actions[:, 0] for place in range(60)]).double()
    torch.testing.assert_close(torch.tensor(found["action"]["mean"], dtype=torch.float64), actions.mean(0))
    assert found["num_trajectories"] == 60
    assert "60 episodes" in capsys.readouterr().out
