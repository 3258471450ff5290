"""Roles and a flow as a user may write them: an index that finds hints, and a verifier that uses a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf import Actor, Group, endpoint
from rlinf.data.sample import Prompt
from rlinf.flows.text import filled


class Index(Actor):
    """Counts what was asked of it, and goes on counting after a restart."""

    async def setup(self, *, top: int, start: int = 0) -> None:
        self.asked, self.top = start, top

    @endpoint
    async def find(self, prompt: Prompt) -> Prompt:
        self.asked += 1
        return prompt

    @endpoint
    async def count(self) -> int:
        return self.asked

    @endpoint
    async def save(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "count.json").write_text(json.dumps(self.asked))

    @endpoint
    async def restore(self, path: str) -> None:
        self.asked = json.loads((Path(path) / "count.json").read_text())


class Verifier(Actor):
    """Adds a point to every answer, on devices that it shares."""

    @endpoint(device=True)
    async def verify(self, group: Group) -> Group:
        samples = (sample.judged(sample.reward + 1, "ok", scores={"verified": 1.0}) for sample in group.samples)
        return Group(group.prompt, tuple(samples))


async def with_index(step: Any, rollout: Any, judge: Any, trainer: Any, index: Any, verifier: Any) -> dict[str, float]:
    """GRPO with both roles in its stream."""

    def answers(prompts: Any) -> Any:
        found = index.find.map(prompts)
        return verifier.verify.map(judge.score.map(rollout.generate(found, n=step.group_size)))

    batch = filled(step, answers)
    metrics: dict[str, float] = await trainer.train(batch.groups)
    await rollout.load(trainer.weights())
    return {**metrics, "asked": float(sum(await index.count()))}
