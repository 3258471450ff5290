"""The tiny instances of policies that `test_contract.py` holds to what every policy promises to trainers.

A policy joins by one line in `INSTANCES`: the dotted path of a function that is given an empty directory and returns an
`Instance`, writing the authors' files into the directory if it has such a form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.tiny_checkpoints import flow_tokenizer
from rlinf.config.importing import resolve
from rlinf.models.policy.build import build_policy_model, save_policy
from tests.models.policy.authored import AUTHORED, publish_as_authors
from tests.models.policy.cases import CNN, MLP, VLA

ROWS = 5
INSTANCES: dict[str, str] = {
    "mlp": "tests.models.policy.contract.mlp",
    "cnn": "tests.models.policy.contract.cnn",
    "vla": "tests.models.policy.contract.vla",
    "flow": "tests.models.policy.contract.flow",
    "openvla": "tests.models.policy.vla.openvla_case.openvla",
    "openvla-oft": "tests.models.policy.vla.openvla_case.oft",
    "openvla-oft, continuous": "tests.models.policy.vla.openvla_case.continuous",
    "openvla-oft, lora": "tests.models.policy.vla.openvla_case.adapted",
    "flow, noise": "tests.models.policy.contract.flow_noise",
    "pi0": "tests.models.policy.vla.flow.contract.pi0",
    "pi05": "tests.models.policy.vla.flow.contract.pi05",
    "pi0, lora": "tests.models.policy.vla.flow.contract.pi0_lora",
    "authored": "tests.models.policy.contract.authored",
    "authored, lora": "tests.models.policy.contract.adapted",
    "gr00t": "tests.models.policy.contract.gr00t",
    "authored, part": "tests.models.policy.contract.partly_frozen",
    "act": "tests.models.policy.contract.act",
    "smolvla": "tests.models.policy.contract.smolvla",
    "wall_x": "tests.models.policy.contract.wall_x",
    "diffusion": "tests.models.policy.contract.diffusion",
    "pi0_fast": "tests.models.policy.vla.flow.contract.pi0_fast",
}
"""By name, what makes an instance."""


@dataclass(frozen=True)
class Instance:
    """A tiny policy, and how to show it something."""

    config: Mapping[str, Any]
    """`type` and settings, fitted to its environment."""
    path: Path | None = None
    """Directory of the authors; None for a new policy."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the trainer that say what learns, such as `train` and `lora`."""
    unused: tuple[str, ...] = ()
    """Patterns of parameters that learn, and that no log-prob, entropy or value depends on: say why beside it."""
    observe: Callable[[int], dict[str, torch.Tensor]] | None = None
    """Makes an observation of so many rows; None: random states and pictures of the config's sizes."""
    instructions: tuple[str, ...] = ()
    """What rows are told by turns; none for policies that do not read."""

    def observation(self, rows: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
        if self.observe is not None:
            return self.observe(rows)
        random = torch.Generator().manual_seed(seed)
        found = {"state": torch.randn(rows, int(self.config.get("state_size", 0)), generator=random)}
        if "image" in self.config:
            shape = (rows, *self.config["image"])
            found["rgb"] = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        return found

    def texts(self, rows: int = ROWS) -> list[str] | None:
        return [self.instructions[row % len(self.instructions)] for row in range(rows)] if self.instructions else None


def instance(name: str, directory: Path) -> Instance:
    """The instance of a name; files go into a directory that is made for them."""
    directory.mkdir(parents=True, exist_ok=True)
    made: Instance = resolve(INSTANCES[name])(directory)
    return made


def mlp(_: Path) -> Instance:
    return Instance({**MLP, "chunk": 2, "value_level": "action"})


def cnn(_: Path) -> Instance:
    return Instance({**CNN, "state_size": 5})


def vla(_: Path) -> Instance:
    return Instance(VLA, instructions=("push", "pull it"))


def flow(_: Path) -> Instance:
    return Instance({"type": "flow", "state_size": 5, "action_size": 3, "chunk": 2, "hidden": [16, 16]})


def flow_noise(directory: Path) -> Instance:
    return Instance({**flow(directory).config, "method": "flow_noise"})


def authored(directory: Path) -> Instance:
    publish_as_authors(directory)
    return Instance({key: value for key, value in AUTHORED.items() if key != "width"}, directory)


def adapted(directory: Path) -> Instance:
    known = authored(directory)
    lora = {"r": 2, "alpha": 4, "target_modules": "auto"}
    return Instance(known.config, known.path, training={"lora": lora})


def partly_frozen(directory: Path) -> Instance:
    known = authored(directory)
    return Instance(known.config, known.path, training={"train": ["*", "!body.0.*", "!entry.*"]})


def gr00t(directory: Path) -> Instance:
    from tests.models.policy.vla.gr00t.tiny import GIVEN, publish

    publish(directory / "authors")
    return Instance(GIVEN, directory / "authors", instructions=("push", "pull it"))


def act(directory: Path) -> Instance:
    """ACT as lerobot writes it: `make test-peers` has lerobot read what is written so."""
    sizes = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 24, "n_encoder_layers": 1, "n_vae_encoder_layers": 1,
             "latent_dim": 4, "chunk_size": 5}  # fmt: skip
    row = {"mean": [0.1] * 7, "std": [0.5] * 7}
    given = {"type": "act", "image": [32, 32, 3], "state_size": 7, "action_size": 7, "chunk": 5}
    save_policy(build_policy_model({**given, "model": sizes, "statistics": {"state": row, "actions": row}}), directory)
    _of_lerobot(directory)
    unused = ("model.vae_encoder*", "model.encoder_latent_input_proj.weight")  # of imitation alone
    return Instance({**given, "chunk": 3}, directory, unused=unused)


