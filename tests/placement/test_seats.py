"""From the keys of `placement` to seats."""

from __future__ import annotations

import pytest

from rlinf.config.common import EmbodiedPlacementConfig, PlacementConfig
from rlinf.placement.grammar import PlacementError
from rlinf.placement.plan import Plan, RolePlan, save
from rlinf.placement.seats import CONTROL, TEXT, place, placed_by

GRPO = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
PPO = [kind for kind in TEXT if kind.name not in ("teacher", "reward_model")]


def hosts(placed):
    return {role: seat.hosts for role, seat in placed.seats.items()}


def test_one_process_has_every_role():
    placed = place(PlacementConfig(rollout="0-1", trainer=3), PPO, 1)
    assert set(hosts(placed).values()) == {(0,)}
    assert placed.plan.mode == "collocated"


def test_placements_by_hand_are_followed_and_who_has_none_sits_with_the_trainer():
    placed = place(PlacementConfig(rollout="0-1", trainer="2-3", teacher=0), TEXT, 4)
    assert hosts(placed) == {
        "rollout": (0, 1), "judge": (0,), "reference": (2, 3), "teacher": (0,), "critic": (2, 3), "trainer": (2, 3),
        "reward_model": (2, 3),
    }  # fmt: skip
    assert placed.of_actors["trainer[1]"] == {3}
    assert "judge[0]" not in placed.of_actors
    assert not placed.turns, "roles that meet by hand share a device"


def test_several_processes_share_a_device_and_one_may_have_several():
    placed = place(PlacementConfig(rollout="0-1:0-3"), GRPO, 2)
    assert hosts(placed)["rollout"] == (0, 0, 1, 1)
    placed = place(PlacementConfig(rollout="0-3:0-1"), GRPO, 4)
    assert hosts(placed)["rollout"] == (0, 2)
    assert placed.seats["rollout"].devices == ({0, 1}, {2, 3})


@pytest.mark.parametrize(
    ("mode", "rollout", "trainer"),
    [("collocated", (0, 1, 2, 3), (0, 1, 2, 3)), ("disaggregated", (0, 1), (2, 3)), ("hybrid", (0, 1), (2, 3))],
)
def test_a_mode_places_what_computes_on_devices_whatever_is_written_below(mode, rollout, trainer):
    placed = place(PlacementConfig(mode=mode, rollout=3, trainer=3, judge=2), GRPO, 4)
    assert (hosts(placed)["rollout"], hosts(placed)["trainer"], hosts(placed)["judge"]) == (rollout, trainer, (2,))
    assert placed.turns


def test_a_hybrid_has_the_others_take_turns_beside_generation():
    placed = place(PlacementConfig(mode="hybrid"), PPO, 4)
    assert {hosts(placed)[role] for role in ("reference", "critic", "trainer")} == {(2, 3)}
    assert placed.plan.mode == "hybrid"
    assert placed.spawning("rollout") == {"hosts": [0, 1]}, "alone on its devices it need not ask for them"
    assert placed.spawning("trainer", 5, 1)["devices"] == ({2}, {3})
    assert placed.spawning("trainer", 5, 1)["resident_bytes"] == 5


def test_too_few_devices_for_a_mode_say_how_many_it_takes():
    with pytest.raises(PlacementError, match=r"4 devices.*start 4 processes"):
        place(PlacementConfig(mode="disaggregated"), PPO, 3)


def test_devices_can_be_named_by_groups_of_nodes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    wanted = PlacementConfig(
        node_groups={"big": {"nodes": "1-2", "hardware": "h100"}},
        trainer={"node_group": "big", "placement": "all"},
    )
    assert hosts(place(wanted, GRPO, 6))["trainer"] == (2, 3, 4, 5)
    wanted.trainer = {"node_group": "bgi", "placement": "all"}
    with pytest.raises(PlacementError, match=r"mean 'big'"):
        place(wanted, GRPO, 6)


def test_memory_makes_roles_take_turns():
    placed = place(PlacementConfig(device_memory_gb=2), GRPO, 1)
    assert placed.turns
    assert placed.memory == 2_000_000_000
    assert place(PlacementConfig(), GRPO, 1, gpu_memory=5).memory == 5


def plan_file(tmp_path, **roles):
    path = tmp_path / "plan.yaml"
    save(Plan({name: RolePlan(*what) for name, what in roles.items()}), path)
    return str(path)


def test_a_plan_is_followed(tmp_path):
    path = plan_file(tmp_path, rollout=((0, 1), (0,)), judge=((),), trainer=((0, 1, 2), (1,)))
    placed = place(PlacementConfig(plan=path, mode="disaggregated", judge=1), GRPO, 3)
    assert hosts(placed) == {"rollout": (0, 1), "judge": (1,), "trainer": (0, 1, 2)}
    assert placed.plan.mode == "hybrid"
    moved = placed_by(Plan({"rollout": RolePlan((2,), items=4), "trainer": RolePlan((0,))}), placed, GRPO)
    assert (hosts(moved)["rollout"], moved.seats["rollout"].items, hosts(moved)["judge"]) == ((2,), 4, (1,))


def test_who_says_nothing_takes_as_many_items_as_travel_together(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "roles:\n  rollout: {devices: 0, phases: [0], items: 2}\n  trainer: {devices: 0-1, phases: [1]}\n"
        "edges:\n  rollout -> trainer: {items: 8}\n"
    )
    seats = place(PlacementConfig(plan=str(path)), GRPO, 2).seats
    assert (seats["rollout"].items, seats["trainer"].items) == (2, 8)
    assert place(PlacementConfig(plan=str(path)), GRPO, 2).spawning("trainer")["items"] == 8


def test_a_plan_that_cannot_be_followed_says_all_that_is_wrong(tmp_path):
    path = plan_file(tmp_path, rollout=((0, 7),), tutor=((1,),))
    with pytest.raises(PlacementError) as caught:
        place(PlacementConfig(plan=path), GRPO, 2)
    told = "\n".join(caught.value.complaints)
    for said in ("says nothing of trainer", "places tutor", "device 7 does not exist"):
        assert said in told
    with pytest.raises(PlacementError, match="cannot be read"):
        place(PlacementConfig(plan=str(tmp_path / "none.yaml")), GRPO, 2)


def test_a_plan_that_overfills_a_device_is_refused_with_the_smallest_fix(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "roles:\n  rollout: {devices: 0, phases: [0], active_bytes: 6000000000, parked_bytes: 1000000000}\n"
        "  trainer: {devices: 0, phases: [1], active_bytes: 5000000000}\n"
    )
    with pytest.raises(PlacementError, match=r"resident.*false"):
        place(PlacementConfig(plan=str(path), device_memory_gb=8), GRPO, 2)


def test_policies_that_act_are_placed_too():
    placed = place(EmbodiedPlacementConfig(mode="disaggregated", env="0-1"), CONTROL, 2)
    assert hosts(placed) == {"env": (0, 1), "policy": (0,), "trainer": (1,)}
