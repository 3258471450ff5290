"""GR00T's networks: its diffusion transformer, its vision-language model (Eagle 2.5), and its action head.

The diffusion transformer (DiT) works on state and action tokens, and takes the time as a bucket; self-attention works
on the output of the vision-language model. Their blocks differ in their first norm alone: in the DiT its scale and
offset follow from the time, and it has no weights of its own.

Eagle 2.5 is SigLIP, one projection, and the first layers of Qwen3: from pictures, and tokens of which some stand for a
picture's patches, to hidden states of all tokens.

The action head predicts a velocity, actions minus noise, from tokens of the backbone, the robot's state, noisy actions
and the time. What is particular to a robot has weights of its own per robot, chosen by the number of its embodiment.

Names and shapes are those of the published tensors, but that below `eagle_model` transformers has no inner
`vision_model` any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

_CHANNELS = 256
"""Sines and cosines of a time."""
_LONGEST = 10_000.0
"""Inverse of the lowest frequency of those."""


class Attention(nn.Module):
    """Attention with as many keys as queries have heads, onto itself or onto other tokens.

    Args:
        width: of the tokens that ask, and of the result.
        heads, head_dim: their product need not be `width`.
        context: width of the tokens that are attended to.
    """

    def __init__(self, width: int, heads: int, head_dim: int, context: int):
        super().__init__()
        inner = heads * head_dim
        self.heads = heads
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(context, inner)
        self.to_v = nn.Linear(context, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])

    def forward(self, tokens: Tensor, context: Tensor, real: Tensor | None = None) -> Tensor:
        """Tokens [N, S, width] after looking at context [N, L, context], or at those that are `real`, bool [N, L]."""
        q, k, v = self._by_head(self.to_q(tokens)), self._by_head(self.to_k(context)), self._by_head(self.to_v(context))
        mask = None if real is None else real[:, None, None]
        attended = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        out: Tensor = self.to_out[0](attended)
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gelu(nn.Module):
    """A linear layer and GELU, by its tanh approximation."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, inner] of [N, S, width]."""
        return functional.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two layers, the inner one four times as wide."""

    def __init__(self, width: int):
        super().__init__()
        # the authors' second entry is dropout, which has no tensors; policies that learn by acting have none
        self.net = nn.ModuleList([Gelu(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, width] of the same."""
        out: Tensor = self.net[2](self.net[0](x))
        return out


class TimedNorm(nn.Module):
    """Layer norm whose scale and offset follow from the time: norm(x) (1 + scale) + offset."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[N, S, width] of the same, and of an embedded time [N, width]."""
        scale, offset = self.linear(functional.silu(time))[:, None].chunk(2, -1)
        return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + offset


class Block(nn.Module):
    """Attention and two layers, each after a norm and beside a residual connection.

    Args:
        heads, head_dim: their product is the width.
        context: width of what is attended to; None for the tokens themselves.
        timed: the norms follow the time, or nothing (the second one); else both have weights.
    """

    def __init__(self, heads: int, head_dim: int, context: int | None, timed: bool):
        super().__init__()
        width = heads * head_dim
        self.norm1: nn.Module = TimedNorm(width) if timed else nn.LayerNorm(width)
        self.attn1 = Attention(width, heads, head_dim, context or width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not timed)
        self.ff = FeedForward(width)

    def forward(
        self,
        tokens: Tensor,
        context: Tensor | None = None,
        time: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Tokens [N, S, width]; context [N, L, context] or None for themselves, of which `real`, bool [N, L], says
        what is looked at; embedded time [N, width]."""
        normed = self.norm1(tokens) if time is None else self.norm1(tokens, time)
        tokens = tokens + self.attn1(normed, normed if context is None else context, real)
        out: Tensor = tokens + self.ff(self.norm3(tokens))
        return out


class TimeEmbedder(nn.Module):
    """Two layers on sines and cosines of a time."""

    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(_CHANNELS, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, waves: Tensor) -> Tensor:
        """[N, width] of [N, 256]."""
        out: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return out


class TimeEncoder(nn.Module):
    """The bucket of a time, embedded."""

    def __init__(self, width: int):
        super().__init__()
        self.timestep_embedder = TimeEmbedder(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """[N, width] of int64 [N]: cos, then sin, of bucket / 10,000^(i / 127) for i from 0 to 127, in layers."""
        half = _CHANNELS // 2
        exponent = torch.arange(half, device=bucket.device, dtype=torch.float32) / (half - 1)
        angles = bucket.float()[:, None] * torch.exp(-math.log(_LONGEST) * exponent)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        out: Tensor = self.timestep_embedder(waves.to(self.timestep_embedder.linear_1.weight.dtype))
        return out


class DiffusionTransformer(nn.Module):
    """Blocks that look at the context and at their own tokens by turns, told the time.

    Args:
        layers: blocks; those with even numbers look at the context.
        heads, head_dim: their product is the width of the tokens.
        context: width of the context.
        outputs: width of the result.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int, context: int, outputs: int):
        super().__init__()
        width = heads * head_dim
        self.timestep_encoder = TimeEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            [Block(heads, head_dim, context if number % 2 == 0 else None, timed=True) for number in range(layers)]
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor, context: Tensor, bucket: Tensor, real: Tensor | None = None) -> Tensor:
        """[N, S, outputs] of tokens [N, S, width], context [N, L, context], of which `real` is looked at, bool [N, L],
        and bucket int64 [N]."""
        time = self.timestep_encoder(bucket)
        for number, block in enumerate(self.transformer_blocks):
            tokens = block(tokens, context, time, real) if number % 2 == 0 else block(tokens, None, time)
        offset, scale = self.proj_out_1(functional.silu(time))[:, None].chunk(2, -1)  # here the offset comes first
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
        out: Tensor = self.proj_out_2(normed * (1 + scale) + offset)
        return out


