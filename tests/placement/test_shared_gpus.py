"""More processes than GPUs: roles that meet on one take turns, and what NCCL would refuse is refused at once."""

from __future__ import annotations

import pytest

from rlinf.config.common import PlacementConfig
from rlinf.placement.devices import first_on_same
from rlinf.placement.grammar import PlacementError
from rlinf.placement.seats import TEXT, place

GRPO = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
MEMORY = 80 << 30


@pytest.fixture(autouse=True)
def machines(monkeypatch):
    """torchrun has started four processes on this machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def test_processes_beyond_the_gpus_of_their_machine_share_them_in_turn(monkeypatch):
    assert first_on_same(8, 2) == (0, 1, 0, 1, 4, 5, 4, 5)
    assert first_on_same(4, 3) == (0, 1, 2, 0)
    assert first_on_same(8, 4) == first_on_same(8, 8) == first_on_same(8, 0) == ()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert first_on_same(8, 2) == (), "where torchrun did not start them, this machine's GPUs tell nothing"


def test_roles_of_two_processes_on_one_gpu_take_turns():
    wanted = PlacementConfig(rollout=0, trainer=1)
    apart = place(wanted, GRPO, 4, gpu_memory=MEMORY, gpus=4)
    assert "devices" not in apart.spawning("trainer")
    together = place(wanted, GRPO, 4, gpu_memory=MEMORY, gpus=1)
    assert together.turns
    assert (together.gpus, together.devices, apart.gpus) == (1, 4, 4)
    assert together.of_actors == {"rollout[0]": {0}, "trainer[0]": {0}}
    for role, number in (("rollout", 0), ("trainer", 1)):
        assert together.spawning(role, 5, 1)["devices"] == ({number},)
    beside = place(PlacementConfig(rollout=0, trainer=3), GRPO, 4, gpu_memory=MEMORY, gpus=2)
    assert "devices" not in beside.spawning("trainer"), "processes 0 and 3 are on GPUs 0 and 1"


def test_a_role_that_computes_together_may_have_one_process_of_each_gpu_and_no_more():
    assert place(PlacementConfig(rollout="0-3", trainer="2-3"), GRPO, 4, gpus=2).seats["trainer"].hosts == (2, 3)
    with pytest.raises(PlacementError, match=r"placement.trainer:.*processes 1.*3.*GPU.*NCCL.*node 2\)"):
        place(PlacementConfig(rollout="0-3", trainer="1-3"), GRPO, 4, gpus=2)
    with pytest.raises(PlacementError, match=r"placement.trainer:.*processes 0.*1 share.*GPU"):
        place(PlacementConfig(mode="collocated"), GRPO, 4, gpus=1)


@pytest.mark.parametrize(("key", "value"), [("profile", "profile.json"), ("mode", "auto")])
def test_planning_is_refused_where_a_process_is_not_a_gpu(key, value):
    wanted = PlacementConfig(**{key: value, "rollout": 0, "trainer": 1})
    with pytest.raises(PlacementError, match=f"placement.{key}:.*planner.*GPU.*process"):
        place(wanted, GRPO, 4, gpus=2)
