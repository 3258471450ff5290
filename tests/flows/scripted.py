"""Roles that take as long and answer as they are told, for tests of flows in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.streams.stream import each


def prompt(number: int) -> Prompt:
    """A prompt with this id."""
    return Prompt(number, np.array([number + 1]), text=str(number))


def group(asked: Prompt, rewards: list[float] | None) -> Group:
    """Its answers, one token each; not judged if there are no rewards."""
    return Group(
        asked,
        tuple(
            Sample(
                prompt=asked,
                index=index,
                response_ids=np.array([7]),
                logprobs=np.zeros(1, dtype=np.float32),
                versions=np.zeros(1, dtype=np.int32),
                text="7",
                truncated=False,
                reward=reward,
                outcome="ok" if reward is not None else None,
            )
            for index, reward in enumerate([None, None] if rewards is None else rewards)
        ),
    )


class Scripted(Actor):
    """Answers each prompt after its own time, all at once.

    Args:
        seconds: by prompt id.
        rewards: of the answers to each, by prompt id; None leaves them to the judge.
        lost: ids of prompts that are never answered.
        fails: id of the prompt over which it fails.
    """

    async def setup(  # type: ignore[override]
        self,
        seconds: list[float],
        rewards: list[list[float]] | None = None,
        lost: tuple[int, ...] = (),
        fails: int | None = None,
    ) -> None:
        self.seconds, self.rewards, self.lost, self.fails = seconds, rewards, lost, fails
        self.log: list[str] = []

    @endpoint
    async def generate(self, prompts: object, n: int = 2) -> AsyncIterator[Group]:
        self.log.append("began")
        done: asyncio.Queue[Prompt | None] = asyncio.Queue()

        async def answer(asked: Prompt) -> None:
            await asyncio.sleep(self.seconds[asked.id])
            done.put_nowait(None if asked.id in self.lost else asked)

        tasks = []
        left = [1]  # prompts on their way, and the reading of more

        async def read() -> None:
            async for asked in each(prompts):  # type: ignore[arg-type]
                left[0] += 1
                tasks.append(asyncio.create_task(answer(asked)))
            done.put_nowait(None)

        tasks.append(asyncio.create_task(read()))
        try:
            while left[0]:
                asked = await done.get()
                left[0] -= 1
                if asked is None:
                    continue
                if asked.id == self.fails:
                    raise RuntimeError(f"no answer to {asked.id}")
                yield group(asked, None if self.rewards is None else self.rewards[asked.id])
            self.log.append("ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.log[-1] == "began":
                self.log.append("stopped")

    @endpoint
    async def load(self, weights: str) -> None:
        self.log.append(f"loads {weights}")

    @endpoint
    async def told(self) -> list[str]:
        return self.log
