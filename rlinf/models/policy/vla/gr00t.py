"""GR00T N1.5 as a policy that acts and learns (arXiv:2503.14734; learning by acting as in pi_RL, arXiv:2510.25889).

    pictures, instruction ─▶ Eagle (SigLIP, 12 layers of Qwen3) ─▶ self-attention ─┐
    state ─▶ one token ─┐                                                          ▼
    32 tokens of its own ├─▶ diffusion transformer, K times ─▶ actions, 16 of 32 numbers each
    noisy actions ───────┘

It reads the authors' directory, `config.json`, `experiment_cfg/metadata.json` (statistics of robots) and Eagle's own
files, and writes the same back. Its time runs from noise to actions, so the field is mirrored. The critic looks at what
the backbone says, averaged over tokens, and at the state's token, both without gradient.

Instructions and pictures become the tokens of a chat, as Eagle 2.5 reads them: rows of equal length, padded on the
left, in which each picture is as many tokens as it has patches. The tokenizer's files, and its chat template if it has
one, are those of Eagle beside the checkpoint.

LeRobot's directories of GR00T N1.5 (`type: groot` in config.json) are read too, and written back: `_groot_model.`
before all names, statistics and the robot's number in the files of its processors, instructions written as a list of
Python's, pictures that are not cropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.data.demonstrations.statistics import FeatureStatistics, as_groot, write_statistics
from rlinf.data.tokenizer import pretrained
from rlinf.models.policy import lerobot
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.published import tensor_files, to_be_read
from rlinf.models.policy.robots import RobotActions, Scaling, cameras, embodiment, normalised, padded, resized
from rlinf.models.policy.vla.flow import Field, FlowConfig, FlowPolicy, Velocity, mirrored
from rlinf.models.policy.vla.gr00t_transformer import ActionHead, Eagle
from rlinf.runtime.base.tasks import OwnDirectory

_GROOT, _PREFIX, _PACKING = "groot", "_groot_model.", "groot_pack_inputs"
"""LeRobot's names: of the policy, what stands before its tensors, the step of the processor with states and actions."""
CONFIG, METADATA, EAGLE = "config.json", "experiment_cfg/metadata.json", "eagle"
"""Files of a checkpoint, and the folder in it for Eagle's configuration and tokenizer. The authors keep the latter
beside their code (`gr00t/model/backbone/eagle2_hg_model`); it is to be copied."""
ROBOTS = {
    "new_embodiment": 31,
    "libero_franka": 31,
    "maniskill_widowx": 30,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
}
"""Which weights of the projectors are whose, by the name of the statistics."""
EAGLE_CONFIG: Mapping[str, Any] = {
    "image_token_index": 151669,
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
    },
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Configuration of the published GR00T N1.5's Eagle, where no `eagle/config.json` lies beside it."""


