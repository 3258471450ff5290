"""`python -m benchmarks.rescale`: what it brings to gather the last answers of a rollout on fewer engines.

The real rollout actors, their protocol and decisions, around modelled engines in virtual time: the seconds below are
calculated, not measured on a cluster. Only the time that decisions take is measured, on this machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rescale_modelled import Lengths, ModelledRollout, expected
from rlinf.actors import tail_migration
from rlinf.data.sample import Prompt
from rlinf.placement.rescale import Bundle, DecodeCost, Load, consolidate
from rlinf.runtime.base.clock import virtual
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.system import ActorSystem

PUBLISHED = DecodeCost(4.0e-3, 0.112e-3, 0.02e-3)
"""Of a 7B model on two GPUs, fitted to published rollouts; the seconds to read a token are our assumption."""
PER_ENGINE = 2
"""Devices of an engine."""
LOGPROB, TRAINING = 5.22e-5, 1.877e-4
"""Device-seconds per token, from published figures: the first goes group by group on whichever device is free, the
second needs all devices at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One rollout."""

    name: str
    """What is special about it."""
    lengths: Lengths
    """Of answers."""
    law: DecodeCost = PUBLISHED
    """Of engines."""
    engines: int = 32
    """How many."""
    prompts: int = 256
    """How many."""
    n: int = 16
    """Answers per prompt."""
    max_rows: int = 128
    """Rows per engine."""


CASES = (
    Case("long answers, half of them cut", Lengths(15_000, 1.0, 28_672)),
    Case("a few very long answers", Lengths(1_500, 1.1, 28_672)),
    Case("the same, four times the engines", Lengths(1_500, 1.1, 28_672), engines=128),
    Case("short answers", Lengths(200, 0.8, 2_048)),
    Case("answers of nearly one length", Lengths(4_000, 0.02, 8_192)),
    Case("every row costs as much as a step", Lengths(1_500, 1.1, 28_672), DecodeCost(1.0e-3, 1.0e-3, 0.02e-3)),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What one rollout came to."""

    rollout: float
    """Seconds until the last answer."""
    freed: float
    """Device-seconds between the end of each engine's work and that."""
    scoring: float
    """Seconds of a step whose log-probs are computed on devices as they become free, then training on all."""
    elastic: float
    """Seconds of a step all of whose other work can be done on whichever devices are free: the limit."""
    together: float
    """Seconds of a step in which everybody else needs all devices at once."""
    moved: int
    """Answers that moved."""
    decided: float
    """CPU seconds that the longest decision took."""


def measure(case: Case, rescale: bool) -> Found:
    """Run one rollout in virtual time."""
    slowest = 0.0

    def timed(*arguments: Any) -> Any:
        nonlocal slowest
        start = time.process_time()
        moves = consolidate(*arguments)
        slowest = max(slowest, time.process_time() - start)
        return moves

    with virtual() as clock, mock.patch.object(tail_migration, "consolidate", timed):
        ends, moved, tokens = clock.run(_rollout(case, rescale))
    last, devices = max(ends), PER_ENGINE * case.engines
    freed = PER_ENGINE * sum(last - end for end in ends)
    return Found(
        last,
        freed,
        max(_filled(ends, LOGPROB * tokens), last) + TRAINING * tokens / devices,
        max(_filled(ends, (LOGPROB + TRAINING) * tokens), last),
        last + (LOGPROB + TRAINING) * tokens / devices,
        moved,
        slowest,
    )


def _filled(ends: list[float], work: float) -> float:
    """When so many device-seconds are done by devices that begin as their engines end."""
    ordered, done = sorted(ends), 0.0
    for count, end in enumerate(ordered, start=1):
        after = ordered[count] if count < len(ordered) else float("inf")
        if done + PER_ENGINE * count * (after - end) >= work:
            return end + (work - done) / (PER_ENGINE * count)
        done += PER_ENGINE * count * (after - end)
    raise AssertionError("the last stretch has no end")


