"""Devices of several kinds: what is declared of them, what a role costs on each, and plans over all of them."""

from __future__ import annotations

import random

import pytest

from rlinf.config.common import PlacementConfig
from rlinf.flows.grpo import grpo
from rlinf.placement.auto import AutoPlacement, choose
from rlinf.placement.bound import bound
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import KNOWN, Devices, Fleet, Hardware, fleet_of
from rlinf.placement.plan import Plan, RolePlan
from rlinf.placement.planner import plan
from rlinf.placement.profile import BESIDE, Profile, Release, StageProfile, Timing, load, save
from rlinf.placement.seats import TEXT, place
from rlinf.placement.workload import Edge, Option, Stage, Workload, workload
from rlinf.runs.placement_manager import _explored
from tests.placement.exhaustive import all_plans, judge

GRPO = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
MIXED = {"new": {"nodes": "0,2", "hardware": "h100"}, "old": {"nodes": 1, "hardware": "l40s"}}
SPEEDS = {"fast": Hardware(80, tflops=4, bandwidth=2), "slow": Hardware(40, tflops=1, bandwidth=1)}


def mixed(monkeypatch, **more):
    """Three machines of two processes, the middle one with old cards."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return PlacementConfig(node_groups=MIXED, **more)


def profile(kind="fast"):
    """Measured on two devices of one kind; the trainer has four times the rollout's work there."""
    even = Release(tuple((k + 1) / 64 for k in range(64)))
    return Profile(
        "m", "x",
        {
            "rollout": StageProfile((Timing(64, 1, 4.0), Timing(64, 2, 2.0)), even, kind=kind),
            "judge": StageProfile((Timing(64, 1, 0.01),), kind=BESIDE),
            "trainer": StageProfile((Timing(64, 1, 4.0), Timing(64, 2, 2.0)), kind=kind),
        },
        {}, (), "rlinf.flows.grpo", 64, (("rollout", "judge", False), ("judge", "trainer", False)),
    )  # fmt: skip


def test_a_fleet_knows_each_device_by_its_node_group_and_cards_by_their_names(monkeypatch):
    fleet = fleet_of(mixed(monkeypatch, devices={"l40s": {"memory_gb": 40}}), 6)
    assert fleet.kinds == ("h100", "h100", "l40s", "l40s", "h100", "h100")
    assert fleet.counts == {"h100": 4, "l40s": 2}
    assert fleet.memories(None) == (78e9, 78e9, 40e9, 40e9, 78e9, 78e9)
    assert fleet.hardware["l40s"].bandwidth == KNOWN["l40s"].bandwidth, "what is not said is as it is known"
    limited = fleet_of(mixed(monkeypatch, device_memory_gb=30), 6)
    assert set(limited.memories(int(30e9))) == {30e9}


def test_a_card_may_be_named_for_all_devices_that_no_group_names():
    assert fleet_of(PlacementConfig(devices={"gpu": "h200"}), 2).memories(None) == (138e9, 138e9)


def test_a_plan_by_kinds_is_put_onto_the_devices_that_the_job_numbers(monkeypatch):
    """The planner has h100s 0-3 and l40s 4-5; in the job, the old ones are in the middle."""
    fleet = fleet_of(mixed(monkeypatch), 6)
    made = fleet.numbered(Plan({"rollout": RolePlan((4, 5)), "trainer": RolePlan((0, 1, 2, 3))}))
    assert made.roles["rollout"].devices == (2, 3)
    assert made.roles["trainer"].devices == (0, 1, 4, 5)


def test_each_role_has_the_memory_of_its_own_devices(monkeypatch):
    wanted = mixed(monkeypatch, trainer="0-1,4-5", rollout={"node_group": "old", "placement": "all"}, judge=0)
    placed = place(wanted, GRPO, 6)
    assert (placed.room("trainer"), placed.room("rollout"), placed.memory) == (78e9, 43e9, 43e9)
    assert placed.memory_by_kind == {"h100": 78e9, "l40s": 43e9}
    assert placed.memory_of(6) == {0: 78e9, 1: 78e9, 2: 43e9, 3: 43e9, 4: 78e9, 5: 78e9}


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"h10": {"tflops": 1}}, r"placement.devices.h10:.*group.*hardware.*'h100'"),
        ({"h100": {"flops": 1}}, r"placement.devices.h100:.*memory_gb, tflops, bandwidth"),
        ({"h100": {"tflops": -1}}, r"placement.devices.h100.tflops: -1.*number above 0"),
    ],
)
def test_what_is_wrong_with_a_kind_is_said_with_its_key(monkeypatch, devices, words):
    with pytest.raises(PlacementError, match=words):
        fleet_of(mixed(monkeypatch, devices=devices), 6)


def test_generation_goes_with_the_memory_and_all_else_with_the_products():
    stages = profile().stages
    assert stages["rollout"].on("slow", SPEEDS).timings[0].seconds == 8.0
    assert stages["trainer"].on("slow", SPEEDS).timings[0].seconds == 16.0
    assert stages["judge"].on("slow", SPEEDS).kind == BESIDE
    assert stages["trainer"].on("slow", {"slow": SPEEDS["slow"]}) is None, "nothing is known of where it was measured"


