"""A faster forward pass for Llama-like models, used once it has been compared with the model's own.

A transformers module spends as long in Python as in matrices while a small batch decodes: here query, key and value are
one matrix product, as are gate and up; queries and keys are rotated together, by angles computed once; and there are no
hooks, wrappers or mask builders. The joined matrices are the model's own parameters, laid next to one another: its
modules go on working, weights are loaded as before, and nothing is held twice. `python -m benchmarks.engine` measures
what it gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlinf.data.pictures.processor import Pictures
from rlinf.data.sample import ImageRef
from rlinf.engines.transformers.kv_cache import Band, Layers
from rlinf.engines.transformers.model_forward import ModelForward, continues, positions_of, tolerance


class LeanForward(ModelForward):
    """The same answers as `ModelForward`, faster, for models for which `fits` is true.

    Args:
        model: in place on its device, in evaluation mode; only `park` may take it from there: moving the module would
            part its parameters from the joined matrices.
        version: of the weights it has.
    """

    def __init__(self, model: PreTrainedModel, version: int):
        super().__init__(model, version)
        self._join()

    def read(
        self,
        ids: Tensor,
        real: Tensor | None,
        images: Sequence[Sequence[ImageRef]] = (),
        past: Layers | None = None,
    ) -> tuple[Tensor, Layers]:
        hidden = F.embedding(ids, self.embedding)
        biases = self._biases(ids, real)
        cos, sin = self.angles(positions_of(ids, real), ids.shape[1] if real is None else real.shape[1])
        pairs = []
        for number, block in enumerate(self.blocks):
            before = None if past is None else past.pairs[number]
            hidden, pair = block.read(hidden, cos, sin, biases[block.window], before)
            pairs.append(pair)
        return self.logits(hidden[:, -1]), Layers(pairs)

    def step(self, ids: Tensor, positions: Tensor, bands: Sequence[Band]) -> Tensor:
        hidden = F.embedding(ids, self.embedding)
        cos, sin = self.angles(positions, max(band.filled for band in bands) + 1)
        masks = {window: [band.mask(window) for band in bands] for window in self.windows}
        for number, block in enumerate(self.blocks):
            hidden = block.step(hidden, cos, sin, bands, masks[block.window], number)
        return self.logits(hidden)

    def _held(self) -> list[Tensor]:
        return [*super()._held(), self._cos, self._sin]

    def _join(self) -> None:
        trunk: Any = self._model.model
        windows = windows_of(self._model)
        self.blocks = [Block(layer, window) for layer, window in zip(trunk.layers, windows, strict=True)]
        self.windows = set(windows)
        self.embedding: Tensor = trunk.embed_tokens.weight
        self._norm = trunk.norm
        self._head: nn.Linear = self._model.lm_head  # type: ignore[assignment]
        self._rotary = trunk.rotary_emb
        self._cos = self._sin = self.embedding.new_empty(0, 0)

    def _biases(self, ids: Tensor, real: Tensor | None) -> dict[int | None, Tensor | None]:
        """What is added to the scores of texts, by the layer's window; None where all that came before is seen."""
        columns = ids.shape[1] if real is None else real.shape[1]
        found: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            whole = window is None or window >= columns
            every = torch.ones_like(ids, dtype=torch.bool) if real is None else real
            found[window] = None if real is None and whole else causal_bias(every, self.dtype, ids.shape[1], window)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]."""
        return F.linear(_rms_norm(hidden, self._norm), self._head.weight, self._head.bias)

    def angles(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for every head of these positions, all below `length`, [..., 1, head size]."""
        self.reach(length)
        return self._cos[positions], self._sin[positions]

    def reach(self, length: int) -> None:
        """Have angles for all positions below `length`; they move only where they had not reached so far."""
        if length > len(self._cos):
            every = torch.arange(2 * length, device=self.embedding.device)[None]
            cos, sin = self._rotary(self.embedding, every)
            half = sin.shape[-1] // 2
            self._cos = cos[0, :, None]
            self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)[:, None]  # see `Block.heads`

    def addresses(self) -> tuple[int, ...]:
        """Where all that steps read lies: a recording of a step is of these addresses."""
        joined = [part for block in self.blocks for part in (*block.qkv, *block.gate_up) if part is not None]
        return tuple(tensor.data_ptr() for tensor in (*self._held(), *joined))


