"""WALL-OSS (arXiv:2509.11766) as a policy that learns by acting, in LeRobot's directories (`wall_x`), by its flow head.

    pictures, words, state ─▶ Qwen2.5-VL, one expert ─▶ keys and values of every layer ─┐
    x_t, mask and t ─▶ embeddings ─▶ the same layers, another expert ───────────────────┴─▶ velocity of H actions

A mask says which of the 20 numbers of an action, and of a state, the robot has. Time runs the other way than here:
from 0, noise, to 1.

LeRobot's config.json names another directory, `pretrained_name_or_path`, for what is not in its own: the sizes of the
network, and the tokenizer. They are read there if it is on this machine, or else beside the weights, where they are to
be copied: its config.json as `qwen25_config.json`, and `tokenizer.json`. What is saved here has both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.models.policy import lerobot
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Generator, Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.published import read_tensors, tensor_files, tensor_shapes, to_be_read, write_sharded
from rlinf.models.policy.robots import RobotActions, Scaling, cameras, padded
from rlinf.models.policy.vla.flow import Field, FlowConfig, FlowPolicy, Velocity, mirrored, sinusoids
from rlinf.models.policy.vla.gemma import Prefix
from rlinf.models.policy.vla.wall_x_network import Network, Prompts, numbers_in

_TOKENIZER, _NETWORK = "tokenizer.json", "qwen25_config.json"
_WORDS = "model.model.embed_tokens.weight"
_STEPS = 10
"""Steps of the ODE, which lerobot has no key for."""
_PERIODS = 2.0 * math.pi, 2.0 * math.pi * 10_000.0
"""Least and greatest period of the sines of time, which is not scaled: none but the first few goes once round."""
_ABOUT: Mapping[str, Any] = {
    "type": "wall_x",
    "chunk_size": 32,
    "max_state_dim": 20,
    "max_action_dim": 20,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
"""LeRobot's defaults."""
_ONLY: Mapping[str, Any] = {"n_obs_steps": 1, "prediction_mode": "diffusion"}
"""Keys of config.json that can have one value here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WallXConfig(FlowConfig):
    """Configuration of `WallXPolicy`. A directory says sizes and statistics, an environment `image`, `state_size` and
    bounds."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    state_size: int
    """Numbers of the observation's "state"."""
    network: Mapping[str, Any]
    """Config.json of the Qwen2.5-VL with experts."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """LeRobot's config.json; keys that are missing are as LeRobot's."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of `state` and `actions`, or by the names of LeRobot's features; empty: numbers are used as they are,
    and actions are in [-1, 1]."""
    instruction: str = "Execute the robot action."
    """Instruction where the environment gives none; this one is LeRobot's."""
    gripper: str = "same"
    """Convention of the gripper."""
    critic_hidden: tuple[int, ...] = (512, 256)
    """Widths of the value head's hidden layers."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)
        about = self.about
        lerobot.check_kinds(about, "wall_x")
        for key, value in _ONLY.items():
            if about.get(key, value) != value:
                raise ValueError(f"policy wall_x: model.{key}={about[key]!r} must be {value!r}, which is what is here")
        if not self.network.get("mlp_moe") or self.network.get("attention_moe"):
            raise ValueError(
                "policy wall_x: network.mlp_moe must be true, and attention_moe false: experts are feed-forward here"
            )
        actions, states = numbers_in(self.network)
        if about["max_action_dim"] != actions or not 1 <= self.state_size <= states:
            raise ValueError(
                f"policy wall_x: model.max_action_dim={about['max_action_dim']} must be the {actions} numbers of "
                f"network.dof_config, and state_size={self.state_size} from 1 to the {states} of agent_pos_config"
            )
        if self.value_level == "action":
            raise ValueError("policy wall_x: value_level must be chunk, or null for no critic")

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json; features are the environment's, under the checkpoint's names of cameras."""
        whole = {**_ABOUT, "n_action_steps": self.chunk, **self.model}
        return {**whole, **lerobot.fitting(whole, self.image, self.state_size, self.action_size)}