def test_what_was_measured_on_a_kind_counts_more_than_its_speeds(tmp_path):
    both = profile().merged(profile("slow"))
    assert both.stages["trainer"].on("slow", SPEEDS).timings[0].seconds == 4.0
    save(both, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == both


def test_a_role_seen_only_on_a_mixture_asks_to_be_measured_by_itself():
    with pytest.raises(PlacementError, match=r"devices.*kind"):
        workload(profile("fast+slow"), Devices({"fast": 2, "slow": 2}, hardware=SPEEDS))
    with pytest.raises(PlacementError, match=r"fast both"):
        workload(profile(), Devices({"slow": 2}))


def test_rollout_goes_to_old_cards_and_training_to_new_ones():
    """On fast ones both take 2 s, so 4 s in turns; slow ones generate at half the speed and train at a quarter."""
    found = choose(profile(), Devices({"slow": 4, "fast": 2}, hardware=SPEEDS), grpo, extrapolate=True)
    roles = found.plan.roles
    assert (roles["rollout"].devices, roles["trainer"].devices) == ((0, 1, 2, 3), (4, 5))
    assert found.rows[0].seconds < 2.5 < 4.0
    assert found.rows[0].seconds >= found.bound.seconds


async def test_auto_measures_each_role_on_each_kind_and_then_goes_where_it_is_quickest():
    """Device 1 of three is slow. Both roles were measured on both kinds: nothing is declared of any speed."""
    fleet = Fleet(("fast", "slow", "fast"))
    explored = _explored(GRPO, fleet)
    assert [{name: role.devices for name, role in one.roles.items()} for one in explored] == [
        {"rollout": (0, 2), "trainer": (1,)},
        {"rollout": (1,), "trainer": (0, 2)},
    ]
    one = AutoPlacement(grpo, fleet, None, explored=explored, first=1, replan_above=0.15)
    slow = {
        name: StageProfile((Timing(64, 1, took),), kind="slow") for name, took in (("rollout", 2.5), ("trainer", 40))
    }
    stages = {name: stage.merged(slow[name]) if name in slow else stage for name, stage in profile().stages.items()}
    measured = Profile("m", "x", stages, {}, (), "rlinf.flows.grpo", 64, profile().edges)
    everybody = Plan({"rollout": RolePlan((0, 1, 2)), "trainer": RolePlan((0, 1, 2))})
    for at, step in ((everybody, 40.0), (explored[0], 40.0), (explored[1], 3.0)):
        one.due(step)
        decision = await one.decide(measured, at)
    assert decision.plan is None, "it is where it is to be"
    assert "disaggregated stays" in decision.sentence
    for _ in range(6):
        one.due(9.0)
    decision = await one.decide(measured, explored[0])
    assert decision.plan is not None
    assert decision.plan.roles["trainer"].devices == (0, 2), decision.sentence


def two_kinds(seed):
    """Three stages of uneven work, whose speed on the second kind has nothing to do with that on the first."""
    rng = random.Random(seed)
    stages = tuple(
        Stage(
            f"s{i}",
            tuple(
                Option(n, work / n**power, kind)
                for kind, power in (("a", rng.uniform(0.5, 1)), ("b", rng.uniform(0.5, 1)))
                for work in (rng.uniform(2, 20),)
                for n in (1, 2, 3)
            ),
        )
        for i in range(3)
    )
    return Workload(stages, (Edge("s0", "s1"), Edge("s1", "s2")), {"a": 3, "b": 3}, chunks=(4,))


@pytest.mark.parametrize("seed", range(2))
def test_over_two_kinds_the_plan_is_the_best_of_all_and_no_bound_is_above_it(seed):
    made = two_kinds(seed)
    found = plan(made, tolerance=0.0)
    best = min(judge(tree, made, 4) for tree in all_plans(made))
    assert found.estimate == pytest.approx(best, rel=1e-9)
    assert bound(made).seconds <= best * (1 + 1e-9)
    for kind in ("a", "b"):
        alone = tuple(Stage(s.name, tuple(o for o in s.options if o.kind == kind)) for s in made.stages)
        one = Workload(alone, made.edges, {kind: 3}, chunks=(4,))
        assert plan(one, tolerance=0.0).estimate >= found.estimate * (1 - 1e-9), "more devices never make it slower"


def test_the_bound_over_two_kinds_is_that_of_the_best_division_of_work():
    """Held against every division in hundredths: each stage may give any share of its work to either kind."""
    for seed in range(4):
        made = two_kinds(50 + seed)
        areas = [
            [min(o.devices * o.seconds for o in s.options if o.kind == k) / 3 for k in ("a", "b")] for s in made.stages
        ]
        shares = [k / 50 for k in range(51)]
        best = min(
            max(sum(x * area[0] for x, area in zip(given, areas, strict=True)),
                sum((1 - x) * area[1] for x, area in zip(given, areas, strict=True)))
            for given in ((x, y, z) for x in shares for y in (0, 1) for z in (0, 1))
        )  # fmt: skip
        for order in ((1, 0, 2), (2, 0, 1)):
            turned = [areas[i] for i in order]
            best = min(best, *(
                max(sum(x * area[0] for x, area in zip(given, turned, strict=True)),
                    sum((1 - x) * area[1] for x, area in zip(given, turned, strict=True)))
                for given in ((x, y, z) for x in shares for y in (0, 1) for z in (0, 1))
            ))  # fmt: skip
        area = bound(made).area
        assert area <= best * (1 + 1e-9)
        assert area == pytest.approx(best, rel=0.03), "at most one stage is divided in the best division"
