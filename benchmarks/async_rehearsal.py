"""`python -m benchmarks.async_rehearsal`: what working ahead brings on 1,024 devices, with long tails. SIMULATED.

A 7B model by the published costs of RLinf (arXiv 2509.15965, figure 9; `placement_published.grpo_7b` says which):
decoding takes 4.0 + 0.112·n ms a token with n answers on an engine of two devices, log-probs 5.22e-5 and training
1.877e-4 device-seconds a token. Lengths are drawn independently by its distribution, scaled to a limit of 20,480
tokens, which 8.8 % of the answers reach. For each number of answers in a step, and each staleness, the best plan is

* calculated, in closed form (`rlinf/placement/asynchronous.py`);
* rehearsed: the real flows `grpo` and `grpo_async`, with the run's own admission, on modelled roles in virtual time;
* where stages are apart, simulated answer by answer (`async_decode.py`), which shares nothing with the planner.

The gain is that of the rehearsed step over the best rehearsed synchronous step of any mode.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.async_decode import Law, period, steps
from rlinf.flows.grpo import grpo
from rlinf.flows.grpo_async import grpo_async
from rlinf.placement.auto import Row, choose_for
from rlinf.placement.bound import bound
from rlinf.placement.profile import Release
from rlinf.placement.workload import Edge, Option, Stage, Workload

DEVICES = 1024
LIMIT = 20480
"""Tokens of the longest answers."""
GROUP = 16
"""Answers to a prompt."""
ANSWERS = (512, 2048, 8192, 32768)
"""In a step; 8192 is the published batch."""
STALENESS = (0, 1, 2, 4)
LOGPROBS, TRAINING = 5.22e-5, 1.877e-4
"""Device-seconds of a token."""
LAW = Law(base=4.0e-3, each=0.112e-3, learning=LOGPROBS + TRAINING)
BAR = 1.8
"""Least gain of staleness 1, with the published batch."""
PUBLISHED = 8192


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan of one case."""

    answers: int
    """In a step."""
    staleness: int
    """0: synchronous."""
    row: Row
    """The plan, with its seconds."""
    efficiency: float
    """Bound over rehearsed seconds."""
    simulated: float | None
    """Seconds of a step, answer by answer; None where stages share devices."""
    gain: float
    """Over the best synchronous plan."""


def lengths(count: int, seed: int) -> NDArray[np.float64]:
    """Tokens of each answer: every eleventh or so at the limit, the others even below it."""
    rng = np.random.default_rng(seed)
    drawn = np.where(rng.random(count) < 0.088, 28672.0, rng.uniform(2000, 26000, count))
    return np.round(drawn * LIMIT / 28672)


def alone(tokens: NDArray[np.float64], engines: int) -> NDArray[np.float64]:
    """Seconds at which each answer of a batch is done, if there is no other batch; dealt to the engines in turn."""
    done = np.empty_like(tokens)
    for engine in range(engines):
        mine = np.arange(engine, len(tokens), engines)
        order = mine[np.argsort(tokens[mine])]
        grown = np.diff(tokens[order], prepend=0.0)
        done[order] = np.cumsum(grown * (LAW.base + LAW.each * np.arange(len(order), 0, -1)))
    return done


def workload(answers: int) -> Workload:
    """The workload that is planned: generation, log-probs and training on up to all devices, in multiples of 16."""
    tokens = lengths(answers, 0)
    sizes = range(16, DEVICES + 1, 16)
    times = {size: alone(tokens, size // LAW.engine_devices) for size in sizes}
    release = Release.from_times(times[DEVICES // 2].reshape(-1, GROUP).max(axis=1).tolist())
    took = {size: float(done.max()) for size, done in times.items()}
    rollout = tuple(Option(n, took[n], longest=min(LIMIT * LAW.base, took[n])) for n in sizes)
    stages = (
        Stage("rollout", rollout, release),
        Stage("judge", (Option(0, 0.0),)),
        Stage("reference", tuple(Option(n, LOGPROBS * tokens.sum() / n) for n in sizes)),
        Stage("trainer", tuple(Option(n, TRAINING * tokens.sum() / n) for n in sizes)),
    )
    edges = (Edge("rollout", "judge"), Edge("judge", "reference"), Edge("reference", "trainer"))
    return Workload(stages, edges, {"gpu": DEVICES}, chunks=(4, 16, 64))


def answer_by_answer(row: Row, answers: int, staleness: int) -> float | None:
    """Seconds of a step of a plan, by an event simulation; log-probs and training are one there."""
    rollout, learning = (set(row.plan.roles[name].devices) for name in ("rollout", "trainer"))
    learning |= set(row.plan.roles["reference"].devices)
    if rollout & learning:
        return None

    def draw(batch: int) -> Sequence[NDArray[np.int64]]:
        return list(lengths(answers, batch).astype(np.int64).reshape(-1, GROUP))

    ends = steps(LAW, draw, len(rollout), len(learning), staleness, 4 + 3 * (staleness + 1))
    return period(ends, 3)


def cases(answers: Sequence[int], tried: Sequence[int]) -> Iterator[Found]:
    """The best plan of each."""
    for count in answers:
        work = workload(count)
        synchronous = 0.0
        for staleness in tried:
            flow = grpo_async if staleness else grpo
            row = choose_for(work, count // GROUP, flow, per_mode=1, staleness=staleness).rows[0]
            synchronous = synchronous or row.seconds
            share = bound(work, staleness=staleness).efficiency(row.seconds)
            simulated = answer_by_answer(row, count, staleness)
            yield Found(count, staleness, row, share, simulated, synchronous / row.seconds)


def main() -> int:
    """Print the table; 1 if staleness 1 brings less than its bar with the published batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, nargs="+", default=ANSWERS, metavar="N", help="in a step")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS, metavar="N", help="0 first")
    given = parser.parse_args()
    table = Table(title=f"{DEVICES:,} devices, answers of up to {LIMIT:,} tokens: all seconds are SIMULATED")
    names = ("answers", "staleness", "mode", "rollout", "reference", "trainer")
    for name in (*names, "calculated s", "rehearsed s", "by answers s", "E", "gain"):
        table.add_column(name, justify="right")
    met = True
    for one in cases(given.answers, given.staleness):
        sizes = [str(len(one.row.plan.roles[name].devices)) for name in ("rollout", "reference", "trainer")]
        by_answers = "-" if one.simulated is None else f"{one.simulated:,.1f}"
        seconds = (f"{one.row.calculated:,.1f}", f"{one.row.seconds:,.1f}", by_answers)
        ends = (f"{one.efficiency:.2f}", f"{one.gain:.2f}")
        table.add_row(f"{one.answers:,}", str(one.staleness), one.row.mode, *sizes, *seconds, *ends)
        if (one.answers, one.staleness) == (PUBLISHED, 1):
            met = one.gain >= BAR
            said = f"staleness 1 with the published batch: {one.gain:.2f}, bar {BAR}: {'met' if met else 'LOST'}"
    Console(width=140).print(table)
    if PUBLISHED in given.answers and 1 in given.staleness:
        Console(width=140).print(said)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
