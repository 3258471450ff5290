"""Steps in which every episode was lost are skipped, a few in a row at most."""

from __future__ import annotations

import pytest

from rlinf.config.load import RunFailure
from rlinf.envs.environment import NothingHappened
from rlinf.flows.embodied_async import embodied_async
from rlinf.flows.interact import acting
from rlinf.runs.embodied import MOST_SKIPPED
from rlinf.runs.rules import load_embodied
from rlinf.runs.start import train
from tests.launching import ROOT, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SMALL = ("log_every=1", "trials.episodes=0", "policy.horizon=5", "env.max_steps=7", "trace=false", "checkpoint.every=3")


async def unlucky(step, env, policy, trainer):
    """Acts ahead, and now and then loses everything."""
    if step.index in LOST:
        await step.in_flight.next_batch(step, lambda steps: acting(steps, env, policy), policy).groups.collect()
        raise NothingHappened("all was lost")
    return await embodied_async(step, env, policy, trainer)


LOST: set[int] = set()


def run(directory, steps, lost):
    LOST.clear()
    LOST.update(lost)
    flow = f"flow={__name__}.unlucky"
    train(
        load_embodied(ROOT / "configs/embodied/toy.yaml", [*SMALL, f"steps={steps}", f"output_dir={directory}", flow])
    )
    return metrics_of(directory / "toy")


def test_steps_that_are_lost_are_skipped_with_a_line_and_the_others_learn(tmp_path, capfd):
    lost = {*range(1, 1 + MOST_SKIPPED), 5}
    steps = run(tmp_path, 8, lost)
    assert [step.get("skipped", 0.0) for step in steps] == [index in lost for index in range(8)]
    kept = [step for step in steps if "skipped" not in step]
    assert all(step["optimizer_steps"] > 0 for step in kept)
    # Steps 4 and 7 were begun ahead; what 4 was begun ahead of taught nothing, so its weights were the newest
    assert [step["staleness/mean"] for step in kept] == [0, 0, 0, 1]
    told = capfd.readouterr().out
    for index in lost:
        assert f"step {index + 1} is skipped: " in told


def test_too_many_in_a_row_end_the_run_with_the_reason(tmp_path):
    with pytest.raises(RunFailure, match=f"step {MOST_SKIPPED + 2}:.*{MOST_SKIPPED} steps.*die"):
        run(tmp_path, 9, set(range(1, 9)))
    assert len(metrics_of(tmp_path / "toy")) == MOST_SKIPPED + 1
