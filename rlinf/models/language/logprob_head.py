"""From hidden states to log-probs of given tokens, without ever holding [tokens, vocabulary] for the batch.

In: the last hidden states where a response token is predicted, and the output embedding. Out: log-prob and entropy of
each token. Logits are made chunk by chunk, used, and made again for the gradient: one more product, against memory of
4 bytes x tokens x vocabulary x (three or four copies). On accelerators `kernels/head.py` computes what is no product of
matrices; what it gives is what the operations here give, one after the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlinf.algos.tensor.masks import wide
from rlinf.models.language.kernels.head import FusedHead

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of configurations by which models change their logits after the output embedding."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    *,
    chunk: int,
    entropy_slope: bool = False,
    fused: FusedHead | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy, under softmax((hidden weightᵀ + bias) / temperature).

    Args:
        hidden: [tokens, width]
        weight: [vocabulary, width]
        bias: [vocabulary], or None.
        targets: int64 [tokens]
        temperature: of each token, float32 [tokens]; None for 1.
        chunk: tokens whose logits exist at a time.
        entropy_slope: entropies are differentiable like log-probs; otherwise they are not.
        fused: what computes all but products of matrices; None for torch's operations one after the other.

    Returns:
        Log-probs, differentiable in hidden, weight and bias; and entropies; nats, [tokens], at least float32.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, entropy_slope, fused)
    return logprobs, entropy


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, *, entropy_slope: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from logits [tokens, vocabulary] that are there already."""
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    all_logprobs = torch.log_softmax(logits, dim=-1)
    with nullcontext() if entropy_slope else torch.no_grad():
        finite = all_logprobs.masked_fill(all_logprobs == -torch.inf, 0.0)
        entropy = -(all_logprobs.exp() * finite).sum(dim=-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropy


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(logits / T), made again in each chunk:

    d logp_t / d logits = (one_hot(t) - p) / T        dH / d logits = -p (log p + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        chunk: int,
        entropy_slope: bool,
        fused: FusedHead | None,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        logprobs = torch.empty(count, dtype=wide(hidden[:0]).dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        norms = torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            if fused is not None:
                raw, warmth = F.linear(hidden[part], weight, bias), _part(temperature, part)
                logprobs[part], entropy[part], norms[part] = fused.scores(raw, targets[part], warmth)
                continue
            logits = _logits(hidden[part], weight, bias, temperature, part)
            norms[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - norms[part]
            logits.sub_(norms[part, None])
            entropy[part] = -torch.where(logits == -torch.inf, 0.0, logits.exp().mul_(logits)).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, norms, entropy if entropy_slope else None)
        ctx.chunk, ctx.fused = chunk, fused
        if not entropy_slope:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, grad_entropy = gradients
        hidden, weight, bias, targets, temperature, norms, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # allocated even for no token at all: every rank must have a gradient to reduce
        for_hidden = torch.empty_like(hidden) if wants_hidden else None
        for_weight = torch.zeros(weight.shape, dtype=norms.dtype, device=weight.device) if wants_weight else None
        for_bias = torch.zeros_like(bias, dtype=norms.dtype) if wants_bias else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            given = (targets[part], _part(temperature, part), norms[part], grad[part])
            asked = (None, None) if entropy is None else (grad_entropy[part], entropy[part])
            if ctx.fused is None:
                slope = _slope(_logits(hidden[part], weight, bias, temperature, part), *given, *asked)
                if for_bias is not None:
                    for_bias += slope.sum(dim=0)
                slope = slope.to(hidden.dtype)
            elif for_bias is None:
                slope = ctx.fused.slopes(F.linear(hidden[part], weight, bias), *given, *asked)
            else:
                slope, summed = ctx.fused.slopes_and_bias(F.linear(hidden[part], weight, bias), *given, *asked)
                for_bias += summed
            if for_hidden is not None:
                torch.mm(slope, weight, out=for_hidden[part])
            if for_weight is not None:
                _add_product(for_weight, slope, hidden[part])
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Add slopeᵀ hidden to a sum in float32 without another tensor of its size, where the device can."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), hidden)
    elif slope.device.type == "cuda" and total.dtype == torch.float32:
        torch.addmm(total, slope.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total += slope.t() @ hidden


def _slope(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    norms: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """What `kernels.head.slopes` gives, of logits that are wide and divided by the temperature already; used up."""
    slope = logits.sub_(norms[:, None])
    if grad_entropy is None or entropy is None:
        slope.exp_().neg_()
        slope.scatter_add_(1, targets[:, None], torch.ones_like(slope[:, :1]))
        return slope.mul_((grad if temperature is None else grad / temperature)[:, None])
    slope = _both_slopes(slope, grad[:, None], grad_entropy[:, None], entropy[:, None])
    slope.scatter_add_(1, targets[:, None], grad[:, None])
    return slope if temperature is None else slope.div_(temperature[:, None])


def _both_slopes(logp: Tensor, grad: Tensor, grad_entropy: Tensor, entropy: Tensor) -> Tensor:
    """-p (grad + grad_entropy (log p + H)): what log-probs and entropies together ask of logits, but for the targets'.

    Args:
        logp: of every token of the vocabulary, [tokens, vocabulary]; used up.
        grad, grad_entropy, entropy: [tokens, 1].
    """
    p = logp.exp()
    finite = logp.masked_fill_(logp == -torch.inf, 0.0)
    return finite.add_(entropy).mul_(grad_entropy).add_(grad).mul_(p).neg_()


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, part: slice) -> Tensor:
    """At least float32, [tokens, vocabulary], ours to overwrite."""
    logits = wide(F.linear(hidden, weight, bias))
    return logits if temperature is None else logits.div_(temperature[part, None])


def head_is_plain(model: PreTrainedModel) -> bool:
    """Whether nothing is known to be done to logits; small ones, as of a new model, would not show it in a trial."""
    config = model.config.get_text_config()
    changed = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES)
    return type(model.get_output_embeddings()) is nn.Linear and not changed
