"""Two live runs never share a run directory, however the second one is started; what a killed one held is free."""

import pytest

from tests.launching import QUICKSTART, TINY, launch, metrics_of, start, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = (
    "--config", QUICKSTART, *TINY, "checkpoint.every=1", "evaluation.every=0",
    "reward.function=tests.own_parts.unhurried", "reward.isolate=never",
)  # fmt: skip
"""A run that takes its time, so that the others have the processor."""


def test_a_second_live_run_of_a_name_is_refused_and_one_that_was_killed_is_not_in_the_way(tmp_path):
    run, here = tmp_path / "quickstart", (*RUN, f"output_dir={tmp_path}")
    live = start(*here, "steps=10000", "checkpoint.keep=0")  # what is gone on from below stays there
    try:
        until(lambda: live.ended() or steps_noted(run) >= 3, "three steps", 100)
        assert not live.ended(), live.everything()
        for how in ("auto", "never", str(run)):
            refused = launch(*here, "steps=4", "--resume", how, expect=2)
            assert refused.stderr.count("\n") == 1
            assert f"error: output_dir: {run} is the run directory" in refused.stderr
            assert "(kill " in refused.stderr
        assert launch(*here, "steps=4", "--dry-run").returncode == 0
        elsewhere = launch(*RUN, f"output_dir={tmp_path}", "steps=1", "name=other", "--resume", str(run))
        assert "going on after step" in elsewhere.stdout
    finally:
        live.end()
    live.codes()
    steps = metrics_of(run)[-1]["step"] + 1
    done = launch(*here, f"steps={steps}", "--resume", "auto")
    assert "taken over from pid " in done.stdout
    assert [line["step"] for line in metrics_of(run)] == list(range(1, steps + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "quickstart"]
