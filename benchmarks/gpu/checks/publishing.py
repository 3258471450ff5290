"""Do engines have the trainer's weights, cast, once they were published: in a process, between two on one card?"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rlinf
from benchmarks.gpu.checks import ranks
from benchmarks.gpu.checks.device import SHARED, emptied
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import TOKENIZER, engine, uncompiled
from benchmarks.gpu.checks.roles import asked, judged, spawn_rollout, spawn_trainer
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.data.tokenizer import load_tokenizer, padding_ids
from rlinf.data.weights import Weights
from rlinf.engines.base import Request, Sampling
from rlinf.runtime.system.system import ActorSystem

PUBLISHED = (
    *(Bound(f"{way}_tensors", least=1) for way in ("direct", "between")),
    *(Bound(f"{way}_tensors_unlike_the_masters", most=0) for way in ("direct", "between")),
    *(Bound(f"{way}_checksums", equals="agree") for way in ("direct", "between")),
    *(Bound(f"{way}_answers_unlike_the_masters", most=0) for way in ("direct", "between")),
    *(Bound(f"{way}_answers_that_training_changed", least=1) for way in ("direct", "between")),
    *(Bound(f"{way}_dtype", equals="bfloat16", needs="bfloat16") for way in ("direct", "between")),
    *(Bound(f"{way}_host_bytes", most=0, needs=SHARED) for way in ("direct", "between")),
    *(Bound(f"{way}_device_bytes", least=1, needs=SHARED) for way in ("direct", "between")),
    Bound("between_ipc_share", least=0.99, needs=SHARED),
)
ANSWERS = 4


def publish(scale: Scale) -> Outcome:
    """A step of training, then `rollout.load(trainer.weights())`: directly, and from process to process."""
    uncompiled(scale)
    figures = {f"direct_{name}": value for name, value in asyncio.run(direct(scale)).items()}
    emptied(scale.device)
    ended = ranks.run(scale, "publishing:between", 2, scale.limit * 0.6)
    print(ended.output)
    figures |= {f"between_{name}": value for name, value in ended.told.items()}
    return judge(scale, {**figures, "between_exit": str(ended.codes)}, PUBLISHED)


async def direct(scale: Scale) -> dict[str, Any]:
    """Trainer and rollout in this process."""
    async with ActorSystem.local() as system:
        return await _published(system, scale, 0)


def between(scale: Scale) -> None:
    """In each of two ranks: the trainer is on one, the rollout on the other."""
    uncompiled(scale)

    async def main(system: ActorSystem) -> None:
        ranks.tell(await _published(system, scale, 1))

    rlinf.run(main)


async def _published(system: ActorSystem, scale: Scale, host: int) -> dict[str, Any]:
    """Train, publish, and compare: the tensors with the trainer's float32, cast; answers with those of an engine that
    was made of these."""
    trainer = await spawn_trainer(system, scale, lr=1e-2, gradient_checkpointing=True)
    rollout = await spawn_rollout(system, scale, hosts=[host])
    before = await _answers(rollout, scale)
    await trainer.train(judged(scale, 0))
    begun = time.perf_counter()
    await rollout.load(trainer.weights())
    seconds = time.perf_counter() - begun
    trace = scale.work / f"publish-{host}.json"
    await system.trace(trace)
    sent, moved = ranks.routes(trace), ranks.parts(trace)
    after = await _answers(rollout, scale)
    await system.kill(rollout)
    weights: Weights = await trainer.weights()
    masters = {name.removeprefix("model."): tensor for name, tensor in (await trainer[0].export_state()).shards.items()}
    published = {name: tensor.to(scale.dtype).cpu() for name, tensor in weights.named()}
    try:
        weights.verify()
        checksums = "agree"
    except ValueError as error:
        checksums = str(error)
    await system.kill(trainer)
    expected = await _of_masters(scale, masters)
    return {
        "tensors": len(published),
        "tensors_unlike_the_masters": sum(
            not torch.equal(tensor, masters[name].to(scale.dtype)) for name, tensor in published.items()
        ),
        "checksums": checksums,
        "answers_unlike_the_masters": _unlike(after, expected),
        "answers_that_training_changed": _unlike(before, after),
        "published_bytes": weights.nbytes,
        "dtype": str(weights.buckets[0].dtype).removeprefix("torch."),
        "load_s": seconds,
        "host_bytes": moved["weights/host_bytes"],
        "device_bytes": moved["weights/device_bytes"],
        "ipc_share": sent.get("ipc", 0) / max(1, sum(sent.values())),
        "routes": str(sent),
    }


Answers = list[tuple[np.ndarray, np.ndarray]]


async def _answers(rollout: Any, scale: Scale) -> Answers:
    """Tokens and log-probs of greedy answers, one after the other, so that each is computed alone."""
    found = []
    for prompt in asked(scale, ANSWERS):
        one = await rollout[0].answer(prompt, seed=0, temperature=0.0, max_new_tokens=8)
        found.append((copy.copy(one.response_ids), copy.copy(one.logprobs)))
    return found


async def _of_masters(scale: Scale, masters: Mapping[str, Tensor]) -> Answers:
    """Answers by an engine whose model was filled with the masters by hand."""
    config, tokenizer = scale.config("1.5B"), load_tokenizer(TOKENIZER)
    ends = (config.eos_token_id, tokenizer.eos_token_id)
    padding = tuple(id for id in padding_ids(tokenizer, config.vocab_size) if id not in ends)  # as a rollout's engine
    async with engine(scale, max_rows=scale.of(64, 8), padding=padding) as made:
        with torch.no_grad():
            for name, parameter in made.model.named_parameters():
                parameter.copy_(masters[name])
        rules = Sampling(8, 0.0, stop_ids=ends)
        found = [(await made.answers([Request(0, prompt.token_ids, rules)]))[0] for prompt in asked(scale, ANSWERS)]
    return [(one.response_ids, one.logprobs) for one in found]


def _unlike(some: Answers, others: Answers) -> int:
    """Answers of which a token or a bit of a log-prob differs."""
    return sum(not (np.array_equal(a, c) and np.array_equal(b, d)) for (a, b), (c, d) in zip(some, others, strict=True))