def diffusion(directory: Path) -> Instance:
    """Diffusion Policy as lerobot writes it, which sees two observations of 4 numbers at once; see `act`."""
    sizes = {"down_dims": [16, 24], "diffusion_step_embed_dim": 8, "horizon": 8, "spatial_softmax_num_keypoints": 2,
             "resize_shape": [40, 40], "num_train_timesteps": 12}  # fmt: skip
    low, high = [-0.5] * 7, [1.5] * 7
    row = {"mean": [0.1] * 7, "std": [0.5] * 7, "min": low, "max": high}
    given = {"type": "diffusion", "image": [32, 32, 6], "state_size": 14, "action_size": 7, "chunk": 3}
    save_policy(build_policy_model({**given, "model": sizes, "statistics": {"state": row, "actions": row}}), directory)
    _of_lerobot(directory)
    return Instance({**given, "method": "DDIM", "steps": 3}, directory)


def smolvla(directory: Path) -> Instance:
    """SmolVLA as lerobot writes it, with the tokenizer that is to be copied; see `act`."""
    words = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 128}  # fmt: skip
    vision = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    sizes = {"vision": vision, "language": words, "expert": {**words, "hidden_size": 24}, "shuffle": 2}
    row = {"mean": [0.1] * 7, "std": [0.5] * 7}
    given = {"type": "smolvla", "image": [24, 32, 3], "state_size": 7, "action_size": 7, "chunk": 3}
    about = {"chunk_size": 4, "resize_imgs_with_padding": [32, 32]}
    save_policy(
        build_policy_model({**given, **sizes, "model": about, "statistics": {"state": row, "actions": row}}), directory
    )
    _of_lerobot(directory)
    flow_tokenizer().save(str(directory / "tokenizer.json"))
    return Instance({**given, "steps": 3}, directory, instructions=("push", "pull it"))


def wall_x(directory: Path) -> Instance:
    """WALL-OSS as lerobot writes it, with the files that are to be copied; see `act`."""
    experts = [{"hidden_size": 48, "intermediate_size": 64}, {"hidden_size": 32, "intermediate_size": 40}]
    network = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
        "vocab_size": 120, "experts": experts, "dim_inputs": [48, 32], "mlp_moe": True, "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "dof_config": {"arm": 13, "hand": 7},
        "agent_pos_config": {"arm": 20}, "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48,
            "fullatt_block_indexes": [1],
        },
    }  # fmt: skip
    row = {"mean": [0.1] * 7, "std": [0.5] * 7}
    given = {"type": "wall_x", "image": [8, 32, 3], "state_size": 7, "action_size": 7, "chunk": 3}
    about, numbers = {"chunk_size": 4}, {"state": row, "actions": row}
    made = {**given, "model": about, "network": network, "statistics": numbers}
    save_policy(build_policy_model(made), directory)
    _of_lerobot(directory)
    (directory / "qwen25_config.json").write_text(json.dumps(network))
    wall_x_tokenizer().save(str(directory / "tokenizer.json"))
    # of the last layer of words only keys and values are read
    return Instance(
        {**given, "steps": 3}, directory, unused=("model.model.layers.1.moe.experts.0.*",),
        instructions=("push", "pull it"),
    )  # fmt: skip


def wall_x_tokenizer() -> Tokenizer:
    """One token per character, with Qwen's special ones and those of robots."""
    tokenizer = flow_tokenizer()
    names = "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|propri|>"
    tokenizer.add_special_tokens([*names, "<|action|>", "<|endoftext|>"])
    return tokenizer


def _of_lerobot(directory: Path) -> None:
    """Leave what lerobot would have written."""
    (directory / "policy.json").unlink()
    (directory / "extra.safetensors").unlink()
