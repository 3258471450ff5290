"""Language models in the shape of a Llama, written with torch alone: what an engine needs of one that joins a job.

transformers takes two seconds of imports, most of them for what generation never uses. Where a model is of one of the
kinds below, an engine that gets its weights from elsewhere can do without: names of parameters, and numbers up to
rounding, are those of transformers' own model. `outline` says whether a model is, and all that its module is made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""By `model_type`."""
_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "attention_bias", "mlp_bias", "sliding_window", "layer_types"),
)
"""Keys of a configuration that say what such a model computes."""


def outline(config: Any) -> dict[str, Any] | None:
    """All that makes a `PlainModel`, as plain values; None of a model of another kind.

    Args:
        config: as transformers' AutoConfig gives it, its defaults filled in.
    """
    if config.model_type not in _KINDS or getattr(config, "hidden_act", None) != "silu":
        return None
    if getattr(config, "quantization_config", None) is not None:
        return None
    if (config.rope_parameters or {}).get("rope_type") != "default" or "rope_theta" not in config.rope_parameters:
        return None
    values = {name: getattr(config, name, None) for name in _KEYS}
    return values | {"rope_parameters": dict(config.rope_parameters)}


_TILE, _SPREAD = 65_537, 0.02
"""Made-up weights are so many random numbers again and again, which is done in a moment for billions; a prime number,
so that no two rows are alike. Their spread is that of transformers' new models."""


class PlainModel(nn.Module):
    """A causal language model.

    Args:
        outline: of it; see `outline`.
    """

    _no_split_modules = ("_Layer",)  # as transformers' models name the class of their layers

    def __init__(self, outline: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**outline)
        self.config.get_text_config = lambda **_: self.config
        self.model = _Trunk(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, outline: Mapping[str, Any]) -> Self:
        """Make one with made-up weights, by which two ways to compute can be compared."""
        with torch.device("meta"):
            model = cls(outline)
        model.to_empty(device=device)
        model.to(dtype)
        some = torch.randn(_TILE, generator=torch.Generator().manual_seed(0)).to(device, dtype) * _SPREAD
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.data.fill_(1.0)
                continue
            whole, rest = divmod(parameter.numel(), _TILE)
            parameter.data.view(-1)[: whole * _TILE].view(whole, _TILE).copy_(some)
            parameter.data.view(-1)[whole * _TILE :].copy_(some[:rest])
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights."""
        return self.lm_head.weight.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        """Those of its tokens."""
        return self.model.embed_tokens

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Logits after every token of whole texts, [rows, tokens] to `logits` [rows, tokens, vocabulary]."""
        if use_cache:
            raise NotImplementedError("a plain model reads whole texts")
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))


class _Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        kinds = config.layer_types or ["sliding_attention"] * config.num_hidden_layers
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        # Drawing its numbers where there is no memory would import torch._dynamo, half a second.
        numbers = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=numbers)
        self.layers = nn.ModuleList(_Layer(config, window) for window in windows)
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = _Rotary(_head(config), config.rope_parameters["rope_theta"])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        cos, sin = self.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in self.layers:
            hidden = layer(hidden, cos[:, None], sin[:, None])
        normed: Tensor = self.norm(hidden)
        return normed


def _head(config: Any) -> int:
    """Numbers of an attention head."""
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


class _Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class _Rotary(nn.Module):
    """Angles by which queries and keys are turned."""

    rope_type = "default"

    def __init__(self, head: int, base: float) -> None:
        super().__init__()
        self._head, self._base = head, base

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(0, self._head, 2, device=like.device).float()
        angles = positions[..., None].float() * (1.0 / self._base ** (pairs / self._head))
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Layer(nn.Module):
    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, window)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class _Attention(nn.Module):
    def __init__(self, config: Any, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = _head(config), window
        self.scaling = self.head_dim**-0.5
        size, kind = config.hidden_size, config.model_type
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        biased = kind == "qwen2" or bool(config.attention_bias)
        self.q_proj = nn.Linear(size, queries, bias=biased)
        self.k_proj = nn.Linear(size, keys, bias=biased)
        self.v_proj = nn.Linear(size, keys, bias=biased)
        self.o_proj = nn.Linear(queries, size, bias=biased and kind != "qwen2")
        if kind == "qwen3":
            self.q_norm = _Norm(self.head_dim, config.rms_norm_eps)
            self.k_norm = _Norm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        places = torch.arange(hidden.shape[1], device=hidden.device)
        back = places[:, None] - places
        mask = (back >= 0) if self.window is None else (back >= 0) & (back < self.window)
        attended = F.scaled_dot_product_attention(
            _turned(query, cos, sin),
            _turned(key, cos, sin).repeat_interleave(query.shape[1] // key.shape[1], dim=1),
            value.repeat_interleave(query.shape[1] // key.shape[1], dim=1),
            attn_mask=mask,
            scale=self.scaling,
        )
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return mixed


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-other, one], dim=-1) * sin


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner, biased = config.hidden_size, config.intermediate_size, bool(config.mlp_bias)
        self.gate_proj = nn.Linear(size, inner, bias=biased)
        self.up_proj = nn.Linear(size, inner, bias=biased)
        self.down_proj = nn.Linear(inner, size, bias=biased)
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return product
