"""A trainer over all ranks of a job that is cancelled, fed with errors, or failing on one rank; says what it saw."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import rlinf
from rlinf import Actor, Stream, endpoint
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group
from tests.actors import toys

SETTINGS: dict[str, Any] = {
    "model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.01, "micro_batch_tokens": 30,
}  # fmt: skip
SCORES_FIRST: dict[str, Any] = {**SETTINGS, "algorithm": "grpo_tis", "minibatches": 2}
BATCH = toys.groups(12)


class FailsOnOneRank(Trainer):
    """Cannot compute its third micro-batch on the last rank."""

    count = 0

    def _learn(self, *order: Any, **more: Any) -> None:
        self.count += 1
        if self.count == 3 and self.rank == self.world_size - 1:
            raise MemoryError("no memory on the last rank")
        super()._learn(*order, **more)


class FailsToScoreOnOneRank(Trainer):
    """Cannot say what the log-probs of its second micro-batch are on the last rank."""

    count = 0

    def _score(self, *order: Any) -> Any:
        self.count += 1
        if self.count == 2 and self.rank == self.world_size - 1:
            raise MemoryError("no memory on the last rank")
        return super()._score(*order)


async def flat(trainer: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in (await trainer.weights()).named()])


async def cancelled(system: rlinf.ActorSystem, settings: dict[str, Any] = SETTINGS) -> None:
    trainer = await system.spawn(Trainer, name="trainer", **settings)
    before = await flat(trainer)
    moments = iter(range(1000))

    async def endless() -> AsyncIterator[Group]:
        for group in BATCH:
            yield group
            await asyncio.sleep(0.002)
        await asyncio.Event().wait()

    for moment in range(5):
        training = asyncio.ensure_future(trainer.train(Stream.of(endless())))
        await asyncio.sleep(0.018 * moment)
        training.cancel()
        try:
            await training
        except asyncio.CancelledError:
            next(moments)
        assert torch.equal(await flat(trainer), before), "a batch that was cancelled changed the weights"
    await trainer.train(Stream.of(BATCH))
    other = await system.spawn(Trainer, name="untouched", **settings)
    await other.train(Stream.of(BATCH))
    assert torch.equal(await flat(trainer), await flat(other))
    print("cancelled", next(moments), "times", flush=True)


async def cancelled_scoring(system: rlinf.ActorSystem) -> None:
    await cancelled(system, SCORES_FIRST)


class Says(Trainer):
    """Gives groups back with its log-probs."""

    @endpoint(device=True, gang=True)
    async def say(self, groups: Any) -> AsyncIterator[Group]:
        async with aclosing(self._annotated(groups, ("proximal_logprobs",))) as told:
            async for group in told:
                yield group


async def unheard(system: rlinf.ActorSystem) -> None:
    """Its listener goes away after some groups, or its input fails; then it learns as if nothing had happened."""
    trainer = await system.spawn(Says, name="trainer", **SETTINGS)

    async def endless() -> AsyncIterator[Group]:
        for group in BATCH:
            yield group
        await asyncio.Event().wait()

    async def broken() -> AsyncIterator[Group]:
        for group in BATCH[:7]:
            yield group
        raise OSError("the judge's disk is full")

    for wanted in (0, 2, 5):
        said, heard = trainer.say(Stream.of(endless())), 0
        async for group in said:
            heard += 1
            assert all("proximal_logprobs" in sample.per_token for sample in group.samples)
            if heard > wanted:
                break
        await said.close()
    try:
        await trainer.say(Stream.of(broken())).collect()
    except OSError as error:
        print(type(error).__name__, flush=True)
    other = await system.spawn(Trainer, name="untouched", **SETTINGS)
    assert await trainer.train(Stream.of(BATCH)) == await other.train(Stream.of(BATCH))
    assert torch.equal(await flat(trainer), await flat(other))
    print("goes on", flush=True)


async def misfed(system: rlinf.ActorSystem) -> None:
    trainer = await system.spawn(Trainer, name="trainer", rescue_dir=sys.argv[1], **SETTINGS)

    async def broken() -> AsyncIterator[Group]:
        for group in BATCH[:7]:
            yield group
        raise OSError("the judge's disk is full")

    first = BATCH[3].samples[0]
    spoilt = replace(first, logprobs=np.full_like(first.logprobs, np.nan))
    bad = [*BATCH[:3], replace(BATCH[3], samples=(spoilt, *BATCH[3].samples[1:]))]
    for groups in (broken(), bad, []):
        try:
            await trainer.train(Stream.of(groups))
        except (OSError, FloatingPointError, ValueError) as error:
            print(type(error).__name__, str(error)[:40], "kept" if "was kept in" in str(error) else "", flush=True)
    try:
        await trainer[0].train(BATCH)
    except rlinf.runtime.base.errors.UserError as error:
        print(str(error), flush=True)
    metrics = await trainer.train(Stream.of(BATCH))
    other = await system.spawn(Trainer, name="untouched", **SETTINGS)
    again = await other.train(BATCH)
    # what is read together depends on what had come by then
    same = {name: value for name, value in again.items() if not name.startswith("tokens_read/")}
    assert all(abs(metrics[name] - value) < 1e-5 for name, value in same.items())
    print("goes on", flush=True)


async def failing(system: rlinf.ActorSystem) -> None:
    trainer = await system.spawn(FailsOnOneRank, name="trainer", **SETTINGS)
    print("begins", flush=True)
    await trainer.train(Stream.of(BATCH))


async def failing_to_score(system: rlinf.ActorSystem) -> None:
    trainer = await system.spawn(FailsToScoreOnOneRank, name="trainer", **SCORES_FIRST)
    print("begins", flush=True)
    await trainer.train(Stream.of(BATCH))


async def crossing(system: rlinf.ActorSystem) -> None:
    """Joint calls made at once, by several flows: each rank does them in the same order."""
    trainer = await system.spawn(Trainer, name="trainer", **SETTINGS)
    calls: list[Any] = []
    for _ in range(2):
        calls += [trainer.train(Stream.of(BATCH)), trainer.weights(), trainer.sft([]), trainer.weights()]
    results = await asyncio.gather(*calls, return_exceptions=True)
    versions = [found.version for found in results if hasattr(found, "version")]
    print("versions", versions, "failures", sum(isinstance(found, ValueError) for found in results), flush=True)


class Generator(Actor):
    """Makes groups, on the trainer's own devices."""

    @endpoint(device=True)
    async def generate(self, groups: Any) -> AsyncIterator[Group]:
        async for group in groups:
            await self.compute(torch.randn(200, 200).mm, torch.randn(200, 200))
            yield group


async def collocated(system: rlinf.ActorSystem) -> None:
    """Generator and trainer take turns on the same devices."""
    everywhere = {"hosts": list(range(system.hosts)), "devices": [[host] for host in range(system.hosts)]}
    generator = await system.spawn(Generator, name="generator", **everywhere)
    trainer = await system.spawn(Trainer, name="trainer", **everywhere, **SETTINGS)
    other = await system.spawn(Trainer, name="untouched", **SETTINGS)
    for _ in range(2):
        metrics = await trainer.train(generator.generate(Stream.of(BATCH)))
        assert await other.train(BATCH) == metrics
        assert torch.equal(await flat(trainer), await flat(other))
    print("took turns", flush=True)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        cancelled,
        cancelled_scoring,
        unheard,
        misfed,
        failing,
        failing_to_score,
        crossing,
        collocated,
    )
}


async def main(system: rlinf.ActorSystem) -> None:
    """Those named on the command line, one after the other, each with actors of its own."""
    for name in sys.argv[2:]:
        print(f"# {name}", flush=True)
        async with system.scope():
            await SCENARIOS[name](system)


if __name__ == "__main__":
    rlinf.run(main)
