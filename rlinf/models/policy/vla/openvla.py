"""OpenVLA-7B and OpenVLA-OFT with discrete actions as policies that act and learn.

OpenVLA-7B (arXiv:2406.09246) draws action tokens one after the other. `draw` keeps keys and values from token to token;
`score` reads all tokens in one pass, which gives the same log-probs up to rounding.

    BOS │ 256 patches of each picture │ padding │ prompt … lone space │ actions
          DINOv2 ++ SigLIP ─▶ projector

Rows of tokens have equal length: the first token in front, then padding, then the rest, so that pictures fit in behind
the first token and actions follow the last one. The last is always the lone space that Llama's tokenizer makes of the
one at the prompt's end (released code). Parameters have the authors' names: vision_backbone, projector, language_model.
The value head is ours, on the hidden state of the prompt's last token, which knows nothing of the actions
(arXiv:2505.19789, section 4).

OpenVLA-OFT (arXiv:2502.19645) decodes all tokens of a chunk at once, in parallel.

    BOS │ patches │ (state) │ padding │ prompt … lone space │ C x A places of zeros │ (stop)

Every place reads every other one, and what a place is to say is read off one before it, so that the first number comes
from the lone space. The variant of RLinf (arXiv:2510.06710) has no stop token and looks at no state; the official one
has both. With `head: l1` the actions are those of the authors' continuous head, which reads the same places as the
tokens and learns to imitate by its distance from demonstrations (L1). It is the mean of normal distributions with
learned deviations, which evaluation does not draw from, and reinforcement learning does.

Settings that are not set come from the checkpoint's config.json, for sizes, and from the row of the embodiment.

The two vision encoders of OpenVLA, DINOv2 with registers and SigLIP, in one class with timm's tensor names.

From pictures as `robots.py` normalises them they make features of patches, of the last block but one, without class and
register tokens and without the final norm: what OpenVLA was trained on (arXiv:2406.09246, section 3.1).
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations.statistics import FeatureStatistics, as_openvla
from rlinf.models.policy.actor_critic import Normal
from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Generator,
    Level,
    Observation,
    Policy,
    PolicyConfig,
    Stored,
    looked_at,
)
from rlinf.models.policy.published import EXTRA, read_tensors, tensor_files, to_be_read
from rlinf.models.policy.robots import (
    HALF,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Embodiment,
    RobotActions,
    Scaling,
    cameras,
    centre_crop,
    chosen_statistics,
    embodiment,
    normalised,
    resized,
)
from rlinf.models.policy.vla.tokens import ActionTokens, hidden_states, picked_by

logger = logging.getLogger(__name__)

_EPSILON = 1e-6  # of all layer norms, as timm has it


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSizes:
    """Sizes of one vision transformer."""

    width: int
    """Numbers in a token."""
    depth: int
    """Blocks, of which the last is not computed."""
    heads: int
    """Heads of the attention."""
    mlp: int
    """Width inside a block's perceptron."""
    image: int = 224
    """Pixels along a picture's side."""
    patch: int = 14
    """Pixels along a patch's side."""
    registers: int = 0
    """Register tokens behind the class token, with which every block's results are scaled too (DINOv2); 0 for an
    encoder without class token (SigLIP), which pools by attention instead."""

    @property
    def patches(self) -> int:
        """Tokens that a picture becomes."""
        return (self.image // self.patch) ** 2


TIMM = {
    "vit_large_patch14_reg4_dinov2.lvd142m": VitSizes(width=1024, depth=24, heads=16, mlp=4096, registers=4),
    "vit_so400m_patch14_siglip_224": VitSizes(width=1152, depth=27, heads=16, mlp=4304),
}
"""Sizes by timm's names, as a checkpoint's `timm_model_ids` gives them."""


def sizes_of(names: Sequence[str], overrides: Sequence[Mapping[str, Any]] = ()) -> tuple[VitSizes, ...]:
    """Sizes of encoders.

    Args:
        names: timm's.
        overrides: fields of `VitSizes` for each, for instances of other sizes; none for the true ones.

    Raises:
        ValueError: a name is unknown, or the sizes do not fit together.
    """
    sizes = []
    for name, changed in zip(names, overrides or [{}] * len(names), strict=True):
        if name not in TIMM:
            raise ValueError(f"policy openvla: timm_model_ids names {name}, but only {', '.join(TIMM)} are known")
        each = replace(TIMM[name], **changed)
        if each.image % each.patch or each.width % each.heads or each.depth < 2:
            raise ValueError(
                f"policy openvla: {each} must have whole patches, a width that its heads divide, and 2 blocks at least"
            )
        sizes.append(each)
    return tuple(sizes)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        output: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(functional.gelu(self.fc1(x)))  # the exact one: SigLIP's usual tanh is 1.6e-3 off
        return output


class _LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))  # timm calls it gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and added to what came in."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        scale = _LayerScale if sizes.registers else nn.Identity
        self.norm1 = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.attn = _Attention(sizes.width, sizes.heads)
        self.ls1 = scale(sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.mlp = _Mlp(sizes.width, sizes.mlp)
        self.ls2 = scale(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, T, width] to tokens."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        output: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return output


class _PatchEmbed(nn.Module):
    def __init__(self, sizes: VitSizes):
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        patches: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return patches


class _AttentionPool(nn.Module):
    """SigLIP's pooling. Nothing reads it here; it is in the checkpoints."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        width = sizes.width
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = _Mlp(width, sizes.mlp)


class Vit(nn.Module):
    """One encoder. What lies behind its last block but one, `unread`, is there for the checkpoints only."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        self.sizes = sizes
        if sizes.registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
            self.reg_token = nn.Parameter(torch.zeros(1, sizes.registers, sizes.width))
        self.pos_embed = nn.Parameter(torch.empty(1, sizes.patches, sizes.width).normal_(std=0.02))
        self.patch_embed = _PatchEmbed(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        if not sizes.registers:
            self.attn_pool = _AttentionPool(sizes)
        self.unread = (f"blocks.{sizes.depth - 1}.*", "norm.*", "attn_pool.*")

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pictures [N, 3, image, image] to features of patches [N, patches, width]."""
        x = self.patch_embed(pixels) + self.pos_embed
        first = 0
        if self.sizes.registers:
            first = 1 + self.sizes.registers
            x = torch.cat([torch.cat([self.cls_token, self.reg_token], 1).expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, first:]


class VisionBackbone(nn.Module):
    """Both encoders beside each other: the features of a patch are DINOv2's, then SigLIP's."""

    def __init__(self, sizes: Sequence[VitSizes]):
        super().__init__()
        dino, siglip = sizes
        self.featurizer, self.fused_featurizer = Vit(dino), Vit(siglip)
        self.width = dino.width + siglip.width
        """Numbers in the features of a patch."""

    def encoders(self) -> Sequence[tuple[str, Vit]]:
        """Both, by their names in the policy."""
        return (
            ("vision_backbone.featurizer", self.featurizer),
            ("vision_backbone.fused_featurizer", self.fused_featurizer),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures of the encoders' size, uint8 [N, 3, image, image], to features [N, patches, width]."""
        dtype = self.featurizer.pos_embed.dtype
        dino = self.featurizer(normalised(pictures, IMAGENET_MEAN, IMAGENET_STD, dtype))
        return torch.cat([dino, self.fused_featurizer(normalised(pictures, HALF, HALF, dtype))], -1)


class Projector(nn.Module):
    """Features of patches as tokens of the language model."""

    def __init__(self, features: int, width: int):
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, patches, seen] to [N, patches, width]."""
        x = functional.gelu(self.fc2(functional.gelu(self.fc1(x))))
        output: Tensor = self.fc3(x)
        return output


PUBLISHED: Mapping[str, Any] = {
    "model_type": "openvla",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "llm_backbone_id": "llama2-7b-pure",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "use_fused_vision_backbone": True,
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
}
"""Network configuration in OpenVLA-7B's config.json, OpenVLA-OFT's alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaConfig(PolicyConfig):
    """Configuration of `OpenVlaPolicy`. What is null, or 0 for `chunk`, is taken from the embodiment's row of the
    table."""

    model: ClassVar[str] = "openvla"

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    embodiment: str
    """The simulator, by a name of the table: libero, maniskill …; plain for one without a row."""
    chunk: int = 0
    """Actions that are decided at a time, C."""
    level: Level = "token"
    """The unit that has a log-prob of its own: each number of an action, each action, or the chunk."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action, in the simulator's units; the environment says it."""
    action_high: tuple[float, ...] = ()
    """Greatest value of each."""
    statistics: str | None = None
    """The data set, by its name in the checkpoint's statistics, whose scale actions are on; null for the row's, or
    for the only one."""
    crop: float | None = None
    """Share of the area in the middle of pictures that the model is shown."""
    gripper: str | None = None
    """Convention of the gripper, by its name in `robots.py`."""
    views: int | None = None
    """Cameras that the model looks at, the first ones of the observation."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to."""
    instruction: str = ""
    """Instruction where the environment gives none."""
    temperature: float = 1.0
    """Logits are divided by it, when drawing as when scoring; more than 0."""
    top_k: int = 0
    """Only so many of the likeliest bins can be drawn; 0 for all."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that say what the network is like; those that are missing are OpenVLA-7B's. `vision_sizes`
    changes the sizes that `timm_model_ids` stand for."""
    norm_stats: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of actions and states by data set, as in config.json or dataset_statistics.json."""

    def __post_init__(self) -> None:
        row = embodiment(self.model, self.embodiment)
        if self.chunk == 0:
            object.__setattr__(self, "chunk", row.chunk)
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        where = f"policy {self.model}"
        if self.image[2] < 3 or self.image[2] % 3:
            raise ValueError(f"{where}: image={list(self.image)} must have 3 channels for each camera")
        if not self.temperature > 0:
            raise ValueError(f"{where}: temperature={self.temperature} must be more than 0")
        if self.top_k < 0:
            raise ValueError(f"{where}: top_k={self.top_k} must be at least 1, or 0 for all")
        if len(self.action_low) != len(self.action_high):
            raise ValueError(f"{where}: action_low and action_high must be as long as each other")

    @property
    def row(self) -> Embodiment:
        """The embodiment's row, with what is set here in place of it."""
        row = embodiment(self.model, self.embodiment)
        own: dict[str, Any] = {
            "crop": self.crop,
            "gripper": self.gripper,
            "cameras": self.views,
            "prompt_length": self.prompt_length,
            "chunk": self.chunk,
        }
        size = row.action_size if row.picked is not None else self.action_size
        set_here = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(row, action_size=size, **set_here)

    @property
    def sizes(self) -> dict[str, Any]:
        """config.json's keys, complete."""
        text = {**PUBLISHED["text_config"], **self.network.get("text_config", {})}
        return {**PUBLISHED, **self.network, "text_config": text}


BOS, SPACE = 1, 29871
"""Llama's tokens that every prompt begins and ends with."""


class Prompts:
    """Instructions to tokens.

    Args:
        tokenizer: the contents of a checkpoint's tokenizer.json.
        template: text with {instruction}.
        length: tokens in a row, the first one included.
        pad: token of padding.
    """

    def __init__(self, tokenizer: bytes, template: str, length: int, pad: int):
        self._tokenizer = Tokenizer.from_buffer(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.template, self.length, self.pad = template, length, pad
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens of instructions, int64 [N, length].

        Raises:
            ValueError: one is too long; the text says which.
        """
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self.length)

    def _encoded(self, instruction: str) -> tuple[int, ...]:
        text = self.template.format(instruction=instruction.lower())
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if tokens[-1:] != [SPACE]:  # of a tokenizer that drops spaces at the end
            tokens = [*tokens, SPACE]
        if len(tokens) >= self.length:
            raise ValueError(
                f"policy openvla: prompt_length={self.length} is too short for {text!r}, which needs {len(tokens) + 1}"
            )
        return (BOS, *[self.pad] * (self.length - 1 - len(tokens)), *tokens)


_ABOUT, _STATISTICS, _TOKENIZER = "config.json", "dataset_statistics.json", "tokenizer.json"
EPSILON = 1e-8  # added to the range of numbers, by OpenVLA-OFT's and RLinf's code
_PROMPT = 32
"""Tokens of a prompt with an instruction such as "pick up the cup": places that nobody fills are not read."""
_VALUE_HEAD = "value_head.mlp."
"""Prefix that RLinf puts before the value head's tensors in its checkpoints."""


class OpenVlaNetwork(Policy):
    """Base class of OpenVLA-7B and OpenVLA-OFT."""

    Config: ClassVar[type[PolicyConfig]] = OpenVlaConfig
    published: ClassVar[tuple[str, ...]] = (_ABOUT, _TOKENIZER, "*.safetensors")
    small_files: ClassVar[tuple[str, ...]] = (
        *(_ABOUT, _STATISTICS, "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
        *("generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py"),
    )
    needs_path: ClassVar[bool] = True
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("qkv", "proj", "fc1", "fc2", "fc3", "q", "kv"),
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    )

    def __init__(self, config: OpenVlaConfig):
        super().__init__(config)
        sizes = config.sizes
        text = LlamaConfig(**{"rms_norm_eps": 1e-6, **sizes["text_config"]})
        width = text.hidden_size
        self.picture = int(sizes["image_sizes"][0])
        self.bins = ActionTokens(text.vocab_size - int(sizes["pad_to_multiple_of"]), int(sizes["n_action_bins"]))
        with to_be_read():
            self.vision_backbone = VisionBackbone(sizes_of(sizes["timm_model_ids"], sizes.get("vision_sizes", ())))
            self.projector = Projector(self.vision_backbone.width, width)
            self.language_model = LlamaForCausalLM._from_config(text, dtype=torch.float32, attn_implementation="sdpa")
        unread = [f"!{name}.{each}" for name, vit in self.vision_backbone.encoders() for each in vit.unread]
        self.trains = ("*", *unread)  # type: ignore[misc]  # follows from the depths
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            values = config.chunk if config.value_level == "action" else 1
            self.critic = _value_head(width, values)
        row = config.row
        key = chosen_statistics(config.norm_stats, row, config.statistics)
        self.data_set: str | None = key
        """Name of the data set whose statistics are used."""
        scaling = None if key is None else Scaling.of(config.norm_stats[key]["action"], row.scale, EPSILON)
        self.robot = self.actions_of(config, scaling)
        self.numbers = row.action_size
        """Tokens of an action."""
        self.prompts: Prompts | None = None

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures of the encoders' size, uint8 [N, k, 3, side, side], and the prompt's tokens."""
        config, row = self.config, self.robot.row
        pictures = cameras(looked_at(observation, "rgb", config.image, f"policy {config.model}"))
        if pictures.shape[1] < row.cameras:
            raise ValueError(
                f"policy {config.model} looks at {row.cameras} cameras, and the environment shows {pictures.shape[1]}: "
                "set policy.settings.views, or have the simulator show more"
            )
        pictures = centre_crop(resized(pictures[:, : row.cameras], self.picture), row.crop)
        texts = [config.instruction] * len(pictures) if instructions is None else instructions
        return {"pictures": pictures, "prompt": self._prompts().encode(texts).to(pictures.device)}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The bins' tokens, int64 [N, C, D], for an action of D numbers."""
        return self.bins.encode(self.robot.to_model(actions))

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks of both encoders, and the language model's layers."""
        vision = self.vision_backbone
        encoders = [*vision.featurizer.blocks[:-1], *vision.fused_featurizer.blocks[:-1]]
        return [*encoders, *self.language_model.model.layers]

    @property
    def randomness(self) -> int:
        """One number for each token."""
        return int(self.config.chunk * self.numbers)

    @property
    def tokens_of_a_decision(self) -> tuple[int, int] | None:
        """See `Policy.tokens_of_a_decision`; the last one that is drawn is read no more."""
        return self.tokens_before_actions, self.randomness - 1

    @property
    def tokens_before_actions(self) -> int:
        """Patches of all pictures and the prompt, without padding: an instruction of a usual length."""
        encoder = sizes_of(self.config.sizes["timm_model_ids"], self.config.sizes.get("vision_sizes", ()))[0]
        return encoder.patches * self.config.row.cameras + min(_PROMPT, self.config.row.prompt_length)

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        if self.critic is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        values: Tensor = self.critic(self._prompt_state(self.inputs(observation, instructions)).float())
        return values[:, 0]

    # Parts that decoding is made of -----------------------------------------------------------------------------------

    def _prompt_state(self, inputs: Stored) -> Tensor:
        """The hidden state of the prompt's last token, [N, width]."""
        raise NotImplementedError

    def _after_pictures(self, inputs: Stored) -> list[Tensor]:
        """Tokens between the pictures and the prompt, [N, T, width] each."""
        return []

    def _prefix(self, inputs: Stored) -> tuple[Tensor, Tensor]:
        """All that comes before the actions, [N, P, width], and which places are read, bool [N, P]."""
        pictures, prompt = inputs["pictures"], inputs["prompt"]
        features = self.vision_backbone(pictures.flatten(0, 1))
        patches = self.projector(features).unflatten(0, pictures.shape[:2]).flatten(1, 2)
        front = [patches, *self._after_pictures(inputs)]
        real = prompt != self.config.sizes["pad_token_id"]
        filled = int(real[:, 1:].any(0).long().argmax()) + 1  # columns that nobody fills cost time
        prompt, real = torch.cat([prompt[:, :1], prompt[:, filled:]], 1), torch.cat([real[:, :1], real[:, filled:]], 1)
        words = self._embedded(prompt)
        before = sum(part.shape[1] for part in front)
        mask = torch.cat([real[:, :1], real.new_ones(len(real), before), real[:, 1:]], 1)
        return torch.cat([words[:, :1], *front, words[:, 1:]], 1), mask

    def _decode(
        self, embedded: Tensor, attention: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states of the last places, after the final norm; see `hidden_states`."""
        return hidden_states(self.language_model.model, embedded, attention, mask=mask, cache=cache)

    def _embedded(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self.language_model.model.embed_tokens(tokens)
        return embeddings

    def _logprobs(self, hidden: Tensor) -> Tensor:
        """Log-probs of all bins, float32 [..., bins]: logits / temperature, the likeliest top_k, normalised."""
        first, last = self.bins.first, self.bins.vocabulary
        head = self.language_model.lm_head
        if type(head) is nn.Linear:  # without adapters: other tokens' logits are not computed
            logits = functional.linear(hidden, head.weight[first:last])
        else:
            logits = head(hidden)[..., first:last]
        logits = logits.float() / self.config.temperature
        if 0 < self.config.top_k < self.bins.bins:
            least = logits.topk(self.config.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return functional.log_softmax(logits, -1)

    def _values(self, hidden: Tensor) -> Tensor | None:
        """Values from the hidden state of the prompt's last token [N, width]: [N, C], or [N] for the chunk."""
        if self.critic is None:
            return None
        values: Tensor = self.critic(hidden.float())
        return values if self.config.value_level == "action" else values[:, 0]

    def _prompts(self) -> Prompts:
        if self.prompts is None:
            raise ValueError(
                f"policy {self.config.model} reads by its checkpoint's {_TOKENIZER}: set policy.path to a directory "
                "that has one"
            )
        return self.prompts

    # The published form -----------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`: what the network is like, and the statistics."""
        about = _read(directory / _ABOUT)
        if (kind := about.get("model_type")) != "openvla":
            raise ValueError(f"{directory / _ABOUT} is of a {kind}, not of an openvla")
        statistics = about.get("norm_stats") or {}
        if (directory / _STATISTICS).is_file():  # of a fine-tuned one; goes before
            statistics = _read(directory / _STATISTICS)
        network = {name: about[name] for name in (*PUBLISHED, "vision_sizes") if name in about}
        return {"network": network, "norm_stats": statistics}

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`."""
        return {"norm_stats": as_openvla(statistics, name, episodes), "statistics": name}

    @classmethod
    def actions_of(cls, config: OpenVlaConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return RobotActions(config.row, scaling, config.action_low, config.action_high)

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.read_published`; with the value head of RLinf's checkpoints, where this policy has one."""
        yield from super().read_published(directory)
        names = {name.replace("critic.", _VALUE_HEAD): name for name in self.state_dict() if name.startswith("critic.")}
        files = {name: path for name, path in tensor_files(directory).items() if name in names}
        yield from ((names[name], tensor) for name, tensor in read_tensors(files))

    def open_published(self, directory: Path) -> None:
        """See `Policy.open_published`: the tokenizer."""
        row = self.robot.row
        pad = int(self.config.sizes["pad_token_id"])
        self.prompts = Prompts(self.files[_TOKENIZER], row.prompt, row.prompt_length, pad)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; config.json is as it was, but for what has changed."""
        before = json.loads(self.files.get(_ABOUT, b"{}"))
        about = {**before, **self.config.sizes}
        statistics = dict(self.config.norm_stats)
        norm_stats = json.loads(self.files[_STATISTICS]) if _STATISTICS in self.files else before.get("norm_stats", {})
        if not before:
            about["norm_stats"] = statistics
        elif norm_stats != statistics:  # of what it was fine-tuned on; goes before those in config.json
            _write(directory / _STATISTICS, statistics)
        if {**before, **about} != before:
            _write(directory / _ABOUT, about)
        super().write_published(directory, state)


def _value_head(width: int, values: int) -> nn.Sequential:
    head = nn.Sequential(
        nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, values, bias=False)
    )
    nn.init.normal_(head[-1].weight, std=0.02)  # type: ignore[arg-type]
    return head


def _read(path: Path) -> dict[str, Any]:
    try:
        contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return contents


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class OpenVlaPolicy(OpenVlaNetwork):
    """Looks at "rgb", uint8 [N, H, W, 3 k], reads the instruction, and draws tokens one after the other."""

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        cache = DynamicCache(config=self.language_model.config)
        embedded, attention = self._prefix(inputs)
        hidden = self._decode(embedded, attention, cache=cache)[:, -1]
        values = self._values(hidden)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for number in range(self.randomness):
            if number:
                attention = functional.pad(attention, (0, 1), value=True)
                hidden = self._decode(self._embedded(tokens[-1][:, None]), attention, cache=cache)[:, -1]
            each = self._logprobs(hidden)
            choice = each.argmax(-1) if noise is None else picked_by(each, noise[:, number])
            tokens.append(choice + self.bins.first)
            logprobs.append(each.gather(1, choice[:, None])[:, 0])
        answer = torch.stack(tokens, 1).view(-1, self.config.chunk, self.numbers)
        actions = self.robot.to_simulator(self.bins.decode(answer))
        return Drawn(actions, answer, torch.stack(logprobs, 1).view(answer.shape), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        shape, tokens = stored["actions"].shape, stored["actions"].flatten(1)
        prefix, attention = self._prefix(stored)
        embeddings = self._embedded(tokens[:, :-1])
        attention = functional.pad(attention, (0, embeddings.shape[1]), value=True)
        hidden = self._decode(torch.cat([prefix, embeddings], 1), attention)[:, prefix.shape[1] - 1 :]
        each = self._logprobs(hidden)
        logprobs = each.gather(-1, (tokens - self.bins.first)[..., None])[..., 0]
        return Evaluated(logprobs.view(shape), entropy(each).view(shape), self._values(hidden[:, 0]))

    def _prompt_state(self, inputs: Stored) -> Tensor:
        embedded, attention = self._prefix(inputs)
        return self._decode(embedded, attention)[:, -1]


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy of distributions over the last dimension, nats; a probability of 0 adds nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)


Variant = Literal["rlinf", "official"]
_STOP = 2  # Llama's end of text
_PROJECTOR, _HEAD = "proprio_projector", "action_head"
"""Parts that the authors keep in files of their own beside the weights, `action_head--150000_checkpoint.pt`."""
_FILES, _FILM = "--*checkpoint.pt", "vision_backbone--*checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaOftConfig(OpenVlaConfig):
    """Configuration of `OpenVlaOftPolicy`."""

    model: ClassVar[str] = "openvla-oft"

    level: Level = "token"
    """The unit that has a log-prob of its own: each number of an action, each action, or the chunk."""
    value_level: Literal["action", "chunk"] | None = "action"
    """A value before each action, or one before the chunk; null for a policy without a critic (GRPO)."""
    variant: Variant = "rlinf"
    """Layout of the sequence: `rlinf` (LIBERO, ManiSkill), or `official`, with the robot's state and a stop token."""
    state_size: int = 0
    """Numbers of the observation's "state"; only the official variant looks at it."""
    head: Literal["tokens", "l1"] = "tokens"
    """Actions are tokens, or numbers of the authors' continuous head; a directory that has such a head says l1."""
    log_std: float = -2.0
    """Logarithm of the standard deviations around the continuous head's numbers that learning by acting begins with,
    where -1 and 1 are the ends of the data's scale."""

    def __post_init__(self) -> None:
        OpenVlaConfig.__post_init__(self)
        if self.head == "l1" and (self.temperature != 1.0 or self.top_k):
            raise ValueError(
                f"policy openvla-oft: temperature={self.temperature} and top_k={self.top_k} are of tokens, and head=l1 "
                "draws none: log_std says how much it explores"
            )


class _ProprioProjector(nn.Module):
    """The robot's state as one token."""

    def __init__(self, state: int, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(state, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return output


class _Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.ffn(x)
        return output


class _Regression(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int):
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList([_Residual(width), _Residual(width)])
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        output: Tensor = self.fc2(self.layer_norm2(x))
        return output


class _ActionHead(nn.Module):
    """The authors' continuous head: the D hidden states of an action, side by side, become its D numbers."""

    def __init__(self, width: int, numbers: int):
        super().__init__()
        self.numbers = numbers
        self.model = _Regression(width * numbers, width, numbers)

    def forward(self, hidden: Tensor) -> Tensor:
        """Numbers [N, C, D] of hidden states [N, C x D, width]."""
        output: Tensor = self.model(hidden.unflatten(1, (-1, self.numbers)).flatten(2))
        return output


class OpenVlaOftPolicy(OpenVlaNetwork):
    """Looks at "rgb", uint8 [N, H, W, 3 k], reads the instruction, and draws the tokens or numbers of a chunk at
    once."""

    Config: ClassVar[type[PolicyConfig]] = OpenVlaOftConfig
    small_files: ClassVar[tuple[str, ...]] = (*OpenVlaNetwork.small_files, _PROJECTOR + _FILES, _HEAD + _FILES)
    own: ClassVar[tuple[str, ...]] = (*OpenVlaNetwork.own, f"{_PROJECTOR}.*", f"{_HEAD}.*", "log_std")
    float32: ClassVar[tuple[str, ...]] = (*OpenVlaNetwork.float32, "log_std")

    def __init__(self, config: OpenVlaOftConfig):
        super().__init__(config)
        self.proprio_projector: _ProprioProjector | None = None
        self._states: Scaling | None = None
        if config.variant == "official" and config.state_size:
            self.proprio_projector = _ProprioProjector(config.state_size, self.language_model.config.hidden_size)
            statistics = {} if self.data_set is None else config.norm_stats[self.data_set]
            if "proprio" in statistics:
                self._states = Scaling.of(statistics["proprio"], config.row.scale, EPSILON)
        self.action_head: _ActionHead | None = None
        if config.head == "l1":
            self.action_head = _ActionHead(self.language_model.config.hidden_size, self.numbers)
            self.log_std = nn.Parameter(torch.full((config.chunk, self.numbers), config.log_std))
            # nothing reads what makes tokens
            self.trains = (*self.trains, "!language_model.lm_head.*")  # type: ignore[misc]
            self.lora_targets = tuple(each for each in self.lora_targets if each != "lm_head")  # type: ignore[misc]

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """See `OpenVlaNetwork.inputs`; in the official variant the scaled state too, float32 [N, S]."""
        stored = super().inputs(observation, instructions)
        if self.proprio_projector is not None:
            state = looked_at(observation, "state", (self.config.state_size,), f"policy {self.config.model}").float()
            stored["state"] = state if self._states is None else self._states.normalised(state).clamp(-1.0, 1.0)
        return stored

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """See `OpenVlaNetwork.encode`; of the continuous head the numbers themselves, float32 [N, C, D]."""
        return super().encode(actions, inputs) if self.action_head is None else self.robot.to_model(actions)

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        hidden = self._pass(inputs)
        if self.action_head is not None:
            around = self._around(hidden)
            numbers = around.likeliest() if noise is None else around.sample(noise)
            values = self._values(hidden[:, 0])
            return Drawn(self.robot.to_simulator(numbers), numbers, around.logprobs(numbers), values)
        each = self._logprobs(hidden)
        choice = each.argmax(-1) if noise is None else picked_by(each, noise)
        actions = (choice + self.bins.first).view(-1, self.config.chunk, self.numbers)
        logprobs = each.gather(-1, choice[..., None])[..., 0].view(actions.shape)
        return Drawn(self.robot.to_simulator(self.bins.decode(actions)), actions, logprobs, self._values(hidden[:, 0]))

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        hidden = self._pass(stored)
        if self.action_head is not None:
            around = self._around(hidden)
            return Evaluated(around.logprobs(stored["actions"]), around.entropy(), self._values(hidden[:, 0]))
        shape, tokens = stored["actions"].shape, stored["actions"].flatten(1)
        each = self._logprobs(hidden)
        logprobs = each.gather(-1, (tokens - self.bins.first)[..., None])[..., 0]
        return Evaluated(logprobs.view(shape), entropy(each).view(shape), self._values(hidden[:, 0]))

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """See `Policy.imitate`; of the continuous head the distance from the demonstrated numbers (L1), as its authors
        fine-tune it."""
        if self.action_head is None:
            return super().imitate(stored, mask, generator)
        error = (self._around(self._pass(stored)).likeliest() - stored["actions"]).abs()
        weights = torch.ones_like(error) if mask is None else mask[..., None].expand(error.shape).to(error.dtype)
        return LossSum((error * weights).sum(), weights.sum(dtype=torch.float64))

    def _around(self, hidden: Tensor) -> Normal:
        """Distributions of the continuous head's numbers, from the hidden states of their places."""
        assert self.action_head is not None
        return Normal(self.action_head(hidden).float(), self.log_std)

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `OpenVlaNetwork.published_settings`; a directory with a continuous head is of the official variant."""
        settings = super().published_settings(directory)
        return settings | ({"head": "l1", "variant": "official"} if [*directory.glob(_HEAD + _FILES)] else {})

    def open_published(self, directory: Path) -> None:
        """See `OpenVlaNetwork.open_published`; and the projector of states and the continuous head, where the authors'
        files are there."""
        super().open_published(directory)
        if film := sorted(directory.glob(_FILM)):
            raise ValueError(
                f"{film[0].name} is of a checkpoint whose encoders are modulated by words (FiLM), which is not "
                "supported: take one without, or merge it into the weights"
            )
        for part, module in self._parts().items():
            name, state = self._file(part), self._in_file(part)
            wanted = {inner: tuple(each.shape) for inner, each in module.state_dict().items()}
            if state and {inner: tuple(each.shape) for inner, each in state.items()} != wanted:
                shapes = ", ".join(f"{inner} {list(each.shape)}" for inner, each in state.items())
                why = (
                    f"the environment's state has {self.config.state_size} numbers: of another robot?"
                    if part == _PROJECTOR
                    else f"an action has {self.numbers} numbers: a head of diffusion, or of another robot?"
                )
                raise ValueError(f"{name} holds {shapes}, and {why}")
            if state:
                module.load_state_dict(state)
            elif part == _HEAD and not (directory / EXTRA).is_file():
                logger.warning(
                    "policy.path: %s has no %s, so that the continuous head begins with random numbers: imitate first",
                    directory,
                    name,
                )

    def write_own(self, directory: Path, own: Mapping[str, Tensor]) -> None:
        """See `Policy.write_own`; the authors' own files too, where they hold something else."""
        super().write_own(directory, own)
        for part in self._parts():
            begin, before = f"{part}.", self._in_file(part)
            state = {name.removeprefix(begin): each for name, each in own.items() if name.startswith(begin)}
            if not before or any(not torch.equal(before[name].to(each.dtype), each) for name, each in state.items()):
                torch.save({f"module.{name}": each for name, each in state.items()}, directory / self._file(part))

    def _parts(self) -> dict[str, nn.Module]:
        """Modules that the authors keep in files of their own, by name."""
        return {name: part for name in (_PROJECTOR, _HEAD) if (part := getattr(self, name)) is not None}

    def _file(self, part: str) -> str:
        """Name of the authors' file of a part."""
        names = sorted(name for name in self.files if name.startswith(f"{part}--"))
        return names[-1] if names else f"{part}--latest_checkpoint.pt"

    def _in_file(self, part: str) -> dict[str, Tensor]:
        """Tensors of that file; none where there is none."""
        if (name := self._file(part)) not in self.files:
            return {}
        weights = torch.load(io.BytesIO(self.files[name]), map_location="cpu", weights_only=True)
        return {name.removeprefix("module."): tensor for name, tensor in weights.items()}

    def _after_pictures(self, inputs: Stored) -> list[Tensor]:
        if self.proprio_projector is None:
            return []
        weight = self.proprio_projector.fc1.weight
        return [self.proprio_projector(inputs["state"].to(weight.dtype))[:, None]]

    @property
    def tokens_of_a_decision(self) -> tuple[int, int] | None:
        """See `Policy.tokens_of_a_decision`: all at once."""
        return self.tokens_before_actions + self.randomness, 0

    def _pass(self, inputs: Stored) -> Tensor:
        """Hidden states that the tokens are read off, [N, C x D, width]; the first is the prompt's last."""
        prefix, attention = self._prefix(inputs)
        count = self.randomness
        parts = [prefix, prefix.new_zeros(len(prefix), count, prefix.shape[2])]
        if self.config.variant == "official":
            parts.append(self._embedded(attention.new_full((len(attention), 1), _STOP, dtype=torch.int64)))
        embedded = torch.cat(parts, 1)
        attention = functional.pad(attention, (0, embedded.shape[1] - attention.shape[1]), value=True)
        # all read all, but for padding; of a model that reads forwards alone, four dimensions are taken as they are
        mask = embedded.new_zeros(attention.shape).masked_fill(~attention, torch.finfo(embedded.dtype).min)
        mask = mask[:, None, None].expand(-1, 1, embedded.shape[1], -1)
        hidden = self._decode(embedded, attention, mask)
        first = prefix.shape[1] - 1
        return hidden[:, first : first + count]

    def _prompt_state(self, inputs: Stored) -> Tensor:
        return self._pass(inputs)[:, 0]
