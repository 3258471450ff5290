"""Makes lanes.svg: one step of GRPO on four devices, collocated, disaggregated and hybrid.

    python -m docs.pictures.make            # from the root of the repository

The flow is `rlinf.flows.grpo`, as it is. The roles are modelled: they hold leases and wait as real ones do, but sleep
instead of computing, in virtual time, so all seconds are simulated. What differs between the three is where the roles
are spawned, nothing else.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf import ActorSystem, Stream, endpoint
from rlinf.actors.base import SpmdActor
from rlinf.dashboard.lanes import device_lanes
from rlinf.dashboard.lanes_svg import device_lanes_svg
from rlinf.data.step import Step
from rlinf.flows.grpo import grpo
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.observer import Watch

PROMPTS, STEPS, ROWS = 64, 3, 8
"""Of a step; of the run; prompts that a rollout answers at a time."""
GB = 10**9
MEMORY = 80 * GB
"""Bytes of a device: rollout and trainer do not fit at once."""


class Asleep:
    """In place of the thread in which an actor computes: time passes, and nothing else."""

    async def run(self, fn: Callable[[float], None], seconds: float) -> None:
        await asyncio.sleep(seconds)

    def close(self) -> None: ...


def computing(seconds: float) -> None:
    """Stands for device work of so many seconds."""


class Modelled(SpmdActor):
    """Takes a second to move onto its devices and half of one to leave them."""

    async def setup(self, seconds: float) -> None:  # type: ignore[override]
        """Make it with the seconds that an item takes."""
        self._seconds = seconds
        self._cell.thread = Asleep()  # type: ignore[assignment]

    async def onload(self) -> None:
        await asyncio.sleep(1.0)

    async def offload(self) -> None:
        await asyncio.sleep(0.5)

    async def work(self, seconds: float) -> None:
        await self.compute(computing, seconds)


class Rollout(Modelled):
    """Answers some prompts at a time; a few answers are long."""

    @endpoint(device=True)
    async def generate(self, prompts: Stream[int], n: int) -> AsyncIterator[int]:
        running: set[asyncio.Task[int]] = set()

        async def answer(prompt: int) -> int:
            await self.work(min(4.0, random.Random(prompt).lognormvariate(0.0, 0.6)) * self._seconds)
            return prompt

        async for prompt in prompts:
            running.add(asyncio.create_task(answer(prompt)))
            while len(running) >= ROWS:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        for each in asyncio.as_completed(running):
            yield await each

    @endpoint(device=True, joint=True)
    async def load(self, weights: str) -> None:
        await self.work(0.5)


class Judge(Modelled):
    """A reward model."""

    @endpoint(device=True)
    async def score(self, group: int) -> int:
        await self.work(self._seconds)
        return group


class Trainer(Modelled):
    """Learns from groups as they come; the optimizer steps when there are no more."""

    @endpoint(device=True, joint=True)
    async def train(self, groups: Stream[int]) -> dict[str, float]:
        async def learn(mine: Stream[int | None]) -> None:
            async for _ in mine:  # None, where a rank has nothing in the last round
                await self.work(self._seconds)
            await self.work(1.0)

        await self.run_spmd(learn, lambda: groups.deal(self.world_size))
        return {}

    @endpoint(device=True, joint=True)
    async def weights(self) -> str:
        return "weights"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the roles are."""

    rollout: tuple[int, ...]
    """Device of each rank; a device is a host here."""
    judge: tuple[int, ...]
    """Devices."""
    trainer: tuple[int, ...]
    """Devices."""
    trainer_items: int = 1
    """Groups at hand before the trainer asks for its devices."""


MODES: Mapping[str, Places] = {
    "collocated": Places((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), PROMPTS),
    "disaggregated": Places((0, 1), (2,), (3,)),
    "hybrid": Places((0, 1, 2), (3,), (0, 1, 2, 3), PROMPTS),
}


async def run(places: Places, trace: Path) -> None:
    """Some steps of the flow; the trace has them all."""
    async with ActorSystem.local(4, device_memory=dict.fromkeys(range(4), MEMORY)) as system:
        large = {"resident_bytes": 60 * GB, "parked_bytes": 4 * GB}
        rollout = await system.spawn(
            Rollout, hosts=places.rollout, name="rollout", devices=places.rollout, seconds=6.0, **large
        )
        judge = await system.spawn(
            Judge, hosts=places.judge, name="judge", devices=places.judge, seconds=0.3, resident_bytes=8 * GB
        )
        trainer = await system.spawn(
            Trainer, hosts=places.trainer, name="trainer", devices=places.trainer, seconds=0.55, **large,
            items=places.trainer_items,
        )  # fmt: skip
        watch = await Watch.start(system)
        for index in range(STEPS):
            watch.begins()
            prompts = Stream.of(list(range(index * PROMPTS, (index + 1) * PROMPTS)), name="prompts")
            await grpo(Step(index, prompts, 8), rollout, judge, trainer)
            await watch.ends(f"step {index + 1}")
        await system.trace(trace)


def main() -> None:
    """Write lanes.svg beside this file."""
    with tempfile.TemporaryDirectory() as made:
        traces = [Path(made) / f"{mode}.json" for mode in MODES]
        for places, trace in zip(MODES.values(), traces, strict=True):
            run_virtual(run(places, trace))
        text = device_lanes_svg([device_lanes(trace) for trace in traces])
    Path(__file__).with_name("lanes.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
