"""Floating-point operations and bytes of a Llama-like model by its shape, for shares of what the card can do.

A matrix product of [m, k] and [k, n] is 2 m k n operations. Source of the whole: appendix B of PaLM
(arXiv:2204.02311), 6 N per learned token and 12 x layers x heads x width x length for attention, forward and backward,
of which a causal mask leaves half, as FlashAttention-2 counts it (arXiv:2307.08691, section 4.1). Here N leaves out
what is looked up and not multiplied, and the output embedding counts where tokens are predicted alone. What
checkpointing or the head computes a second time does not count: this is model FLOPs utilisation (MFU).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's configuration decides its cost."""

    layers: int
    width: int
    """Of hidden states."""
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Width between the matrices of an MLP."""
    vocabulary: int
    tied: bool
    """Input and output embedding are one matrix."""

    @staticmethod
    def of(config: Any) -> Shape:
        """The shape of a transformers configuration (Llama, Qwen2, Mistral)."""
        return Shape(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
            config.vocab_size,
            bool(config.tie_word_embeddings),
        )

    @property
    def block_weights(self) -> int:
        """Weights of matrices in all layers."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return self.layers * self.width * (2 * queries + 2 * keys + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        """Weights of the output embedding."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """Weights of all matrices, embeddings included; biases and norms, under 0.1 %, left out."""
        return self.block_weights + self.head_weights * (1 if self.tied else 2)

    def pairs_flops(self, pairs: int) -> int:
        """Attention of so many (query, key) pairs in every layer: a product with keys and one with values."""
        return 4 * pairs * self.heads * self.head_width * self.layers

    def forward_flops(self, lengths: Iterable[int], predicted: int, *, causal: bool = True) -> int:
        """One forward pass.

        Args:
            lengths: tokens of each sequence.
            predicted: tokens at which the output embedding is applied.
            causal: a token attends to itself and those before it; otherwise to all, as the kernels of a plain product
                would compute.
        """
        lengths = list(lengths)
        pairs = sum(length * (length + 1) // 2 if causal else length * length for length in lengths)
        return 2 * self.block_weights * sum(lengths) + self.pairs_flops(pairs) + 2 * self.head_weights * predicted

    def training_flops(self, lengths: Iterable[int], predicted: int, *, frozen: bool = False) -> int:
        """Forward and backward pass; a product has two gradients, each as dear as itself.

        Args:
            lengths, predicted: as for `forward_flops`.
            frozen: the weights do not learn (their adapters do, whose own cost is left out), so that of the two
                gradients of a product with weights one is not needed; attention, without weights, needs both.
        """
        lengths = list(lengths)
        if not frozen:
            return 3 * self.forward_flops(lengths, predicted)
        attention = self.pairs_flops(sum(length * (length + 1) // 2 for length in lengths))
        return 2 * (self.forward_flops(lengths, predicted) - attention) + 3 * attention

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of so many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_width * itemsize * tokens

    def decode_bytes(self, rows: int, context: float, itemsize: int) -> float:
        """Least bytes that a decode step reads: every matrix once, and the cache of every row.

        Args:
            rows: answers that each get a token.
            context: tokens that each attends to, on average.
            itemsize: bytes of a number.
        """
        return (self.block_weights + self.head_weights) * itemsize + self.cache_bytes(1, itemsize) * rows * context
