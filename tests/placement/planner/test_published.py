"""The planner puts modes into the order in which the published system measured them."""

import pytest

from benchmarks.placement_published import RANKINGS, grpo_7b, moe, ppo_7b
from rlinf.placement.bound import bound
from rlinf.placement.planner import best_of_each_mode


@pytest.mark.parametrize("name", RANKINGS)
def test_the_published_ranking_is_reproduced(name):
    found = RANKINGS[name]()
    assert found.ours == found.published, found.seconds


def test_the_seconds_of_each_published_mode_are_near_where_its_stages_are_published():
    grpo = best_of_each_mode(grpo_7b())
    assert grpo["collocated"].seconds == pytest.approx(1061.4, rel=0.05)
    ppo = best_of_each_mode(ppo_7b())
    assert ppo["collocated"].seconds == pytest.approx(27.6, rel=0.05)
    assert ppo["disaggregated"].seconds == pytest.approx(21.35, rel=0.1)
    assert best_of_each_mode(moe(32))["disaggregated"].seconds == pytest.approx(791, rel=0.02)


def test_the_published_decoding_times_follow_from_two_constants():
    times = {option.devices: option.seconds for option in grpo_7b(256).stage("rollout").options}
    assert times[64] == pytest.approx(591.3, rel=0.05)
    assert times[128] == pytest.approx(367.5, rel=0.05)
    assert times[256] == pytest.approx(236.3, rel=0.06)


def test_no_published_plan_beats_the_bound():
    for workload in (grpo_7b(), ppo_7b(), moe(32)):
        limit = bound(workload)
        assert all(limit.efficiency(found.seconds) <= 1.0 for found in best_of_each_mode(workload).values())
