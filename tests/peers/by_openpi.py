"""openpi's own pi0 or pi0.5, made tiny, saved by its writer, and asked for tokens, actions and losses.

    python by_openpi.py pi05 FOLDER   # given.safetensors in; openpi/ and answers.safetensors out

Runs where openpi is installed, and imports nothing of rlinf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from imported import stand_in
from safetensors.torch import load_file, save_file, save_model
from tokenizers import Tokenizer

stand_in("jax", "flax", "einops", "equinox", "orbax", "sentencepiece", "openpi_client", "beartype", "jaxtyping",
         "openpi.shared.array_typing", "openpi.shared.normalize", "openpi.shared.download", "openpi.models.gemma",
         "openpi.models.utils.fsq_tokenizer")  # fmt: skip
import numpy as np  # noqa: E402
from openpi.models.tokenizer import PaligemmaTokenizer  # noqa: E402
from openpi.models_pytorch import gemma_pytorch, pi0_pytorch  # noqa: E402
from openpi.transforms import Normalize, Unnormalize  # noqa: E402
from transformers import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig  # noqa: E402

SIZES = {"width": 64, "depth": 2, "mlp_dim": 96, "num_heads": 8, "num_kv_heads": 1, "head_dim": 16}
VOCABULARY, ASSET = 128, "physical-intelligence/libero"
VISION = {"hidden_size": 144, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 224, "patch_size": 56, "projection_dim": 64, "vision_use_head": False}  # fmt: skip


def _hold(config: type, sizes: dict[str, int]) -> None:
    """Have a configuration keep these sizes where openpi's lines set those of the true model."""
    plain = config.__setattr__
    config.__setattr__ = lambda self, name, value: plain(self, name, sizes.get(name, value))  # type: ignore


def _paligemma() -> PaliGemmaConfig:
    config = PaliGemmaConfig()
    config.vision_config, config.text_config = SiglipVisionConfig(**VISION), GemmaConfig()
    return config


def model_of(kind: str, horizon: int) -> Any:
    """PI0Pytorch with random weights, of which none is left at 0."""
    _hold(SiglipVisionConfig, VISION)
    _hold(GemmaConfig, {"vocab_size": VOCABULARY})
    gemma_pytorch.CONFIG_MAPPING = {"paligemma": _paligemma, "gemma": GemmaConfig}
    pi0_pytorch._gemma.get_config = lambda variant: SimpleNamespace(**SIZES)
    torch.compile = lambda function, **_: function
    torch.manual_seed(5)
    config = SimpleNamespace(
        pi05=kind == "pi05", paligemma_variant="", action_expert_variant="", dtype="float32",
        action_horizon=horizon, action_dim=32,
    )  # fmt: skip
    model = pi0_pytorch.PI0Pytorch(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    plain = model._preprocess_observation
    model._preprocess_observation = lambda observation, train: plain(observation, train=False)  # no augmentation
    return model


def main(kind: str, folder: Path) -> None:
    given = load_file(folder / "given.safetensors")
    about = json.loads((folder / "given.json").read_text())
    model = model_of(kind, given["actions"].shape[1])
    directory = folder / "openpi"
    directory.mkdir()
    save_model(model, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(
        json.dumps({"action_dim": 32, "action_horizon": model.config.action_horizon})
    )
    (directory / "assets" / ASSET).mkdir(parents=True)
    (directory / "assets" / ASSET / "norm_stats.json").write_text(json.dumps({"norm_stats": about["statistics"]}))

    def numbers(part: str) -> Any:
        return SimpleNamespace(**{name: np.array(row) for name, row in about["statistics"][part].items()})

    quantiles = kind == "pi05"

    def normal(x: torch.Tensor, part: str) -> torch.Tensor:
        scale = Normalize(None, use_quantiles=quantiles)
        scaled = (scale._normalize_quantile if quantiles else scale._normalize)(x.numpy(), numbers(part))
        return torch.from_numpy(scaled).float()

    characters = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str, add_bos: bool = False) -> list[int]:
        return [characters.token_to_id("<bos>")] * add_bos + characters.encode(text, add_special_tokens=False).ids

    tokenizer = PaligemmaTokenizer.__new__(PaligemmaTokenizer)
    tokenizer._tokenizer, tokenizer._max_len = SimpleNamespace(encode=encode), about["length"]
    state = normal(given["state"], "state")
    rows = [
        tokenizer.tokenize(text, one if quantiles else None)
        for text, one in zip(about["texts"], state.numpy(), strict=True)
    ]
    tokens, mask = (torch.from_numpy(np.stack([row[number] for row in rows])) for number in (0, 1))
    cameras = [given["rgb"][..., :3], given["rgb"][..., 3:], torch.zeros_like(given["rgb"][..., :3])]
    observation = SimpleNamespace(
        images={
            name: (picture.float() / 255 * 2 - 1).permute(0, 3, 1, 2)
            for name, picture in zip(("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"), cameras, strict=True)
        },
        image_masks={"right_wrist_0_rgb": torch.zeros(len(state), dtype=torch.bool)},
        state=torch.nn.functional.pad(state, (0, 24)), tokenized_prompt=tokens.long(),
        tokenized_prompt_mask=mask.bool(),
        token_ar_mask=None, token_loss_mask=None,
    )  # fmt: skip
    chain = model.sample_actions("cpu", observation, noise=given["noise"], num_steps=about["steps"])
    back = Unnormalize(None, use_quantiles=quantiles)
    units = (back._unnormalize_quantile if quantiles else back._unnormalize)(chain.numpy(), numbers("actions"))
    wanted = torch.nn.functional.pad(normal(given["actions"], "actions"), (0, 25))
    with torch.no_grad():
        losses = model(observation, wanted, noise=given["noise"], time=given["time"])
    answers = {"tokens": tokens.long(), "chain": chain, "actions": torch.from_numpy(units)[..., :7], "losses": losses}
    save_file({name: each.contiguous() for name, each in answers.items()}, folder / "answers.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
