"""E is never above 1, whatever ran at the same time, and its parts add up to all that lies above the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.costs import MeasuredRun, efficiency, profile_of, read_step
from rlinf.placement.profile import Profile, StageProfile, Timing
from rlinf.runtime.observe.spans import Busy
from rlinf.runtime.system.observer import Flow, Lap, Moved

RUN = MeasuredRun("m", "x", "f")
TWO = {"rollout[0]": frozenset({0}), "trainer[0]": frozenset({1})}


def lap(*busy, seconds=10.0, flows=(), moves=()):
    parts = tuple(Busy(actor, name, tuple(times)) for actor, name, times in busy)
    return Lap(0.0, seconds, parts, tuple(flows), tuple(moves))


def own(step, devices, profile=None, items=8):
    seen = read_step(step, devices)
    return efficiency(seen, profile or profile_of(seen, items, RUN), items)


def lost(found):
    return {name.removeprefix("lost/"): value for name, value in found.metrics().items() if name.startswith("lost/")}


def test_every_part_shows_where_it_belongs():
    flows = (Flow("rollout.generate", "trainer.train", 20, (*tuple(k * 0.25 for k in range(1, 20)), 6.0)),)
    moves = (Moved("trainer[0]", "onload", 6.0, 7.0),)
    step = lap(
        ("rollout[0]", "generate", [(0, 6)]),
        ("trainer[0]", "train", [(2, 4.75), (7, 8)]),
        ("trainer[0]", "weights", [(8, 8.5)]),
        ("rollout[0]", "load", [(8.5, 9)]),
        flows=flows,
        moves=moves,
    )
    found = own(step, TWO)
    assert found.limit.area == (6 + 3.75) / 2
    assert found.value == pytest.approx(found.limit.area / 10)
    assert {name: value for name, value in lost(found).items() if value} == pytest.approx(
        {
            "tail": 1.25 / 2,  # 4.75 to 6: the trainer waits for the last of twenty items
            "imbalance": (2 + 1) / 2,  # the trainer before its first item, the rollout while the last are learned from
            "switching": 1 / 2,
            "sync": (0.5 + 0.5) / 2,
            "overhead": (1.0 + 0.5 + 0.5 + 1.0 + 1.0) / 2,
        }
    )


intervals = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted).map(tuple), max_size=4)
steps = st.builds(
    lambda times, moved, released: lap(
        *zip(
            ("rollout[0]", "rollout[1]", "judge[0]", "trainer[0]", "trainer[0]", "env[0]", "policy[0]"),
            ("generate", "generate", "score", "train", "weights", "step", "act"),
            times,
            strict=True,
        ),
        moves=[Moved("trainer[0]", "offload", *one) for one in moved],
        flows=(
            Flow("rollout.generate", "trainer.train", 9, tuple(sorted(released))),
            Flow("rollout.generate", "judge.score", 2),
            Flow("judge.score", "env.step", 2),
            Flow("env.step", "policy.act", 3),
            Flow("policy.act", "env.step", 3),
        ),
    ),
    st.tuples(*[intervals] * 7),
    intervals,
    st.lists(st.floats(0, 10), max_size=9),
)
actors = ("rollout[0]", "rollout[1]", "judge[0]", "trainer[0]", "env[0]", "policy[0]")
places = st.fixed_dictionaries(dict.fromkeys(actors, st.frozensets(st.integers(0, 2), max_size=2)))
timings = st.builds(Timing, st.just(8), st.integers(1, 3), st.floats(0.01, 50)).map(lambda one: (one,))
profiles = st.builds(
    lambda stages, sync: Profile("m", "x", {name: StageProfile(one) for name, one in stages.items()}, {}, sync),
    st.dictionaries(st.sampled_from(["rollout", "trainer", "judge", "env+policy"]), timings),
    timings | st.just(()),
)


@given(steps, places, profiles)
def test_of_any_step_on_any_devices_and_beside_any_profile_the_parts_add_up_and_none_is_negative(
    step, devices, profile
):
    found = own(step, devices, profile)
    if found is None:
        return
    assert 0 <= found.value <= 1 + 1e-9
    assert found.losses.total == pytest.approx(10.0 - found.limit.seconds, abs=1e-6)
    assert all(part >= -1e-6 for part in lost(found).values())


def test_two_roles_that_keep_one_device_busy_together_reach_what_is_possible_and_no_more():
    both = lap(("rollout[0]", "generate", [(0, 10)]), ("trainer[0]", "train", [(0, 10)]))
    found = own(both, dict.fromkeys(("rollout[0]", "trainer[0]"), frozenset({0})))
    assert found.value == pytest.approx(1.0)


def test_what_took_longer_than_the_profile_is_interference_and_what_took_less_is_no_wonder():
    step = lap(("rollout[0]", "generate", [(0, 10)]), ("trainer[0]", "train", [(0, 10)]))
    stages = {name: StageProfile((Timing(8, 1, 8.0),)) for name in ("rollout", "trainer")}
    found = own(step, TWO, Profile("m", "x", stages))
    assert (found.value, lost(found)["interference"]) == (pytest.approx(0.8), pytest.approx(2.0))
    slow = {name: StageProfile((Timing(8, 1, 80.0),)) for name in ("rollout", "trainer")}
    found = own(step, TWO, Profile("m", "x", slow))
    assert (found.value, found.losses.total) == (pytest.approx(1.0), pytest.approx(0.0))


def test_a_size_that_was_once_more_efficient_makes_a_loss_of_scaling():
    devices = {"rollout[0]": frozenset({0}), "rollout[1]": frozenset({1})}
    step = lap(("rollout[0]", "generate", [(0, 10)]), ("rollout[1]", "generate", [(0, 10)]))
    known = Profile("m", "x", {"rollout": StageProfile((Timing(8, 1, 16.0), Timing(8, 2, 10.0)))})
    found = own(step, devices, known)
    assert found.limit.binding == "saturation"  # no size was ever quicker than 10 s, so the 2 s cannot be had back
    assert found.limit.area == 8.0
    assert found.losses.total == pytest.approx(0.0)
    quick = Profile("m", "x", {"rollout": StageProfile((Timing(8, 1, 9.0),))})
    found = own(step, devices, quick)
    assert (found.limit.seconds, found.limit.area) == (9.0, 4.5)
    assert lost(found)["scaling"] == pytest.approx(1.0)


def test_who_must_wait_for_all_that_another_makes_cannot_be_beside_it():
    flows = (Flow("rollout.generate", "trainer.train", 1),)
    step = lap(("rollout[0]", "generate", [(0, 6)]), ("trainer[0]", "train", [(6, 9)]), flows=flows)
    together = dict.fromkeys(TWO, frozenset({0}))
    found = own(step, together)
    assert (found.limit.seconds, lost(found)["overhead"]) == (9.0, 1.0)
    apart = own(step, {**TWO, "judge[0]": frozenset({0})})
    assert apart.limit.saturation == 4.5, "as if either would scale to both devices"


def test_where_no_device_worked_nothing_is_said():
    assert own(lap(("judge[0]", "score", [(0, 5)])), {"judge[0]": frozenset(), "rollout[0]": frozenset({0})}) is None
    assert own(lap(("judge[0]", "score", [(0, 5)])), {}) is None
