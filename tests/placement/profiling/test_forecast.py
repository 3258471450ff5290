"""What was measured becomes what can be planned, and what was not measured is asked for."""

import re

import pytest

from rlinf.placement.bound import bound
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Devices
from rlinf.placement.planner import best_of_each_mode, plan
from rlinf.placement.profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing
from rlinf.placement.workload import Edge, Sync, chunk_choices, workload


def profile(**changes):
    rollout = StageProfile(
        (Timing(64, 1, 8.0), Timing(64, 4, 2.5), Timing(16, 1, 3.0), Timing(16, 4, 1.0)), Release((0.5, 0.75, 1.0))
    )
    trainer = StageProfile((Timing(64, 1, 6.0), Timing(64, 2, 3.5)), footprints=(Footprint(1, 10, 2, 0.5, 0.25),))
    judge = StageProfile((Timing(64, 1, 1.0),), kind=BESIDE)
    given = {
        "stages": {"rollout": rollout, "judge": judge, "trainer": trainer},
        "sync": (Timing(1, 4, 0.5),),
        "flow": "rlinf.flows.grpo",
        "items": 64,
        "edges": (("rollout", "judge", False), ("judge", "trainer", True)),
        "published": (("trainer", "rollout"),),
        "transfers": {("judge", "trainer"): 0.01},
    }
    return Profile("m", "x", **(given | changes))


def test_a_profile_becomes_all_that_the_planner_asks():
    made = workload(profile(), Devices({"gpu": 4}, {"gpu": 20}))
    assert [option.devices for option in made.stage("rollout").options] == [1, 2, 3, 4]
    assert [option.devices for option in made.stage("trainer").options] == [1, 2], "no further than was measured"
    assert made.stage("trainer").options[0].parked_bytes == 2
    assert made.stage("rollout").release == Release((0.5, 0.75, 1.0))
    assert made.edges == (Edge("rollout", "judge"), Edge("judge", "trainer", True, 0.64))
    assert made.sync == (Sync("trainer", "rollout", 0.5, 0.5),)
    (judge,) = made.stage("judge").options
    assert (judge.devices, judge.seconds) == (0, 1.0)


def test_chunks_are_measured_or_a_share_of_the_whole():
    made = workload(profile(), Devices({"gpu": 4}))
    rollout, trainer = made.stage("rollout").options[0], made.stage("trainer").options[0]
    assert rollout.chunk_seconds[4] == 3.0
    assert 32 not in rollout.chunk_seconds, "two items were never measured"
    assert trainer.chunk_seconds == {}


def test_the_planner_plans_it():
    made = workload(profile(), Devices({"gpu": 4}))
    found = best_of_each_mode(made)
    assert {"disaggregated", "hybrid"} <= found.keys()
    best = plan(made)
    assert best is not None
    assert best.seconds >= bound(made).seconds
    far = workload(profile(), Devices({"gpu": 16}), extrapolate=True)
    assert plan(far).seconds < best.seconds


def test_outside_of_what_was_measured_a_stage_asks_to_be_profiled():
    with pytest.raises(PlacementError) as caught:
        workload(profile(), Devices({"gpu": 4}), items=640)
    assert len(caught.value.complaints) == 3
    (trainer,) = (text for text in caught.value.complaints if "'trainer'" in text)
    assert [int(number) for number in re.findall(r"\d+", trainer)] == [64, 1, 2, 640, 4]
    assert workload(profile(), Devices({"gpu": 4}), items=640, extrapolate=True).stage("trainer").options[3].seconds > 0


def test_a_profile_of_another_kind_of_device_or_of_nothing_is_one_message_each():
    with pytest.raises(PlacementError) as caught:
        workload(profile(), Devices({"tpu": 4}))
    assert [text.split("'")[1:4:2] for text in caught.value.complaints] == [["rollout", "gpu"], ["trainer", "gpu"]]
    with pytest.raises(PlacementError, match="has no stage"):
        workload(Profile("m", "x"), Devices({"gpu": 1}))
    with pytest.raises(PlacementError, match="name `items`"):
        workload(profile(items=0), Devices({"gpu": 1}))
    with pytest.raises(PlacementError, match=r"'late'.*measured"):
        workload(
            profile(stages={"late": StageProfile()}, edges=(), published=()), Devices({"gpu": 1}), extrapolate=True
        )


@pytest.mark.parametrize("items", [1, 7, 60, 64, 509, 4096])
def test_chunk_choices_divide_the_step(items):
    choices = chunk_choices(items)
    assert all(items % count == 0 for count in choices)
    assert choices[0] == 1
    assert len(choices) <= 6
