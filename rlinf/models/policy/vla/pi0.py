"""pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054) as policies that learn by acting.

    pictures, words ─▶ PaliGemma ─▶ keys and values ─┐
    state, x_t and t ─▶ embeddings ─▶ expert ────────┴─▶ velocity of H actions x 32 numbers

Actions leave the model on the scale of its data: statistics bring them to the robot's units, and the simulator's bounds
to [-1, 1]. By default the expert learns and PaliGemma stands still. pi0's value head reads what the expert says at the
steps that drew, averaged over the horizon, detached and averaged over those steps (arXiv:2510.25889, equation 16).

pi0.5's expert is conditioned on time by its norms. The state is written into the prompt as whole numbers; where the
embodiment has none, as in pi_RL's models for LIBERO, the prompt is that of pi0. The value head reads the mean output of
the language model over pictures and all places for words, pads included, detached (arXiv:2510.25889, section 4.3).

Directories are openpi's, or lerobot's, under their own names:

    config.json                     action_dim, action_horizon … (lerobot: max_action_dim, chunk_size …)
    model.safetensors               names as in `gemma.py`; lerobot puts `model.` before all of them
    <asset id>/norm_stats.json      statistics of states and actions, also below assets/

PaliGemma's tokenizer lies in the same directory: either `tokenizer.json` (read by the package tokenizers) or the
sentencepiece file as it was published, such as `paligemma_tokenizer.model` (read by the package sentencepiece, where it
is installed).
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.data.demonstrations.statistics import FeatureStatistics, as_openpi
from rlinf.data.safetensors_io import write_text
from rlinf.models.policy import lerobot
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.published import read_tensors, tensor_files, tensor_shapes, to_be_read, write_sharded
from rlinf.models.policy.robots import (
    PI0_PROMPT,
    PI05_PROMPT,
    Embodiment,
    RobotActions,
    Scale,
    Scaling,
    cameras,
    chosen_statistics,
    embodiment,
    padded,
    resized_with_padding,
)
from rlinf.models.policy.vla.flow import Field, FlowConfig, FlowPolicy, Velocity, sinusoids
from rlinf.models.policy.vla.gemma import EXPERT, LANGUAGE, VISION, Expert, PaliGemma, Prefix

logger = logging.getLogger(__name__)

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*tokenizer.model")
"""Patterns of the tokenizer's files."""
_BINS = 256  # of numbers of the state in prompts


