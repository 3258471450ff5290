"""A rollout over all ranks of a job, with and without its last answers being gathered on fewer of them."""

from __future__ import annotations

import sys
from typing import Any

import torch

import rlinf
from rlinf import Stream, endpoint
from rlinf.actors import tail_migration
from rlinf.actors.rollout import Rollout
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.toy_tasks import PromptStream, make_task
from rlinf.placement.rescale import DecodeCost
from tests.actors import toys

TASK = make_task("copy", digits=2)
TRIES = 20
"""Whether ranks still have answers under way when the last prompt is read depends on who is quicker, so it is tried
until something moves; the answers are the same each time."""


class Moving(Rollout):
    """Counts what it took from others, and when its own calls ended."""

    async def setup(self, **settings: Any) -> None:
        self.taken = 0
        await super().setup(**settings)

    @endpoint
    async def rescale_take(self, key: Any, groups: Any, version: int) -> Any:
        report = await super().rescale_take(key, groups, version)
        self.taken += len(groups) if report is not None else 0
        return report

    @endpoint
    async def history(self) -> tuple[int, int, int]:
        """Groups taken; what is still known of calls and of their ranks."""
        return self.taken, len(self._in_flight.calls), len(self._tables)


async def main(system: rlinf.ActorSystem) -> None:
    prompts = PromptStream(TASK.train, load_tokenizer(TASK.tokenizer), 0).take(12)
    results = {}
    for rescale in (False, True):
        rollout = await system.spawn(
            Moving, name=f"rollout-{rescale}", rescale=rescale, model=toys.configuration(), tokenizer=TASK.tokenizer,
            max_new_tokens=150, temperature=4.0, max_rows=6,
        )  # fmt: skip
        for _ in range(TRIES):
            groups = [group async for group in rollout.generate(Stream.of(prompts), n=3)]
            history = await rollout.history()
            if not rescale or any(taken for taken, _, _ in history):
                break
        results[rescale] = {"groups": groups, "history": history}
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    tail_migration.fit = lambda sums: DecodeCost(1.0, 1e-6)  # timings of so small a model on shared cores say nothing
    rlinf.run(main)
