"""A run on two hosts of which one is slow: nobody says how slow, and it gets the work that it does least harm with."""

from __future__ import annotations

from rlinf.placement.plan import load as load_plan
from rlinf.placement.profile import load as load_profile
from tests.launching import QUICKSTART, TINY, launch

KINDS = "placement.node_groups={quick: {nodes: 0, hardware: quick}, slow: {nodes: 1, hardware: slow}}"


def test_auto_measures_a_slow_host_and_gives_it_less(tmp_path):
    done = launch(
        "--config", QUICKSTART, *TINY, "steps=8", "sft.steps=0", "evaluation.problems=4", "evaluation.every=0",
        "checkpoint.every=0",
        "placement.mode=auto", "placement.profile_steps=2", KINDS, "rollout.engine=tests.runs.slowed.build",
        f"output_dir={tmp_path}", processes=2, LOCAL_WORLD_SIZE=1,
    )  # fmt: skip
    assert done.stdout.count("measuring disaggregated") == 2, "each role on each kind"
    run = tmp_path / "quickstart"
    stages = load_profile(run / "profile.json").stages
    took = {
        role: {kind: stages[role].on(kind).timings[0].seconds for kind in ("quick", "slow")}
        for role in ("rollout", "trainer")
    }
    lost = {role: own["slow"] - own["quick"] for role, own in took.items()}
    assert min(lost.values()) > 0, took
    roles = load_plan(run / "plan.yaml").roles
    assert roles[max(lost, key=lambda role: lost[role])].devices == (0,), (took, done.stdout)
