"""Generators of text in `benchmarks.engine`: our engine, transformers' `generate`, and a loop written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers import engine as transformers_engine
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.model import ModelForward

SIZES = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 512},
    "0.1M": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 20},
}
"""Qwen2 with 4 heads and 2 key-value heads; the smaller one is the quickstart's."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Prompts to be answered, and how."""

    size: str
    """Size of the model, a key of `SIZES`."""
    prompts: Sequence[np.ndarray]
    """int64 [prompt] each."""
    lengths: Sequence[int]
    """Tokens that each answer has."""

    @property
    def tokens(self) -> int:
        """To generate."""
        return sum(self.lengths)

    @property
    def ragged(self) -> bool:
        """Prompts or answers differ in length."""
        return len({len(prompt) for prompt in self.prompts}) > 1 or len(set(self.lengths)) > 1


def model(size: str) -> PreTrainedModel:
    """A new model; the same every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, **SIZES[size],
    )  # fmt: skip
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return built


def ours(work: Work, max_rows: int, *, lean: bool = True) -> Callable[[], None]:
    """Our engine, warm, with so many rows; not `lean`, it decodes by the model's own forward."""
    with contextlib.nullcontext() if lean else mock.patch.object(transformers_engine, "fastest", ModelForward):
        engine = TransformersEngine(model(work.size), max_rows=max_rows)
    requests = [
        Request(number, prompt, Sampling(length), number)
        for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]

    async def answer() -> int:
        return sum([len(completion.response_ids) async for completion in engine.generate(requests)])

    def run() -> None:
        if (count := asyncio.run(answer())) != work.tokens:
            raise RuntimeError(f"the engine made {count} tokens, not {work.tokens}")

    return run


def generate(work: Work, **settings: Any) -> Callable[[], None]:
    """`model.generate`: one batch, prompts padded on the left, answers cut to their lengths when all are done."""
    net: Any = model(work.size)
    longest = max(map(len, work.prompts))
    ids = torch.zeros((len(work.prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    room = max(work.lengths)

    def run() -> None:
        net.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=room, eos_token_id=None, pad_token_id=0,
            **settings,
        )  # fmt: skip

    return run


def by_hand(work: Work) -> Callable[[], None]:
    """A static cache and the layers in a loop, for answers of equal length: what there is to gain without an engine."""
    if work.ragged:
        raise ValueError("the loop written by hand answers equal lengths only")
    net: Any = model(work.size)
    ids = torch.from_numpy(np.stack(work.prompts))

    def run() -> None:
        torch.manual_seed(1)
        with torch.inference_mode():
            _loop(net, ids, work.lengths[0])

    return run


def _loop(net: Any, ids: Tensor, room: int) -> Tensor:
    config, trunk = net.config, net.model
    rows, prompt = ids.shape
    size = config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, rows, config.num_key_value_heads, prompt + room, size)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    cos, sin = trunk.rotary_emb(keys, torch.arange(prompt + room)[None])
    answers = []
    logprobs = []
    start, fresh = 0, ids
    for _ in range(room):
        end = start + fresh.shape[1]
        hidden = trunk.embed_tokens(fresh)
        for number, layer in enumerate(trunk.layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed = layer.input_layernorm(hidden)
            query, key, value = (
                projection(normed).view(rows, end - start, -1, size).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = (_rotated(x, cos[:, start:end], sin[:, start:end]) for x in (query, key))
            keys[number, :, :, start:end], values[number, :, :, start:end] = key, value
            attended = F.scaled_dot_product_attention(
                query, keys[number, :, :, :end], values[number, :, :, :end], is_causal=start == 0, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(attended.transpose(1, 2).reshape(rows, end - start, -1))
            normed = layer.post_attention_layernorm(hidden)
            hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        scores = torch.log_softmax(net.lm_head(trunk.norm(hidden[:, -1])), dim=-1)
        fresh = torch.multinomial(scores.exp(), 1)
        answers.append(fresh)
        logprobs.append(scores.gather(1, fresh))
        start = end
    return torch.cat(answers, dim=1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def seconds(run: Callable[[], None]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
