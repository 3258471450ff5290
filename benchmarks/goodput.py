"""Goodput of a job on thousands of hosts that fail: engines that come and go, beside a restart for every lost host.

    python -m benchmarks.goodput [--hosts 4096] [--days 100] [--seeds 5]

Goodput is the share of the time in which steps are made that stay, of an undisturbed job on as many hosts. The job is
asynchronous: hosts that train and hosts that generate work side by side, and as fast as the slower of the two. Hosts
fail one by one, at published rates, and others take their places. Nothing runs here but failures and what follows from
them, from event to event; every number that enters is printed with its source, measured, published or assumed.

*Restart-only*: whatever host is lost, all begin again from the newest checkpoint. *Elastic*: those that generate have
joined (`rollout.own_engine=false`, docs/multi-node.md). Of them a lost one takes along the answers that it had under
way, which others begin anew, and is missing until another has joined; only a lost host that trains has all begin again.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Job:
    """Assumptions about a job whose hosts fail."""

    hosts: int = 4096
    """Machines."""
    devices: int = 8
    """Devices of a host."""
    training: float = 0.25
    """Share of the hosts that train; the others generate, and both take equally long for a step."""
    rate: float = 1e-3
    """Failures of a device in a day, each of which takes its host along."""
    elastic: bool = True
    """Those that generate have joined; False: all are members, and any loss has all begin again."""
    restart: float = 180.0
    """Seconds from a failure to the first new step: until it is noticed, all have started, and have loaded."""
    pause: float = 2.0
    """Seconds for which a checkpoint holds up steps."""
    writing: float = 30.0
    """Seconds after which a checkpoint that has begun can be gone on from."""
    replaced: float = 600.0
    """Seconds until another machine is there for one that generated."""
    joining: float = 3.0
    """Seconds from there to its first answer."""
    answer: float = 300.0
    """Seconds that an answer takes; of a lost host's, half on average has been in vain."""

    @property
    def apart(self) -> float:
        """Mean seconds between failures after which all begin again."""
        share = self.training if self.elastic else 1.0
        failures = self.rate * self.devices * self.hosts * share / DAY
        return 1 / failures if failures else math.inf

    @property
    def every(self) -> float:
        """Seconds of steps between checkpoints that lose least, by Young's rule."""
        return math.sqrt(2 * self.pause * self.apart)


class Progress:
    """Seconds of steps that a job has made and kept.

    Args:
        job: it.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.now, self.made, self.restarts = job, 0.0, 0.0, 0
        self._starts = 0.0  # when steps go on
        self._saved = 0.0  # of what was made, by the newest checkpoint
        self._back: list[float] = []  # when missing hosts that generate are there again
        self._speed = 1.0 if math.isinf(job.every) else job.every / (job.every + job.pause)

    def until(self, when: float) -> None:
        """Go on until then."""
        while self.now < when:
            change = min(when, self._back[0]) if self._back else when
            generating = self._job.hosts * (1 - self._job.training)
            share = 1 - len(self._back) / generating if self._back else 1.0
            self.made += max(0.0, change - max(self.now, self._starts)) * share * self._speed
            self.now = change
            while self._back and self._back[0] <= change:
                heapq.heappop(self._back)

    def begin_again(self) -> None:
        """A host is lost without which no step is made."""
        every = self._job.every
        written = math.floor(max(0.0, self.made - self._job.writing) / every) * every
        self.made = self._saved = max(self._saved, written)
        self._starts = self.now + self._job.restart
        self.restarts += 1

    def do_without(self) -> None:
        """A host is lost that generated."""
        heapq.heappush(self._back, self.now + self._job.answer / 2 + self._job.replaced + self._job.joining)


def goodput(job: Job, days: float, seed: int = 0) -> tuple[float, int, int]:
    """Its goodput in so many days, how many hosts were lost, and how often all began again."""
    rng, progress, lost = random.Random(seed), Progress(job), 0
    mean = DAY / (job.rate * job.devices * job.hosts) if job.rate else math.inf
    when = rng.expovariate(1 / mean) if job.rate else math.inf
    while when < days * DAY:
        progress.until(when)
        lost += 1
        if rng.random() < job.training or not job.elastic:
            progress.begin_again()
        else:
            progress.do_without()
        when += rng.expovariate(1 / mean)
    progress.until(days * DAY)
    return progress.made / (days * DAY), lost, progress.restarts


_LLAMA = 419 / 54 / 16_384
"""Interruptions that nobody had planned, of a device in a day (Llama 3, arXiv 2407.21783, section 3.3.4)."""
_SOURCES = (
    ("failures", "1 a day per 1,000 devices: the bar's; 0.47: Llama 3, 419 in 54 days on 16,384 (arXiv 2407.21783)"),
    ("hosts, devices", "the bar's 4,096; 8 each: assumed"),
    ("training", "a quarter of the hosts trains, the others generate, as in AReaL's experiments: assumed"),
    (
        "restart",
        "60 s until a silent host is given up (system.host_timeout), 16 s to start (docs/benchmarks.md, measured",
    ),
    ("", "on two cores), the rest for rendezvous, groups and loading on thousands of ranks: assumed; 600 s beside it"),
    ("pause", "2 s: assumed; states are copied to host memory and written beside the steps"),
    ("writing", "30 s: assumed; 512 MiB took 4.3 s (docs/checkpoints.md, measured on two cores)"),
    ("replaced", "10 minutes until a scheduler has another machine for one that generated: assumed"),
    ("joining", "3 s from a cold start to the first answer: the bar; measured 2 s of processor time"),
    ("answer", "5 minutes for a long answer: assumed"),
    ("spares", "for a host that trains another one waits, in both: assumed"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4096, help="machines of the job (4096)")
    parser.add_argument("--days", type=float, default=100.0, help="simulated, of each row and seed (100)")
    parser.add_argument("--seeds", type=int, default=5, help="of the failures (5)")
    options = parser.parse_args(arguments)
    for name, source in _SOURCES:
        print(f"{name:<15} {source}")
    print(f"\n{options.hosts:,} hosts, {options.days:g} simulated days, {options.seeds} seeds: mean (least to most)")
    print("failures per 1,000 devices a day | restart takes | mode | all begin again, a day | saved every | goodput")
    for rate, restart, elastic in itertools.product((1e-3, _LLAMA), (180.0, 600.0), (False, True)):
        job = replace(Job(), hosts=options.hosts, rate=rate, restart=restart, elastic=elastic)
        runs = [goodput(job, options.days, seed) for seed in range(options.seeds)]
        found = sorted(share for share, _, _ in runs)
        again = sum(restarts for _, _, restarts in runs) / options.seeds / options.days
        mode = "elastic" if elastic else "restart-only"
        row = (f"{rate * 1000:.2f}", f"{restart:g} s", mode, f"{again:.1f}", f"{job.every:.0f} s")
        print(" | ".join((*row, f"{sum(found) / len(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})")))


if __name__ == "__main__":
    main()
