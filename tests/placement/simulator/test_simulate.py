"""Rehearsals: the real flow with roles that only take time, held against formulas worked out by hand."""

import asyncio
import inspect

import pytest

from rlinf.actors.critic import Critic
from rlinf.actors.env import EnvActor
from rlinf.actors.judge import Judge
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.actors.reference import Reference
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.flows.embodied import embodied, model_based
from rlinf.flows.grpo import grpo
from rlinf.flows.ppo import ppo
from rlinf.flows.sac import sac
from rlinf.placement.auto import choose_for, stand_in
from rlinf.placement.grammar import PlacementError
from rlinf.placement.plan import EdgePlan, Plan, RolePlan
from rlinf.placement.profile import Release
from rlinf.placement.simulate import rehearse, trial
from rlinf.placement.simulated_actors import endpoints_of
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload
from rlinf.runtime.actor.actor import Actor, endpoint

CHAIN = (Edge("rollout", "judge"), Edge("judge", "trainer"))


def stage(name, seconds, sizes, release=None, **option):
    """A stage of the same seconds at every size."""
    return Stage(name, tuple(Option(size, seconds, **option) for size in sizes), release)


def chain(seconds, sizes, *, release=None, devices=4, **how):
    """Rollout, judge and trainer, each of one size."""
    names = ("rollout", "judge", "trainer")
    stages = tuple(
        stage(name, took, [size], release if name == "rollout" else None)
        for name, took, size in zip(names, seconds, sizes, strict=True)
    )
    return Workload(stages, CHAIN, {"gpu": devices}, **how)


def turns(devices, items):
    """All three roles on the same devices, one after the other."""
    return Plan(
        {
            name: RolePlan(tuple(range(devices)), (number,), items=items)
            for number, name in enumerate(("rollout", "judge", "trainer"))
        },
        {("rollout", "judge"): EdgePlan(items), ("judge", "trainer"): EdgePlan(items)},
    )


def beside(items, *, rollout=(0, 1), judge=(2,), trainer=(3,)):
    """Each role on devices of its own, all at work at once."""
    roles = {"rollout": rollout, "judge": judge, "trainer": trainer}
    return Plan(
        {name: RolePlan(where, items=items) for name, where in roles.items()},
        {("rollout", "judge"): EdgePlan(items), ("judge", "trainer"): EdgePlan(items)},
    )


def flow_shop(periods, chunks):
    """Seconds of so many chunks through machines of these times: the first through all, then one per slowest time."""
    return sum(periods) + (chunks - 1) * max(periods)


@pytest.mark.parametrize("items", [4, 300])  # more than a stream holds before its producer pauses
def test_roles_in_turns_take_the_sum_of_their_times(items):
    found = rehearse(grpo, turns(2, items), chain((30.0, 4.0, 16.0), (2, 2, 2)), items=items)
    assert found.seconds == pytest.approx(50.0)
    assert found.moves == ()


