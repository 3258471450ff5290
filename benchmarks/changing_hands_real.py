"""`torchrun --standalone --nproc-per-node 2 -m benchmarks.changing_hands_real`: the same for real, on two processes.

Rollout and trainer share both devices. One prompt's answers are much longer than all others, which end early. Steps of
a trainer that goes in step and of one that goes at its own pace take turns, so that whatever else the machine does
slows down both. Engine, trainer and leases are those of a run; lengths are given and rewards drawn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import rlinf
from rlinf.actors import rollout as rollouts
from rlinf.actors.rollout import GenerateCall, PartialGroup, Rollout
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group, Prompt
from rlinf.engines.base import Sampling
from rlinf.runtime.streams.stream import Stream

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ALPHABET = {"characters": "0123456789>"}
ANSWERS = 4
"""Answers to each prompt."""


class GivenLengths(GenerateCall):
    """Answers that are as long as their prompt's right answer says."""

    def new_group(self, prompt: Prompt, seeds: Iterable[int], sampling: Sampling) -> PartialGroup:
        """See `GenerateCall`."""
        length = int(prompt.answer)
        return super().new_group(prompt, seeds, replace(sampling, min_new_tokens=length, max_new_tokens=length))


class Told(Rollout):
    """A rollout that gives answers of given lengths, with rewards."""

    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        """Set up like the rollout."""
        mock.patch.object(rollouts, "GenerateCall", GivenLengths).start()
        await super().setup(**settings)

    async def _groups(self, answered: Any) -> list[Group]:
        groups = await super()._groups(answered)
        return [
            Group(group.prompt, tuple(replace(one, reward=float(one.index % 2), outcome="ok") for one in group.samples))
            for group in groups
        ]


async def main(system: rlinf.ActorSystem) -> None:
    """Take turns, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=7, help="of each, without the first, which warms up")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--short", type=int, default=48, help="tokens of all answers but one prompt's")
    parser.add_argument("--long", type=int, default=900, help="tokens of those")
    asked = parser.parse_args()
    ranks = range(system.hosts)
    shared = {"model": MODEL, "tokenizer": ALPHABET, "hosts": [*ranks], "devices": [*ranks]}
    rollout = await system.spawn(Told, name="rollout", max_new_tokens=asked.long, max_rows=16, **shared)
    trainers = {
        order: await system.spawn(
            Trainer,
            name=f"trainer_{order}",
            order=order,
            sharding="replicate",
            micro_batch_tokens=512,
            lr=0.0,
            **shared,
        )
        for order in ("arrival", "free")
    }
    took: dict[str, list[float]] = {order: [] for order in trainers}
    for step in range(asked.steps + 1):
        # the long one is neither first nor last: a rank that begins with it has answered its others beside it
        prompts = [
            Prompt(number, np.array([2, 3, 4]), answer=str(asked.long if number == asked.prompts // 2 else asked.short))
            for number in range(asked.prompts)
        ]
        for order, trainer in trainers.items():
            start = time.perf_counter()
            await trainer.train(rollout.generate(Stream.of(prompts), n=ANSWERS))
            took[order] += [time.perf_counter() - start] if step else []
    for order, seconds in took.items():
        print(f"{order:8} {np.median(seconds):.2f} s  ({', '.join(f'{each:.2f}' for each in sorted(seconds))})")
    ratios = np.divide(took["arrival"], took["free"])
    print(f"at their own pace: {np.median(ratios):.2f} x steps/s ({ratios.min():.2f} to {ratios.max():.2f})")


if __name__ == "__main__":
    rlinf.run(main)