class WallXPolicy(FlowPolicy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and "state", float32 [N, S]; reads the instruction."""

    Config: ClassVar[type[PolicyConfig]] = WallXConfig
    published = ("config.json", "*.safetensors")
    small_files = ("config.json", _NETWORK, _TOKENIZER, *lerobot.FILES, "train_config.json")
    needs_path = True
    own = ("critic.*", "deviation.*")
    float32 = ("*layernorm.weight", "model.model.norm.weight", "model.action_preprocessor.*", "critic.*", "deviation.*")
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    imitates_padding = False

    def __init__(self, config: WallXConfig):
        about, (actions, _) = config.about, numbers_in(config.network)
        width: int = config.network["hidden_size"]
        super().__init__(config, horizon=about["chunk_size"], width=actions, features=width)
        with to_be_read():
            self.model = Network(config.network)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            self.critic = perceptron(width, config.critic_hidden, 1, gain=0.0, activation=nn.ReLU)
        self._cameras = lerobot.cameras_of(about)
        self._around = lerobot.Processors(about, config.statistics, {})
        self._robot = self.actions_of(config, self._around.actions)
        self._prompts: Prompts | None = None
        self._unused: dict[str, Tensor] = {}

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, has no statistics, or does not say the sizes of the network.
        """
        settings = lerobot.opened(directory, "wall_x")
        about, rows = settings["model"], settings["statistics"]
        del settings["pictures"]  # which are not normalised
        settings["statistics"] = {name: rows[name] for name in (lerobot.STATE, lerobot.ACTION) if rows.get(name)}
        path, shapes = _beside(directory, about, _NETWORK), tensor_shapes(tensor_files(directory))
        try:
            network = json.loads(path.read_text(encoding="utf-8"))
            settings["network"] = {**network, "vocab_size": shapes[_WORDS][0]}  # which grows with the tokenizer
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged, or {directory} lacks a tensor: {error}") from error
        return settings | {"steps": _STEPS}

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`; lerobot's files have no place for the name."""
        return {"statistics": lerobot.counted(statistics)}

    @classmethod
    def actions_of(cls, config: WallXConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return lerobot.robot_actions(config, scaling)

    def open_published(self, directory: Path) -> None:
        """Take the tokenizer, and keep it and the network's sizes with what is saved.

        Raises:
            ValueError: there is none.
        """
        about = self.config.about
        for name in (_TOKENIZER, _NETWORK):
            if name not in self.files:
                self.files[name] = _beside(directory, about, name).read_bytes()
        grid = self.model.grid(*self.config.image[:2])  # type: ignore[operator]
        self._prompts = Prompts(self.files[_TOKENIZER], self._cameras, grid, self.horizon)

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.read_published`; what no computation reads, such as logits of words, is kept and written back."""
        mine = {*self._of_authors()}
        for name, tensor in read_tensors(tensor_files(directory)):
            if name in mine:
                yield name, tensor
            else:
                self._unused[name] = tensor.clone()  # of the file that a checkpoint may replace

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; processors with the statistics that it acts by."""
        write_sharded(directory, {**state, **self._unused})
        self._around.write(directory, self.files)

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of the vision tower and the language model."""
        network: Any = self.model
        return [*network.visual.blocks, *network.model.layers]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as they came, the prompt as tokens, the state."""
        config = self.config
        pictures = cameras(looked_at(observation, "rgb", config.image, "policy wall_x"))[:, : len(self._cameras)]
        texts = [config.instruction] * len(pictures) if instructions is None else list(instructions)
        text = self._reader().encode(texts).to(pictures.device)
        state = looked_at(observation, "state", (config.state_size,), "policy wall_x").float()
        return {"rgb": pictures.contiguous(), "text": text, "state": state}

    def context(self, inputs: Stored) -> Prefix:
        """See `FlowPolicy.context`; a place sees those before it."""
        network: Any = self.model
        prompts, head = self._reader(), network.action_preprocessor
        text = inputs["text"][:, : int((inputs["text"] >= 0).sum(1).max())]
        patches = network.patches(inputs["rgb"].flatten(0, 1))
        state, _ = self._around.states(inputs["state"])
        numbers = head.propri_proj.in_features // 2
        present = self._present(state.shape[1], numbers, state).expand(len(state), -1)
        token = head.propri_proj(torch.cat([padded(state, numbers), present], 1))
        x = network.model.embed_tokens(text.clamp(min=0))
        x = x.masked_scatter((text == prompts.picture)[..., None], patches.to(x.dtype))
        x = x.masked_scatter((text == prompts.state)[..., None], token.to(x.dtype))
        places, real = text.shape[1], text >= 0
        mask = real[:, None] & torch.ones(places, places, dtype=torch.bool, device=text.device).tril()
        hidden, cache = network.model(x, mask, prompts.positions(places, text.device)[:, None])
        return Prefix(cache, real, hidden)

    def _reader(self) -> Prompts:
        if self._prompts is None:
            raise ValueError("policy wall_x: it reads with its checkpoint's tokenizer: set policy.path")
        return self._prompts

    @staticmethod
    def _present(count: int, numbers: int, like: Tensor) -> Tensor:
        """Mask of the first `count` of so many numbers, float32."""
        return (torch.arange(numbers, device=like.device) < count).float()

    # What comes out ---------------------------------------------------------------------------------------------------

    def velocity(self, context: Prefix) -> Velocity:
        """See `FlowPolicy.velocity`. Actions see each other, and all before them."""
        network: Any = self.model
        head = network.action_preprocessor
        device, horizon, places = context.mask.device, self.horizon, context.mask.shape[1]
        mask = functional.pad(context.mask, (0, horizon), value=True)[:, None].expand(-1, horizon, -1)
        first = self._reader().positions(places + 1, device)[0, -1] - places + context.mask.sum(1, keepdim=True)
        positions = (first + torch.arange(horizon, device=device)).expand(3, -1, -1)

        def at(x: Tensor, t: Tensor) -> Field:
            present = self._present(self.config.action_size, self.width, x).expand_as(x)
            actions = head.w1(torch.cat([x, present], -1))
            time = sinusoids(t, actions.shape[-1], *_PERIODS)[:, None].expand_as(actions)
            mixed = head.w3(functional.silu(head.w2(torch.cat([actions, time], -1))))
            features, _ = network.model(mixed, mask, positions, context.cache, 1)
            return Field(head.action_proj_back(features.float()), features.float())

        return mirrored(at)

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """See `FlowPolicy.imitate`. As in lerobot the mean is over all numbers, of which those that the robot has not
        miss nothing."""
        lost = super().imitate(stored, mask, generator)
        return LossSum(lost.total, lost.weight * (self.width / self.config.action_size))

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.emitted`."""
        return self._robot.to_simulator(x)

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The inverse of `emitted`."""
        return self._robot.to_model(actions)

    def values(self, context: Prefix, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`: of the mean of the prompt's outputs, without gradient."""
        if self.critic is None:
            return None
        real = context.mask[..., None].float()
        result: Tensor = self.critic((context.hidden.detach().float() * real).sum(1) / real.sum(1))
        return result[:, 0]


def _beside(directory: Path, about: Mapping[str, Any], name: str) -> Path:
    """A file that lerobot takes from `pretrained_name_or_path`, there or beside the weights.

    Raises:
        ValueError: it is in neither.
    """
    origin, there = str(about.get("pretrained_name_or_path", "x-square-robot/wall-oss-flow")), name
    if name == _NETWORK:
        there = "config.json"
    for path in (directory / name, Path(origin).expanduser() / there):
        if path.is_file():
            return path
    raise ValueError(f"{directory} has no {name}: copy it there from {origin}, where it is {there}")
