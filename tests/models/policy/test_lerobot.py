"""ACT, SmolVLA and Diffusion Policy in LeRobot's directories: what is refused, and how it is drawn. That they compute
what LeRobot's do: `make test-peers`."""

import json

import pytest
import torch

from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy.build import build_policy_model, load_policy, save_policy
from tests.models.policy.contract import act, diffusion, smolvla, wall_x

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
        (diffusion, {"use_group_norm": False}, r"use_group_norm.*True"),
        (diffusion, {"noise_scheduler_type": "PNDM"}, r"noise_scheduler_type.*DDIM"),
        (diffusion, {"horizon": 6}, r"horizon=6.*4"),
        (diffusion, {"n_action_steps": 8}, r"chunk=8.*7"),
        (diffusion, {"num_inference_steps": 13}, r"steps=13.*12"),
        (smolvla, {"type": "act"}, r"config\.json.*act"),
        (smolvla, {"attention_mode": "self_attn"}, r"attention_mode.*cross_attn"),
        (smolvla, {"resize_imgs_with_padding": None}, r"resize_imgs_with_padding.*32"),
        (smolvla, {"input_features": {}, "output_features": {}}, r"config\.json.*'action'"),
        (wall_x, {"type": "smolvla"}, r"config\.json.*smolvla"),
        (wall_x, {"prediction_mode": "fast"}, r"prediction_mode.*diffusion"),
        (wall_x, {"max_action_dim": 32}, r"max_action_dim=32.*20"),
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


@pytest.mark.parametrize(
    ("name", "there"), [("tokenizer.json", "tokenizer.json"), ("qwen25_config.json", "config.json")]
)
def test_wall_oss_without_what_lies_elsewhere_is_refused_and_reads_it_there(name, there, tmp_path):
    known = wall_x(tmp_path / "weights")
    content = (tmp_path / "weights" / name).read_bytes()
    (tmp_path / "weights" / name).unlink()
    said(tmp_path / "weights", {"pretrained_name_or_path": str(tmp_path)})
    with pytest.raises(ValueError, match=rf"{name}.*{tmp_path}.*{there}"):
        load_policy(tmp_path / "weights", known.config)
    (tmp_path / there).write_bytes(content)
    save_policy(load_policy(tmp_path / "weights", known.config), tmp_path / "saved")
    assert (tmp_path / "saved" / name).read_bytes() == content


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


BLURRED = {"type": "diffusion", "state_size": 6, "action_size": 2, "chunk": 2, "steps": 4, "model": {
    "n_obs_steps": 2, "horizon": 4, "down_dims": [8, 8], "diffusion_step_embed_dim": 8, "num_train_timesteps": 20,
}}  # fmt: skip


@pytest.mark.parametrize("method", ["DDPM", "DDIM"])
def test_a_diffusion_policy_s_steps_are_those_of_the_posterior_in_float64(method):
    """If actions are known, DDPM's steps, and those of DDIM that draw, keep the marginals of the noise:
    x_p ~ N(sqrt(a_p) x0, 1 - a_p) follows from x_t ~ N(sqrt(a_t) x0, 1 - a_t)."""
    model = {**BLURRED["model"], "prediction_type": "sample", "clip_sample": False}
    policy = build_policy_model({**BLURRED, "method": method, "min_std": 0.0, "model": model})
    shares = policy._signal.double()
    clean = torch.full((1, 4, 2), 0.7)
    policy.diffusion.unet.forward = lambda x, *_: clean.expand_as(x)
    for number, (now, after) in enumerate(policy._times):
        a, b = shares[now], shares[after] if after >= 0 else torch.tensor(1.0).double()
        x = torch.stack([torch.zeros(4, 2), torch.ones(4, 2)])
        mean, std = policy._step(x, torch.full((2,), number), torch.zeros(2, 6), draws=True)
        slope = (mean[1] - mean[0]).double()
        mean_of_all = mean[0].double() + slope * a.sqrt() * 0.7
        variance = slope**2 * (1 - a) + std[0].double() ** 2
        torch.testing.assert_close(mean_of_all, (b.sqrt() * 0.7).expand_as(slope), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(variance, (1 - b).expand_as(slope), atol=1e-5, rtol=1e-5)
    assert std.max() == 0.0  # the last step is certain


def test_what_pads_an_episode_is_a_copy_of_its_ends_and_rows_that_do_not_count_change_no_loss():
    policy = build_policy_model(BLURRED)
    seen, actions = {"state": torch.randn(3, 6)}, torch.rand(3, 4, 2)
    real = torch.tensor([[False, True, True, False], [True] * 4, [False] * 4])
    copied = actions.clone()
    copied[0, 0], copied[0, 3] = actions[0, 1], actions[0, 2]

    def lost(actions, rows, mask):
        stored = policy.demonstrated({"state": seen["state"][rows]}, actions[rows])
        return policy.imitate(stored, mask, torch.arange(3)[rows])

    two = torch.tensor([0, 1])
    wanted = lost(copied, two, None).mean()
    torch.testing.assert_close(lost(actions, two, real[:2]).mean(), wanted)
    torch.testing.assert_close(lost(actions, torch.arange(3), real).mean(), wanted)
