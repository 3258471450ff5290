"""When roles move by themselves, and where to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf.flows.grpo import grpo
from rlinf.placement import auto
from rlinf.placement.asynchronous import AtStaleness, Recommendation
from rlinf.placement.auto import WINDOW, AutoPlacement, Choice, Row
from rlinf.placement.bound import Bound
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Fleet
from rlinf.placement.plan import Plan, RolePlan
from rlinf.placement.planner import Candidate
from rlinf.placement.profile import BESIDE, Profile, Release, StageProfile, Timing

TOGETHER = Plan({"rollout": RolePlan((0, 1)), "trainer": RolePlan((0, 1))})
APART = Plan({"rollout": RolePlan((0,)), "trainer": RolePlan((1,))})
MIXED = Plan({"rollout": RolePlan((0,)), "trainer": RolePlan((0, 1))})


def profile(rollout: float, trainer: float) -> Profile:
    """Of 64 items on two devices and on one, with perfect scaling."""
    even = Release(tuple((k + 1) / 64 for k in range(64)))
    return Profile(
        "m", "x",
        {
            "rollout": StageProfile((Timing(64, 1, 2 * rollout), Timing(64, 2, rollout)), even),
            "judge": StageProfile((Timing(64, 1, 0.01),), kind=BESIDE),
            "trainer": StageProfile((Timing(64, 1, 2 * trainer), Timing(64, 2, trainer))),
        },
        {}, (), "rlinf.flows.grpo", 64, (("rollout", "judge", False), ("judge", "trainer", False)),
    )  # fmt: skip


def planner(first=3, explored=(APART,), replan_above=0.15):
    return AutoPlacement(
        grpo, Fleet(("gpu",) * 2), None, explored=list(explored), first=first, replan_above=replan_above
    )


def simulate(monkeypatch, *rows):
    """The planner finds these (plan, seconds), whatever was measured."""
    found = tuple(Row(plan, plan.mode, seconds, seconds, 0.0, 0, 1) for plan, seconds in rows)
    chosen = Choice(found, Bound(0.1, 0.1, 0.0, 0.1, 0.0), "", 0.0)
    monkeypatch.setattr(auto, "choose", lambda *_, **__: chosen)


def steps(one: AutoPlacement, *seconds: float) -> list[bool]:
    return [one.due(each) for each in seconds]


async def test_it_measures_everybody_together_and_then_apart_before_it_plans():
    one = planner()
    assert steps(one, 9.0, 2.0, 2.0) == [False, False, True]
    first = await one.decide(profile(1.0, 1.0), TOGETHER)
    assert first.plan is APART
    assert "collocated takes 2.00 s" in first.sentence
    assert steps(one, 9.0, 2.1, 2.1) == [False, False, True]
    second = await one.decide(profile(1.0, 1.0), APART)  # the real planner, with the real flow
    assert "disaggregated 2.0" in second.sentence
    assert "collocated 2.0" in second.sentence


async def test_it_goes_where_a_simulation_promises_more_than_anything_measured(monkeypatch):
    simulate(monkeypatch, (MIXED, 1.0), (APART, 1.2))
    one = planner(explored=())
    steps(one, 2.0, 2.0, 2.0)
    decision = await one.decide(profile(1.0, 1.0), TOGETHER)
    assert decision.plan == MIXED
    assert "hybrid, 1.00 s" in decision.sentence


async def test_a_gain_within_what_the_planner_can_know_is_not_worth_a_move(monkeypatch):
    simulate(monkeypatch, (APART, 1.99))
    one = planner(explored=())
    steps(one, 2.0, 2.0, 2.0)
    assert (await one.decide(profile(1.0, 1.0), TOGETHER)).plan is None


async def test_what_was_measured_counts_more_than_what_was_simulated_there(monkeypatch):
    simulate(monkeypatch, (MIXED, 1.0))
    one = planner()
    steps(one, 2.0, 2.0, 2.0)
    await one.decide(profile(1.0, 1.0), TOGETHER)
    steps(one, 1.5, 1.5, 1.5)
    assert (await one.decide(profile(1.0, 1.0), APART)).plan == MIXED
    assert steps(one, *[2.5] * (WINDOW + 1))[-1], "far from the promised 1.0"
    back = await one.decide(profile(1.0, 1.0), MIXED)
    assert back.plan is APART
    assert "2.50 s where 1.00 s" in back.sentence


async def test_it_says_which_staleness_would_pay(monkeypatch):
    rows = [AtStaleness(number, Candidate(None, 1, seconds, seconds), None) for number, seconds in ((0, 3.0), (1, 2.0))]
    simulate(monkeypatch, (TOGETHER, 4.0))
    chosen = replace(auto.choose(), recommended=Recommendation(tuple(rows), 1))
    monkeypatch.setattr(auto, "choose", lambda *_, **__: chosen)
    one = planner(explored=())
    steps(one, 4.0, 4.0, 4.0)
    assert "staleness 1 gains 50 %: take 1" in (await one.decide(profile(2.0, 2.0), TOGETHER)).sentence


async def test_steps_as_expected_are_no_reason_to_plan_and_one_slow_step_is_none_either(monkeypatch):
    simulate(monkeypatch, (TOGETHER, 2.0))
    one = planner(explored=())
    steps(one, 2.0, 2.0, 2.0)
    await one.decide(profile(1.0, 1.0), TOGETHER)
    assert not any(steps(one, 2.1, 1.9, 50.0, 2.2, 2.0, 1.8, 2.1, 2.2))
    assert any(steps(one, *[2.4] * WINDOW)), "20 % off, over a window"


async def test_what_grows_slower_everywhere_does_not_make_old_measurements_look_quick(monkeypatch):
    simulate(monkeypatch, (TOGETHER, 1.0))
    one = planner()
    steps(one, 2.0, 2.0, 2.0)
    await one.decide(profile(1.0, 1.0), TOGETHER)
    steps(one, 1.5, 1.5, 1.5)
    assert (await one.decide(profile(1.0, 1.0), APART)).plan is None
    assert steps(one, *[3.0] * (WINDOW + 1))[-1]
    assert (await one.decide(profile(2.0, 2.0), APART)).plan is None, "there it would take 4 s by now, not 2"


async def test_where_no_plan_can_be_made_it_stays_and_says_why(monkeypatch):
    def refuse(*_, **__):
        raise PlacementError(["stage 'x' has no size"])

    monkeypatch.setattr(auto, "choose", refuse)
    one = planner(explored=())
    steps(one, 2.0, 2.0, 2.0)
    decision = await one.decide(profile(1.0, 1.0), TOGETHER)
    assert decision.plan is None
    assert "stage 'x'" in decision.sentence


@pytest.mark.parametrize("count", [1, 3])
def test_it_waits_for_as_many_steps_as_are_asked_for(count):
    one = planner(first=count)
    assert steps(one, *[1.0] * count) == [False] * (count - 1) + [True]
