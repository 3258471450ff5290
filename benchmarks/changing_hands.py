"""`python -m benchmarks.changing_hands`: trainers that take devices as they become free, beside such as go in step.

The real streams, leases, micro-batches and rollout actors around modelled engines and a modelled trainer, in virtual
time: the seconds below are calculated, not measured on a cluster. With `--auto`, runs whose trainer finds its way
itself (`trainer.order: auto`) beside such as go in step, on answers with and without long tails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.changing_hands_modelled import (
    DecodeCost,
    Gathered,
    LeasedRollout,
    Lengths,
    ModelledTrainer,
    Together,
)
from rlinf.data.sample import Prompt
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.pacing import Pacing

DEVICES = 16
PUBLISHED = DecodeCost(4.0e-3, 0.112e-3, 0.02e-3)
"""Costs of a 7B model on two GPUs, fitted to published rollouts; the seconds to read a token are our assumption."""
TRAINING = 1.877e-4
"""Device-seconds per token, from published figures."""
SWITCH = 2.0
"""Seconds to park a role or to bring it back: some 60 GB over a bus of 30 GB/s."""
STEP = 1.5
"""Seconds of an optimizer step with its sums of gradients over 16 devices; assumed."""
MICRO_BATCH = 32_768
"""Tokens."""
SPLITS = (2, 3, 4, 6, 8)
"""Devices of a trainer that has its own."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step."""

    name: str
    """The case's speciality, in words."""
    lengths: Lengths
    """Lengths of answers."""
    prompts: int = 64
    """How many."""
    n: int = 8
    """Answers per prompt."""
    max_rows: int = 64
    """Rows per engine."""
    seeds: int = 3
    """Draws of prompts."""


CASES = (
    Case("long answers, half of them cut", Lengths(15_000, 1.0, 28_672)),
    Case("a few very long answers", Lengths(1_500, 1.1, 28_672)),
    Case("the same, four times the prompts", Lengths(1_500, 1.1, 28_672), prompts=256),
    Case("20k tails", Lengths(4_000, 0.8, 20_480), prompts=128),
)
OTHERS = (
    Case("300 tokens, alike", Lengths(300, 0.3, 1_024)),
    Case("1k tokens", Lengths(1_000, 0.6, 4_096)),
    Case("4k tokens, alike", Lengths(4_000, 0.15, 8_192)),
    Case("8k tokens, half of them cut", Lengths(8_000, 0.5, 8_192), prompts=128),
)
"""Where there is less to gain."""


def seconds(case: Case, own: int | None, order: str, *, seed: int = 0, everywhere: bool = False) -> float:
    """Virtual seconds of one step, the second of two.

    Args:
        case: what is generated.
        own: devices that only the trainer has; None: it shares all with the rollout.
        order: `arrival`: the trainer goes in step, where it shares devices on all of them; `free`: its copies go at
            their own pace, on all devices.
        seed: which prompts.
        everywhere: the trainer is on all devices in any order.
    """
    wide = own is None or order == "free" or everywhere
    return run_virtual(
        _steps(case, range(own or 0, DEVICES), range(DEVICES) if wide else range(own or 0), order, seed)
    )[0]


async def _steps(case: Case, rollouts: range, trainers: range, order: str, seed: int) -> float:
    taken: list[dict[int, Gathered]] = []
    meetings: dict[Any, Together] = {}
    async with ActorSystem.local(
        hosts=DEVICES, trace=False, device_memory=dict.fromkeys(range(DEVICES), 100)
    ) as system:
        rollout = await system.spawn(
            LeasedRollout, hosts=[*rollouts], devices=[*rollouts], resident_bytes=60, name="rollout", law=PUBLISHED,
            lengths=case.lengths, max_rows=case.max_rows, switch=SWITCH,
        )  # fmt: skip
        trainer = await system.spawn(
            ModelledTrainer, hosts=[*trainers], devices=[*trainers], resident_bytes=60, name="trainer",
            copies=[[rank] for rank in range(len(trainers))], taken=taken, meetings=meetings, order=order,
            token=TRAINING, step=STEP, switch=SWITCH, budget=MICRO_BATCH,
        )  # fmt: skip
        loop, took = system._host.loop, []
        for index in range(2):
            start = loop.time()
            first = (seed * 2 + index) * case.prompts
            await trainer.train(rollout.generate(Stream.of(_prompts(first, case.prompts)), n=case.n))
            took.append(loop.time() - start)
    for sums in taken:
        assert sum(sum(part.rows.values()) for part in sums.values()) == case.prompts * case.n
    return took[-1]


def _prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(number, np.array([number] + [0] * 299)) for number in range(first, first + count)]


def mean(case: Case, own: Sequence[int | None], order: str) -> tuple[float, int | None]:
    """The mean over draws under the best of some splits, and that split."""
    found = [
        (float(np.mean([seconds(case, split, order, seed=seed) for seed in range(case.seeds)])), split) for split in own
    ]
    return min(found, key=lambda one: one[0])


def found(case: Case, own: int | None, steps: int) -> tuple[float, float, float]:
    """Seconds of a run in step, at its copies' own pace, and of one that finds its way: `case.seeds` draws again and
    again."""
    draws = {
        free: [seconds(case, own, order, seed=seed, everywhere=True) for seed in range(case.seeds)]
        for free, order in ((False, "arrival"), (True, "free"))
    }
    pacing, took = Pacing(), 0.0
    for step in range(steps):
        spent = draws[pacing.free][step % case.seeds]
        took += spent
        pacing.after(spent, 1.0)
    static = [sum(draws[free][step % case.seeds] for step in range(steps)) for free in (False, True)]
    return static[0], static[1], took


def autos(steps: int) -> Table:
    """Runs that find their way."""
    table = Table(title=f"A run of {steps} steps on {DEVICES} devices, the trainer on all (virtual)")
    for name in ("answers", "placement", "in step", "own pace", "auto", "auto over in step"):
        table.add_column(name)
    for case in (*CASES, *OTHERS):
        for placement, own in (("rollout on all", None), ("rollout on 12", 4), ("rollout on 8", 8)):
            off, on, took = found(case, own, steps)
            table.add_row(case.name, placement, f"{off:,.0f}", f"{on:,.0f}", f"{took:,.0f}", f"{off / took:.3f} x")
    return table


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--auto", type=int, metavar="STEPS", help="instead: runs of so many steps that find their way")
    arguments = parser.parse_args()
    if arguments.auto:
        Console(width=200).print(autos(arguments.auto))
        return 0
    table = Table(title=f"Seconds of a step on {DEVICES} devices: in step -> at their own pace (virtual)")
    for name in ("answers", "placement", "seconds"):
        table.add_column(name)
    for case in CASES[: arguments.cases]:
        for placement, own in (("collocated", (None,)), ("trainer's own devices, best split", SPLITS)):
            (off, before), (on, after) = (mean(case, own, order) for order in ("arrival", "free"))
            splits = "" if before is None else f", {before} -> {after} devices"
            table.add_row(case.name, placement, f"{off:,.1f} -> {on:,.1f} ({off / on:.2f} x{splits})")
    Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
