"""The processes of `benchmarks.placement_measured`: the real GRPO flow and runtime around roles that only sleep.

In: a job (a file with cases, rounds and steps), under torchrun. Out: a file with the seconds of every step and what the
ledger says of it, and per case the profile of its first rounds. Who wakes whom: items, leases and weights, as between
the real roles, whose protocols these keep: the trainer's ranks work on what rank 0 orders, weights are switched on all
ranks or none, and whoever shares a device is loaded and parked by its leases.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import pickle
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlinf
from benchmarks.placement_cases import KIND, Case, Job, seated
from rlinf.actors.base import SpmdActor
from rlinf.data.step import Step
from rlinf.data.weights import Weights
from rlinf.flows.grpo import grpo
from rlinf.placement.costs import Ledger, MeasuredRun
from rlinf.placement.profile import Release, save
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.streams.stream import Consumer, Stream
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.schedule import CommandStream
from rlinf.training.weight_sync import Receiver

FOUND = "found.json"
"""File of the results, beside the job."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a role's work takes on the devices that it has."""

    seconds: float
    """Seconds of a step, on all its devices together."""
    items: int
    """Items of a step."""
    at_a_time: int
    """Items that the role takes at a time, over all ranks."""
    moving: float = 0.0
    """To load a rank, and to park it."""
    sync: float = 0.0
    """To switch to new weights."""
    release: Release | None = None
    """When items leave the rollout."""
    virtual: bool = False
    """Under the virtual clock, where a thread's time would not count."""

    @property
    def each(self) -> float:
        """Seconds of an item."""
        return self.seconds / self.items


class Sleeping(Actor):
    """A role that takes its time in its own thread, as if it computed there."""

    async def setup(self, *, pace: Pace) -> None:  # type: ignore[override]
        self.pace, self._one_at_a_time = pace, asyncio.Lock()

    async def take(self, seconds: float) -> None:
        """Keep the devices busy for so long; one piece of work at a time."""
        if seconds > 0 and self.pace.virtual:
            lease = lease_here()
            held = lease.computing() if lease is not None else contextlib.nullcontext()
            async with held, self._one_at_a_time:
                await asyncio.sleep(seconds)
        elif seconds > 0:
            await self.compute(time.sleep, seconds)

    async def onload(self) -> None:
        await self.take(self.pace.moving)

    async def offload(self) -> None:
        await self.take(self.pace.moving)


