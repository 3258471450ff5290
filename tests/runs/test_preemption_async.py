"""A run that works ahead and is told to end keeps what is in flight: it goes on from there, and draws nothing twice."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.launching import QUICKSTART, TINY, launch, metrics_of, start, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = (
    "--config", QUICKSTART, *TINY, "steps=6000", "evaluation.every=0", "checkpoint.every=0",
    "flow=rlinf.flows.grpo_async", "staleness.max=2", "rollout.max_new_tokens=12",
)  # fmt: skip


def test_what_is_in_flight_is_in_the_checkpoint_and_goes_on(tmp_path):
    run, here = tmp_path / "quickstart", (*RUN, f"output_dir={tmp_path}")
    ranks = start(*here)
    try:
        until(lambda: ranks.ended() or steps_noted(run) >= 5, "five steps", 100)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.code(0) == 75, ranks.everything()
    finally:
        ranks.end()
    (done,) = map(int, re.findall(r"stopped after step (\d+); ", ranks.printed(0)))
    checkpoint = Path(run / "checkpoints" / f"step_{done:06d}")
    drawn = json.loads((checkpoint / "queue.json").read_text())["problems"]["train"]["position"]
    kept = json.loads((checkpoint / "in_flight.json").read_text())["objects"]
    in_flight = {value["id"] for kind, value in kept if kind == "Prompt"}
    assert drawn == 4 * done + len(in_flight), "every prompt is trained or in flight"
    assert len(in_flight) > 0
    said = launch(*here, f"steps={done + 4}", "--resume", "auto").stdout
    assert f"going on after step {done}, from " in said
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, done + 5))
    assert max(line["staleness/max"] for line in lines) <= 2