class SelfAttention(nn.Module):
    """Blocks over the vision-language model's tokens.

    Args:
        layers, heads, head_dim: see `DiffusionTransformer`.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block(heads, head_dim, None, timed=False) for _ in range(layers)])

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        """[N, L, width] of the same, of which `real` is looked at, bool [N, L]; None for all."""
        for block in self.transformer_blocks:
            tokens = block(tokens, real=real)
        return tokens


_GIVEN = ("_attn_implementation", "attn_implementation", "model_type", "architectures", "torch_dtype", "dtype")


class Eagle(nn.Module):
    """Reads pictures and words.

    Args:
        config: the authors' configuration of Eagle: `vision_config`, `text_config`, `image_token_index`.
        layers: of the language model that are kept.
    """

    def __init__(self, config: Mapping[str, Any], layers: int):
        super().__init__()
        vision = {key: value for key, value in config["vision_config"].items() if key not in _GIVEN}
        words = {key: value for key, value in config["text_config"].items() if key not in _GIVEN}
        kinds = words.pop("layer_types", None)
        words["num_hidden_layers"] = layers
        if kinds:
            words["layer_types"] = kinds[:layers]
        kwargs: dict[str, Any] = {"attn_implementation": "sdpa"}
        self.vision_model = SiglipVisionModel(SiglipVisionConfig(**vision, **kwargs))
        self.language_model = Qwen3ForCausalLM(Qwen3Config(**words, **kwargs))
        self.mlp1 = nn.Sequential(nn.Linear(vision["hidden_size"], words["hidden_size"]))
        self.picture = int(config["image_token_index"])
        """The token that stands for a patch."""
        self.side = int(vision["image_size"])
        """Pixels of a picture's height and width."""
        self.patches = (self.side // int(vision["patch_size"])) ** 2
        """Tokens of one picture."""

    def forward(self, pixels: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
        """Hidden states after the last norm, [N, L, width].

        Args:
            pixels: k pictures of each row, float [N, k, 3, H, W], on SigLIP's scale.
            tokens: int64 [N, L], k x `patches` of them `picture`.
            real: which tokens are text and no padding, bool [N, L].
        """
        patches = self.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
        embedded = self.language_model.get_input_embeddings()(tokens)
        here = tokens == self.picture
        embedded = embedded.masked_scatter(here[..., None], self.mlp1(patches).to(embedded.dtype))
        length = tokens.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        # Padding sees nothing: its attention is 0, as where it is cut out. Other tokens do not look at it, but the
        # action head does, so what it becomes matters.
        mask = (earlier & real[:, None, :] & real[:, :, None])[:, None]
        output: Tensor = self.language_model.model(
            inputs_embeds=embedded, attention_mask=mask, position_ids=torch.arange(length, device=tokens.device)[None]
        ).last_hidden_state
        return output


_BUILT: Mapping[str, Mapping[str, Any]] = {
    "": {"add_pos_embed": True, "use_vlln": True},
    "diffusion_model_cfg": {"interleave_self_attention": True, "norm_type": "ada_norm", "positional_embeddings": None},
    "vl_self_attention_cfg": {"positional_embeddings": None},
}
"""Keys of `action_head_cfg` that could say another network than this one, and what they must say."""


class RobotLinear(nn.Module):
    """A linear layer with weights for each of several robots.

    Args:
        robots: how many.
        inputs, outputs: widths.
    """

    def __init__(self, robots: int, inputs: int, outputs: int):
        super().__init__()
        self.W = nn.Parameter(0.02 * torch.randn(robots, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(robots, outputs))

    def forward(self, x: Tensor, robot: int) -> Tensor:
        """[N, S, outputs] of [N, S, inputs], for one robot."""
        return x @ self.W[robot] + self.b[robot]


class RobotLayers(nn.Module):
    """Two layers with ReLU between them, for each robot."""

    def __init__(self, robots: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.layer1 = RobotLinear(robots, inputs, hidden)
        self.layer2 = RobotLinear(robots, hidden, outputs)

    def forward(self, x: Tensor, robot: int) -> Tensor:
        """[N, S, outputs] of [N, S, inputs], for one robot."""
        out: Tensor = self.layer2(functional.relu(self.layer1(x, robot)), robot)
        return out


class ActionEncoder(nn.Module):
    """Noisy actions and their time as tokens, for each robot."""

    def __init__(self, robots: int, numbers: int, width: int):
        super().__init__()
        self.width = width
        self.W1 = RobotLinear(robots, numbers, width)
        self.W2 = RobotLinear(robots, 2 * width, width)
        self.W3 = RobotLinear(robots, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, robot: int) -> Tensor:
        """[N, H, width] of actions [N, H, numbers] and bucket int64 [N]."""
        half = self.width // 2
        exponent = torch.arange(half, device=bucket.device, dtype=torch.float32) / half
        angles = bucket.float()[:, None] * torch.exp(-math.log(10_000.0) * exponent)
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(actions.dtype)
        features = torch.cat([self.W1(actions, robot), waves[:, None].expand(-1, actions.shape[1], -1)], -1)
        out: Tensor = self.W3(functional.silu(self.W2(features, robot)), robot)
        return out


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads = {"heads": config["num_attention_heads"], "head_dim": config["attention_head_dim"]}
    return {"layers": config["num_layers"], **heads}


class ActionHead(nn.Module):
    """The velocity field on top of the backbone.

    Args:
        config: the authors' `action_head_cfg`.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        dit, attention = config["diffusion_model_cfg"], config["vl_self_attention_cfg"]
        width, context, hidden = (
            config[each] for each in ("input_embedding_dim", "backbone_embedding_dim", "hidden_size")
        )
        if dit["num_attention_heads"] * dit["attention_head_dim"] != width or dit["output_dim"] != hidden:
            raise ValueError(
                f"policy gr00t: action_head_cfg has heads of {dit['num_attention_heads']} x "
                f"{dit['attention_head_dim']} that must be input_embedding_dim={width}, and output_dim="
                f"{dit['output_dim']} that must be hidden_size={hidden}"
            )
        for part, built in _BUILT.items():
            settings = config if not part else config[part]
            if odd := [key for key, value in built.items() if settings.get(key, value) != value]:
                where = ".".join(filter(None, ("action_head_cfg", part, odd[0])))
                raise ValueError(
                    f"policy gr00t: {where}={settings[odd[0]]!r} is of another network than this, "
                    f"GR00T N1.5's, whose is {built[odd[0]]!r}"
                )
        robots = config.get("max_num_embodiments", 32)
        self.buckets = config.get("num_timestep_buckets", 1000)
        self.horizon, self.numbers = config["action_horizon"], config["action_dim"]
        self.model = DiffusionTransformer(**_sizes(dit), context=context, outputs=hidden)
        self.state_encoder = RobotLayers(robots, config["max_state_dim"], hidden, width)
        self.action_encoder = ActionEncoder(robots, self.numbers, width)
        self.action_decoder = RobotLayers(robots, hidden, hidden, self.numbers)
        self.future_tokens = nn.Embedding(config.get("num_target_vision_tokens", 32), width)
        self.position_embedding = nn.Embedding(config.get("max_seq_len", 1024), width)
        for table in (self.future_tokens, self.position_embedding):
            nn.init.normal_(table.weight, std=0.02)
        self.vlln = nn.LayerNorm(context)
        self.vl_self_attention = SelfAttention(**_sizes(attention))

    def read(self, backbone: Tensor, real: Tensor | None = None) -> Tensor:
        """The backbone's output, ready to be attended to, [N, L, context]; what is not `real`, bool [N, L], is not
        looked at."""
        out: Tensor = self.vl_self_attention(self.vlln(backbone), real)
        return out

    def tokens(self, state: Tensor, robot: int) -> Tensor:
        """Tokens that stand before the actions, [N, 1 + future tokens, width].

        Args:
            state: [N, max_state_dim], on the model's scale.
            robot: number of the embodiment.
        """
        future = self.future_tokens.weight.expand(len(state), -1, -1)
        return torch.cat([self.state_encoder(state[:, None], robot), future], 1)

    def forward(
        self, context: Tensor, before: Tensor, actions: Tensor, t: Tensor, robot: int, *, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity, and the hidden states that it is decoded from.

        Args:
            context: of `read`, [N, L, context].
            before: of `tokens`.
            actions: noisy, [N, H, numbers].
            t: 0 for noise, 1 for actions, float [N].
            robot: number of the embodiment.
            real: tokens of the context that are looked at, bool [N, L]; None for all.

        Returns:
            actions - noise, [N, H, numbers]; [N, H, hidden_size].
        """
        bucket = (t.double() * self.buckets + 1e-3).long()  # a time such as 0.7 is stored a little below itself
        places = self.position_embedding.weight[: actions.shape[1]]
        tokens = torch.cat([before, self.action_encoder(actions, bucket, robot) + places], 1)
        hidden = self.model(tokens, context, bucket, real)[:, -actions.shape[1] :]
        return self.action_decoder(hidden, robot), hidden
