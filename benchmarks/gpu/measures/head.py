"""The trainer's head, hidden states to log-probs and back, per 1,024 tokens: matrix products against all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.measuring.clock import Figures, Parts, device_seconds, told
from benchmarks.gpu.measuring.limits import Limits, limits_of
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.models.language.kernels import FusedHead
from rlinf.models.language.policy_model import token_logprobs


def head(scale: Scale) -> Outcome:
    """Measure the 1.5B model's head as a trainer computes it here, with and without a temperature, and unfused."""
    parts, limits = Parts("head", scale), limits_of(scale)
    if scale.rehearse:
        torch._dynamo.config.disable = True  # compiling for a CPU takes longer than all measures together
    fused = {"fused": FusedHead.make()}
    parts.make("", lambda: passes(scale, limits, fused, temperature=None), expected=5.0)
    parts.make("temperature", lambda: passes(scale, limits, fused, temperature=0.7), expected=3.0)
    parts.make("unfused", lambda: passes(scale, limits, {}, temperature=None), expected=1.0)
    return parts.outcome()


def passes(scale: Scale, limits: Limits, fused: Mapping[str, Any], *, temperature: float | None) -> Figures:
    """Forward and backward pass over chunks of 1,024 tokens, and the products in them alone."""
    config, device, dtype = scale.config("1.5B"), scale.device, scale.dtype
    chunk = scale.of(1024, 32)
    count = 4 * chunk
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(count, config.hidden_size, device=device, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(config.vocab_size, config.hidden_size, device=device, generator=generator)
    weight = weight.mul_(0.02).to(dtype).requires_grad_()
    targets = torch.randint(config.vocab_size, (count,), device=device, generator=generator)
    heat = None if temperature is None else torch.full((count,), temperature, device=device)
    rounds = scale.of(8, 2)

    def whole() -> None:
        hidden.grad = weight.grad = None
        logprobs, _ = token_logprobs(hidden, weight, None, targets, heat, chunk=chunk, **fused)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    logits = torch.empty(chunk, config.vocab_size, dtype=dtype, device=device)
    back, into = torch.empty_like(hidden[:chunk]), torch.empty_like(weight)

    @torch.no_grad()
    def products() -> None:
        for part in hidden.split(chunk):
            torch.mm(part, weight.t(), out=logits)  # forward
            torch.mm(part, weight.t(), out=logits)  # made again for the gradient
            torch.mm(logits, weight, out=back)
            torch.mm(logits.t(), part, out=into)

    both = told("ms_per_1024", [1e3 * one * 1024 / count for one in device_seconds(whole, device, rounds)])
    alone = told("matmul_ms_per_1024", [1e3 * one * 1024 / count for one in device_seconds(products, device, rounds)])
    all_ms, matmul_ms = float(both["ms_per_1024"]), float(alone["matmul_ms_per_1024"])
    flops = 8 * 1024 * config.vocab_size * config.hidden_size
    return {
        **both,
        **alone,
        "rest_ms_per_1024": all_ms - matmul_ms,
        "rest_share": (all_ms - matmul_ms) / all_ms,
        "matmul_limit_ms_per_1024": 1e3 * flops / limits.matmul_flop_per_s,
    }
