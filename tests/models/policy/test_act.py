"""ACT in LeRobot's directories: what it refuses. That it computes what LeRobot's does: `make test-peers`."""

import json

import pytest
import torch

from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy.build import build_policy_model, load_policy
from tests.models.policy.contract import act

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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "diffusion"}, r"config\.json.*diffusion"),
        ({"output_features": {}}, r"config\.json.*'action'"),
        ({"vision_backbone": "resnet50"}, r"vision_backbone.*resnet18"),
        ({"normalization_mapping": {"ACTION": "QUANTILE10"}}, r"QUANTILE10.*MEAN_STD"),
    ],
)
def test_a_directory_of_what_is_not_here_is_refused(changes, said, tmp_path):
    act(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | changes))
    with pytest.raises(ValueError, match=said):
        load_policy(tmp_path, {"type": "act"})


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
