"""Does a trainer compute in bfloat16, packed and compiled, what plain float32 says?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.gpu.checks.device import cudnn_attention, emptied, kernels
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import engine, policy_gradient, prompts, requests, rows, trainer
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.models.language.policy_model import PolicyModel

GIVEN = 0.01
"""Nats by which log-probs may differ on average, whatever rounding explains."""
TURN = 2e-5
"""1 - cosine of two gradients that are the same."""
PACKED = (
    Bound("mean_error_over_rounding", most=1.5),
    Bound("largest_logprob_error_nats", most=0.2),
    Bound("gradient_turn_over_rounding", most=1.5),
    Bound("packed", equals="yes"),
    Bound("by_a_kernel", equals="yes", needs="attention kernels for packed sequences"),
    Bound("cudnn_attention_kernels", most=0),
    Bound("flash_kernels", least=1),
)
"""Rounding is what transformers' own forward in the same precision is off by, of log-probs at least `GIVEN`, of the
gradient, by 1 - cosine with that in float32, `TURN`."""
ENGINE = (
    Bound("mean_error_over_rounding", most=2.0),
    Bound("largest_logprob_error_nats", most=0.3),
    Bound("tokens", least=16),
)
"""Two that round independently differ by sqrt(2) as much as each from the truth. (Random weights of the full shape, on
a CPU: 0.016 nats.)"""
COMPILED = (
    Bound("compiled", equals="yes"),
    Bound("plain", equals="uncompiled"),
    Bound("gradient_turn_over_plain", most=1.5),
    Bound("mean_difference_over_given", most=2.0),
    Bound("graphs", least=1),
    Bound("graphs_of_later_lengths", most=0),
)
"""Fused arithmetic rounds less often: the two are no closer than either is to float32, from whose gradient compiled
blocks may be turned by 1.5 times as much as plain ones."""


def beside_float32(scale: Scale) -> Outcome:
    """Log-probs and gradient of a packed micro-batch, beside transformers in float32, one sequence at a time."""
    # Groups of four share their prompt, as those of GRPO do; lengths have all residues modulo 8.
    lengths = [(scale.of(96, 9) + 8 * (n // 4), scale.of(120, 5) + 5 * n) for n in range(scale.of(16, 8))]
    batch = _grouped(rows(scale, lengths))
    with trainer(scale, gradient_checkpointing=True) as back:
        packed = pack(batch)
        with kernels(scale.device) as found:
            ours = back.outputs(packed)[0].float().cpu()
        optimization = back.optimization(LearningSettings(lr=1e-6))
        optimization.accumulate([packed], policy_gradient)
        gradient = _gradients(back.model)
        way = {
            "attention": back.module.words,
            "packed": "yes" if back.module.packs else "no",
            "by_a_kernel": "yes" if back.module.kernel else "no",
        }
    rounded, rounded_gradient = by_transformers(scale, batch, scale.dtype, learned=True)
    theirs, reference = by_transformers(scale, batch, torch.float32, learned=True)
    turns = {"": turn(gradient, reference), "transformers_": turn(rounded_gradient, reference)}
    error, rounding = (ours - theirs).abs(), float((rounded - theirs).abs().mean())
    figures = {
        "tokens": len(ours),
        "mean_logprob_error_nats": float(error.mean()),
        "transformers_mean_logprob_error_nats": rounding,
        "mean_error_over_rounding": float(error.mean()) / max(GIVEN, rounding),
        "largest_logprob_error_nats": float(error.max()),
        **{f"{whose}gradient_turn": value for whose, value in turns.items()},
        "gradient_turn_over_rounding": turns[""] / max(TURN, turns["transformers_"]),
        **way,
        "cudnn_attention_kernels": cudnn_attention(found),
        "flash_kernels": sum(count for name, count in found.items() if "flash" in name.lower()),
    }
    return judge(scale, figures, PACKED)


def _grouped(batch: Sequence[Row]) -> list[Row]:
    return [Row(batch[n - n % 4].prompt_ids, row.response_ids, advantage=row.advantage) for n, row in enumerate(batch)]


def _gradients(model: Any) -> dict[str, Tensor]:
    """Gradient of each parameter by name, whole, where they are."""
    found = {}
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def compiled(scale: Scale) -> Outcome:
    """Blocks and head compiled and checkpointed, beside neither; micro-batches of further lengths compile nothing."""
    shapes = [[(scale.of(96, 9) + n, scale.of(400, 12) + 3 * n) for n in range(count)] for count in (8, 5, 6)]
    first, *others = (rows(scale, lengths) for lengths in shapes)
    batches = [pack(batch) for batch in (first, *others)]

    def learned(on: bool) -> tuple[str, Tensor, dict[str, Tensor], list[int]]:
        with trainer(scale, compile=on, gradient_checkpointing=on) as back:
            optimization = back.optimization(LearningSettings(lr=1e-6))
            logprobs = back.outputs(batches[0])[0].float().cpu()
            optimization.accumulate(batches[:1], policy_gradient)
            gradient, graphs = _gradients(back.model), [_graphs()]
            for batch in batches[1:]:
                optimization.accumulate([batch], policy_gradient)
                graphs.append(_graphs())
            return back.module.words, logprobs, gradient, graphs

    plain_words, plain, expected, _ = learned(False)
    with nullcontext() if scale.device.type == "cuda" else interpreted():
        words, found, gradient, graphs = learned(True)
    _, reference = by_transformers(scale, first, torch.float32, learned=True)
    turns = {"": turn(gradient, reference), "plain_": turn(expected, reference)}
    error = (found - plain).abs()
    figures = {
        "compiled": "yes" if words.endswith("blocks and head compiled") else f"no: {words}",
        "plain": "uncompiled" if "compiled" not in plain_words else plain_words,
        **{f"{whose}gradient_turn": value for whose, value in turns.items()},
        "gradient_turn_over_plain": turns[""] / max(TURN, turns["plain_"]),
        "mean_logprob_difference_nats": float(error.mean()),
        "largest_logprob_difference_nats": float(error.max()),
        "mean_difference_over_given": float(error.mean()) / GIVEN,
        "graphs": graphs[0],
        "graphs_of_later_lengths": graphs[-1] - graphs[1],
    }
    return judge(scale, figures, COMPILED)


def _graphs() -> int:
    """Compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def interpreted() -> Iterator[None]:
    """Graphs are traced and run as they are: kernels made of them take a CPU half a minute."""
    with mock.patch.object(PolicyModel, "compiler", "aot_eager"):
        yield


