"""pi0 (arXiv:2410.24164) as a policy that learns by acting, and what pi0.5 has in common with it.

    pictures, words ─▶ PaliGemma ─▶ keys and values ─┐
    state, x_t and t ─▶ embeddings ─▶ expert ────────┴─▶ velocity of H actions x 32 numbers

Weights are those of openpi's checkpoints, or lerobot's, under their own names (`checkpoint`). Actions leave the model
on the scale of its data: statistics bring them to the robot's units, and the simulator's bounds to [-1, 1]. By default
the expert learns and PaliGemma stands still; the value head reads what the expert says at the steps that drew, averaged
over the horizon, detached and averaged over those steps (arXiv:2510.25889, equation 16).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.data.demonstrations.statistics_files import as_openpi
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.published import to_be_read, write_sharded
from rlinf.models.policy.vla.embodiment.actions import RobotActions, chosen_statistics
from rlinf.models.policy.vla.embodiment.images import cameras, resized_with_padding
from rlinf.models.policy.vla.embodiment.statistics import Scale, Scaling, padded
from rlinf.models.policy.vla.embodiment.table import PI0_PROMPT, Embodiment, embodiment
from rlinf.models.policy.vla.flow import checkpoint
from rlinf.models.policy.vla.flow.matching import Field, Velocity, sinusoids
from rlinf.models.policy.vla.flow.paligemma import EXPERT, LANGUAGE, VISION, Expert, PaliGemma, Prefix
from rlinf.models.policy.vla.flow.policy import FlowConfig, FlowPolicy
from rlinf.models.policy.vla.flow.prompts import FILES, Prompts, cleaned

_EPSILON = 1e-6  # openpi adds it to deviations and widths
_PERIODS = (4e-3, 4.0)  # of times
_RELATIVE = 6  # numbers of an action: position and angles, not the gripper


@dataclass(frozen=True, slots=True, kw_only=True)
class PiConfig(FlowConfig):
    """Of pi0 and pi0.5. A directory says sizes and statistics, an environment `image`, `state_size` and bounds."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera, the one before the table first."""
    state_size: int = 0
    """Numbers of the observation's "state"; 0 does not look at it."""
    embodiment: str = ""
    """Simulator whose row of the table of models and simulators counts, such as libero; empty: all is set here."""
    instruction: str = ""
    """What to do where the environment does not say."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to; null as published: 48 for pi0, 200 for pi0.5."""
    asset: str | None = None
    """Which of the checkpoint's statistics count; null: the embodiment's, or the only ones."""
    gripper: str | None = None
    """Name of the gripper's convention; null: the embodiment's, or none."""
    relative: bool = False
    """The first 6 numbers of actions are relative to the state (openpi's first pi0 for LIBERO)."""
    critic_hidden: tuple[int, ...] | None = None
    """Widths of the value head's hidden layers; null as published."""
    horizon: int = 50
    """Actions that are denoised together, H; the first `chunk` of them are done."""
    width: int = 32
    """Numbers that states and actions are padded to."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Of states and actions by asset, as in norm_stats.json; empty: numbers are used as they are."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the vision encoder that are not SigLIP so400m's."""
    language: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the language model that are not Gemma-2B's."""
    expert: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the expert that are not Gemma-300M's."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)
        if self.value_level == "action":
            raise ValueError(
                "policy pi: value_level must be chunk, or null for no critic: one value for all its actions"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What is computed once for an observation."""

    prefix: Prefix
    """Pictures and words."""
    state: Tensor | None
    """On the model's scale, padded, [N, width]; None where it is not looked at."""


class PiPolicy(FlowPolicy):
    """What pi0 and pi0.5 share. Looks at "rgb" and, where there is one, "state"; reads the instruction."""

    Config: ClassVar[type[PolicyConfig]] = PiConfig
    model: ClassVar[str]
    """Name in the table of embodiments."""
    adaptive: ClassVar[bool]
    """Whether the expert's norms are conditioned on time."""
    scale: ClassVar[Scale]
    """Of states and actions."""
    prompt_length: ClassVar[int]
    """As published."""
    published = ("config.json", "*.safetensors")
    beside = ("config.json", *FILES)
    needs_path = True
    own = ("critic.*", "deviation.*")
    # as openpi converts it: what embeds patches, norms of the language models, and all outside of them
    float32 = (
        "*.vision_model.embeddings.*", "*.input_layernorm.*", "*.post_attention_layernorm.*", "*model.norm.*",
        "action_*", "state_proj.*", "time_mlp_*", "critic.*", "deviation.*",
    )  # fmt: skip
    trains = ("*", "!paligemma_with_expert.paligemma.*")
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, config: PiConfig):
        expert: Mapping[str, Any] = {**EXPERT, **config.expert}
        super().__init__(config, horizon=config.horizon, width=config.width, features=expert["hidden_size"])
        self.row = self._row(config)
        self.side = {**VISION, **config.vision}["image_size"]
        self.state_size = min(config.state_size, self.row.state_size)
        self._state, actions = self._scalings()
        self._robot = self.actions_of(config, actions)
        with to_be_read():
            self.paligemma_with_expert = nn.Module()
            self.paligemma_with_expert.paligemma = PaliGemma(config.vision, config.language)
            self.paligemma_with_expert.gemma_expert = Expert(config.expert, adaptive=self.adaptive)
            self._projections(config.width, expert["hidden_size"])
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            self.critic = self._critic({**LANGUAGE, **config.language}["hidden_size"], expert["hidden_size"])
        self._prompts: Prompts | None = None
        self._prefix = ""
        self._unused: dict[str, Tensor] = {}

    @abstractmethod
    def _projections(self, width: int, expert: int) -> None:
        """Make what is outside of the two stacks, under the names of checkpoints."""

    @abstractmethod
    def _critic(self, language: int, expert: int) -> nn.Module:
        """The value head, on what is that wide."""

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `PublishedForm.published_settings`."""
        return checkpoint.settings_in(directory, cls.scale)

    def open_published(self, directory: Path) -> None:
        """Take the tokenizer, and what stands before the names of tensors.

        Raises:
            ValueError: there is no tokenizer, or there are no statistics.
        """
        if not self.config.statistics:
            raise ValueError(
                f"{directory} has no norm_stats.json, without which its actions have no scale: put that of the data "
                "set into a directory named like its asset, or set policy.settings.statistics (lerobot's directories "
                "have the numbers in policy_preprocessor*.safetensors, which is not read)"
            )
        self._prompts = Prompts(self.files, self.config.prompt_length or self.row.prompt_length)
        self._prefix = checkpoint.prefix_in(directory)

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """See `PublishedForm.read_published`."""
        return checkpoint.tensors_of(directory, self._unused)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `PublishedForm.write_published`."""
        expert = self.paligemma_with_expert.gemma_expert.model.config.hidden_size  # type: ignore[union-attr]
        unused = self._unused or {checkpoint.UNUSED: checkpoint.unused_like(state, expert)}  # type: ignore[arg-type]
        write_sharded(directory, {self._prefix + name: each for name, each in {**state, **unused}.items()})
        checkpoint.write_beside(directory, self.config, "config.json" in self.files)

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of the encoder, the language model and the expert."""
        parts: Any = self.paligemma_with_expert
        vision, language = parts.paligemma.model.vision_tower.vision_model, parts.paligemma.model.language_model
        return [*vision.encoder.layers, *language.layers, *parts.gemma_expert.model.layers]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures at the encoder's size, the prompt as tokens, the state as it came."""
        where = f"policy {self.model}"
        pictures = cameras(looked_at(observation, "rgb", self.config.image, where))
        pictures = resized_with_padding(pictures[:, : self.row.cameras], self.side).contiguous()
        state = None
        if self.state_size or self.config.relative:
            state = looked_at(observation, "state", (self.config.state_size,), where).float()
        texts = [self.config.instruction] * len(pictures) if instructions is None else list(instructions)
        found = {"rgb": pictures, "text": self._tokens(texts, state).to(pictures.device)}
        return found if state is None else {**found, "state": state}

    def _tokens(self, texts: Sequence[str], state: Tensor | None) -> Tensor:
        return self.prompts.encode([(cleaned(text), "\n") for text in texts])

    @property
    def prompts(self) -> Prompts:
        """The tokenizer.

        Raises:
            ValueError: no directory was read that has one.
        """
        if self._prompts is None:
            raise ValueError(f"policy {self.model}: it reads with its checkpoint's tokenizer: set policy.path")
        return self._prompts

    def context(self, inputs: Stored) -> Seen:
        """See `FlowPolicy.context`; without gradient where nothing of PaliGemma learns."""
        paligemma: Any = self.paligemma_with_expert.paligemma
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in paligemma.parameters())
        with torch.set_grad_enabled(learns):
            prefix = paligemma(inputs["rgb"], inputs["text"])
        return Seen(prefix, padded(self._normal(inputs["state"]), self.width) if self.state_size else None)

    def _normal(self, state: Tensor) -> Tensor:
        """The robot's own numbers on the model's scale, [N, `state_size`]."""
        state = state[:, : self.state_size]
        return state if self._state is None else self._state.normalised(state)

    # What comes out ---------------------------------------------------------------------------------------------------

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.emitted`: in the robot's units by the statistics, then by the simulator's bounds."""
        return self._robot.to_simulator(x, inputs.get("state"))

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The inverse of `emitted`."""
        return self._robot.to_model(actions, inputs.get("state"))

    @classmethod
    def with_statistics(cls, name: str, found: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `PublishedForm.with_statistics`."""
        return {"statistics": {name: as_openpi(found)["norm_stats"]}, "asset": name}

    @classmethod
    def actions_of(cls, config: PiConfig, scaling: Scaling | None) -> RobotActions:
        """See `PublishedForm.actions_of`."""
        relative = _RELATIVE if config.relative else 0
        return RobotActions(cls._row(config), scaling, config.action_low, config.action_high, relative)

    @classmethod
    def _row(cls, config: PiConfig) -> Embodiment:
        """Of the table, or of a robot that is in none: all pictures and numbers that there are."""
        if config.embodiment:
            row = embodiment(cls.model, config.embodiment)
        else:
            row = Embodiment(
                prompt=PI0_PROMPT, prompt_length=cls.prompt_length, cameras=config.image[2] // 3,
                state_size=config.state_size, scale=cls.scale,
            )  # fmt: skip
        return replace(row, gripper=config.gripper or row.gripper)

    def _scalings(self) -> tuple[Scaling | None, Scaling | None]:
        """Scales of states and of actions, as far as there are numbers; None without statistics."""
        config = self.config
        asset = chosen_statistics(config.statistics, self.row, config.asset, "policy.settings.asset")
        if asset is None:
            return None, None
        found = config.statistics[asset]

        def of(part: str, size: int) -> Scaling:
            if part not in found:
                raise ValueError(f"the statistics of {asset} have none of {part}")
            rows = {name: row[:size] for name, row in found[part].items() if isinstance(row, list | tuple)}
            return Scaling.of(rows, self.row.scale, _EPSILON)

        return of("state", self.state_size) if self.state_size else None, of("actions", config.action_size)


class Pi0Policy(PiPolicy):
    """pi0: the state is a token, and time is mixed into the embeddings of actions."""

    model = "pi0"
    adaptive = False
    scale = "mean_std"
    prompt_length = 48
    reads_chain = True

    def _projections(self, width: int, expert: int) -> None:
        self.state_proj = nn.Linear(width, expert)
        self.action_in_proj = nn.Linear(width, expert)
        self.action_time_mlp_in = nn.Linear(2 * expert, expert)
        self.action_time_mlp_out = nn.Linear(expert, expert)
        self.action_out_proj = nn.Linear(expert, width)

    def _critic(self, language: int, expert: int) -> nn.Module:
        hidden = self.config.critic_hidden or (512, 256, 128)
        return perceptron(expert, hidden, 1, gain=0.0, activation=nn.ReLU)

    def velocity(self, context: Seen) -> Velocity:
        """See `FlowPolicy.velocity`. The state does not see actions; actions see the state and each other."""
        places = 1 + self.horizon
        device = context.prefix.read.device
        mask = torch.ones(places, places, dtype=torch.bool, device=device)
        mask[0, 1:] = False
        state = torch.zeros(len(context.prefix.read), self.width, device=device)
        state = self.state_proj(state if context.state is None else context.state)[:, None]

        def at(x: Tensor, t: Tensor) -> Field:
            time = sinusoids(t, state.shape[-1], *_PERIODS)[:, None].expand(-1, self.horizon, -1)
            mixed = self.action_time_mlp_in(torch.cat([self.action_in_proj(x), time], -1))
            actions = self.action_time_mlp_out(functional.silu(mixed))
            expert: Any = self.paligemma_with_expert.gemma_expert
            features = expert(torch.cat([state, actions], 1), context.prefix, mask)[:, 1:]
            return Field(self.action_out_proj(features), features)

        return at

    def values(self, context: Seen, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None or features is None:
            return None
        found: Tensor = self.critic(features.mean(2).detach())  # [N, steps, 1]
        return found[..., 0].mean(1)
