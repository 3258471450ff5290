"""GRPO learns the quickstart's task through a real SGLang server."""

from __future__ import annotations

import pytest

from rlinf.engines.base import lacking
from tests.launching import QUICKSTART, launch, metrics_of


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(lacking("sglang") is not None, reason=str(lacking("sglang")))
def test_grpo_learns_the_quickstart_through_sglang(tmp_path):
    launch("--config", QUICKSTART, "rollout.engine=sglang", "steps=15", f"output_dir={tmp_path}", timeout=280)
    metrics = metrics_of(tmp_path / "quickstart")
    rewards = [step["reward/mean"] for step in metrics if "reward/mean" in step]
    assert sum(rewards[-3:]) > 1.4 * sum(rewards[:3])
    assert metrics[-1]["evaluation/accuracy"] >= 0.9
    assert max(step.get("mismatch/max", 0.0) for step in metrics) < 1e-4
    assert list((tmp_path / "quickstart").glob("sglang-*.log"))
