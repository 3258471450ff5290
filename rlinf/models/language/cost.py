"""Floating-point operations and bytes of a transformer, from its configuration alone.

A product of [m, k] and [k, n] is 2 m k n operations. Source of the whole: appendix B of PaLM (arXiv:2204.02311), 6 N
per learned token and 12 x layers x heads x width x length for attention, forward and backward, of which a causal mask
leaves half, as FlashAttention-2 counts it (arXiv:2307.08691, section 4.1). Here N leaves out what is looked up and not
multiplied, of experts it has those that a token takes, and the output embedding counts where tokens are predicted. What
checkpointing or the head computes a second time does not count: shares of a device's products are model FLOPs
utilisation (MFU). `tests/models/language/test_cost.py` holds it against torch's own counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.data.routes import experts_of

_UNGATED = frozenset(
    "bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt opt phi starcoder2".split()  # noqa: SIM905
)
"""Kinds of models whose MLPs have two matrices; those of all others have a third, whose product is a gate."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Numbers of a model's configuration that decide how much is computed and moved."""

    attention: Mapping[int | None, int]
    """Layers with attention by their window; None: they see all tokens before."""
    pair: int
    """Operations of one query with one key in one layer: a product with the key and one with the value."""
    cached: int
    """Numbers that a layer keeps of a token: keys and values."""
    block_weights: int
    """Weights of matrices in all layers, through which a token passes."""
    expert_weights: int
    """Weights of all experts, of which a token passes through `share`."""
    share: float
    """Experts that a token takes, of those of a layer; 1 without experts."""
    head_weights: int
    """Weights of the output embedding."""
    vocabulary: int
    tied: bool
    """Input and output embedding are one matrix."""

    @staticmethod
    def of(config: Any) -> ModelCost:
        """Read off a transformers configuration; of a model of several parts, that of its text counts."""
        text = config.get_text_config(decoder=True)
        layers, width, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        windows = tuple(window if "sliding" in kind or set(kinds) == {"full_attention"} else None for kind in kinds)
        projections, pair, cached = _attention(text, width, heads)
        dense, experts, share = _mlps(text, layers, width)
        return ModelCost(
            attention=Counter(each for each, kind in zip(windows, kinds, strict=True) if "linear" not in kind),
            pair=pair,
            cached=cached,
            block_weights=layers * projections + dense + round(experts * share),
            expert_weights=experts,
            share=share,
            head_weights=text.vocab_size * width,
            vocabulary=text.vocab_size,
            tied=bool(getattr(text, "tie_word_embeddings", config.tie_word_embeddings)),
        )

    @property
    def weights(self) -> int:
        """Weights of all matrices, embeddings included; biases and norms, under 0.1 %, left out."""
        others = self.expert_weights - round(self.expert_weights * self.share)
        return self.block_weights + others + self.head_weights * (1 if self.tied else 2)

    @property
    def layers(self) -> int:
        """Layers with attention."""
        return sum(self.attention.values())

    def pairs(self, end: int, begin: int = 0) -> int:
        """Pairs of a query and a key that it sees, in all layers, of the tokens of a text from `begin` to `end`."""
        return sum(count * (_pairs(end, window) - _pairs(begin, window)) for window, count in self.attention.items())

    def pairs_flops(self, pairs: int) -> int:
        """Attention of so many pairs of a query and a key in every layer."""
        return self.pair * pairs * self.layers

    def forward_flops(
        self, lengths: Iterable[int], predicted: int, *, causal: bool = True, tokens: int | None = None
    ) -> int:
        """One forward pass.

        Args:
            lengths: tokens of each sequence.
            predicted: tokens at which the output embedding is applied.
            causal: a token attends to itself and those before it; otherwise to all, as the kernels of a plain product
                would compute.
            tokens: that are read, fewer than those of all sequences where some share a beginning.
        """
        lengths = list(lengths)
        count = sum(lengths) if tokens is None else tokens
        if causal:
            pairs = self.pair * sum(map(self.pairs, lengths))
        else:
            pairs = self.pairs_flops(sum(length * length for length in lengths))
        return 2 * self.block_weights * count + pairs + 2 * self.head_weights * predicted

    def training_flops(
        self, lengths: Iterable[int], predicted: int, *, frozen: bool = False, tokens: int | None = None
    ) -> int:
        """Forward and backward pass; a product has two gradients, each as dear as itself.

        Args:
            lengths, predicted, tokens: as for `forward_flops`.
            frozen: the weights do not learn (their adapters do, whose own cost is left out), so that of the two
                gradients of a product with weights one is not needed; attention, without weights, needs both.
        """
        lengths = list(lengths)
        once = self.forward_flops(lengths, predicted, tokens=tokens)
        return 2 * once + self.pair * sum(map(self.pairs, lengths)) if frozen else 3 * once

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of so many tokens."""
        return self.cached * self.layers * itemsize * tokens

    def weight_bytes(self, rows: float, itemsize: int) -> float:
        """Bytes of weights that a decode step reads: every matrix once, of experts those that any row chooses, of E
        experts with k for a token E (1 - (1 - k/E)^rows).

        Args:
            rows: answers that each get a token.
            itemsize: bytes of a number.
        """
        dense = self.block_weights - round(self.expert_weights * self.share) + self.head_weights
        return (dense + self.expert_weights * (1 - (1 - self.share) ** rows)) * itemsize

    def decode_bytes(self, rows: int, context: float, itemsize: int) -> float:
        """Least bytes that a decode step reads: weights, and the cache of every row.

        Args:
            rows: answers that each get a token.
            context: tokens that each attends to, on average.
            itemsize: bytes of a number.
        """
        return self.weight_bytes(rows, itemsize) + self.cache_bytes(1, itemsize) * rows * context


def _pairs(length: int, window: int | None) -> int:
    most = length if window is None else min(length, window)
    return most * (most + 1) // 2 + (length - most) * most


def _attention(text: Any, width: int, heads: int) -> tuple[int, int, int]:
    """Weights of a layer's projections, operations of a pair of query and key, and numbers kept of a token."""
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:  # latent attention, of DeepSeek-V2 (arXiv:2405.04434)
        turned, values = text.qk_rope_head_dim, text.v_head_dim
        keys, queries = text.qk_nope_head_dim + turned, getattr(text, "q_lora_rank", None)
        asking = (width if queries is None else queries) * heads * keys + (0 if queries is None else width * queries)
        keeping = width * (rank + turned) + rank * heads * (keys - turned + values)
        return asking + keeping + heads * values * width, 2 * heads * (keys + values), rank + turned
    head = getattr(text, "head_dim", None) or width // heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "multi_query", False):
        shared = 1
    return width * head * (2 * heads + 2 * shared), 4 * heads * head, 2 * shared * head


def _mlps(text: Any, layers: int, width: int) -> tuple[int, int, float]:
    """Weights of all MLPs outside of experts, those of all experts, and the share of these that a token takes."""
    matrices = 2 if text.model_type in _UNGATED else 3
    sizes = (getattr(text, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"))
    inner = next((size for size in sizes if isinstance(size, int) and size > 0), 4 * width)
    experts = experts_of(text)
    if not experts:
        return layers * matrices * width * inner, 0, 1.0
    dense = {*(getattr(text, "mlp_only_layers", None) or ()), *range(getattr(text, "first_k_dense_replace", None) or 0)}
    every = getattr(text, "decoder_sparse_step", None) or 1
    sparse = sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
    each = getattr(text, "moe_intermediate_size", None) or inner
    always = getattr(text, "shared_expert_intermediate_size", None) or (
        (getattr(text, "n_shared_experts", None) or 0) * each
    )
    others = (layers - sparse) * matrices * width * inner + sparse * width * (matrices * always + experts)
    active = getattr(text, "num_experts_per_tok", None) or 1
    return others, sparse * experts * matrices * width * each, min(1.0, active / experts)
