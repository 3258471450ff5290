"""Whether a model may be run by `LeanForward`. It is not guessed from its name: its parts must fit, and its own forward
must agree."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlinf.engines.cache import Band
from rlinf.engines.forward import ModelForward
from rlinf.engines.lean import LeanForward

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
    if not fits(model):
        return own
    lean = LeanForward(model, version)
    return lean if _agree(own, lean) else own


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
        tolerance = torch.finfo(own.dtype).eps ** 0.5 / 3 * theirs.abs().max()  # 1e-4 in float32, 0.03 in bfloat16
        if not bool(((theirs - ours).abs() <= tolerance).all()):
            return False
    return True