MODEL: Mapping[str, Any] = {
    "model_type": "gr00t_n1_5",
    "backbone_cfg": {"select_layer": 12},
    "action_head_cfg": {
        "action_dim": 32, "action_horizon": 16, "max_state_dim": 64, "hidden_size": 1024, "input_embedding_dim": 1536,
        "backbone_embedding_dim": 2048, "num_inference_timesteps": 4, "num_target_vision_tokens": 32,
        "num_timestep_buckets": 1000, "max_num_embodiments": 32, "max_seq_len": 1024,
        "diffusion_model_cfg": {
            "num_layers": 16, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024,
            "cross_attention_dim": 2048, "interleave_self_attention": True, "norm_type": "ada_norm",
            "positional_embeddings": None,
        },
        "vl_self_attention_cfg": {
            "num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64, "positional_embeddings": None,
        },
    },
}  # fmt: skip
"""The published GR00T N1.5, where no checkpoint is named: for estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gr00tConfig(FlowConfig):
    """Configuration of `Gr00tPolicy`."""

    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    """The authors' config.json: `action_head_cfg` and `backbone_cfg`."""
    eagle: Mapping[str, Any] = field(default_factory=lambda: EAGLE_CONFIG)
    """Eagle's config.json: `vision_config`, `text_config`, `image_token_index`."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """`metadata.json`: by robot, least and greatest of each number of its state and actions; none: numbers are as the
    model has them."""
    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    state_size: int = 0
    """Numbers of the observation's "state"."""
    embodiment: str = "libero"
    """Simulator, a row of `policy/robots.py`."""
    robot: str | None = None
    """Name of the statistics; null takes the first of the row that the checkpoint has."""
    robot_id: int | None = None
    """Which weights of the projectors; null follows from `robot`."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to; null as in the row."""
    reads_padding: bool | None = None
    """The action head looks at padding, as where it was trained in batches of a fixed length (RLinf), so that the
    length changes what it does; false as the authors act, without padding. null as in the row."""
    cameras: int | None = None
    """Pictures that the model looks at; null as in the row."""
    crop: float | None = None
    """Share of a picture's area that is kept in the middle; null as in the row."""
    instruction: str = "Perform the default behavior."
    """Instruction where the environment gives none."""
    listed: bool = False
    """Instructions are written as a list of Python's, `['pick it up']`, as lerobot fine-tunes; its directories say
    it."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action, in the simulator's units."""
    action_high: tuple[float, ...] = ()
    """Greatest value of each number of an action."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        embodiment("gr00t", self.embodiment)
        for key in ("action_head_cfg", "backbone_cfg"):
            if key not in self.model:
                raise ValueError(f"policy gr00t: model lacks {key}; it is the authors' config.json")
        if (width := self.model["backbone_cfg"].get("project_to_dim")) is not None:
            raise ValueError(f"policy gr00t: backbone_cfg.project_to_dim={width} is of GR00T N1, not of N1.5")


def settings_in(directory: Path) -> dict[str, Any]:
    """Settings in an authors' directory: `model`, `eagle` if it lies there, `statistics`.

    Raises:
        ValueError: it is of another model, or damaged.
    """
    model = _read(directory / CONFIG)
    if model.get("type") == _GROOT:
        return _lerobot_settings(directory, model)
    if model.get("model_type") not in (None, "gr00t_n1_5"):
        raise ValueError(
            f"{directory / CONFIG}: model_type={model.get('model_type')} is no GR00T N1.5, which is what there is here"
        )
    settings = {"model": model}
    for key, file in (("eagle", f"{EAGLE}/{CONFIG}"), ("statistics", METADATA)):
        if (directory / file).is_file():
            settings[key] = _read(directory / file)
    return settings


def _lerobot_settings(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in a directory of lerobot, whose sizes are always those of the published model.

    Raises:
        ValueError: its processors are damaged, or do something that is not done here.
    """
    path = directory / f"{lerobot.PROCESSORS[0]}.json"
    steps = _read(path).get("steps", []) if path.is_file() else []
    packing: Mapping[str, Any] = next(
        (each["config"] for each in steps if str(each.get("registry_name")).startswith(_PACKING)), {}
    )
    if packing.get("formalize_language") or not packing.get("normalize_min_max", True):
        raise ValueError(f"{path}: formalize_language=false and normalize_min_max=true are what there is here")
    robot = str(packing.get("embodiment_tag", about.get("embodiment_tag", "new_embodiment")))
    settings: dict[str, Any] = {"listed": True, "crop": 1.0, "reads_padding": False, "robot": robot}
    if (numbers := packing.get("embodiment_mapping")) is not None:
        settings["robot_id"] = numbers.get(robot, 0)
    if (directory / METADATA).is_file():  # of what it was fine-tuned on here
        settings["statistics"] = _read(directory / METADATA)
    elif rows := lerobot.statistics_of_processors(directory).get(lerobot.LEROBOT):
        parts = {"state": rows.get("state", {}), "action": rows["actions"]}
        settings["statistics"] = {robot: {"statistics": {part: {part: row} for part, row in parts.items() if row}}}
    if (directory / EAGLE / CONFIG).is_file():
        settings["eagle"] = _read(directory / EAGLE / CONFIG)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must be an object of JSON")
    return contents


def robot_of(config: Gr00tConfig) -> str:
    """Name of the statistics that are used.

    Raises:
        ValueError: the checkpoint has none of that name, or several of which none is the row's.
    """
    robots = [*config.statistics]
    wanted = (config.robot,) if config.robot else embodiment("gr00t", config.embodiment).statistics
    for name in wanted:
        if name in robots or not robots:
            return name
    if config.robot is None and len(robots) == 1:
        return robots[0]
    raise ValueError(
        f"policy gr00t: the checkpoint has statistics of {', '.join(robots)}, not of {' or '.join(wanted)}: set "
        "policy.settings.robot"
    )


def scalings_of(config: Gr00tConfig) -> tuple[Scaling, Scaling] | None:
    """Between the robot's units and the model's scale, of the state and of actions; None without statistics."""
    if not config.statistics:
        return None
    robot = robot_of(config)
    try:
        statistics = config.statistics[robot]["statistics"]
        looks = config.state_size and embodiment("gr00t", config.embodiment).state_size
        parts = [_joined(statistics["state"] if looks else statistics.get("state", {})), _joined(statistics["action"])]
    except (KeyError, TypeError) as error:
        raise ValueError(f"policy gr00t: statistics of {robot} lack {error}") from error
    return Scaling.of(parts[0], "min_max"), Scaling.of(parts[1], "min_max")


