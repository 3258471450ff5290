"""`python -m benchmarks.rehearsal`: how long rehearsals take, and how far the chosen plan is from the best one tried.

Everything here is simulated: stages sleep under the virtual clock, on costs that are drawn. What is measured is this
machine's time. *Regret* is how much longer the chosen plan takes, rehearsed with the true costs, than the best of all
structures that were rehearsed with them: many of a planner that knows the truth, and those of the one that
chose. With *noise* the planner saw each stage's seconds wrong by a factor of its own, between -30 % and +50 %, and was
told so.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.placement_planned import GRPO, TAIL, Row
from rlinf.flows.grpo import grpo
from rlinf.placement.auto import choose_for, stand_in
from rlinf.placement.planner import best_of_each_mode, to_plan
from rlinf.placement.profile import Release
from rlinf.placement.simulate import Cast, rehearse, trial
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload

ITEMS = 8192
"""Groups of a step; of 16 answers each that is 131,072 samples."""
DEVICES = 1024
SIZES = (8, 64, 512, 4096)
"""Devices of the sweep."""
STEPS = 32
"""Sizes of a stage: the cluster in so many equal parts, or all counts of a small one."""
TAILS = {
    "even": None,
    "long": TAIL,
    "very long": Release((0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 1.0)),
}
"""When items leave generation."""
SWITCHES = (0.0, 0.02, 0.05)
"""Seconds to load or park a stage, as a share of 400 s, about a step; roles do not fit side by side, so that four such
moves are a fifth of a step at most, as in the published PPO run with the dearest switches."""
NOISE = (0.7, 1.5)
"""Factors between which the planner sees a stage's seconds."""
DOUBT = 0.45
"""By which share the planner is told that costs may be wrong, with noise: 1 / 0.7 - 1 and 1.5 - 1, about."""
TRIES = 8
"""Structures of each mode that are rehearsed with the true costs, to find out which had been best; whoever chooses
rehearses fewer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload of the sweep."""

    devices: int
    """How many."""
    tail: str
    """Key of `TAILS`."""
    switch: float
    """One of `SWITCHES`."""
    seed: int
    """Seed of the work of each stage."""

    def workload(self, seen: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Workload:
        """Return what is to be planned.

        Args:
            seen: by which factor each stage's seconds are wrong.
        """
        rng = random.Random(f"{self.seed} {self.tail}")
        shares = [rng.uniform(0.3, 1.0), rng.uniform(0.01, 0.2), rng.uniform(0.2, 1.0)]
        fixed = [rng.uniform(0.0, 0.25), rng.uniform(0.0, 0.1), rng.uniform(0.0, 0.1)]
        unit = max(1, self.devices // STEPS)
        stages = []
        for number, name in enumerate(("rollout", "judge", "trainer")):
            options = tuple(
                self._option(name, count, 400 * shares[number] * seen[number], fixed[number])
                for count in range(unit, self.devices + 1, unit)
            )
            stages.append(Stage(name, options, None if number else TAILS[self.tail]))
        memory = {"gpu": 80} if self.switch else {}
        edges = (Edge("rollout", "judge"), Edge("judge", "trainer"))
        sync = (Sync("trainer", "rollout", 1.0, 2.0),)
        return Workload(tuple(stages), edges, {"gpu": self.devices}, memory, (4, 16, 64), sync)

    def _option(self, name: str, count: int, seconds: float, fixed: float) -> Option:
        """A size: most of the work is divided among the devices, a part is not."""
        took = seconds * (fixed + (1 - fixed) * self.devices / count)
        held = 2 if name == "judge" else 60
        move = self.switch * 400
        return Option(count, took, "gpu", held, held // 10, move, move)


def scale(rounds: int) -> Iterator[Row]:
    """One step of 131,072 samples on 1,024 virtual devices, in real seconds."""
    stages = tuple(
        Stage(
            name,
            tuple(Option(n, fixed + work * DEVICES / n) for n in range(8, DEVICES + 1, 8)),
            None if number else TAIL,
        )
        for number, (name, work, fixed) in enumerate(GRPO[0])
    )
    names = {"logprob": "judge"}
    stages = tuple(replace(stage, name=names.get(stage.name, stage.name)) for stage in stages)
    work = Workload(stages, (Edge("rollout", "judge"), Edge("judge", "trainer")), {"gpu": DEVICES}, chunks=(64,))
    for mode, found in best_of_each_mode(work).items():
        plan = to_plan(found.tree, work, found.chunks, ITEMS, None)
        for per_rank in (8, 1):
            wall, cpu = [], []
            for _ in range(rounds):
                started, used = time.perf_counter(), time.process_time()
                seen = rehearse(grpo, plan, work, items=ITEMS, devices_per_rank=per_rank)
                wall.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
            middle = statistics.median(wall)
            what = f"rehearsal, 131,072 samples, 1,024 devices, {mode}, {per_rank} per process"
            text = f"{middle:.1f} s ({statistics.median(cpu):.1f} s of CPU; step of {seen.seconds:,.1f} s, simulated)"
            yield Row(what, "<= 60 s", text, middle <= 60)


def cases(seeds: int) -> Iterator[Case]:
    for devices in SIZES:
        for tail in TAILS:
            for switch in SWITCHES:
                for seed in range(seeds):
                    yield Case(devices, tail, switch, seed)


def regret(case: Case, cast: Cast, *, noisy: bool) -> float:
    """How much longer the chosen plan takes than the best one tried, as a share."""
    rng = random.Random(f"noise {case}")
    seen = tuple(rng.uniform(*NOISE) if noisy else 1.0 for _ in range(3))
    truth = case.workload()
    chosen = choose_for(case.workload(seen), ITEMS, grpo, cost_error=DOUBT if noisy else 0.0, cast=cast)
    best = choose_for(truth, ITEMS, grpo, per_mode=TRIES, cast=cast)
    # Plans that both found count once: most of a sweep's time goes into rehearsals.
    known = {_key(row.plan.roles): row.seconds for row in best.rows}
    for row in chosen.rows:
        if _key(row.plan.roles) not in known:
            again = rehearse(grpo, row.plan, truth, items=ITEMS, rehearsed_items=stand_in(ITEMS, row.chunks), cast=cast)
            known[_key(row.plan.roles)] = again.seconds
    return known[_key(chosen.plan.roles)] / min(known.values()) - 1


def _key(roles: object) -> str:
    return repr(roles)


def regrets(seeds: int) -> Iterator[Row]:
    """The sweep, with true costs and with wrong ones."""
    cast = trial(grpo, ["rollout", "judge", "trainer"])
    for noisy in (False, True):
        found = [regret(case, cast, noisy=noisy) for case in cases(seeds)]
        mean, worst = statistics.mean(found), max(found)
        above = sum(one > 0.03 for one in found)
        text = f"mean {mean:.2%}, worst {worst:.2%}, {above} of {len(found)} above 3 %"
        what = "costs seen -30...+50 % wrong" if noisy else "true costs"
        yield Row(f"regret under the virtual clock, N = 8...4,096, {what}", "mean <= 3 %", text, mean <= 0.03)


def rows(rounds: int = 1, seeds: int = 1) -> Iterator[Row]:
    """All figures.

    Args:
        rounds: times that each large rehearsal is run.
        seeds: draws of the work per (devices, tail, switch).
    """
    yield from scale(rounds)
    yield from regrets(seeds)


def main() -> int:
    """Print the table; 1 if a figure misses its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="times that each large rehearsal is run")
    parser.add_argument("--seeds", type=int, default=1, help="draws of the work per devices, tail and switch")
    given = parser.parse_args()
    table = Table("what", "bar", "found", "", title="rehearsal: all step times are SIMULATED")
    made = list(rows(given.rounds, given.seeds))
    for row in made:
        table.add_row(row.what, row.bar, row.found, "met" if row.met else "LOST")
    Console(width=150).print(table)
    return int(any(row.met is False for row in made))


if __name__ == "__main__":
    sys.exit(main())
