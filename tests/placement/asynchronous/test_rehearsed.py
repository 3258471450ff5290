"""Flows with work in flight between steps, rehearsed: the real flow and its real admission in virtual time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.flows.embodied_async import embodied_async
from rlinf.flows.grpo import grpo
from rlinf.flows.grpo_async import grpo_async
from rlinf.flows.ppo_async import ppo_async
from rlinf.placement.asynchronous import steady
from rlinf.placement.planner import Leaf, Pair, to_plan
from rlinf.placement.profile import Release
from rlinf.placement.simulate import rehearse
from rlinf.placement.simulated_costs import Company, lengths
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload

TAIL = Release((0.1, 0.15, 0.2, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 1.0))
NAMES = ("rollout", "judge", "trainer")


def side_by_side(seconds, *, names=NAMES, edges=None, release=None, longest=0.0, chunks=16, **how):
    """A workload of stages on a device each, and the tree of that plan."""
    stages = tuple(
        Stage(name, (Option(1, took, longest=0.0 if number else longest),), None if number else release)
        for number, (name, took) in enumerate(zip(names, seconds, strict=True))
    )
    edges = edges or [(one, two) for one, two in itertools.pairwise(names)]
    work = Workload(stages, tuple(Edge(*edge) for edge in edges), {"gpu": len(stages)}, chunks=(chunks,), **how)
    tree = Leaf(stages[0], stages[0].options[0])
    for stage in stages[1:]:
        tree = Pair("spatial", tree, Leaf(stage, stage.options[0]))
    return work, tree


def both(flow, work, tree, staleness, items=16):
    """Seconds of a step as rehearsed, and as calculated."""
    chunks = work.chunks[0]
    plan = to_plan(tree, work, chunks, items, None)
    rehearsed = rehearse(flow, plan, work, items=items, staleness=staleness).seconds
    return rehearsed, steady(tree, work, chunks, staleness).seconds


@settings(max_examples=15)
@given(st.lists(st.integers(1, 20).map(float), min_size=3, max_size=3), st.integers(1, 4))
def test_the_rehearsed_step_takes_what_is_calculated(seconds, staleness):
    rehearsed, calculated = both(grpo_async, *side_by_side(seconds), staleness)
    assert rehearsed == pytest.approx(calculated, rel=1e-6)


@pytest.mark.parametrize(
    ("trainer", "staleness"),
    [
        *[(2.0, 1), (8.0, 1), (8.0, 2), (30.0, 2)],
        *(
            pytest.param(*case, marks=pytest.mark.repeated)
            for case in ((2.0, 2), (30.0, 1), (8.0, 4), (30.0, 4), (8.0, 8))
        ),
    ],
)
def test_answers_of_several_steps_take_in_company_what_they_do_in_the_long_run(trainer, staleness):
    """However long it takes until as many answers begin early as in the long run: some 60 steps with 8 versions."""
    work, tree = side_by_side((20.0, 0.1, trainer), release=TAIL, longest=12.0, chunks=32)
    rehearsed, calculated = both(grpo_async, work, tree, staleness, 64)
    assert rehearsed == pytest.approx(calculated, rel=0.02)


def test_with_nothing_begun_early_an_asynchronous_flow_takes_what_its_sibling_does():
    work, tree = side_by_side((20.0, 1.0, 8.0), release=TAIL, longest=12.0)
    assert both(grpo_async, work, tree, 0)[0] == pytest.approx(both(grpo, work, tree, 0)[0])


def test_publishing_holds_up_generation_and_learning():
    sync = (Sync("trainer", "rollout", apart=2.0),)
    slow = side_by_side((20.0, 1.0, 8.0), sync=sync)
    assert both(grpo_async, *slow, 2) == (pytest.approx(22.0), pytest.approx(22.0))
    tailed = side_by_side((20.0, 0.1, 8.0), release=TAIL, longest=12.0, sync=sync)
    rehearsed, calculated = both(grpo_async, *tailed, 1)
    assert rehearsed == pytest.approx(calculated, rel=0.1)
    assert rehearsed > both(grpo_async, *side_by_side((20.0, 0.1, 8.0), release=TAIL, longest=12.0), 1)[0] + 1.0


def test_ppo_learns_twice_while_it_generates():
    names = ("rollout", "judge", "critic", "trainer")
    edges = [("rollout", "judge"), ("judge", "critic"), ("critic", "trainer")]
    work, tree = side_by_side((12.0, 1.0, 16.0, 9.0), names=names, edges=edges)
    rehearsed, _ = both(ppo_async, work, tree, 2)
    assert rehearsed == pytest.approx(16.0)  # of the critic's time a quarter is for values, the rest to learn


def test_acting_goes_on_while_it_is_learned_from():
    stages = (Stage("env+policy", (Option(1, 12.0),)), Stage("trainer", (Option(1, 9.0),)))
    work = Workload(stages, (Edge("env+policy", "trainer", barrier=True),), {"gpu": 2}, chunks=(1,))
    tree = Pair("spatial", *(Leaf(stage, stage.options[0]) for stage in stages))
    rehearsed, calculated = both(embodied_async, work, tree, 1, items=8)
    assert (rehearsed, calculated) == (pytest.approx(12.0, rel=0.02), 12.0)
    assert both(embodied_async, work, tree, 0, items=8)[0] == pytest.approx(21.0, rel=0.02)


@given(
    st.lists(st.floats(0.01, 1), max_size=8), st.floats(1, 100), st.floats(0.05, 1.0), st.integers(1, 40)
)  # fmt: skip
def test_items_alone_leave_by_their_release_curve(shares, seconds, part, count):
    release = Release((*sorted(shares), 1.0))
    longest = part * seconds
    company = Company(lengths(release, seconds, longest, count), seconds - longest, longest)
    company.add(0.0, range(count))
    left = []
    while company.next is not None:
        left += [company.next] * len(company.leave(company.next))
    assert left == pytest.approx([share * seconds for share in release.chunks(count)], rel=1e-6, abs=1e-6)