def _joined(parts: Mapping[str, Any]) -> dict[str, list[float]]:
    """Least and greatest of numbers that are kept by name, such as x, y, z and gripper, one behind the other."""
    return {name: [float(each) for part in parts.values() for each in part[name]] for name in ("min", "max")}


PICTURE, BEGIN, END = "<IMG_CONTEXT>", "<img>", "</img>"
"""The token of a patch, and what stands around a picture's."""
_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""Where the tokenizer has no template."""
_TEMPLATE = "chat_template.json"
"""The file of Eagle's template, which is a processor's, so that a tokenizer does not read it by itself."""
_PLACE = re.compile(r"<image-(\d+)>")
"""Placeholder that Eagle's template writes for a picture."""


class Prompts:
    """Instructions to tokens.

    Args:
        files: of the tokenizer, by name.
        cameras: pictures in front of each instruction.
        patches: tokens of each picture.
        length: tokens in a row.
        listed: instructions are written as a list of Python's.

    Raises:
        ValueError: the files are no tokenizer with the tokens of pictures.
    """

    def __init__(self, files: Mapping[str, bytes], cameras: int, patches: int, length: int, *, listed: bool = False):
        self._tokenizer, self._listed = _tokenizer(files), listed
        self.cameras, self.patches, self.length = cameras, patches, length
        self.picture: int = self._tokenizer.convert_tokens_to_ids(PICTURE)
        """The token of a patch."""
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens of instructions, int64 [N, length], -1 for padding.

        Raises:
            ValueError: one is too long; the text says which.
        """
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self.length)

    def _encoded(self, instruction: str) -> tuple[int, ...]:
        tokens = self._tokenizer.encode(self.text(instruction), add_special_tokens=False)
        if (places := tokens.count(self.picture)) != self.cameras * self.patches:
            raise ValueError(
                f"policy gr00t: the chat template beside the checkpoint makes {places} tokens of {self.cameras} "
                f"pictures of {self.patches} tokens: it must write <image-1>, <image-2> … as Eagle's {_TEMPLATE} does"
            )
        if len(tokens) > self.length:
            raise ValueError(
                f"policy gr00t: prompt_length={self.length} is too short for {self.cameras} pictures of {self.patches} "
                f"tokens and {instruction!r}, which need {len(tokens)}"
            )
        return (*[-1] * (self.length - len(tokens)), *tokens)

    def text(self, instruction: str) -> str:
        """Text that is tokenized for an instruction."""
        instruction = str([instruction]) if self._listed else instruction
        places = "".join(f"<image-{number}>" for number in range(1, self.cameras + 1))
        chat = _CHAT.format(content=places + instruction)
        if self._tokenizer.chat_template is not None:
            content: list[dict[str, Any]] = [{"type": "image", "image": number} for number in range(self.cameras)]
            content.append({"type": "text", "text": instruction})
            chat = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        patches = PICTURE * self.patches
        return _PLACE.sub(lambda match: f"<image {match[1]}>{BEGIN}{patches}{END}", chat)


def _tokenizer(files: Mapping[str, bytes]) -> Any:
    from transformers import AutoTokenizer

    with OwnDirectory("tokenizer") as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        try:
            tokenizer = pretrained(AutoTokenizer, str(folder))
            if _TEMPLATE in files:
                tokenizer.chat_template = json.loads(files[_TEMPLATE])["chat_template"]
        except Exception as error:  # of files that may hold anything
            raise ValueError(f"policy gr00t: the files of Eagle's tokenizer cannot be read: {error}") from error
    if missing := [
        token for token in (PICTURE, BEGIN, END) if len(tokenizer.encode(token, add_special_tokens=False)) != 1
    ]:
        raise ValueError(f"policy gr00t: the tokenizer beside the checkpoint has no {' and no '.join(missing)}")
    return tokenizer


_HALF = (0.5, 0.5, 0.5)
_CRITIC = (1024, 512, 256)
_INNER = "backbone.eagle_model.vision_model."
"""transformers has no inner vision_model any more; the authors' names have."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Parts that are computed once for an observation."""

    context: Tensor
    """Tokens that the action head attends to, [N, L, width]."""
    before: Tensor
    """The state's token and the learned ones, [N, 1 + T, width]."""
    real: Tensor | None
    """Tokens of the context that are looked at, bool [N, L]; None for all, padding too."""


