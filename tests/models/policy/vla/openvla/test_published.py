"""Directories as OpenVLA's authors publish them: names, shapes, statistics, tokenizer; read, and saved back alike."""

import json

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_checkpoints import unit_statistics
from examples.tiny_checkpoints import write_tiny_openvla as write_tiny
from rlinf.data.safetensors_io import write_tensors
from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.models.policy.published import tensor_files, write_sharded
from rlinf.models.policy.vla.tokens import ActionTokens
from tests.models.policy.vla.openvla_case import loaded, seen, told

PUBLISHED = {
    "vision_backbone.featurizer.cls_token": (1, 1, 1024),
    "vision_backbone.featurizer.reg_token": (1, 4, 1024),
    "vision_backbone.featurizer.pos_embed": (1, 256, 1024),
    "vision_backbone.featurizer.patch_embed.proj.weight": (1024, 3, 14, 14),
    "vision_backbone.featurizer.blocks.23.attn.qkv.weight": (3072, 1024),
    "vision_backbone.featurizer.blocks.0.attn.proj.bias": (1024,),
    "vision_backbone.featurizer.blocks.0.ls1.scale_factor": (1024,),
    "vision_backbone.featurizer.blocks.0.ls2.scale_factor": (1024,),
    "vision_backbone.featurizer.blocks.0.mlp.fc1.weight": (4096, 1024),
    "vision_backbone.featurizer.blocks.0.norm2.weight": (1024,),
    "vision_backbone.featurizer.norm.weight": (1024,),
    "vision_backbone.fused_featurizer.pos_embed": (1, 256, 1152),
    "vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight": (4304, 1152),
    "vision_backbone.fused_featurizer.attn_pool.latent": (1, 1, 1152),
    "vision_backbone.fused_featurizer.attn_pool.q.weight": (1152, 1152),
    "vision_backbone.fused_featurizer.attn_pool.kv.weight": (2304, 1152),
    "vision_backbone.fused_featurizer.attn_pool.mlp.fc2.bias": (1152,),
    "projector.fc1.weight": (8704, 2176),
    "projector.fc2.weight": (4096, 8704),
    "projector.fc3.bias": (4096,),
    "language_model.model.embed_tokens.weight": (32064, 4096),
    "language_model.model.layers.31.mlp.down_proj.weight": (4096, 11008),
    "language_model.model.norm.weight": (4096,),
    "language_model.lm_head.weight": (32064, 4096),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("openvla") / "tiny", "openvla", action_size=3)


@pytest.fixture(scope="module")
def large():
    with torch.device("meta"):
        return build_policy_model({"type": "openvla", "embodiment": "libero", "image": (256, 256, 3), "action_size": 7})


def test_the_real_model_has_the_published_names_shapes_and_number_of_parameters(large):
    shapes = {name: tuple(each.shape) for name, each in large.named_parameters()}
    assert {name: shapes[name] for name in PUBLISHED} == PUBLISHED
    assert not [name for name in shapes if "fused_featurizer" in name and ("ls1" in name or "cls" in name)]
    mine = sum(each.numel() for name, each in large.named_parameters() if name.startswith("critic."))
    assert sum(each.numel() for each in large.parameters()) - mine == 7_541_237_184
    assert [tuple(each.shape) for each in large.critic.parameters()][::2] == [(512, 4096), (128, 512), (1, 128)]
    assert large.language_model.config.rms_norm_eps == 1e-6
    assert len(large.blocks()) == 23 + 26 + 32


def test_action_tokens_are_the_last_256_of_the_true_vocabulary(large):
    assert (large.bins.first, large.bins.vocabulary, large.bins.bins) == (31744, 32000, 256)
    edges = torch.linspace(-1, 1, 256, dtype=torch.float64)
    centres = ((edges[1:] + edges[:-1]) / 2).float()
    tokens = torch.arange(31744, 32000)
    index = (32000 - tokens - 1).clamp(0, 254)
    assert torch.equal(ActionTokens(32000, 256).decode(tokens), centres[index])


def test_a_directory_is_read_and_saved_back_tensor_by_tensor_and_file_by_file(directory, tmp_path):
    theirs = load_file(directory / "model.safetensors")
    (tmp_path / "sharded").mkdir()
    for path in directory.glob("*.json"):
        (tmp_path / "sharded" / path.name).write_bytes(path.read_bytes())
    write_sharded(tmp_path / "sharded", theirs, shard_bytes=9_000_000)
    assert len(set(tensor_files(tmp_path / "sharded").values())) == 2
    save_policy(loaded(tmp_path / "sharded", "openvla"), tmp_path / "again")
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def test_what_is_in_bfloat16_stays_so_but_for_the_value_head(directory):
    policy = loaded(directory, "openvla").keep(torch.bfloat16)
    kinds = {name.split(".")[0]: each.dtype for name, each in policy.named_parameters()}
    assert kinds["critic"] == torch.float32
    assert kinds["language_model"] == kinds["vision_backbone"] == torch.bfloat16
    drawn = policy.act(seen(), instructions=told(), generator=torch.arange(4))
    assert drawn.logprobs.dtype == drawn.values.dtype == torch.float32
    policy.evaluate(drawn.stored).logprobs.sum().backward()


def test_fine_tuned_statistics_go_before_those_of_the_pretraining(directory, tmp_path):
    tuned = {"libero_spatial_no_noops": {"action": {**unit_statistics(3), "q99": [0.5, 0.5, 1.0]}}}
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(tuned))
    policy = loaded(tmp_path, "openvla", statistics="libero_spatial")
    assert policy.data_set == "libero_spatial_no_noops"
    assert policy.robot.scaling.unnormalised(torch.ones(3)).tolist() == pytest.approx([0.5, 0.5, 1.0])
    save_policy(policy, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "dataset_statistics.json").read_text()) == tuned


def test_statistics_that_may_mean_several_data_sets_are_asked_for(tmp_path):
    both = {name: {"action": unit_statistics(3)} for name in ("bridge_orig", "fractal")}
    write_tiny(tmp_path, "openvla", action_size=3, norm_stats=both)
    with pytest.raises(ValueError, match=r"set policy.settings.statistics.*bridge_orig, fractal"):
        loaded(tmp_path, "openvla")
    with pytest.raises(ValueError, match=r"statistics='fractals'.*checkpoint's: bridge_orig"):
        loaded(tmp_path, "openvla", statistics="fractals")
    assert loaded(tmp_path, "openvla", embodiment="maniskill").data_set == "bridge_orig"


def test_the_value_head_of_rlinf_is_read_by_its_names(directory, tmp_path):
    policy = loaded(directory, "openvla", value_level="action")
    head = {f"value_head.mlp.{name}": each + 1.0 for name, each in policy.critic.state_dict().items()}
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_tensors(tmp_path / "value.safetensors", head)
    found = loaded(tmp_path, "openvla", value_level="action").critic.state_dict()
    assert all(torch.equal(each, head[f"value_head.mlp.{name}"]) for name, each in found.items())


def test_another_model_s_directory_is_refused(directory, tmp_path):
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ValueError, match=r"config.json.*llava.*openvla"):
        loaded(tmp_path, "openvla")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        loaded(tmp_path, "openvla")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
        loaded(tmp_path, "openvla")
