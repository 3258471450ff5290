"""ACT and SmolVLA in LeRobot's directories: what is refused. That they compute what LeRobot's do: `make test-peers`."""

import json

import pytest
import torch

from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from tests.models.policy.contract import act, smolvla

SMALL = {"dim_model": 8, "n_heads": 2, "dim_feedforward": 8, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
         "latent_dim": 2, "chunk_size": 4}  # fmt: skip
BLIND = {"type": "act", "state_size": 3, "action_size": 2, "chunk": 4, "model": SMALL}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"action_size": 6}, r"7 numbers.*action_size=6"),
        ({"state_size": 9}, r"7 numbers of the robot.*state has 9"),
        ({"image": None}, r"camera1.*environment shows 0"),
        ({"chunk": 6}, r"chunk=6.*chunk_size=5"),
    ],
)
def test_another_robot_than_the_checkpoint_s_is_refused(settings, said, tmp_path):
    known = act(tmp_path)
    with pytest.raises(ValueError, match=said):
        load_policy(tmp_path, {**known.config, **settings})


def said(directory, changes):
    about = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(about | changes))


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (act, {"type": "diffusion"}, r"config\.json.*diffusion"),
        (act, {"output_features": {}}, r"config\.json.*'action'"),
        (act, {"vision_backbone": "resnet50"}, r"vision_backbone.*resnet18"),
        (act, {"normalization_mapping": {"ACTION": "QUANTILE10"}}, r"QUANTILE10.*MEAN_STD"),
        (smolvla, {"type": "act"}, r"config\.json.*act"),
        (smolvla, {"attention_mode": "self_attn"}, r"attention_mode.*cross_attn"),
        (smolvla, {"resize_imgs_with_padding": None}, r"resize_imgs_with_padding.*32"),
        (smolvla, {"input_features": {}, "output_features": {}}, r"config\.json.*'action'"),
    ],
)
def test_a_directory_of_what_is_not_here_is_refused(make, changes, words, tmp_path):
    kind = make(tmp_path).config["type"]
    said(tmp_path, changes)
    with pytest.raises(ValueError, match=words):
        load_policy(tmp_path, {"type": kind})


def test_smolvla_without_its_tokenizer_is_refused(tmp_path):
    known = smolvla(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    said(tmp_path, {"vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"})
    with pytest.raises(ValueError, match=r"tokenizer\.json.*HuggingFaceTB/SmolVLM2"):
        load_policy(tmp_path, known.config)


def test_smolvla_goes_on_with_another_robot_and_its_checkpoint_says_so(tmp_path):
    known = smolvla(tmp_path / "base")
    shape = {"type": "VISUAL", "shape": [3, 256, 256]}
    inputs = {f"observation.images.{name}": shape for name in ("camera1", "camera2", "empty_camera_0")}
    said(tmp_path / "base", {"input_features": {**inputs, "observation.state": {"type": "STATE", "shape": [7]}}})
    row = {"mean": [0.0] * 4, "std": [1.0] * 4}
    robot = {"state_size": 5, "action_size": 4, "statistics": {"state": {**row, "mean": [0.0] * 5, "std": [1.0] * 5}}}
    policy = load_policy(
        tmp_path / "base", {**known.config, **robot, "statistics": robot["statistics"] | {"actions": row}}
    )
    assert policy.config.cameras == 1
    save_policy(policy, tmp_path / "tuned")
    about = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert about["output_features"]["action"]["shape"] == [4]
    assert {name: each["shape"] for name, each in about["input_features"].items()} == {
        "observation.images.camera1": [3, 256, 256], "observation.state": [5],
    }  # fmt: skip
    (tmp_path / "tuned" / "policy.json").unlink()
    again = load_policy(tmp_path / "tuned", {"type": "smolvla", "image": [24, 32, 3]})
    assert (again.config.state_size, again.config.action_size) == (5, 4)
    assert again.config.statistics["action"]["mean"] == [0.0] * 4


def test_a_directory_without_numbers_of_actions_is_refused(tmp_path):
    act(tmp_path)
    for path in tmp_path.glob("policy_p*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"policy_preprocessor.*migrate"):
        load_policy(tmp_path, {"type": "act"})


def test_rows_that_do_not_count_change_no_loss_and_the_latent_is_a_row_s_own():
    policy = build_policy_model(BLIND)
    seen = {"state": torch.randn(4, 3)}
    stored, seeds = policy.demonstrated(seen, torch.rand(4, 4, 2)), torch.arange(4)
    real = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4, [True] * 4])

    def lost(rows) -> LossSum:
        return policy.imitate({name: each[rows] for name, each in stored.items()}, real[rows], seeds[rows])

    whole, parts = lost(torch.arange(4)), lost(torch.tensor([0])) + lost(torch.tensor([1, 3]))
    torch.testing.assert_close(whole.mean(), parts.mean())
    assert lost(torch.tensor([2])).total.item() == 0.0
