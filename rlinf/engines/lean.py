"""The forward pass of Llama-like models with what costs time besides the arithmetic left out.

A transformers module spends as long in Python as in matrices while a small batch decodes: here query, key and value are
one matrix product, as are gate and up; both are rotated together, by angles computed once; and there are no hooks,
wrappers or mask builders. The joined matrices are the model's own parameters, laid next to one another: its modules go
on working, weights are loaded as before, and nothing is held twice.

Whether a model is of this kind is not guessed from its name: its parts must fit, and its own forward must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlinf.engines.cache import RowCache
from rlinf.engines.forward import ModelForward

_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on how long the text is
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def fastest(model: PreTrainedModel, version: int) -> ModelForward:
    """The lean forward if it does what the model does, else the model's own.

    Args:
        model: in place on its device, in evaluation mode.
        version: of the weights it has.

    Raises:
        ValueError: the model has layers that are not full attention.
    """
    own = ModelForward(model, version)
    if not _fits(model):
        return own
    lean = LeanForward(model, version)
    return lean if _agree(own, lean) else own


class LeanForward(ModelForward):
    """Runs a Llama-like model (Llama, Qwen2, Qwen3, ...) by its parameters alone.

    The model must stay on its device from now on: moving it would part the parameters from the joined matrices.
    """

    def __init__(self, model: PreTrainedModel, version: int):
        super().__init__(model, version)
        trunk: Any = model.model
        self._blocks = [_Block(layer) for layer in trunk.layers]
        self._embedding: Tensor = trunk.embed_tokens.weight
        self._norm = trunk.norm
        self._head: nn.Linear = model.lm_head  # type: ignore[assignment]
        self._rotary = trunk.rotary_emb
        self._cos = self._sin = self._embedding.new_empty(0, 0)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RowCache) -> Tensor:
        hidden = F.embedding(ids, self._embedding)
        self._reach(cache.get_seq_length() + ids.shape[1])
        cos, sin = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)  # [rows, tokens, 1, head]
        for number, block in enumerate(self._blocks):
            hidden = block(hidden, cos, sin, mask, cache, number)
        last = _rms_norm(hidden[:, -1], self._norm)
        return F.linear(last, self._head.weight, self._head.bias)

    def _reach(self, length: int) -> None:
        """Have the angles of the first `length` positions at hand."""
        if length > len(self._cos):
            positions = torch.arange(2 * length, device=self.device)[None]
            cos, sin = self._rotary(self._embedding, positions)
            self._cos, self._sin = cos[0], sin[0]


class _Block:
    """One transformer layer."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self.output: nn.Linear = attention.o_proj
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self.down: nn.Linear = mlp.down_proj
        self.head = int(attention.head_dim)
        self.queries = attention.q_proj.out_features // self.head
        self.keys = attention.k_proj.out_features // self.head
        self.scale = float(attention.scaling)

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: RowCache, number: int
    ) -> Tensor:
        """[rows, tokens, hidden] to the same; `number` is the layer's, in the cache."""
        attended = self._attend(_rms_norm(hidden, self.norms[0]), cos, sin, mask, cache, number)
        hidden = hidden + F.linear(attended, self.output.weight, self.output.bias)
        gate, up = F.linear(_rms_norm(hidden, self.norms[1]), *self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down.weight, self.down.bias)

    def _attend(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: RowCache, number: int
    ) -> Tensor:
        rows, tokens, _ = hidden.shape
        heads = F.linear(hidden, *self.qkv).view(rows, tokens, self.queries + 2 * self.keys, self.head)
        turning = heads[:, :, : self.queries + self.keys]
        query_norm, key_norm = self.head_norms
        if query_norm is not None and key_norm is not None:
            split = turning.split([self.queries, self.keys], dim=2)
            turning = torch.cat([_rms_norm(split[0], query_norm), _rms_norm(split[1], key_norm)], dim=2)
        half = self.head // 2
        turned = turning * cos + torch.cat([-turning[..., half:], turning[..., :half]], dim=-1) * sin
        query, key = turned[:, :, : self.queries], turned[:, :, self.queries :]
        keys, values = cache.update(
            key.transpose(1, 2), heads[:, :, self.queries + self.keys :].transpose(1, 2), number
        )
        if tokens == 1:  # the queries that share a key are the "tokens" of one head: no key is repeated
            query = query.reshape(rows, self.keys, -1, self.head)
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scale)
            return attended.reshape(rows, 1, -1)
        repeats = self.queries // self.keys
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.repeat_interleave(repeats, dim=1),
            values.repeat_interleave(repeats, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        return attended.transpose(1, 2).reshape(rows, tokens, -1)


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    weight: Tensor = norm.weight
    return F.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def _joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of all in one; the parameters become parts of them."""
    return _join([linear.weight for linear in linears]), (
        None if linears[0].bias is None else _join([linear.bias for linear in linears])
    )


def _join(parameters: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joined


def _fits(model: PreTrainedModel) -> bool:
    """Whether the model has the parts of a Llama and no others."""
    trunk, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or {name for name, _ in getattr(trunk, "named_children", list)()} != {
        "embed_tokens",
        "layers",
        "norm",
        "rotary_emb",
    }:
        return False
    assert isinstance(trunk, nn.Module)
    return (
        getattr(trunk.rotary_emb, "rope_type", None) in _ROTATIONS
        and hasattr(trunk.norm, "variance_epsilon")
        and all(_layer_fits(layer) for layer in trunk.layers)  # type: ignore[union-attr]
    )


def _layer_fits(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())  # type: ignore[union-attr]
    joined = [[attention.get(f"{x}_proj") for x in "qkv"], [mlp.get("gate_proj"), mlp.get("up_proj")]]
    linears = [*joined[0], *joined[1], attention.get("o_proj"), mlp.get("down_proj")]
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    for group in joined:  # a bias on all or on none
        if len({linear.bias is None for linear in group if isinstance(linear, nn.Linear)}) != 1:
            return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    return (
        all(hasattr(norm, "variance_epsilon") for norm in norms) and "silu" in type(mlp.get("act_fn")).__name__.lower()
    )


@torch.inference_mode()
def _agree(own: ModelForward, lean: LeanForward) -> bool:
    """Whether both give the same logits for a made-up text, with padding, in two bites."""
    device = own.device
    vocabulary = lean._embedding.shape[0]
    ids = (torch.arange(14, device=device).view(2, 7) * 7919) % vocabulary
    real = torch.ones((2, 7), dtype=torch.bool, device=device)
    real[0, :2] = False
    visible = (real[:, None, :] & torch.ones((7, 7), dtype=torch.bool, device=device).tril()) | torch.eye(
        7, dtype=torch.bool, device=device
    )
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    for padded in (True, False):
        results = []
        for forward in (own, lean):
            cache = RowCache(forward.layers)
            mask = visible[:, None] if padded else None
            places = positions if padded else torch.arange(7, device=device).expand(2, 7)
            first = forward(ids[:, :6], places[:, :6], None if mask is None else mask[:, :, :6, :6], cache)
            cache.take(torch.arange(2, device=device), 7)
            second = forward(ids[:, 6:], places[:, 6:], None if mask is None else mask[:, :, 6:], cache)
            results.append(torch.stack([first, second]).float())
        theirs, ours = results
        tolerance = torch.finfo(own.dtype).eps ** 0.5 / 3 * theirs.abs().max()  # 1e-4 in float32, 0.03 in bfloat16
        if not bool(((theirs - ours).abs() <= tolerance).all()):
            return False
    return True