class Gr00tPolicy(FlowPolicy):
    """Looks at "rgb" and "state", reads the instruction, and denoises a chunk."""

    _blank: Tensor

    Config: ClassVar[type[PolicyConfig]] = Gr00tConfig
    published = (CONFIG, "*.safetensors")
    small_files = (METADATA, f"{EAGLE}/*", CONFIG, *lerobot.FILES, "train_config.json")
    needs_path = True
    imitates_padding = False  # the authors mask what the robot does not have
    own = ("critic.*", "deviation.*")
    float32 = ("critic.*", "deviation.*")
    trains = ("action_head.*", "critic.*", "deviation.*")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, config: Gr00tConfig):
        head = config.model["action_head_cfg"]
        super().__init__(config, horizon=head["action_horizon"], width=head["action_dim"], features=head["hidden_size"])
        self.row = embodiment("gr00t", config.embodiment)
        robot = robot_of(config)
        self.robot = config.robot_id if config.robot_id is not None else ROBOTS.get(robot, ROBOTS["new_embodiment"])
        self.scalings = scalings_of(config)
        actions = None if self.scalings is None else self.scalings[1]
        self.actions = self.actions_of(config, actions)
        self.cameras = config.cameras or self.row.cameras
        self.reads_padding = self.row.reads_padding if config.reads_padding is None else config.reads_padding
        # Without a state the authors take sines and cosines of zeros: 0 for each of the robot's numbers, then 1
        numbers = 0 if self.scalings is None or self.row.state_size else len(self.scalings[0].centre)
        self.register_buffer(
            "_blank", torch.cat([torch.zeros(1, numbers), torch.ones(1, numbers)], 1), persistent=False
        )
        with to_be_read():
            self.backbone = nn.Module()
            self.backbone.eagle_model = Eagle(config.eagle, config.model["backbone_cfg"]["select_layer"])
            self.action_head = ActionHead(head)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            width = head["backbone_embedding_dim"] + head["input_embedding_dim"]
            outputs = config.chunk if config.value_level == "action" else 1
            self.critic = perceptron(width, _CRITIC, outputs, gain=0.0, activation=nn.ReLU)
        self._prompts: Prompts | None = None
        self._prefix = ""

    # The authors' directory -------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`."""
        return settings_in(directory)

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`."""
        return {"statistics": as_groot(statistics, name), "robot": name}

    @classmethod
    def actions_of(cls, config: Gr00tConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return RobotActions(embodiment("gr00t", config.embodiment), scaling, config.action_low, config.action_high)

    def open_published(self, directory: Path) -> None:
        """Take Eagle's tokenizer, and what stands before the names of tensors."""
        self._prefix = _PREFIX if all(name.startswith(_PREFIX) for name in tensor_files(directory)) else ""
        names = [name for name in self.files if name.startswith(f"{EAGLE}/") and name != f"{EAGLE}/{CONFIG}"]
        if names:
            length = self.config.prompt_length or self.row.prompt_length
            files = {name.removeprefix(f"{EAGLE}/"): self.files[name] for name in names}
            self._prompts = Prompts(files, self.cameras, self._eagle.patches, length, listed=self.config.listed)
            self._eagle.picture = self._prompts.picture

    def published_name(self, name: str) -> str:
        """See `Policy.published_name`."""
        inner = name.replace(_INNER, f"{_INNER}vision_model.", 1) if name.startswith(_INNER) else name
        return self._prefix + inner

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; processors of lerobot with the statistics that it acts by."""
        processors = self._prefix and f"{lerobot.PROCESSORS[0]}.json" in self.files
        if not processors and json.loads(self.files.get(METADATA, b"{}")) != self.config.statistics:
            write_statistics(directory / METADATA, self.config.statistics)
        if processors:
            for name, content in lerobot.with_numbers(self.files, self._numbers()).items():
                (directory / name).write_bytes(content)
        if not self._prefix:
            (directory / CONFIG).write_text(json.dumps(self.config.model, indent=2) + "\n", encoding="utf-8")
        words = "backbone.eagle_model.language_model"  # the authors' files have both names of what is tied
        head = state[f"{words}.model.embed_tokens.weight"].clone()
        super().write_published(directory, {f"{words}.lm_head.weight": head, **state})

    def _numbers(self) -> dict[str, dict[str, Any]]:
        """Statistics by the names of lerobot's features: parts of the body one behind the other."""
        numbers: dict[str, dict[str, Any]] = {}
        mine = self.config.statistics.get(robot_of(self.config), {}).get("statistics", {})
        for name, feature in (("state", lerobot.STATE), ("action", lerobot.ACTION)):
            parts = list(mine.get(name, {}).values())
            kinds = [kind for kind in lerobot.STATISTICS if parts and all(part.get(kind) is not None for part in parts)]
            numbers[feature] = {kind: [each for part in parts for each in part[kind]] for kind in kinds}
        return {feature: row for feature, row in numbers.items() if row}

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of all four transformers."""
        return [
            *self._eagle.vision_model.encoder.layers,
            *self._eagle.language_model.model.layers,
            *self.action_head.vl_self_attention.transformer_blocks,
            *self.action_head.model.transformer_blocks,
        ]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes, the chat as tokens, the state as it came.

        Raises:
            ValueError: something is missing or has another shape, or there is no tokenizer.
        """
        if self._prompts is None:
            raise ValueError(
                f"policy gr00t: no tokenizer lies beside the checkpoint; copy Eagle's files to its folder {EAGLE}/"
            )
        rgb = looked_at(observation, "rgb", self.config.image, "policy gr00t")
        if rgb.shape[3] < 3 * self.cameras:
            raise ValueError(
                f"policy gr00t: pictures of {rgb.shape[3] // 3} cameras came, and {self.cameras} are looked at; set "
                "policy.settings.cameras"
            )
        texts = [self.config.instruction] * len(rgb) if instructions is None else instructions
        stored = {"rgb": rgb, "text": self._prompts.encode(texts).to(rgb.device)}
        if self.config.state_size and self.row.state_size:
            stored["state"] = looked_at(observation, "state", (self.config.state_size,), "policy gr00t").float()
        return stored

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.denoised`."""
        return self.actions.to_model(actions)

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.emitted`."""
        return self.actions.to_simulator(x)

    # What comes out ---------------------------------------------------------------------------------------------------

    def context(self, inputs: Stored) -> Read:
        """See `FlowPolicy.context`."""
        dtype = self.action_head.vlln.weight.dtype
        text, real = inputs["text"], None
        if not self.reads_padding:
            text = text[:, int((text >= 0).any(0).long().argmax()) :]  # columns that nobody fills cost time
            real = text >= 0
        hidden = self._eagle(self._pictures(inputs["rgb"]).to(dtype), text.clamp(min=0), text >= 0)
        state = self._blank.expand(len(text), -1) if "state" not in inputs else inputs["state"]
        if "state" in inputs and self.scalings is not None:
            state = self.scalings[0].normalised(state)
        before = self.action_head.tokens(padded(state, self._state_width).to(dtype), self.robot)
        return Read(self.action_head.read(hidden, real), before, real)

    def velocity(self, context: Read) -> Velocity:
        """See `FlowPolicy.velocity`."""

        def of_time(x: Tensor, t: Tensor) -> Field:
            velocity, hidden = self.action_head(
                context.context, context.before, x.to(context.before.dtype), t, self.robot, real=context.real
            )
            return Field(velocity.float(), hidden)

        return mirrored(of_time)

    def values(self, context: Read, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        tokens = context.context
        if context.real is None:
            mean = tokens.mean(1)
        else:
            share = context.real / context.real.sum(1, keepdim=True)
            mean = (tokens * share[..., None].to(tokens.dtype)).sum(1)
        summary = torch.cat([mean, context.before[:, 0]], -1).detach()
        result: Tensor = self.critic(summary.float())
        return result if self.config.value_level == "action" else result[:, 0]

    @property
    def _eagle(self) -> Eagle:
        return self.backbone.eagle_model  # type: ignore[return-value]  # of a plain module, for the authors' names

    @property
    def _state_width(self) -> int:
        return self.action_head.state_encoder.layer1.W.shape[1]

    def _pictures(self, rgb: Tensor) -> Tensor:
        """Middle parts of the first cameras' pictures at the encoder's size, [N, k, 3, H, H]."""
        pictures = cameras(rgb)[:, : self.cameras]
        share = math.sqrt(self.config.crop or self.row.crop)
        height, width = (int(side * share) for side in pictures.shape[-2:])
        # torchvision's CenterCrop rounds, as the authors' transforms do
        above, before = round((pictures.shape[-2] - height) / 2), round((pictures.shape[-1] - width) / 2)
        pictures = pictures[..., above : above + height, before : before + width]
        return normalised(resized(pictures, self._eagle.side, "bilinear", rounded=False), _HALF, _HALF)