class Generating(Sleeping, Receiver):
    """A rollout whose ranks share the prompts evenly, and let each answer go when the release curve says."""

    @endpoint(device=True)
    async def generate(self, prompts: Stream[int], n: int = 1) -> AsyncIterator[int]:
        pace, release = self.pace, self.pace.release
        assert release is not None
        part = -(-pace.items // self.world_size)
        consumer: Consumer[int] = Consumer(prompts, prefetch=False, most=part)
        try:
            while taken := await consumer.take():
                before = 0.0
                for k, (_, item) in enumerate(taken):
                    number = min(k * self.world_size + self.rank + 1, pace.items)
                    share = release.at(number / pace.items)
                    await self.take((share - before) * pace.seconds)
                    before = share
                    yield item
                await self.take((1.0 - before) * pace.seconds)
        finally:
            consumer.close()

    async def check_weights(self, weights: Weights) -> None:
        """They fit."""

    async def switch_weights(self, weights: Weights) -> None:
        await self.take(self.pace.sync)


class Judging(Sleeping):
    """A judge, beside the devices: one answer after the other."""

    @endpoint
    async def score(self, item: int) -> int:
        await self.take(self.pace.each)
        return item


class Telling(Sleeping):
    """A reference whose ranks share a stream."""

    @endpoint(device=True)
    async def logprobs(self, items: Stream[int]) -> AsyncIterator[int]:
        most = max(1, self.pace.at_a_time // self.world_size)
        consumer: Consumer[int] = Consumer(items, prefetch=True, most=most)
        try:
            while taken := await consumer.take():
                await self.take(self.pace.each * len(taken) * self.world_size)
                for _, item in taken:
                    yield item
        finally:
            consumer.close()


class Training(Sleeping, SpmdActor):
    """A trainer whose ranks work together on each micro-batch as soon as it is full."""

    @endpoint(device=True, joint=True)
    async def train(self, items: Stream[int]) -> dict[str, float]:
        feed = CommandStream(self._orders(items), range(self.world_size))

        async def carry_out(orders: Stream[int]) -> int:
            learned = 0
            async for count in orders:
                await self.take(self.pace.each * count)
                learned += count
                feed.done()
            return learned

        learned = await self.run_spmd(carry_out, feed.streams, feed.stop)
        if feed.error is not None:
            raise feed.error
        return {} if self.rank else {"items": float(learned)}

    async def _orders(self, items: Stream[int]) -> AsyncGenerator[tuple[int, ...], None]:
        """How many items each rank is to work on."""
        waiting = 0
        async for _ in items:
            waiting += 1
            if waiting == self.pace.at_a_time:
                yield (waiting,) * self.world_size
                waiting = 0
        if waiting:
            yield (waiting,) * self.world_size

    @endpoint(device=True, joint=True)
    async def weights(self) -> Weights | None:
        async def published(_: None) -> Weights | None:
            # no version twice: a rollout that has it would not switch
            return None if self.rank else Weights.pack([("weight", torch.zeros(1))], time.monotonic_ns())

        return await self.run_spmd(published)


CLASSES: Mapping[str, type[Sleeping]] = {
    "rollout": Generating,
    "judge": Judging,
    "reference": Telling,
    "trainer": Training,
}


class Measuring:
    """One case under way: its ledger, and what was found so far.

    Args:
        case: which.
        virtual: see `Pace`.
    """

    def __init__(self, case: Case, *, virtual: bool = False) -> None:
        self.case, self.plan, self._virtual = case, case.plan(), virtual
        self.placed = seated(self.plan)
        held = {name: (role.active_bytes, role.parked_bytes) for name, role in case.roles.items() if name != "judge"}
        run = MeasuredRun("modelled", "sleeping", "rlinf.flows.grpo.grpo", (KIND,) * self.case.devices, held)
        self.ledger = Ledger(self.placed.of_actors, case.items, run)
        self.seconds: list[float] = []
        self.told: list[dict[str, float]] = []

    async def round(self, system: ActorSystem, watch: Watch, steps: int, *, measured: bool) -> None:
        """Start the roles and take some steps, of which the first is not counted."""
        async with system.scope():
            roles = {
                name: await system.spawn(CLASSES[name], name=name, pace=self._pace(name), **self._seat(name))
                for name in self.plan.roles
            }
            for index in range(steps + 1):
                prompts: Stream[Any] = Stream.of(list(range(self.case.items)), name="prompts")
                watch.begins()
                found = await grpo(Step(index, prompts, 1, self.case.items), **roles)
                lap = await watch.ends(f"{self.case.name}, step {index}")
                if found["items"] != self.case.items:
                    raise RuntimeError(f"{self.case.name}: the trainer got {found['items']:.0f} of {self.case.items}")
                if index:
                    metrics = self.ledger.step(lap)
                    if measured:
                        self.seconds.append(lap.end - lap.start)
                        self.told.append(metrics)

    def _seat(self, name: str) -> dict[str, Any]:
        role = self.case.roles[name]
        return self.placed.spawning(name, role.active_bytes, role.parked_bytes)

    def _pace(self, name: str) -> Pace:
        case, role, entry = self.case, self.case.roles[name], self.plan.roles[name]
        return Pace(
            role.work / max(1, len(entry.devices)), case.items, entry.items or 1, role.moving,
            case.sync if name == "rollout" else 0.0, case.curve if name == "rollout" else None,
            self._virtual,
        )  # fmt: skip


async def measure(system: ActorSystem, job: Job, directory: Path) -> None:
    """Run all cases in turn, some rounds, and write down what was found."""
    watch = await Watch.start(system)
    cases = [Measuring(case) for case in job.cases]
    for number in range(job.profiled + job.rounds):
        for case in cases:
            await case.round(system, watch, job.steps, measured=number >= job.profiled)
        if number == job.profiled - 1:
            for index, case in enumerate(cases):
                profile = case.ledger.profile
                assert profile is not None
                save(profile, directory / f"{index}.json")
    found = [{"seconds": case.seconds, "told": case.told} for case in cases]
    (directory / FOUND).write_text(json.dumps({"cases": found, "late": late()}), encoding="utf-8")


def virtually(case: Case) -> float:
    """Virtual seconds of a step of the same flow, runtime and roles where messages and threads take no time."""

    async def second_step() -> float:
        memory = dict.fromkeys(range(case.devices), case.memory[KIND]) if case.memory else None
        async with ActorSystem.local(hosts=case.devices, device_memory=memory) as system:
            found = Measuring(case, virtual=True)
            await found.round(system, await Watch.start(system), 1, measured=True)
        return found.seconds[0]

    return run_virtual(second_step())[0]


def late(seconds: float = 0.01, times: int = 50) -> float:
    """By how much longer than asked for a sleep takes now, in seconds: the median."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        time.sleep(seconds)
        took.append(time.perf_counter() - start - seconds)
    return statistics.median(took)


def main() -> None:
    """Take part in a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the job is, and its results go")
    directory = parser.parse_args().directory
    job: Job = pickle.loads((directory / "job").read_bytes())
    memory: dict[int, int] = {}
    for case in job.cases:
        memory |= {device: case.memory[KIND] for device in range(case.devices) if KIND in case.memory}
    rlinf.run(functools.partial(measure, job=job, directory=directory), device_memory=memory or None)


if __name__ == "__main__":
    main()
