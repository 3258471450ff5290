"""A step in the long run, held against event simulations: chunk by chunk, and answer by answer."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.async_decode import Decoding, Law, period, steps
from rlinf.placement.asynchronous import advice, plan_ahead, plan_joined, recommend, steady
from rlinf.placement.bound import bound
from rlinf.placement.hardware import Devices
from rlinf.placement.planner import Leaf, Pair, leaves, plan
from rlinf.placement.profile import Profile, Release, StageProfile, Timing
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload

CHUNKS = 4


def simulated(parts, edges, staleness, batches=400):
    """Mean seconds of a step: every chunk of every batch, through stages that each have devices of their own.

    Args:
        parts: per stage in order: name, seconds of a step, shares of the makespan at which chunks leave, or None.
        edges: (source, target, barrier).
        staleness: the last stage's end of batch k lets the first chunk of batch k + staleness + 1 begin anywhere.
    """
    free = {name: 0.0 for name, *_ in parts}
    ends = []
    for k in range(batches):
        begun = ends[k - staleness - 1] if k > staleness else 0.0
        left = {}
        for name, seconds, shares in parts:
            feeding = [(source, barrier) for source, target, barrier in edges if target == name]
            if shares is not None and not feeding:
                start = max(free[name], begun)
                left[name] = [start + share * seconds for share in shares]
                free[name] = start + seconds
                continue
            left[name] = []
            for chunk in range(CHUNKS):
                arrivals = [left[source][-1 if barrier else chunk] for source, barrier in feeding]
                free[name] = max([free[name], begun, *arrivals]) + seconds / CHUNKS
                left[name].append(free[name])
        ends.append(max(times[-1] for times in left.values()))
    half = batches // 2  # what repeats does so with a period of at most staleness + 1 steps, of which 60 is a multiple
    return (ends[half + 120] - ends[half]) / 120


def spatial(made):
    """Stages side by side."""
    tree = made[0]
    for leaf in made[1:]:
        tree = Pair("spatial", tree, leaf)
    return tree


seconds = st.integers(1, 20).map(float)
curves = st.none() | st.lists(st.floats(0, 1), min_size=CHUNKS - 1, max_size=CHUNKS - 1).map(
    lambda shares: Release((*sorted(shares), 1.0))
)


@given(st.lists(seconds, min_size=2, max_size=4), curves, st.booleans(), st.integers(0, 5))
def test_stages_on_devices_of_their_own_take_what_an_event_simulation_says(times, release, barrier, staleness):
    names = [f"s{number}" for number in range(len(times))]
    stages = tuple(
        Stage(name, (Option(1, took),), None if number else release)
        for number, (name, took) in enumerate(zip(names, times, strict=True))
    )
    edges = [
        (one, two, barrier and number == len(names) - 2) for number, (one, two) in enumerate(itertools.pairwise(names))
    ]
    made = Workload(stages, tuple(Edge(*edge) for edge in edges), {"gpu": len(names)}, chunks=(CHUNKS,))
    tree = spatial([Leaf(stage, stage.options[0]) for stage in stages])
    parts = [
        (stage.name, stage.options[0].seconds, None if stage.release is None else stage.release.chunks(CHUNKS))
        for stage in stages
    ]
    found = steady(tree, made, CHUNKS, staleness).seconds
    assert found == pytest.approx(simulated(parts, edges, staleness), rel=1e-6)
    assert bound(made, staleness=staleness).seconds <= found + 1e-9


options = st.lists(st.tuples(st.integers(1, 4), seconds), min_size=1, max_size=3).map(
    lambda pairs: tuple(Option(count, took) for count, took in pairs)
)


@given(st.lists(options, min_size=2, max_size=3), curves, st.integers(1, 3), st.integers(3, 9))
def test_the_plan_on_disjoint_devices_is_the_best_of_all_sizes(sizes, release, staleness, devices):
    stages = tuple(Stage(f"s{number}", own, None if number else release) for number, own in enumerate(sizes))
    edges = [(one.name, two.name, False) for one, two in itertools.pairwise(stages)]
    try:
        made = Workload(stages, tuple(Edge(*edge) for edge in edges), {"gpu": devices}, chunks=(CHUNKS,))
    except ValueError:  # some stage has no size that fits
        return
    best = min(
        (
            simulated(
                [
                    (stage.name, one.seconds, None if stage.release is None else stage.release.chunks(CHUNKS))
                    for stage, one in zip(stages, chosen, strict=True)
                ],
                edges,
                staleness,
                batches=260,
            )
            for chosen in itertools.product(*sizes)
            if sum(one.devices for one in chosen) <= devices
        ),
        default=None,
    )
    found = plan_ahead(made, staleness).get("disaggregated")
    assert (found is None) == (best is None)
    if found is not None:
        assert found.seconds == pytest.approx(best, rel=1e-6)


def two(rollout=(12.0, 8.0), trainer=(12.0, 6.0), **how):
    """Rollout and trainer, each on one or two devices of two."""
    stages = tuple(
        Stage(name, tuple(Option(count, took) for count, took in enumerate(times, 1)))
        for name, times in (("rollout", rollout), ("trainer", trainer))
    )
    return Workload(stages, (Edge("rollout", "trainer", barrier=True),), {"gpu": 2}, chunks=(1,), **how)


def test_in_turns_on_the_same_devices_nothing_is_gained():
    assert plan_ahead(two(), 1)["collocated"].seconds == 8.0 + 6.0


def test_apart_a_step_takes_the_slower_of_the_two():
    found = plan_ahead(two(), 1)["disaggregated"]
    assert found.seconds == 12.0
    assert {leaf.stage.name: leaf.option.devices for leaf in leaves(found.tree)} == {"rollout": 1, "trainer": 1}


def test_publishing_takes_the_time_of_both_who_send_and_receive():
    work = two(sync=(Sync("trainer", "rollout", 1.0, 2.0),))
    assert plan_ahead(work, 3)["disaggregated"].seconds == 14.0
    assert plan_ahead(work, 3)["collocated"].seconds == 15.0


def test_what_does_not_fit_side_by_side_on_one_device_is_parked_in_every_step():
    stages = tuple(
        Stage(name, (Option(1, 5.0, "gpu", 6, 1, onload_seconds=1.0, offload_seconds=0.5),)) for name in ("a", "b")
    )
    work = Workload(stages, (Edge("a", "b"),), {"gpu": 1}, {"gpu": 8}, (1,))
    assert plan_ahead(work, 1)["collocated"].seconds == 10.0 + 2 * 1.5
    assert not plan_ahead(Workload(stages, (Edge("a", "b"),), {"gpu": 1}, {"gpu": 6}, (1,)), 1)


def test_a_stage_beside_the_devices_is_a_part_of_its_own():
    stages = (
        Stage("rollout", (Option(1, 10.0), Option(2, 5.0))),
        Stage("judge", (Option(0, 7.0),)),
        Stage("trainer", (Option(1, 4.0),)),
    )
    edges = (Edge("rollout", "judge"), Edge("judge", "trainer"))
    found = plan_ahead(Workload(stages, edges, {"gpu": 3}, chunks=(4,)), 4)
    assert found["disaggregated"].seconds == 7.0


# Answers that are decoded at once ------------------------------------------------------------------------------------

LAW = Law(base=4.0e-3, each=0.112e-3, learning=24e-5)
LIMIT = 4000


def lengths(batch, *, groups=96, each=4):
    """Tokens of each answer of each group: every tenth at the limit."""
    rng = np.random.default_rng(batch)
    count = groups * each
    drawn = np.where(rng.random(count) < 0.1, LIMIT, rng.uniform(200, 0.8 * LIMIT, count))
    return list(drawn.astype(np.int64).reshape(groups, each))


def measured(devices):
    """Seconds at which the groups of some batches leave the engines, each batch alone."""
    made = []
    for batch in range(3):
        decoding = Decoding(LAW, devices // 2)
        decoding.add(0.0, dict(enumerate(lengths(batch))))
        times = []
        while decoding.next < float("inf"):
            now, complete = decoding.end()
            times += [now] * len(complete)
        made.append(times)
    return made


def profiled(sizes, devices):
    """What a synchronous run would have measured, on two sizes of the rollout."""
    alone = {size: measured(size) for size in sizes}
    timings = tuple(Timing(96, size, float(np.mean([times[-1] for times in made]))) for size, made in alone.items())
    release = Release.from_times(np.concatenate([np.array(times) / times[-1] for times in alone[sizes[0]]]).tolist())
    longest = StageProfile(timings, release).longest(96)
    tokens = np.mean([sum(map(np.sum, lengths(batch))) for batch in range(3)])
    stages = (
        Stage("rollout", tuple(Option(one.devices, one.seconds, longest=longest) for one in timings), release),
        Stage("trainer", tuple(Option(n, LAW.learning * tokens / n) for n in (8, 16, 24))),
    )
    return Workload(stages, (Edge("rollout", "trainer"),), {"gpu": devices}, chunks=(32,))


def test_the_longest_answer_is_found_in_what_two_sizes_take():
    work = profiled((16, 32), 64)
    assert work.stages[0].options[0].longest == pytest.approx(LIMIT * LAW.base, rel=0.1)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("trainer", [8, 16])
def test_decoding_with_company_takes_what_a_simulation_of_every_answer_says(staleness, trainer):
    work = profiled((16, 32), 64)
    for rollout in work.stages[0].options:
        learner = next(one for one in work.stages[1].options if one.devices == trainer)
        tree = spatial([Leaf(work.stages[0], rollout), Leaf(work.stages[1], learner)])
        ends = steps(LAW, lengths, rollout.devices, trainer, staleness, 12 + 6 * staleness)
        took = period(ends, 4 + staleness)
        assert steady(tree, work, 32, staleness).seconds == pytest.approx(took, rel=0.1)
        assert bound(work, staleness=staleness).seconds <= took


def test_more_staleness_is_never_slower_and_the_one_that_pays_is_named():
    found = recommend(profiled((8, 16, 24, 32, 40, 48), 56))
    took = [row.candidate.seconds for row in found.rows]
    assert [row.staleness for row in found.rows] == [0, 1, 2, 4]
    assert took == sorted(took, reverse=True)
    assert found.staleness > 0
    gain = f"{took[0] / took[1] - 1:.0%}".replace("%", " %")
    assert found.text.startswith(f"staleness 1 gains {gain}, 2 gains ")
    assert found.text.endswith(f": take {found.staleness}")


def test_where_nothing_is_gained_a_run_stays_synchronous():
    stages = (Stage("rollout", (Option(1, 5.0),)), Stage("trainer", (Option(1, 4.0),)))
    found = recommend(Workload(stages, (Edge("rollout", "trainer"),), {"gpu": 1}, chunks=(1,)))
    assert found.staleness == 0
    assert found.text.count("nothing") == 3
    assert found.rows[-1].candidate.seconds == plan(Workload(stages, (), {"gpu": 1}, chunks=(1,))).seconds
    assert recommend(Workload(stages[:1], (), {"gpu": 1})) is None


def test_engines_that_join_bring_what_a_simulation_of_every_answer_says():
    work = profiled((8, 16, 24, 32, 40, 48, 56), 40)
    rollout, trainer = (
        StageProfile(tuple(Timing(96, one.devices, one.seconds) for one in stage.options), stage.release)
        for stage in work.stages
    )
    edges = (("rollout", "trainer", False),)
    profile = Profile("m", "here", {"rollout": rollout, "trainer": trainer}, items=96, edges=edges)
    rows = plan_joined(profile, Devices({"gpu": 40}, multiple=8), (32, 16, 8), staleness=1)
    assert [row.count for row in rows] == [0, 8, 16, 32]
    took = []
    for row in rows:
        sizes = {leaf.stage.name: leaf.option.devices for leaf in leaves(row.candidate.tree)}
        took.append(period(steps(LAW, lengths, sizes["rollout"] + row.count, sizes["trainer"], 1, 18), 5))
        assert row.candidate.seconds == pytest.approx(took[-1], rel=0.1)
        assert row.bound.seconds <= took[-1]
        assert row.alone >= row.candidate.seconds
    assert took == sorted(took, reverse=True)
    assert rows[0].alone == rows[0].candidate.seconds
    assert advice(rows).startswith("engines that join: 8 gain ")