def by_transformers(
    scale: Scale, batch: Sequence[Row], dtype: torch.dtype, *, learned: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all answers end to end, by transformers alone, one sequence at a time; where something is learned,
    the gradient of `policy_gradient` too."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(scale.model_dir("1.5B"), dtype=dtype)
    model = model.to(scale.device).eval()
    logprobs = []
    for row in batch:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).to(scale.device)
        begun = len(row.prompt_ids)
        with torch.set_grad_enabled(learned):
            logits = model(ids[None, :-1], use_cache=False).logits[0, begun - 1 :].float()
            taken = torch.log_softmax(logits, -1).gather(1, ids[begun:, None])[:, 0]
            if learned:
                (-float(row.advantage) * taken).sum().backward()  # type: ignore[no-untyped-call]
        logprobs.append(taken.detach().cpu())
    return torch.cat(logprobs), _gradients(model)


def turn(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """1 - cosine of two gradients as long vectors; sums in float64. They are of the same names."""
    if one.keys() != other.keys():
        raise ValueError(f"gradients of other parameters: {sorted(one.keys() ^ other.keys())[:3]}")
    sums = np.zeros(3)
    for name, a in one.items():
        a, b = a.double().flatten(), other[name].double().flatten().to(a.device)
        sums += [float(a @ b), float(a @ a), float(b @ b)]
    return max(0.0, 1.0 - float(sums[0] / math.sqrt(sums[1] * sums[2])))


def beside_engine(scale: Scale) -> Outcome:
    """Log-probs of sampled answers as the engine told them and as the trainer finds them."""
    asked = prompts(scale, [scale.of(33, 5) + 3 * number for number in range(scale.of(64, 8))])
    new = scale.of(64, 12)

    async def answered() -> list[Any]:
        async with engine(scale, max_rows=len(asked)) as made:
            return await made.answers(requests(asked, new))

    found = asyncio.run(answered())
    emptied(scale.device)
    batch = [Row(prompt, one.response_ids) for prompt, one in zip(asked, found, strict=True)]
    with trainer(scale) as back:
        scored = back.outputs(pack(batch))[0].float().cpu().numpy()
    error = np.abs(scored - np.concatenate([one.logprobs for one in found]))
    exact, rounded = (by_transformers(scale, batch, dtype)[0] for dtype in (torch.float32, scale.dtype))
    rounding = float((rounded - exact).abs().mean())
    figures = {
        "mean_logprob_error_nats": float(error.mean()),
        "transformers_mean_logprob_error_nats": rounding,
        "mean_error_over_rounding": float(error.mean()) / max(GIVEN, rounding),
        "largest_logprob_error_nats": float(error.max()),
        "tokens": len(error),
    }
    return judge(scale, figures, ENGINE)
