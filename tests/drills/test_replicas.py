"""Kill -9 of replicas of the trainer, in the middle of steps: the run goes on, to the weights of one that had none.

python -m tests.drills.test_replicas 20
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlinf.joining.address import FILES
from tests.drills.run import PATIENCE, Drill
from tests.drills.test_joining import counted, had_joined, join
from tests.launching import equal, metrics_of, start, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(600)]

SMALL = ("trainer.micro_batch_tokens=48", "placement.trainer=0", "algorithm.epochs=8")
"""A hundred micro-batches in a step, so that a replica has one under way at most moments."""
LONG = 10 * PATIENCE
"""Seconds for a whole run."""
PER_KILL = 4
"""Steps in which one joins and another is killed, on a machine that is busy."""


def run_of(steps: int, directory: Path, more: tuple[str, ...]):
    """A synchronous run, in which the trainer takes most of the time."""
    return start(*Drill("grpo", steps=steps, more=(*SMALL, *more)).arguments(directory, engine=False))


def killed_in_the_middle(points: int, directory: Path, beside: int = 3, seed: int = 0) -> tuple[int, str]:
    """Kill replicas of a run that has so many; returns how many were, and what the run said."""
    rng, kills, steps = random.Random(seed), 0, PER_KILL * points + 6
    run, path = run_of(steps, directory / "lost", ("trainer.join=127.0.0.1:0",)), directory / "lost" / "quickstart"
    try:
        until(lambda: (path / FILES["trainer"]).exists() or run.ended(), lambda: run.everything(), PATIENCE)
        replicas = [join(path, "trainer") for _ in range(beside)]
        counted(run, path, "trainer/joined_tokens")
        while kills < points and not run.ended():
            time.sleep(rng.random())
            victim = replicas.pop(rng.randrange(len(replicas)))
            victim.kill_all(signal.SIGKILL)
            victim.codes(PATIENCE)
            kills += steps_noted(path) < steps - 2  # of those in its last steps the run need not say anything
            replicas.append(join(path, "trainer"))
        assert run.codes(LONG) == [0], run.everything()
        assert not any(code for each in replicas for code in had_joined(each))
    finally:
        run.end()
    whole = run_of(steps, directory / "whole", ())
    try:
        assert whole.codes(LONG) == [0], whole.everything()
    finally:
        whole.end()
    equal(path, directory / "whole" / "quickstart")
    return kills, run.everything()


def test_a_run_whose_replicas_are_killed_has_the_weights_of_one_that_had_none(tmp_path):
    kills, said = killed_in_the_middle(2, tmp_path, beside=2)
    assert said.count("is gone: ") >= kills
    assert "Traceback" not in said
    rows = metrics_of(tmp_path / "lost" / "quickstart")
    assert max(row["trainer/joined_count"] for row in rows) >= 1
    assert sum(row.get("trainer/joined_tokens", 0) for row in rows) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        done, said = killed_in_the_middle(int(sys.argv[1]), Path(directory))
        rows = metrics_of(Path(directory) / "lost" / "quickstart")
    lines = [line.split(" micro-batches that it had")[0] for line in said.splitlines() if " micro-batches that" in line]
    had = [int(line.rsplit(" ", 1)[1]) for line in lines]
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("tokens", "trainer/joined_tokens")}
    print(f"{done} killed, which had {had} micro-batches under way; {sums}, {len(rows)} steps")