class Prompts:
    """Rows of tokens of equal length: BOS, the prompt, and 0 on the right.

    Args:
        files: contents of a checkpoint's small files by name.
        length: tokens in a row.
        key: of the configuration, that says how many.

    Raises:
        ValueError: there is no tokenizer among the files, or it cannot be read.
    """

    def __init__(self, files: Mapping[str, bytes], length: int, key: str = "prompt_length"):
        self.length, self._key = length, key
        self.words = _tokenizer(files)
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, parts: Sequence[tuple[str, ...]]) -> Tensor:
        """Tokens of prompts, int64 [N, length].

        Args:
            parts: texts of each prompt that are tokenized one by one, N of them.

        One that is too long loses its end, and is told of.
        """
        return torch.tensor([self._row(each) for each in parts], dtype=torch.int64).view(len(parts), self.length)

    def _encoded(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        tokens = [self.words.first, *(token for part in parts for token in self.words.encode(part))]
        if len(tokens) > self.length:
            logger.warning(  # once for each text: rows are kept
                "policy.settings.%s=%d is too short for %r, which is %d tokens: its end is cut off, as by openpi",
                self._key,
                self.length,
                "".join(parts),
                len(tokens),
            )
            tokens = tokens[: self.length]
        return (*tokens, *[0] * (self.length - len(tokens)))


def cleaned(text: str) -> str:
    """An instruction as openpi puts it into prompts: on one line, with spaces for underscores."""
    return text.strip().replace("_", " ").replace("\n", " ")


def written(state: Tensor) -> str:
    """A state on the model's scale as pi0.5 reads it: 256 equal bins from -1 to 1, as whole numbers; float32 [S].

    What lies below -1 is -1, as in openpi, and what lies above 1 is 255.
    """
    edges = torch.linspace(-1.0, 1.0, _BINS + 1, dtype=torch.float64)[:-1]
    return " ".join(map(str, (torch.bucketize(state.double().cpu(), edges, right=True) - 1).tolist()))


@dataclass(frozen=True, slots=True)
class Words:
    """PaliGemma's tokens."""

    first: int
    """BOS, the token that begins texts."""
    last: int
    """EOS, the token that ends them."""
    size: int
    """Tokens in all."""
    encode: Callable[[str], Sequence[int]]
    """Tokens of a text, without those two."""


def _tokenizer(files: Mapping[str, bytes]) -> Words:
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # of a file that may hold anything
            raise ValueError(f"policy.path: its tokenizer.json cannot be read: {error}") from error
        first, last = (tokenizer.token_to_id(each) for each in ("<bos>", "<eos>"))
        if first is None or last is None:
            raise ValueError("policy.path: its tokenizer.json has no tokens <bos> and <eos>: it is not PaliGemma's")
        size = tokenizer.get_vocab_size(with_added_tokens=False)
        return Words(first, last, size, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    pieces = [name for name in files if name.endswith("tokenizer.model")]
    if not pieces:
        raise ValueError(
            "policy.path: the directory has no tokenizer: put PaliGemma's tokenizer.json, or its "
            "paligemma_tokenizer.model, beside the weights"
        )
    try:
        from sentencepiece import SentencePieceProcessor  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(
            f"policy.path: reading {pieces[0]} takes the package sentencepiece (pip install sentencepiece), or "
            "put PaliGemma's tokenizer.json in its place"
        ) from error
    processor = SentencePieceProcessor(model_proto=files[pieces[0]])
    return Words(processor.bos_id(), processor.eos_id(), processor.vocab_size(), processor.encode)


PREFIX = "model."
"""Prefix that lerobot puts before names."""
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""A tensor of checkpoints that no computation reads."""
WORDS = "paligemma_with_expert.paligemma.lm_head.weight"
"""The embedding of words."""
TIED = (
    "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight",
    "paligemma_with_expert.gemma_expert.model.embed_tokens.weight",
)
"""Copies of the two that some programs write too, or in their place."""
MAIN = "paligemma_with_expert.paligemma.model."
"""Prefix of PaliGemma's other tensors."""
_STATS = "norm_stats.json"


def settings_in(directory: Path) -> dict[str, Any]:
    """Keys of `PiConfig` that a directory says: sizes by the shapes of its tensors, and its statistics.

    Args:
        directory: of the checkpoint.

    Raises:
        ValueError: a file is damaged, the tensors are not those of such a model, or numbers are on a scale of which
            there is none here.
    """
    about = lerobot.said_in(directory)
    shapes = {ours(name): shape for name, shape in tensor_shapes(tensor_files(directory)).items()}
    try:
        settings: dict[str, Any] = {
            "width": shapes["action_in_proj.weight"][1],
            "vision": vision_sizes(shapes, about),
            "language": stack_sizes(shapes, f"{MAIN}language_model.") | {"vocab_size": shapes[WORDS][0]},
            "expert": stack_sizes(shapes, "paligemma_with_expert.gemma_expert.model."),
            "statistics": statistics_in(directory),
            **_normalised_in(directory, about),
        }
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{directory} lacks {error}: it is no checkpoint of pi0 or pi0.5") from error
    for key in ("action_horizon", "chunk_size"):
        if isinstance(about.get(key), int):
            settings["horizon"] = about[key]
    return settings


def _normalised_in(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `PiConfig` of how lerobot normalises a directory's numbers, and writes the state into prompts.

    Raises:
        ValueError: states and actions are normalised in two ways, or in one that there is none of here.
    """
    settings: dict[str, Any] = {}
    if about.get("type") == "pi05" and isinstance(width := about.get("max_state_dim", 32), int):
        settings["prompt_numbers"] = width
    mapping: Mapping[str, Any] = about.get("normalization_mapping") or {}
    kinds = {feature: str(mapping[feature]) for feature in ("STATE", "ACTION") if feature in mapping}
    if len({*kinds.values()}) > 1 or not {*kinds.values()} <= {*lerobot.SCALES}:
        raise ValueError(
            f"{directory / 'config.json'}: normalization_mapping says {kinds}: a policy is read whose states and "
            f"actions are both normalised by one of {', '.join(lerobot.SCALES)}"
        )
    return settings | ({"scale": lerobot.SCALES[next(iter(kinds.values()))]} if kinds else {})


def statistics_in(directory: Path) -> dict[str, Any]:
    """Statistics of each asset, `{"physical-intelligence/libero": {"state": {...}, "actions": {...}}}`; where there are
    none, those of lerobot's processors, as asset `lerobot`.

    Raises:
        ValueError: a file is damaged.
    """
    statistics: dict[str, Any] = {}
    for path in sorted(directory.rglob(_STATS)):
        asset = path.parent.relative_to(directory).as_posix().removeprefix("assets/")
        try:
            statistics[asset] = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return statistics or lerobot.statistics_of_processors(directory)


def tensors_of(directory: Path, unused: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names without prefix, and tensors, one at a time; what is not read by any computation goes to `unused`."""
    named = dict(sorted(tensor_files(directory).items()))
    words = {ours(name) for name in named}
    for name, tensor in read_tensors(named):
        own = ours(name)
        if own == UNUSED:
            unused[own] = tensor.clone()  # of the file that a checkpoint may replace
        elif own == TIED[0] and WORDS not in words:
            yield WORDS, tensor
        elif own not in TIED:
            yield own, tensor


def prefix_in(directory: Path) -> str:
    """Prefix of the names of a directory's tensors."""
    return PREFIX if all(name.startswith(PREFIX) for name in tensor_files(directory)) else ""


def ours(name: str) -> str:
    """A name without lerobot's prefix."""
    return name.removeprefix(PREFIX)


def write_beside(directory: Path, config: Any, has_config: bool) -> None:
    """Statistics, and a config.json where none was read.

    Args:
        directory: there already.
        config: a `PiConfig`.
        has_config: config.json is there.
    """
    for asset, statistics in config.statistics.items():
        if asset == lerobot.LEROBOT and (directory / f"{lerobot.PROCESSORS[0]}.json").is_file():
            continue
        (directory / asset).mkdir(parents=True, exist_ok=True)
        write_text(directory / asset / _STATS, json.dumps({"norm_stats": statistics}, indent=2) + "\n")
    if not has_config:
        about = {"action_dim": config.width, "action_horizon": config.horizon, "precision": "bfloat16"}
        heads = {"vision_heads": config.vision["num_attention_heads"]} if "num_attention_heads" in config.vision else {}
        write_text(directory / "config.json", json.dumps(about | heads, indent=2) + "\n")


def unused_like(state: Mapping[str, Tensor], expert_width: int) -> Tensor:
    """Zeros in place of the unused tensor in a policy that was not read: openpi refuses a file without it."""
    words = state[WORDS]
    return torch.zeros(words.shape[0], expert_width, dtype=words.dtype)


def stack_sizes(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Any]:
    """Sizes of a stack; all published ones have one head for keys and values, so its width is that of a head."""
    layers = len({name.split(".layers.")[1].split(".")[0] for name in shapes if name.startswith(f"{prefix}layers.")})
    first = f"{prefix}layers.0."
    heads, head = shapes[f"{first}self_attn.q_proj.weight"][0], shapes[f"{first}self_attn.k_proj.weight"][0]
    inner, width = shapes[f"{first}mlp.up_proj.weight"]
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads // head, "num_key_value_heads": 1, "head_dim": head}


def vision_sizes(shapes: Mapping[str, tuple[int, ...]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the encoder; heads are 72 wide, or as many as config.json says."""
    prefix = f"{MAIN}vision_tower.vision_model."
    width, _, patch, _ = shapes[f"{prefix}embeddings.patch_embedding.weight"]
    side = round(shapes[f"{prefix}embeddings.position_embedding.weight"][0] ** 0.5) * patch
    layers = {name.split(".layers.")[1].split(".")[0] for name in shapes if name.startswith(f"{prefix}encoder.layers.")}
    heads = about.get("vision_heads", max(1, width // 72))
    inner = shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0]
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": len(layers)}
    return {**sizes, "num_attention_heads": heads, "image_size": side, "patch_size": patch}


_EPSILON = 1e-6  # openpi adds it to deviations and widths
_PERIODS = (4e-3, 4.0)  # of times
_RELATIVE = 6  # numbers of an action: position and angles, not the gripper


@dataclass(frozen=True, slots=True, kw_only=True)
class PiConfig(FlowConfig):
    """Configuration of pi0 and pi0.5. A directory says sizes and statistics, an environment `image`, `state_size` and
    bounds."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera, the one before the table first."""
    state_size: int = 0
    """Numbers of the observation's "state"; 0 does not look at it."""
    embodiment: str = ""
    """Simulator whose row of the table of models and simulators counts, such as libero; empty: all is set here."""
    instruction: str = ""
    """Instruction where the environment gives none."""
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
    """Statistics of states and actions by asset, as in norm_stats.json; empty: numbers are used as they are."""
    scale: Scale | None = None
    """How statistics scale: q01_q99, mean_std or min_max; null: as a directory of lerobot says, otherwise as openpi has
    the embodiment's."""
    prompt_numbers: int = 0
    """Numbers of the state in pi0.5's prompts, zeros behind the robot's own; 0: its own (openpi). lerobot writes 32."""
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
class Context:
    """Parts that are computed once for an observation."""

    prefix: Prefix
    """Pictures and words."""
    state: Tensor | None
    """On the model's scale, padded, [N, width]; None where it is not looked at."""


class PiPolicy(FlowPolicy):
    """Base class of pi0 and pi0.5. Looks at "rgb" and, where there is one, "state"; reads the instruction."""

    Config: ClassVar[type[PolicyConfig]] = PiConfig
    model: ClassVar[str]
    """Name in the table of embodiments."""
    adaptive: ClassVar[bool]
    """True if the expert's norms are conditioned on time."""
    scale: ClassVar[Scale]
    """Scale of states and actions."""
    prompt_length: ClassVar[int]
    """Tokens of a prompt, as published."""
    published = ("config.json", "*.safetensors")
    small_files = ("config.json", *FILES, *lerobot.FILES, "train_config.json")
    needs_path = True
    own = ("critic.*", "deviation.*")
    # as openpi converts it: what embeds patches, norms of the language models, and all outside of them
    float32 = (
        *("*.vision_model.embeddings.*", "*.input_layernorm.*", "*.post_attention_layernorm.*", "*model.norm.*"),
        *("action_*", "state_proj.*", "time_mlp_*", "critic.*", "deviation.*"),
    )
    trains = ("*", "!paligemma_with_expert.paligemma.*")
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, config: PiConfig):
        expert: Mapping[str, Any] = {**EXPERT, **config.expert}
        super().__init__(config, horizon=config.horizon, width=config.width, features=expert["hidden_size"])
        self.row = self._row(config)
        self.side = {**VISION, **config.vision}["image_size"]
        self.state_size = config.state_size if config.prompt_numbers else min(config.state_size, self.row.state_size)
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
        """See `Policy.published_settings`."""
        return settings_in(directory)

    def open_published(self, directory: Path) -> None:
        """Take the tokenizer, and what stands before the names of tensors.

        Raises:
            ValueError: there is no tokenizer, or there are no statistics.
        """
        if not self.config.statistics:
            raise ValueError(
                f"{directory} has neither norm_stats.json nor lerobot's policy_preprocessor.json with its files, "
                "without which its actions have no scale: put the first, of the data set, into a directory named like "
                "its asset, or set policy.settings.statistics"
            )
        self._prompts = Prompts(self.files, self.config.prompt_length or self.row.prompt_length)
        self._prefix = prefix_in(directory)

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.read_published`."""
        return tensors_of(directory, self._unused)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`."""
        expert = self.paligemma_with_expert.gemma_expert.model.config.hidden_size  # type: ignore[union-attr]
        unused = self._unused or {UNUSED: unused_like(state, expert)}  # type: ignore[arg-type]
        write_sharded(directory, {self._prefix + name: each for name, each in {**state, **unused}.items()})
        write_beside(directory, self.config, "config.json" in self.files)
        for name, content in lerobot.with_numbers(self.files, self._numbers()).items():
            (directory / name).write_bytes(content)

    def _numbers(self) -> dict[str, Mapping[str, Any]]:
        """Statistics that it acts by, by the names of lerobot's features."""
        asset = chosen_statistics(self.config.statistics, self.row, self.config.asset, "policy.settings.asset")
        parts = {} if asset is None else self.config.statistics[asset]
        names = {"state": lerobot.STATE, "actions": lerobot.ACTION}
        return {names[part]: rows for part, rows in parts.items() if part in names}

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
        stored = {"rgb": pictures, "text": self._tokens(texts, state).to(pictures.device)}
        return stored if state is None else {**stored, "state": state}

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

    def context(self, inputs: Stored) -> Context:
        """See `FlowPolicy.context`; without gradient where nothing of PaliGemma learns."""
        paligemma: Any = self.paligemma_with_expert.paligemma
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in paligemma.parameters())
        with torch.set_grad_enabled(learns):
            prefix = paligemma(inputs["rgb"], inputs["text"])
        return Context(prefix, padded(self._normal(inputs["state"]), self.width) if self.state_size else None)

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
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`."""
        return {"statistics": {name: as_openpi(statistics)["norm_stats"]}, "asset": name}

    @classmethod
    def actions_of(cls, config: PiConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        relative = _RELATIVE if config.relative else 0
        return RobotActions(cls._row(config), scaling, config.action_low, config.action_high, relative)

    @classmethod
    def _row(cls, config: PiConfig) -> Embodiment:
        """The embodiment's row of the table, or one for a robot that is in none: all pictures and numbers that there
        are."""
        if config.embodiment:
            row = embodiment(cls.model, config.embodiment)
        else:
            row = Embodiment(
                prompt=PI0_PROMPT,
                prompt_length=cls.prompt_length,
                cameras=config.image[2] // 3,
                state_size=config.state_size,
                scale=cls.scale,
            )
        return replace(row, gripper=config.gripper or row.gripper)

    def _scalings(self) -> tuple[Scaling | None, Scaling | None]:
        """Scales of states and of actions, as far as there are numbers; None without statistics."""
        config = self.config
        asset = chosen_statistics(config.statistics, self.row, config.asset, "policy.settings.asset")
        if asset is None:
            return None, None
        statistics = config.statistics[asset]

        def of(part: str, size: int) -> Scaling:
            if part not in statistics:
                raise ValueError(f"the statistics of {asset} have none of {part}")
            rows = {name: row[:size] for name, row in statistics[part].items() if isinstance(row, list | tuple)}
            return Scaling.of(rows, config.scale or self.row.scale, _EPSILON)

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

    def velocity(self, context: Context) -> Velocity:
        """See `FlowPolicy.velocity`. The state does not see actions; actions see the state and each other."""
        places = 1 + self.horizon
        device = context.prefix.mask.device
        mask = torch.ones(places, places, dtype=torch.bool, device=device)
        mask[0, 1:] = False
        state = torch.zeros(len(context.prefix.mask), self.width, device=device)
        state = self.state_proj(state if context.state is None else context.state)[:, None]

        def at(x: Tensor, t: Tensor) -> Field:
            time = sinusoids(t, state.shape[-1], *_PERIODS)[:, None].expand(-1, self.horizon, -1)
            mixed = self.action_time_mlp_in(torch.cat([self.action_in_proj(x), time], -1))
            actions = self.action_time_mlp_out(functional.silu(mixed))
            expert: Any = self.paligemma_with_expert.gemma_expert
            features = expert(torch.cat([state, actions], 1), context.prefix, mask)[:, 1:]
            return Field(self.action_out_proj(features), features)

        return at

    def values(self, context: Context, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None or features is None:
            return None
        result: Tensor = self.critic(features.mean(2).detach())  # [N, steps, 1]
        return result[..., 0].mean(1)


class Pi05Policy(PiPolicy):
    """pi0.5: there is no token of the state, and time conditions the expert's norms."""

    model = "pi05"
    adaptive = True
    scale = "q01_q99"
    prompt_length = 200

    def _projections(self, width: int, expert: int) -> None:
        self.action_in_proj = nn.Linear(width, expert)
        self.time_mlp_in = nn.Linear(expert, expert)
        self.time_mlp_out = nn.Linear(expert, expert)
        self.action_out_proj = nn.Linear(expert, width)

    def _critic(self, language: int, expert: int) -> nn.Module:
        hidden = self.config.critic_hidden or (1024, 512, 256)
        return perceptron(language, hidden, 1, gain=0.0, activation=nn.ReLU)

    def _tokens(self, texts: Sequence[str], state: Tensor | None) -> Tensor:
        if state is None or not self.state_size:
            return super()._tokens(texts, state)
        rows = zip(texts, padded(self._normal(state), max(self.config.prompt_numbers, self.state_size)), strict=True)
        return self.prompts.encode(
            [(PI05_PROMPT.format(instruction=cleaned(text), state=written(numbers)),) for text, numbers in rows]
        )

    def velocity(self, context: Context) -> Velocity:
        """See `FlowPolicy.velocity`. Actions see each other."""
        mask = torch.ones(self.horizon, self.horizon, dtype=torch.bool, device=context.prefix.mask.device)

        def at(x: Tensor, t: Tensor) -> Field:
            time = self.time_mlp_in(sinusoids(t, self.time_mlp_in.in_features, *_PERIODS))
            condition = functional.silu(self.time_mlp_out(functional.silu(time)))
            expert: Any = self.paligemma_with_expert.gemma_expert
            features = expert(self.action_in_proj(x), context.prefix, mask, condition)
            return Field(self.action_out_proj(features), features)

        return at

    def values(self, context: Context, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        result: Tensor = self.critic(context.prefix.hidden.float().mean(1).detach())
        return result[:, 0]
