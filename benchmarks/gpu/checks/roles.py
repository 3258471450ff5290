"""Trainer and rollout as a program of one's own spawns them, and judged groups to train on."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.checks.parts import ENGINES_DTYPE, TOKENIZER, prompts
from benchmarks.gpu.scale import Scale
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runtime.system.system import ActorSystem


async def spawn_trainer(system: ActorSystem, scale: Scale, **given: Any) -> Any:
    """The trainer role; `given` as for `system.spawn` and `Trainer.setup`."""
    settings = {
        "hosts": [0], "name": "trainer", "model": str(scale.model_dir("1.5B")), "tokenizer": TOKENIZER,
        "dtype": ENGINES_DTYPE[scale.dtype], "lr": 1e-4, "micro_batch_tokens": scale.of(8192, 512),
        "publishes": ENGINES_DTYPE[scale.dtype],
    }  # fmt: skip
    return await system.spawn(Trainer, **{**settings, **given})


async def spawn_rollout(system: ActorSystem, scale: Scale, **given: Any) -> Any:
    """The rollout role; `given` as for `system.spawn` and `Rollout.setup`."""
    settings = {
        "hosts": [0], "name": "rollout", "model": str(scale.model_dir("1.5B")), "tokenizer": TOKENIZER,
        "dtype": ENGINES_DTYPE[scale.dtype], "max_rows": scale.of(64, 8), "max_new_tokens": scale.of(128, 8),
    }  # fmt: skip
    return await system.spawn(Rollout, **{**settings, **given})


def asked(scale: Scale, count: int, first: int = 0) -> list[Prompt]:
    """Prompts of different lengths; the same for the same numbers."""
    lengths = [scale.of(40, 6) + (7 * number) % 29 for number in range(count)]
    ids = prompts(scale, lengths, seed=100 + first)
    return [Prompt(first + number, token_ids) for number, token_ids in enumerate(ids)]


def judged(scale: Scale, step: int) -> list[Group]:
    """Groups of four answers with rewards, the batch of a step."""
    rng = np.random.default_rng(step)
    found = []
    for prompt in asked(scale, scale.of(8, 3), first=100 * step):
        answers = prompts(scale, rng.integers(4, scale.of(200, 12), 4).tolist(), seed=step)
        samples = [
            Sample(
                prompt, index, ids, np.full(len(ids), -7.0, np.float32), np.zeros(len(ids), np.int32), "", False,
                reward=float(index % 2), outcome="ok",
            )
            for index, ids in enumerate(answers)
        ]  # fmt: skip
        found.append(Group(prompt, tuple(samples)))
    return found