async def _rollout(case: Case, rescale: bool) -> tuple[list[float], int, int]:
    """When each engine ended, answers moved, and tokens made; and that no answer is another, missing or double."""
    prompts = [Prompt(number, np.array([number] + [0] * 299)) for number in range(case.prompts)]
    async with ActorSystem.local(trace=False) as system:
        settings = {"law": case.law, "lengths": case.lengths, "max_rows": case.max_rows}
        rollout = await system.spawn(
            ModelledRollout, hosts=[0] * case.engines, name="rollout", rescale=rescale, **settings
        )
        found: dict[tuple[int, int], int] = {}
        async for group in rollout.generate(Stream.of(prompts), n=case.n):
            for sample in group.samples:
                assert (group.prompt.id, sample.index) not in found
                found[group.prompt.id, sample.index] = len(sample.response_ids)
        told = await rollout.ended()
    wanted = {(p.id, i): expected(case.lengths, p.id, i) for p in prompts for i in range(case.n)}
    assert found == wanted
    return [end for end, _ in told], sum(moved for _, moved in told), sum(found.values())


def decision(rounds: int = 5) -> float:
    """CPU seconds to decide about 10,000 answers on 512 engines: of six loads the slowest, of several times the median.

    Of the CPU, since a machine that is shared may take any time for it.
    """
    rng = np.random.default_rng(0)
    slowest = 0.0
    for shares in (np.ones(512), rng.pareto(1.0, 512) + 0.01, np.r_[np.ones(256), np.full(256, 9.0)]):
        loads: list[list[Bundle]] = [[] for _ in range(512)]
        for number, where in enumerate(rng.choice(512, 10_000, p=shares / shares.sum())):
            length = int(rng.integers(500, 20_000))
            loads[where].append(Bundle(number, 1, 30_000, length + 300, length))
        given = [Load(engine, 128, 3_000_000, tuple(some)) for engine, some in enumerate(loads)]
        for law in (PUBLISHED, DecodeCost(4e-3, 4e-5, 2e-6)):
            times = []
            for _ in range(rounds):
                start = time.process_time()
                consolidate(given, law)
                times.append(time.process_time() - start)
            slowest = max(slowest, sorted(times)[rounds // 2])
    return slowest


def rows() -> Iterator[Any]:
    """Lines for `benchmarks.placement`."""
    from benchmarks.placement_planned import Row

    seconds = decision()
    yield Row("rescaling decided, 10,000 answers on 512 engines", "< 0.2 s", f"{seconds:.3f} s of CPU", seconds < 0.2)
    case = CASES[1]
    off, on = measure(case, False), measure(case, True)
    text = (
        f"rollout {off.rollout:,.1f} -> {on.rollout:,.1f} s, free {off.freed:,.0f} -> {on.freed:,.0f} device-s, "
        f"step {off.elastic:,.1f} -> {on.elastic:,.1f} s (modelled)"
    )
    yield Row(f"rescaling, {case.name}", "rollout <= 10 % longer", text, on.rollout <= 1.1 * off.rollout)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    arguments = parser.parse_args()
    table = Table(title="The last answers gathered on fewer engines: off -> on, modelled engines, virtual seconds")
    for name in ("rollout", "engines", "rollout s", "free device-s", "step s, all else on free devices",
                 "step s, scoring on free devices", "step s, all at once", "moved", "longest decision"):  # fmt: skip
        table.add_column(name)
    for case in CASES[: arguments.cases]:
        off, on = measure(case, False), measure(case, True)
        pairs = [
            _pair(getattr(off, name), getattr(on, name))
            for name in ("rollout", "freed", "elastic", "scoring", "together")
        ]
        table.add_row(case.name, str(case.engines), *pairs, f"{on.moved:,}", f"{1000 * on.decided:.1f} ms")
    Console(width=220).print(table)
    print(f"decision about 10,000 answers on 512 engines: {1000 * decision():.0f} ms of CPU")
    return 0


def _pair(off: float, on: float) -> str:
    change = f" ({100 * (on / off - 1):+.1f} %)" if off else ""
    return f"{off:,.1f} -> {on:,.1f}{change}"


if __name__ == "__main__":
    sys.exit(main())
