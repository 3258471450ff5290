"""One `generate` over all ranks of a job that goes on while prompts come in lots, weights change and it pauses."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch

import rlinf
from rlinf import Stream, endpoint
from rlinf.actors.rollout import Rollout
from rlinf.data.datasets.toy_tasks import PromptStream, make_task
from rlinf.data.sample import Prompt
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.models.language.build import build_model
from tests.actors import toys

TASK = make_task("copy", digits=2)
N, ROWS = 2, 6
LONG = {"temperature": 4.0, "min_new_tokens": 150}


class Watched(Rollout):
    """Tells what it has under way."""

    @endpoint
    async def begun(self) -> tuple[list[int], int]:
        """Prompts that it has taken and not answered, and how many answers they lack."""
        groups = [group for group in await self.in_flight() if group.left]
        return [group.prompt.id for group in groups], sum(len(group.left) for group in groups)

    @endpoint
    async def idle(self) -> bool:
        """Nothing is left of any call."""
        return not (self._calls or self._engine._batch.live or self._engine._scheduler.calls)


async def main(system: rlinf.ActorSystem) -> None:
    model = toys.configuration()
    tokenizer = load_tokenizer(TASK.tokenizer)
    drawn = PromptStream(TASK.train, tokenizer, 0).take(60)
    prompts = iter(drawn)
    rollout = await system.spawn(
        Watched, name="rollout", model=model, tokenizer=TASK.tokenizer, max_new_tokens=300, max_rows=ROWS
    )
    queue: asyncio.Queue[Prompt | None] = asyncio.Queue()

    async def coming() -> Any:
        while (prompt := await queue.get()) is not None:
            yield prompt

    most: list[int] = []
    starved: list[bool] = []
    queued = 0

    def lot(count: int) -> None:
        nonlocal queued
        queued += count
        for _ in range(count):
            queue.put_nowait(next(prompts))

    async def taken(reached: Any) -> list[list[int]]:
        while True:
            told = await rollout.begun()
            most.append(max(lacking for _, lacking in told))
            waiting = queued - len(groups) - sum(len(ids) for ids, _ in told)
            starved.append(waiting >= 4 and not all(ids for ids, _ in told))
            if reached(begun := [ids for ids, _ in told]):
                return begun
            await asyncio.sleep(0.02)

    groups: list[Any] = []
    stream = rollout.generate(Stream.of(coming()), n=N, **LONG)

    async def consume() -> None:
        async for group in stream:
            groups.append(group)

    consuming = asyncio.create_task(consume())
    lot(1)
    await taken(lambda begun: sum(map(len, begun)) == 1)
    lot(30)
    await taken(lambda begun: all(N * len(some) >= ROWS for some in begun))
    starved.clear()
    built = build_model(model, tokenizer, seed=1)
    await rollout.load(Weights.pack(((name, tensor) for name, tensor in built.named_parameters()), 1))
    await rollout.pause()
    still = await taken(all)
    dropped = await rollout.drop([some[0] for some in still])
    await rollout.resume()
    await taken(lambda begun: len(groups) == queued - len(still))
    lot(2)  # with room everywhere
    await taken(lambda begun: len(groups) == queued - len(still))
    await rollout.settled([group.id for group in groups])
    left = [len(some) for some in await rollout.in_flight()]
    lot(8)
    await taken(lambda begun: all(begun))
    consuming.cancel()
    await stream.close()
    while not all(await rollout.idle()):
        await asyncio.sleep(0.02)
    result = {
        "most": max(most), "starved": starved, "dropped": dropped, "still": still, "left": left,
        "groups": groups, "queued": queued,
    }  # fmt: skip
    torch.save(result, sys.argv[1])


if __name__ == "__main__":
    rlinf.run(main)
