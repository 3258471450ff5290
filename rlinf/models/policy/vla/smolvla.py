"""SmolVLA (arXiv:2506.01844) as a policy that learns by acting, in LeRobot's directories.

    pictures, words ─▶ SmolVLM2's first layers ─▶ keys and values of every layer ─┐
    state, one token behind them ─▶ the same layers ─▶ its keys and values ───────┤
    x_t and t ─▶ embeddings ─▶ expert, a narrower stack ──────────────────────────┴─▶ velocity of H actions x 32 numbers

By turns a layer of the expert attends to all of that and to the actions before its own, or, through projections of its
own, to the other stack's keys and values alone. Pictures and words do not look at the state, so that they are computed
without gradient where nothing of SmolVLM2 learns; the projection of the state learns all the same.

All names are those of LeRobot's checkpoints. Beside them lies `tokenizer.json`, which LeRobot takes from SmolVLM2's own
directory: it is to be copied. Sizes follow from the tensors; heads are 64 wide, as published, unless the run says
otherwise. The critic reads what the language model says, averaged over what is no padding, without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.models.policy import lerobot
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.published import read_tensors, tensor_files, tensor_shapes, to_be_read, write_sharded
from rlinf.models.policy.robots import RobotActions, Scaling, cameras, padded
from rlinf.models.policy.vla.flow import Field, FlowConfig, FlowPolicy, Velocity, sinusoids
from rlinf.models.policy.vla.gemma import Attention, Cache, Prefix

_WORDS, _VISION = "model.vlm_with_expert.vlm.model.text_model.", "model.vlm_with_expert.vlm.model.vision_model."
_JOIN = "model.vlm_with_expert.vlm.model.connector.modality_projection.proj.weight"
_EXPERT = "model.vlm_with_expert.lm_expert."
_TOKENIZER = "tokenizer.json"
_ROPE = 10_000.0
"""Base of rotary periods: LeRobot's own, whatever SmolVLM2's configuration says."""
VISION: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
"""SigLIP of SmolVLM2-500M."""
LANGUAGE: Mapping[str, Any] = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 16,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "vocab_size": 49280,
}
"""The 16 layers of SmolVLM2-500M that SmolVLA has."""
EXPERT: Mapping[str, Any] = {**LANGUAGE, "hidden_size": 720, "intermediate_size": 2048}
"""The expert, three quarters as wide."""
_SHUFFLE = 4
"""Side of the squares of patches that become one token, as published; a directory's tensors say it."""
_ABOUT: Mapping[str, Any] = {
    "type": "smolvla",
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_steps": 10,
    "tokenizer_max_length": 48,
    "self_attn_every_n_layers": 2,
    "min_period": 4e-3,
    "max_period": 4.0,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
"""LeRobot's defaults."""
_ONLY: Mapping[str, Any] = {
    "attention_mode": "cross_attn",
    "adapt_to_pi_aloha": False,
    "add_image_special_tokens": False,
}
"""Keys of config.json that can have one value here."""


class Layer(nn.Module):
    """One layer of Llama; one that crosses reads the keys and values of another stack alone.

    Args:
        config: sizes.
        crosses: whether it does.
    """

    def __init__(self, config: Any, crosses: bool):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.crosses = crosses
        if crosses:
            width = config.num_key_value_heads * config.head_dim
            self.self_attn.k_proj = nn.Linear(width, width, bias=False)
            self.self_attn.v_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, and keys and values of all places, those given first; see `gemma.Layer`."""
        dtype = next(self.mlp.parameters()).dtype  # looked up here: see `gemma.Layer`
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        normed = self.input_layernorm(x)
        if self.crosses and keys is not None and values is not None:
            output, k, v = self._across(normed, cos, sin, mask[..., : keys.shape[2]], keys, values), keys, values
        else:
            output, k, v = self.self_attn(normed, cos, sin, mask, None if keys is None else (keys, values))
        x = x + output
        return x + self.mlp(self.post_attention_layernorm(x)), k, v

    def _across(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        own: Any = self.self_attn
        q = own.q_proj(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos, sin)
        k, v = (
            project(each.transpose(1, 2).flatten(2)).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for project, each in ((own.k_proj, keys), (own.v_proj, values))
        )
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        output: Tensor = own.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class Stack(nn.Module):
    """Layers without words: embeddings in, hidden states out.

    Args:
        config: sizes.
        every: of so many layers the first attends to its own stack, the others cross; 0: none crosses.
    """

    def __init__(self, config: Any, every: int = 0):
        super().__init__()
        crossing = [every > 0 and number % every != 0 for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(config, each) for each in crossing)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._periods = _ROPE ** (torch.arange(0, config.head_dim, 2).double() / config.head_dim)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, before: Cache | None = None) -> tuple[Tensor, Cache]:
        """Hidden states after the last norm, and keys and values; see `gemma.Gemma`. Layers that cross count positions
        from the first of `x` on."""
        own, crossing = self._rotations(positions), self._rotations(positions - positions[:, :1])
        cache: Cache = []
        for number, layer in enumerate(self.layers):
            keys, values = (None, None) if before is None else before[number]
            cos, sin = crossing if layer.crosses else own
            x, keys, values = layer(x, cos, sin, mask[:, None], keys, values)
            cache.append((keys, values))
        return self.norm(x), cache

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.double()[..., None] / self._periods.to(positions.device)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float(), angles.sin().float()


class Prompts:
    """Instructions to rows of tokens: a line break behind each, -1 on the right.

    Args:
        contents: of tokenizer.json.
        length: tokens in a row; what is longer loses its end, as in LeRobot.
    """

    def __init__(self, contents: bytes, length: int):
        try:
            self._tokenizer = Tokenizer.from_str(contents.decode())
        except Exception as error:  # of a file that may hold anything
            raise ValueError(f"policy.path: its {_TOKENIZER} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._length = length
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens, int64 [N, length]."""
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self._length)

    def _encoded(self, text: str) -> tuple[int, ...]:
        tokens = self._tokenizer.encode(text if text.endswith("\n") else f"{text}\n").ids[: self._length]
        return (*tokens, *[-1] * (self._length - len(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVlaConfig(FlowConfig):
    """Configuration of `SmolVlaPolicy`. A directory says sizes and statistics, an environment `image`, `state_size`
    and bounds."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    state_size: int = 0
    """Numbers of the observation's "state"; 0 does not look at it."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """LeRobot's config.json; keys that are missing are as LeRobot's."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of `state` and `actions`, or by the names of LeRobot's features; empty: numbers are used as they are,
    and actions are in [-1, 1]."""
    instruction: str = ""
    """Instruction where the environment gives none."""
    gripper: str = "same"
    """Convention of the gripper."""
    critic_hidden: tuple[int, ...] = (512, 256)
    """Widths of the value head's hidden layers."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the vision encoder that are not those of SmolVLM2-500M."""
    language: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the language model that are not."""
    expert: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the expert that are not as published."""
    shuffle: int = _SHUFFLE
    """Side of the squares of patches that become one token."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)
        about = self.about
        lerobot.check_kinds(about, "smolvla")
        for key, value in _ONLY.items():
            if about.get(key, value) != value:
                raise ValueError(f"policy smolvla: model.{key}={about[key]!r} must be {value!r}, which is what is here")
        layers = {**LANGUAGE, **self.language}["num_hidden_layers"], {**EXPERT, **self.expert}["num_hidden_layers"]
        if layers[0] != layers[1]:
            raise ValueError(
                f"policy smolvla: the expert has {layers[1]} layers, and the language model {layers[0]}: as many are "
                "what is here"
            )
        if self.value_level == "action":
            raise ValueError("policy smolvla: value_level must be chunk, or null for no critic")

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json; features are the environment's, under the checkpoint's names of cameras."""
        whole = {**_ABOUT, "n_obs_steps": 1, "n_action_steps": self.chunk, **self.model}
        return {**whole, **lerobot.fitting(whole, self.image, self.state_size, self.action_size)}

    @property
    def cameras(self) -> int:
        """Cameras that are looked at: the first ones, as many as the checkpoint and the environment have."""
        return sum(each["type"] == "VISUAL" for each in self.about["input_features"].values())


class SmolVlaPolicy(FlowPolicy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and "state", float32 [N, S]; reads the instruction."""

    Config: ClassVar[type[PolicyConfig]] = SmolVlaConfig
    published = ("config.json", "*.safetensors")
    small_files = ("config.json", _TOKENIZER, *lerobot.FILES, "train_config.json")
    needs_path = True
    own = ("critic.*", "deviation.*")
    float32 = ("*norm*.weight", "model.action_*", "model.state_proj.*", "critic.*", "deviation.*")
    trains = ("*", "!model.vlm_with_expert.vlm.*")
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, config: SmolVlaConfig):
        vision = SiglipVisionConfig(**{**VISION, **config.vision}, vision_use_head=False)
        words, narrow = (
            LlamaConfig(**sizes, rms_norm_eps=1e-5)  # SmolLM2's
            for sizes in ({**LANGUAGE, **config.language}, {**EXPERT, **config.expert})
        )
        about = config.about
        width = about["max_action_dim"]
        super().__init__(config, horizon=about["chunk_size"], width=width, features=narrow.hidden_size)
        self.side: int = {**VISION, **config.vision}["image_size"]
        self._periods = (about["min_period"], about["max_period"])
        with to_be_read():
            self.model = _network(vision, words, narrow, about, config.shuffle)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            self.critic = perceptron(words.hidden_size, config.critic_hidden, 1, gain=0.0, activation=nn.ReLU)
        self._around = lerobot.Processors(about, config.statistics, {})
        self._robot = self.actions_of(config, self._around.actions)
        self._prompts: Prompts | None = None
        self._unused: dict[str, Tensor] = {}

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, or has no statistics.
        """
        settings = lerobot.opened(directory, "smolvla")
        about, rows = settings["model"], settings["statistics"]
        del settings["pictures"]  # which are not normalised
        settings["statistics"] = {name: rows[name] for name in (lerobot.STATE, lerobot.ACTION) if rows.get(name)}
        settings["steps"] = about.get("num_steps", _ABOUT["num_steps"])
        return settings | _sizes_in(tensor_shapes(tensor_files(directory)), about, directory)

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`; lerobot's files have no place for the name."""
        return {"statistics": lerobot.counted(statistics)}

    @classmethod
    def actions_of(cls, config: SmolVlaConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return lerobot.robot_actions(config, scaling)

    def open_published(self, directory: Path) -> None:
        """Take the tokenizer.

        Raises:
            ValueError: there is none.
        """
        if _TOKENIZER not in self.files:
            raise ValueError(
                f"{directory} has no {_TOKENIZER}: copy it from the directory of "
                f"{self.config.about.get('vlm_model_name', 'SmolVLM2')}, from where lerobot takes it"
            )
        self._prompts = Prompts(self.files[_TOKENIZER], self.config.about["tokenizer_max_length"])

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
        """Layers of the encoder, the language model and the expert."""
        both: Any = self.model.vlm_with_expert
        vlm = both.vlm.model
        return [*vlm.vision_model.encoder.layers, *vlm.text_model.layers, *both.lm_expert.layers]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as they came, the instruction as tokens, the state."""
        config = self.config
        if self._prompts is None:
            raise ValueError("policy smolvla: it reads with its checkpoint's tokenizer: set policy.path")
        pictures = cameras(looked_at(observation, "rgb", config.image, "policy smolvla"))[:, : config.cameras]
        texts = [config.instruction] * len(pictures) if instructions is None else list(instructions)
        stored = {"rgb": pictures.contiguous(), "text": self._prompts.encode(texts).to(pictures.device)}
        if config.state_size:
            stored["state"] = looked_at(observation, "state", (config.state_size,), "policy smolvla").float()
        return stored

    def context(self, inputs: Stored) -> Prefix:
        """See `FlowPolicy.context`: pictures and words first, then the state, which looks at them."""
        network: Any = self.model
        vlm, text = network.vlm_with_expert.vlm, inputs["text"]
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in vlm.parameters())
        with torch.set_grad_enabled(learns):
            patches = self._patches(inputs["rgb"].flatten(0, 1)).unflatten(0, inputs["rgb"].shape[:2]).flatten(1, 2)
            words = vlm.model.text_model.embed_tokens(text.clamp(min=0))
            x = torch.cat([patches.to(words.dtype), words], 1) * math.sqrt(words.shape[-1])
            real = functional.pad(text >= 0, (patches.shape[1], 0), value=True)
            mask, positions = real[:, None].expand(-1, x.shape[1], -1), (real.long().cumsum(1) - 1).clamp(min=0)
            hidden, cache = vlm.model.text_model(x, mask, positions)
        state = inputs.get("state", torch.zeros(len(text), 0, device=text.device))
        state, _ = self._around.states(state)
        token = network.state_proj(padded(state, network.state_proj.in_features))[:, None]
        whole = functional.pad(real, (0, 1), value=True)
        last, cache = vlm.model.text_model(token, whole[:, None], real.sum(1, keepdim=True), cache)
        return Prefix(cache, whole, torch.cat([hidden, last.to(hidden.dtype)], 1))

    def _patches(self, pictures: Tensor) -> Tensor:
        """Tokens of pictures, [M, T, width] of uint8 [M, 3, H, W]: scaled to fit, black above and on the left."""
        vlm: Any = self.model.vlm_with_expert.vlm.model  # type: ignore[union-attr]
        height, width = pictures.shape[-2:]
        ratio, x = max(height, width) / self.side, pictures.float() / 255.0
        inner = int(height / ratio), int(width / ratio)
        if inner != (height, width):
            x = functional.interpolate(x, inner, mode="bilinear", align_corners=False)
        x = functional.pad(x, (self.side - inner[1], 0, self.side - inner[0], 0)) * 2.0 - 1.0
        vision, project = vlm.vision_model, vlm.connector.modality_projection.proj
        x = vision.embeddings(x).to(project.weight.dtype)
        x = vision.post_layernorm(vision.encoder(inputs_embeds=x).last_hidden_state).to(project.weight.dtype)
        side, square = math.isqrt(x.shape[1]), self.config.shuffle
        x = x.view(len(x), side // square, square, side // square, square, -1).transpose(2, 3)
        tokens: Tensor = project(x.flatten(3).flatten(1, 2))
        return tokens

    # What comes out ---------------------------------------------------------------------------------------------------

    def velocity(self, context: Prefix) -> Velocity:
        """See `FlowPolicy.velocity`. An action sees those before it."""
        network: Any = self.model
        rows, device = len(context.mask), context.mask.device
        causal = torch.ones(self.horizon, self.horizon, dtype=torch.bool, device=device).tril()
        before = context.mask[:, None].expand(-1, self.horizon, -1)
        mask = torch.cat([before, causal.expand(rows, -1, -1)], 2)
        positions = context.mask.sum(1, keepdim=True) + torch.arange(self.horizon, device=device)

        def at(x: Tensor, t: Tensor) -> Field:
            actions = network.action_in_proj(x)
            time = sinusoids(t, actions.shape[-1], *self._periods)[:, None].expand_as(actions)
            mixed = functional.silu(network.action_time_mlp_in(torch.cat([actions, time], -1)))
            mixed = network.action_time_mlp_out(mixed)
            features, _ = network.vlm_with_expert.lm_expert(mixed, mask, positions, context.cache)
            return Field(network.action_out_proj(features.float()), features.float())

        return at

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.emitted`."""
        return self._robot.to_simulator(x)

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The inverse of `emitted`."""
        return self._robot.to_model(actions)

    def values(self, context: Prefix, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        real = context.mask[..., None].float()
        result: Tensor = self.critic((context.hidden.detach().float() * real).sum(1) / real.sum(1))
        return result[:, 0]


def _network(
    vision: SiglipVisionConfig, words: LlamaConfig, narrow: LlamaConfig, about: Mapping[str, Any], shuffle: int
) -> nn.Module:
    """All modules, under the names of checkpoints."""
    network, both, vlm = nn.Module(), nn.Module(), nn.Module()
    vision._attn_implementation = "sdpa"
    vlm.vision_model = SiglipVisionModel(vision)
    vlm.connector = nn.Module()
    vlm.connector.modality_projection = nn.Module()
    vlm.connector.modality_projection.proj = nn.Linear(vision.hidden_size * shuffle**2, words.hidden_size, bias=False)
    vlm.text_model = Stack(words)
    vlm.text_model.embed_tokens = nn.Embedding(words.vocab_size, words.hidden_size)
    nn.init.normal_(vlm.text_model.embed_tokens.weight, std=0.02)  # type: ignore[arg-type]
    both.vlm = nn.Module()
    both.vlm.model = vlm
    both.lm_expert = Stack(narrow, about["self_attn_every_n_layers"])
    network.vlm_with_expert = both
    network.state_proj = nn.Linear(about["max_state_dim"], words.hidden_size)
    network.action_in_proj = nn.Linear(about["max_action_dim"], narrow.hidden_size)
    network.action_out_proj = nn.Linear(narrow.hidden_size, about["max_action_dim"])
    network.action_time_mlp_in = nn.Linear(2 * narrow.hidden_size, narrow.hidden_size)
    network.action_time_mlp_out = nn.Linear(narrow.hidden_size, narrow.hidden_size)
    return network


def _sizes_in(shapes: Mapping[str, tuple[int, ...]], about: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Keys of `SmolVlaConfig` that tensors say."""

    def layers(prefix: str) -> int:
        return len({name.split(".layers.")[1].split(".")[0] for name in shapes if name.startswith(f"{prefix}layers.")})

    def stack(prefix: str) -> dict[str, Any]:
        first = f"{prefix}layers.0."
        inner, width = shapes[f"{first}mlp.up_proj.weight"]
        heads = {"num_attention_heads": shapes[f"{first}self_attn.q_proj.weight"][0] // head}
        heads["num_key_value_heads"] = shapes[f"{first}self_attn.k_proj.weight"][0] // head
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers(prefix)}
        return {**sizes, **heads, "head_dim": head}

    head = wide = LANGUAGE["head_dim"]  # of both, as published
    try:
        width, _, patch, _ = shapes[f"{_VISION}embeddings.patch_embedding.weight"]
        side = math.isqrt(shapes[f"{_VISION}embeddings.position_embedding.weight"][0]) * patch
        inner = shapes[f"{_VISION}encoder.layers.0.mlp.fc1.weight"][0]
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers(f"{_VISION}encoder.")}
        vision = {**sizes, "num_attention_heads": max(1, width // wide), "image_size": side, "patch_size": patch}
        language = stack(_WORDS) | {"vocab_size": shapes[f"{_WORDS}embed_tokens.weight"][0]}
        shuffle = math.isqrt(shapes[_JOIN][1] // width)
        settings = {"vision": vision, "language": language, "expert": stack(_EXPERT), "shuffle": shuffle}
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{directory} lacks {error}: it is no checkpoint of SmolVLA") from error
    if (wanted := about.get("resize_imgs_with_padding", [VISION["image_size"]] * 2)) != [side, side]:
        raise ValueError(
            f"{directory / 'config.json'}: resize_imgs_with_padding={wanted} is another size than its encoder's, {side}"
        )
    return settings
