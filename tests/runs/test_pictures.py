"""Runs on prompts with pictures: learned from in slices over two processes, saved for everybody, and taken up again."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import rlinf
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from tests.launching import launch, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
CONFIG = "configs/pictures/shapes.yaml"
SMALL = ("steps=3", "sft.steps=2", "sft.batch_size=8", "algorithm.prompts_per_step=4", "algorithm.group_size=2",
         "model.freeze=[visual]", "evaluation.problems=8", "log_every=1", "trace=false",
         "trainer.micro_batch_tokens=32")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two processes that share the model in slices, and a reference policy."""
    directory = tmp_path_factory.mktemp("pictures")
    launch("--config", CONFIG, *SMALL, "algorithm.kl={place: loss, kind: k3, beta: 0.01}", "trainer.sharding=shard",
                   "placement.trainer=0-1", f"output_dir={directory}", processes=2)  # fmt: skip
    return directory / "shapes"


def test_a_run_learns_from_pictures_and_saves_what_others_can_load(run):
    path = run
    steps = metrics_of(path)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["mismatch/max"] < 1e-4 for row in steps)
    saved = path / "checkpoints" / "latest" / "hf"
    model = AutoModelForImageTextToText.from_pretrained(saved)
    assert model.config.image_token_id == json.loads((saved / "config.json").read_text())["image_token_id"]
    assert AutoImageProcessor.from_pretrained(saved).patch_size == 8
    tensors = load_file(saved / "model.safetensors")
    name = "visual.patch_embed.proj.weight"  # by which hubs know it
    assert torch.equal(tensors[name], model.model.visual.patch_embed.proj.weight)
    config = rlinf.load_config(CONFIG)
    begun = build_model(config.model.config, load_tokenizer(config.model.tokenizer), seed=0).state_dict()
    learned = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, begun[name])}
    assert learned == {name for name in begun if "visual" not in name}  # as model.freeze says
