"""Kill -9 of engines that have joined a run, at random moments: the run goes on, and nothing is lost or repeated.

python -m tests.drills.test_joining 20 grpo_async
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlinf.cli.runs import account
from rlinf.storage.files import read_lines
from tests.drills.run import PATIENCE, Drill
from tests.launching import ROOT, metrics_of, start, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(240)]


def join(path: Path):
    """One more engine for a run; it has joined."""
    joiner = start("join", str(path), "--role", "rollout", program=ROOT / "rlinf" / "__main__.py")
    until(lambda: "joined" in joiner.printed(0) or joiner.ended(), "an engine that joins", PATIENCE)
    return joiner


def _goes_on(run, path: Path) -> None:
    """Wait until a run has done a further step, or ended."""
    before = steps_noted(path)
    until(lambda: run.ended() or steps_noted(path) > before, lambda: run.everything(), PATIENCE)


def killed_again_and_again(points: int, flow: str, directory: Path, seed: int = 0) -> tuple[int, list[float], str]:
    """Kill engines that join; returns how many were, seconds until each had joined, and what the run said."""
    rng, seconds, kills = random.Random(seed), [], 0
    more = ("rollout.join=127.0.0.1:0", "rollout.engine=transformers", "rollout.max_rows=16")
    drill = Drill(flow, steps=8 * points + 8, more=more)
    run = start(*drill.arguments(directory, engine=False), processes=2)
    path = directory / "quickstart"
    try:
        until(lambda: steps_noted(path) or run.ended(), "the first step", PATIENCE)
        while kills < points and not run.ended():
            began = time.monotonic()
            joiner = join(path)
            seconds.append(time.monotonic() - began)
            time.sleep(rng.random())
            if run.ended():
                break
            joiner.kill(0)
            joiner.codes(PATIENCE)
            kills += 1
        while not run.ended():
            _goes_on(run, path)
        codes = run.codes(PATIENCE)
        assert set(codes) == {0}, run.everything()
    finally:
        run.end()
    found = account(path)
    assert found.balances, found.problems
    assert found.whole.steps == drill.steps
    assert not found.whole.dropped
    assert [row["step"] for row in read_lines(path / "metrics.jsonl")] == list(range(drill.steps + 1))
    return kills, seconds, run.everything()


@pytest.mark.parametrize("flow", ["grpo_async", "grpo"])
def test_engines_that_joined_are_killed_and_the_run_goes_on(flow, tmp_path):
    kills, _, said = killed_again_and_again(2, flow, tmp_path)
    assert said.count("has joined") >= kills
    assert said.count("is gone: ") >= kills
    assert "Traceback" not in said
    counts = [row.get("rollout/joined_count", 0) for row in metrics_of(tmp_path / "quickstart")]
    assert kills == 0 or max(counts) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        done, waited, said = killed_again_and_again(int(sys.argv[1]), sys.argv[2], Path(directory))
    lines = [line.split(" answers that it had")[0] for line in said.splitlines() if " answers that it had" in line]
    had, joining = [int(line.rsplit(" ", 1)[1]) for line in lines], sorted(round(one, 2) for one in waited)
    print(f"{done} killed, which had {had} answers under way; seconds to join: {joining}")
