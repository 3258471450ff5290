"""Opponents of `benchmarks.real` that run in its own process: transformers' `generate`, and a plain training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed, Row, pack
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.fsdp import Learner

PROMPTS, ANSWERS, PROMPT, ANSWER = 2, 4, 24, (8, 24)
"""Sizes of what a turn of the trainers learns from: tokens of a prompt, and the fewest and most of an answer."""
LR = 1e-6


def generators(model: Path, prompts: np.ndarray, new: int) -> dict[str, Callable[[], float]]:
    """`generate` in float32 by cache: functions that answer prompts, int64 [rows, tokens], in one batch, and return the
    tokens per processor second."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return {f"generate, {cache} cache": _generator(net, prompts, new, cache) for cache in ("static", "dynamic")}


def _generator(net: PreTrainedModel, prompts: np.ndarray, new: int, cache: str) -> Callable[[], float]:
    ids = torch.from_numpy(prompts)
    kind = {"static": {"cache_implementation": "static"}, "dynamic": {}}[cache]
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, **kind}

    def turn() -> float:
        start = time.process_time()
        answers = net.generate(ids, attention_mask=torch.ones_like(ids), **how)  # type: ignore[operator]
        return answers[:, ids.shape[1] :].numel() / (time.process_time() - start)

    return turn


def rows_to_learn() -> list[Row]:
    """Answers of many lengths to a few prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 49_000, PROMPT) for _ in range(PROMPTS)]
    lengths = rng.integers(ANSWER[0], ANSWER[1] + 1, PROMPTS * ANSWERS)
    return [
        Row(prompts[number // ANSWERS], rng.integers(100, 49_000, size), np.full(size, -3, np.float32), 1.0)
        for number, size in enumerate(lengths)
    ]


def ours(model: Path, rows: Sequence[Row], dtype: torch.dtype) -> tuple[Callable[[], None], str]:
    """A function that takes an optimizer step as our trainer does in a precision, and words on what it computes."""
    policy = PolicyModel(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    policy.compute_in(dtype)
    policy.settle()
    learner, batch = Learner(policy, LearningSettings(lr=LR)), pack(rows)

    def loss(batch: Packed, outputs: tuple[Tensor, ...]) -> LossSum:
        return LossSum(_clipped(outputs[0], batch.old_logprobs), torch.tensor(float(len(batch.targets))))

    def step() -> None:
        learner.accumulate([batch], loss)
        learner.step()

    return step, f"packed, {len(batch.ids)} tokens: prompts once"


def plain(model: Path, rows: Sequence[Row]) -> tuple[Callable[[], None], str]:
    """A plain loop by hand: sequences padded to one length, log-softmax over the logits of answers, fused AdamW."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0, fused=True)
    ids = torch.zeros((len(rows), max(row.size for row in rows)), dtype=torch.int64)
    learned = torch.zeros_like(ids, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : row.size] = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
        learned[number, len(row.prompt_ids) : row.size] = True
    old = torch.from_numpy(np.concatenate([row.old_logprobs for row in rows if row.old_logprobs is not None]))

    def step() -> None:
        optimizer.zero_grad()
        logits = net(input_ids=ids[:, :-1], use_cache=False).logits[learned[:, 1:]]
        logprobs = logits.log_softmax(-1).gather(1, ids[learned][:, None])[:, 0]
        (_clipped(logprobs, old) / len(old)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step, f"padded, {ids[:, :-1].numel()} tokens"


def _clipped(logprobs: Tensor, old: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-ratio, -ratio.clamp(0.8, 1.2)).sum()