class Block:
    """One transformer layer, which sees so many tokens at most, itself included; None for all."""

    def __init__(self, layer: Any, window: int | None):
        self.window = window
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

    def read(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[rows, tokens, hidden] to the same, with the keys and values of these tokens and of those before them, each
        [rows, key-value heads, tokens, head size]."""
        turned, values = self.heads(hidden, cos, sin)
        query = turned[..., : self.queries, :].transpose(1, 2)
        keys, values = turned[..., self.queries :, :].transpose(1, 2), values.transpose(1, 2)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        repeats = self.queries // self.keys
        attended = F.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(repeats, dim=1),
            values.repeat_interleave(repeats, dim=1),
            attn_mask=bias,
            is_causal=bias is None,
            scale=self.scale,
        )
        return self.finish(hidden, attended.transpose(1, 2).flatten(2)), (keys, values)

    def step(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        bands: Sequence[Band],
        masks: Sequence[Tensor | None],
        number: int,
    ) -> Tensor:
        """[rows, hidden] to the same; `number` is the layer's, in the bands."""
        turned, values = self.heads(hidden, cos, sin)
        parts = []
        start = 0
        for band, mask in zip(bands, masks, strict=True):
            rows = slice(start, start + len(band))
            start = rows.stop
            keys, seen = band.write(number, turned[rows, self.queries :], values[rows], self.window)
            # The queries that share a key are the "tokens" of one head: no key is repeated.
            query = turned[rows, : self.queries].view(len(band), self.keys, -1, self.head)
            attended = F.scaled_dot_product_attention(query, keys, seen, attn_mask=mask, scale=self.scale)
            parts.append(attended.reshape(len(band), -1))
        return self.finish(hidden, parts[0] if len(parts) == 1 else torch.cat(parts))

    def heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, [..., heads, head size], and values."""
        turning, values = self.unturned(hidden)
        # The halves change places, and the sines carry the minus sign of the first.
        return torch.addcmul(turning * cos, turning.roll(self.head // 2, dims=-1), sin), values

    def unturned(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before they are rotated, [..., heads, head size], and values."""
        heads = F.linear(_rms_norm(hidden, self.norms[0]), *self.qkv)
        heads = heads.view(*heads.shape[:-1], self.queries + 2 * self.keys, self.head)
        turning, values = heads.split([self.queries + self.keys, self.keys], dim=-2)
        query_norm, key_norm = self.head_norms
        if query_norm is not None and key_norm is not None:
            query, key = turning.split([self.queries, self.keys], dim=-2)
            turning = torch.cat([_rms_norm(query, query_norm), _rms_norm(key, key_norm)], dim=-2)
        return turning, values

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention."""
        hidden = hidden + F.linear(attended, self.output.weight, self.output.bias)
        gate, up = F.linear(_rms_norm(hidden, self.norms[1]), *self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down.weight, self.down.bias)


def causal_bias(real: Tensor, dtype: torch.dtype, tokens: int, window: int | None = None) -> Tensor:
    """What is added to the scores of the last tokens of texts aligned at their ends, [rows, 1, tokens, columns].

    Args:
        real: which tokens are no padding, bool [rows, columns].
        dtype: of the scores.
        tokens: how many of each text look at it.
        window: tokens that a token sees at most, itself included; None for all.
    """
    columns = torch.arange(real.shape[1], device=real.device)
    looking = columns[-tokens:, None]
    causal = columns <= looking
    if window is not None:
        causal &= columns > looking - window
    # Padding sees itself: a row of attention that sees nothing is NaN, and 0 x NaN spreads from the cache.
    itself = columns == looking
    hidden = ~((real[:, None, :] & causal) | itself)
    return torch.zeros(hidden.shape, dtype=dtype, device=real.device).masked_fill_(hidden, -torch.inf)[:, None]


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


_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on how long the text is
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


_WINDOWED = {"mistral", "ministral", "qwen2", "qwen3", "smollm3", "cwm"}
"""Kinds of model whose windows are those that their configuration says, in the layers that it says."""


def fastest(model: PreTrainedModel, version: int, pictures: Pictures | None = None) -> ModelForward:
    """The lean forward if it does what the model does, else the model's own.

    Args:
        model: in place on its device, in evaluation mode.
        version: of the weights it has.
        pictures: see `ModelForward`.

    Raises:
        ValueError: the model does not give the same token by token as for a whole text.
    """
    own = ModelForward(model, version, pictures)
    chosen = own
    if fits(model):
        lean = LeanForward(model, version)
        chosen = lean if _agree(own, lean) else own
    if chosen is own:
        own.prove()
    chosen.continues = continues(chosen)
    return chosen


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """How many tokens each layer sees at most, itself included; None for all."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def fits(model: PreTrainedModel) -> bool:
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
        str(getattr(trunk.rotary_emb, "rope_type", None)) in _ROTATIONS  # models with several have a dict
        and hasattr(trunk.norm, "variance_epsilon")
        and (model.config.model_type in _WINDOWED or not any(windows_of(model)))
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
    """Whether both give the same logits for made-up texts, reading and then stepping, with padding and without."""
    device = own.device
    vocabulary = lean.vocabulary
    ids = (torch.arange(14, device=device).view(2, 7) * 7919) % vocabulary
    ragged = torch.ones((2, 6), dtype=torch.bool, device=device)
    ragged[0, :2] = False
    for real in (ragged, None):
        lengths = np.array([4, 6] if real is not None else [6, 6])
        results = []
        for forward in (own, lean):
            first, read = forward.read(ids[:, :6], real)
            band = Band(read, 1)
            band.place(np.arange(2), lengths, read, torch.arange(2, device=device))
            second = forward.step(ids[:, 6], torch.from_numpy(lengths).to(device), [band])
            results.append(torch.stack([first, second]).float())
        theirs, ours = results
        if not bool(((theirs - ours).abs() <= tolerance(own.dtype) * theirs.abs().max()).all()):
            return False
    return True
