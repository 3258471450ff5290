"""Kill -9 of anything at any moment loses nothing and repeats nothing: a few of the points that `make drills` tries."""

from __future__ import annotations

import json
import random
import signal

import pytest

from tests.drills.driver import drilled
from tests.drills.examine import summary
from tests.drills.run import Drill
from tests.drills.signals import Point, tried

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("drill", "points", "seed"),  # `make drills` tries 100 points
    [(Drill("grpo_async", staleness=2, steps=24), 2, 5), (Drill("grpo", steps=8), 1, 6)],
    ids=["asynchronous", "synchronous"],
)
def test_nothing_is_lost_or_repeated(drill, points, seed, tmp_path):
    found = drilled(drill, points, seed, tmp_path, torchrun=False)
    assert found.well, json.dumps(summary(found), indent=1)
    assert len(found.points) == points
    assert found.again <= 0.01 * found.held


@pytest.mark.parametrize(
    ("phase", "number", "grace"),
    [("start", signal.SIGHUP, 30.0), ("learning", signal.SIGTERM, 0.3), ("writing", signal.SIGHUP, 30.0)],
    ids=lambda each: str(getattr(each, "name", each)),
)
def test_a_signal_ends_a_run_as_its_page_says(phase, number, grace, tmp_path):
    point, rng = Point(phase, number, grace), random.Random(phase)
    # A moment passes unseen where this process is late; then the run has ended, and another one is begun.
    assert any(tried(point, tmp_path / str(attempt), rng) for attempt in range(9)), "each run had ended before"
    assert not point.wrong, point