@pytest.mark.parametrize("seconds", [(40.0, 8.0, 24.0), (8.0, 40.0, 24.0), (24.0, 8.0, 40.0)])
@pytest.mark.parametrize(("chunks", "items"), [(8, 8), (8, 64), (1, 16)])
def test_roles_side_by_side_take_the_time_of_a_flow_shop(seconds, chunks, items):
    found = rehearse(grpo, beside(items // chunks), chain(seconds, (2, 1, 1)), items=items)
    assert found.seconds == pytest.approx(flow_shop([one / chunks for one in seconds], chunks))


def test_a_phase_waits_for_all_of_the_phase_before_it_where_they_share_devices():
    roles = {"rollout": RolePlan((0, 1), (0,), items=1), "judge": RolePlan((2,), (0,), items=1)}
    edges = {("rollout", "judge"): EdgePlan(1), ("judge", "trainer"): EdgePlan(8)}
    plan = Plan({**roles, "trainer": RolePlan((0, 1, 2), (1,), items=8)}, edges)
    found = rehearse(grpo, plan, chain((40.0, 8.0, 24.0), (2, 1, 3)), items=8)
    assert found.seconds == pytest.approx(flow_shop([5.0, 1.0], 8) + 24.0)


def test_items_leave_generation_by_its_release_curve():
    work = chain((40.0, 0.0, 8.0), (2, 1, 1), release=Release((0.1, 0.2, 0.5, 1.0)))
    found = rehearse(grpo, beside(1), work, items=4)
    now = 0.0  # the trainer takes 2 s for each of four items, which come after 4, 8, 20 and 40 s
    for left in (4.0, 8.0, 20.0, 40.0):
        now = max(now, left) + 2.0
    assert found.seconds == pytest.approx(now)


@pytest.mark.parametrize("per_rank", [None, 2, 1])
def test_how_many_processes_a_role_has_changes_nothing_where_the_work_divides_evenly(per_rank):
    plan = beside(4, rollout=(0, 1, 2, 3), judge=(4, 5), trainer=(6, 7))
    work = chain((40.0, 8.0, 24.0), (4, 2, 2), devices=8, release=Release((0.25, 0.5, 0.75, 1.0)))
    found = rehearse(grpo, plan, work, items=32, devices_per_rank=per_rank)
    # the last eight items leave after 40 s; four of them are judged in 1 s, and the trainer takes 3 s for each four
    assert found.seconds == pytest.approx(40.0 + 1.0 + 2 * 3.0)
    ranks = {one.actor for one in found.work if one.actor.startswith("trainer")}
    assert len(ranks) == (1 if per_rank is None else 2 // per_rank)


def test_a_gang_works_in_step():
    plan = beside(2, rollout=(0,), judge=(1,), trainer=(2, 3))
    found = rehearse(grpo, plan, chain((8.0, 2.0, 4.0), (1, 1, 2)), items=8, devices_per_rank=1)
    first, second = (one.intervals for one in found.work if one.endpoint == "train")
    assert first == second


@pytest.mark.parametrize("per_rank", [None, 1])
def test_roles_that_do_not_fit_together_are_parked_and_no_device_holds_too_much(per_rank):
    option = {"active_bytes": 60, "parked_bytes": 5, "onload_seconds": 3.0, "offload_seconds": 2.0}
    stages = (
        stage("rollout", 30.0, [2], **option),
        stage("judge", 4.0, [0]),
        stage("trainer", 16.0, [2], **option),
    )
    work = Workload(stages, CHAIN, {"gpu": 2}, {"gpu": 80})
    plan = turns(2, 8)
    plan = Plan({**plan.roles, "judge": RolePlan((), (1,), items=8)}, plan.edges)
    found = rehearse(grpo, plan, work, items=8, devices_per_rank=per_rank)
    # rollout begins with the trainer loaded, the trainer with the rollout loaded: each is parked and the other loaded
    assert found.seconds == pytest.approx(2 * (2.0 + 3.0) + 30.0 + 4.0 + 16.0)
    assert len(found.moves) == 4 * (1 if per_rank is None else 2)
    assert found.peak_bytes == 65


def test_roles_that_fit_together_stay_loaded():
    option = {"active_bytes": 35, "parked_bytes": 5, "onload_seconds": 3.0, "offload_seconds": 2.0}
    stages = tuple(stage(name, 10.0, [1], **option) for name in ("rollout", "judge", "trainer"))
    work = Workload(stages, CHAIN, {"gpu": 1}, {"gpu": 110})
    found = rehearse(grpo, turns(1, 4), work, items=4)
    assert (found.seconds, len(found.moves), found.peak_bytes) == (pytest.approx(30.0), 0, 105)


def test_weights_take_longer_to_devices_of_their_own():
    sync = (Sync("trainer", "rollout", together=1.0, apart=7.0),)
    together = rehearse(grpo, turns(2, 4), chain((30.0, 4.0, 16.0), (2, 2, 2), sync=sync), items=4)
    apart = rehearse(grpo, beside(4), chain((30.0, 4.0, 16.0), (2, 1, 1), sync=sync), items=4)
    assert together.seconds == pytest.approx(51.0)
    assert apart.seconds == pytest.approx(57.0)


def test_a_link_moves_one_item_at_a_time():
    edges = (Edge("rollout", "judge"), Edge("judge", "trainer", seconds=80.0))
    work = Workload(chain((8.0, 8.0, 8.0), (2, 1, 1)).stages, edges, {"gpu": 4})
    found = rehearse(grpo, beside(1), work, items=8)
    assert found.seconds == pytest.approx(flow_shop([1.0, 1.0, 10.0, 1.0], 8))


def test_an_item_may_stand_for_many():
    work = chain((40.0, 8.0, 24.0), (2, 1, 1), release=Release((0.3, 0.6, 0.7, 1.0)))
    plan = beside(1024)
    every = rehearse(grpo, plan, work, items=8192)
    few = rehearse(grpo, plan, work, items=8192, rehearsed_items=stand_in(8192, 8))
    assert few.seconds == pytest.approx(every.seconds, rel=0.02)


def test_ppo_shares_the_critics_time_between_its_endpoints():
    names = ("rollout", "judge", "critic", "trainer")
    stages = tuple(stage(name, took, [1]) for name, took in zip(names, (8.0, 1.0, 16.0, 4.0), strict=True))
    edges = (Edge("rollout", "judge"), Edge("judge", "critic"), Edge("critic", "trainer"))
    plan = Plan({name: RolePlan((number,), items=8) for number, name in enumerate(names)})
    found = rehearse(ppo, plan, Workload(stages, edges, {"gpu": 4}), items=8)
    assert found.seconds == pytest.approx(8.0 + 1.0 + 16.0)  # the trainer learns while the critic does
    took = {one.endpoint: sum(b - a for a, b in one.intervals) for one in found.work if one.actor == "critic[0]"}
    assert took == {"values": pytest.approx(4.0), "train": pytest.approx(12.0)}


@pytest.mark.parametrize(("flow", "seconds"), [(embodied, 9.0), (sac, 6.0)])
def test_a_loop_takes_its_time_and_learning_off_policy_overlaps_it(flow, seconds):
    stages = (stage("env+policy", 6.0, [1]), stage("trainer", 3.0, [1]))
    work = Workload(stages, (Edge("env+policy", "trainer", barrier=True),), {"gpu": 2})
    plan = Plan({"env+policy": RolePlan((0,), (0,)), "trainer": RolePlan((1,), (1,))})
    assert rehearse(flow, plan, work, items=4).seconds == pytest.approx(seconds)


def test_learning_inside_a_world_takes_turns_outside_and_inside():
    seconds = {"env+policy": 6.0, "world_trainer": 2.0, "world": 4.0, "trainer": 3.0}
    work = Workload(tuple(stage(name, took, [1]) for name, took in seconds.items()), (), {"gpu": 1})
    plan = Plan({name: RolePlan((0,), (0,)) for name in seconds})
    assert rehearse(model_based, plan, work, items=4).seconds == pytest.approx(15.0)


async def tutored(step, rollout, tutor, trainer):
    marked = tutor.mark.map(rollout.generate(step.prompts, n=step.group_size))
    return await trainer.train(tutor.explain(marked))


class Tutor(Actor):
    @endpoint
    async def mark(self, group):
        return group

    @endpoint(device=True)
    async def explain(self, groups):
        async for group in groups:
            yield group


def test_a_role_of_ones_own_is_modelled_by_its_class():
    names = ("rollout", "tutor", "trainer")
    stages = tuple(stage(name, took, [1]) for name, took in zip(names, (8.0, 4.0, 8.0), strict=True))
    plan = Plan({name: RolePlan((number,), items=8) for number, name in enumerate(names)})
    work = Workload(stages, (Edge("rollout", "tutor"), Edge("tutor", "trainer")), {"gpu": 3})
    found = rehearse(tutored, plan, work, items=8, cast=trial(tutored, names, actors={"tutor": Tutor}))
    assert {one.endpoint for one in found.work if one.actor == "tutor[0]"} == {"mark", "explain"}
    assert found.seconds == pytest.approx(8.0 + 4.0 + 8.0)


async def marked(step, rollout, tutor, trainer):
    return await trainer.train(tutor.mark.map(rollout.generate(step.prompts, n=step.group_size)))


def test_a_role_of_which_only_the_name_is_known_answers_to_what_it_is_called():
    names = ("rollout", "tutor", "trainer")
    stages = tuple(stage(name, 8.0, [1]) for name in names)
    plan = Plan({name: RolePlan((number,), items=8) for number, name in enumerate(names)})
    work = Workload(stages, (Edge("rollout", "tutor"), Edge("tutor", "trainer")), {"gpu": 3})
    assert rehearse(marked, plan, work, items=8).seconds == pytest.approx(24.0)


async def curious(step, rollout, judge, trainer):
    async for group in rollout.generate(step.prompts, n=1):
        assert group.samples


def test_a_flow_that_looks_into_its_items_is_told_that_they_are_modelled():
    with pytest.raises(PlacementError, match=r"curious.*rehearsed.*samples"):
        rehearse(curious, turns(1, 4), chain((1.0, 1.0, 1.0), (1, 1, 1)), items=4)


def test_a_flow_with_other_roles_is_refused():
    with pytest.raises(PlacementError, match=r"'critic'.*profiled"):
        rehearse(ppo, turns(1, 4), chain((1.0, 1.0, 1.0), (1, 1, 1)), items=4)
    with pytest.raises(PlacementError, match=r"'rollout'.*trainer"):
        rehearse(embodied, turns(1, 4), chain((1.0, 1.0, 1.0), (1, 1, 1)), items=4)


def test_a_size_that_is_not_known_is_refused():
    with pytest.raises(PlacementError, match=r"roles.judge: nothing.*2 devices:.*1"):
        rehearse(grpo, turns(2, 4), chain((1.0, 1.0, 1.0), (2, 1, 2)), items=4)


async def endless(step, rollout, judge, trainer):
    await asyncio.get_running_loop().create_future()


def test_a_step_that_stands_still_is_reported():
    with pytest.raises(PlacementError, match=r"came.*standstill"):
        rehearse(endless, turns(1, 4), chain((1.0, 1.0, 1.0), (1, 1, 1)), items=4)


async def test_a_rehearsal_runs_in_a_thread_beside_a_running_system():
    plan, work = turns(2, 4), chain((30.0, 4.0, 16.0), (2, 2, 2))
    found = await asyncio.gather(*(asyncio.to_thread(rehearse, grpo, plan, work, items=4) for _ in range(2)))
    assert [one.seconds for one in found] == [pytest.approx(50.0)] * 2


@pytest.mark.parametrize(
    ("role", "cls"),
    [
        ("rollout", Rollout), ("judge", Judge), ("reference", Reference), ("critic", Critic), ("trainer", Trainer),
        ("trainer", PolicyTrainer), ("trainer", SacTrainer), ("env", EnvActor), ("policy", PolicyActor),
    ],
)  # fmt: skip
def test_modelled_roles_have_the_endpoints_that_flows_call(role, cls):
    for name, spec in endpoints_of(role, {}).items():
        if name in cls.endpoints:
            assert spec == cls.endpoints[name]
    called = {"rollout": {"generate", "load"}, "trainer": {"train", "weights"}, "policy": {"act", "trajectory", "load"}}
    assert called.get(role, set()) <= endpoints_of(role, {}).keys()


def test_flows_take_only_roles_that_can_be_modelled():
    for flow in (grpo, ppo, embodied, sac, model_based):
        for name in set(inspect.signature(flow).parameters) - {"step"}:
            assert endpoints_of(name, {}), name


def test_the_quickest_of_all_rehearsed_plans_is_chosen():
    sizes = range(1, 9)
    stages = (
        Stage("rollout", tuple(Option(n, 20 + 400 / n) for n in sizes), Release((0.4, 0.6, 0.8, 1.0))),
        Stage("judge", tuple(Option(n, 1 + 30 / n) for n in sizes)),
        Stage("trainer", tuple(Option(n, 10 + 240 / n) for n in sizes)),
    )
    work = Workload(stages, CHAIN, {"gpu": 8}, chunks=(4, 16))
    chosen = choose_for(work, 64, grpo)
    assert {row.mode for row in chosen.rows} == {"collocated", "disaggregated", "hybrid"}
    for row in chosen.rows:
        again = rehearse(grpo, row.plan, work, items=64, rehearsed_items=stand_in(64, row.chunks))
        assert again.seconds == pytest.approx(row.rehearsed)
        assert chosen.rows[0].rehearsed <= row.rehearsed
        assert chosen.bound.seconds <= row.rehearsed
    assert chosen.plan.predicted.step_seconds == chosen.rows[0].rehearsed
    assert chosen.plan.reason == chosen.reason


def balanced(switch):
    """Two stages that take 15 s side by side if costs are right, or 10 s and the switches in turns."""
    option = {"active_bytes": 60, "onload_seconds": switch, "offload_seconds": switch}
    sizes = (2, 4)
    stages = tuple(Stage(name, tuple(Option(n, 20.0 / n, **option) for n in sizes)) for name in ("rollout", "trainer"))
    return Workload(stages, (Edge("rollout", "trainer"),), {"gpu": 4}, {"gpu": 80}, (16,))


async def simple(step, rollout, trainer):
    return await trainer.train(rollout.generate(step.prompts, n=1))


def test_devices_divided_by_costs_that_may_be_wrong_are_chosen_less_readily():
    work = balanced(0.3)  # 11.2 s in turns; 10.6 s side by side, if both stages take equally long
    certain, doubtful = (choose_for(work, 64, simple, cost_error=error) for error in (0.0, 0.4))
    assert certain.plan.mode == "disaggregated"
    assert doubtful.plan.mode == "collocated"
    assert "disaggregated would be" in doubtful.reason
    assert all(row.expected >= row.seconds * 0.99 for row in doubtful.rows)
