"""What is in flight between steps: nothing is lost, learned twice or older than the bound, whatever takes how long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.in_flight import Completed, InFlight, Rules
from rlinf.data.in_flight.admission import Lookahead
from rlinf.data.sample import Group
from rlinf.data.step import Step
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from tests.data.in_flight.modelled import Rollout, Run, balanced, group, prompt


def in_virtual_time(main):
    async def inside():
        async with ActorSystem.local():
            return await main()

    return run_virtual(inside())


RUNS = st.builds(
    Run,
    rules=st.builds(
        Rules,
        st.integers(0, 3),
        st.integers(1, 3),
        mode=st.sampled_from(["mask", "drop", "resample"]),
        carry=st.none() | st.integers(0, 5),
        extra=st.none() | st.integers(0, 4),
    ),
    steps=st.integers(1, 6),
    every=st.integers(1, 3),
    n=st.integers(1, 2),
    rows=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    learning=st.lists(st.integers(0, 8).map(float), min_size=1, max_size=4),
)


@settings(max_examples=120)
@given(run=RUNS, lives=st.lists(st.integers(0, 40).map(float), max_size=3))
@example(Run(Rules(1, 1, mode="resample", carry=4), 6, 1, 1, 4, [1, 12], [1.0]), [7.0])
def test_every_sample_is_learned_once_or_counted_as_dropped_and_no_token_is_older_than_the_bound(run, lives):
    async def main():
        for seconds in lives:
            await run.go_on(seconds)
        await run.go_on()
        _, _, kept, _ = run.checkpoint if run.steps % run.every == 0 else (0, 0, None, None)
        return kept

    kept, _ = in_virtual_time(main)
    assert len(run.trained) == run.steps
    assert run.oldest <= run.rules.staleness
    if kept is not None:
        balanced(run, kept)
    carried = run.rules.carry is not None and run.rules.carry > run.rules.staleness
    if not carried:
        assert not run.books.dropped_samples
        assert run.books.masked_tokens == 0, "thrown away although a step waits for what would be too old"
    if run.rules.mode == "mask":
        assert not run.books.dropped_samples
    assert run.repeated == 0 or (carried and run.rules.mode == "resample")


def steady(**changed):
    """Samples per second of a run whose lengths have a tail, and the run."""
    rules = {"staleness": 0, "batch": 4, **changed}
    run = Run(Rules(**rules), 24, 24, 1, 16, [4, 4, 5, 6, 4, 4, 40], [8.0])
    _, seconds = in_virtual_time(run.go_on)
    return len(run.learned()) / seconds, run


def test_the_tail_does_not_hold_a_step():
    """Two of fourteen answers take ten times as long: a step of four waits for one every other time."""
    synchronous, _ = steady()
    one, run = steady(staleness=1)
    many, _ = steady(staleness=4)
    assert one > 1.5 * synchronous
    assert many > 2.5 * synchronous
    assert run.oldest == 1
    carried, run = steady(staleness=1, carry=8)
    assert carried > 2.5 * synchronous
    assert run.oldest == 1
    assert run.books.masked_tokens > 0


@pytest.mark.parametrize("staleness", [2, 4])
def test_where_generating_is_faster_answers_begin_as_late_as_lets_no_step_wait(staleness):
    run = Run(Rules(staleness, 4), 24, 24, 1, 16, [3], [9.0])
    _, seconds = in_virtual_time(run.go_on)
    ages = [[index - int(one.samples[0].versions.min()) for one in groups] for index, groups in enumerate(run.trained)]
    assert max(map(max, ages)) == staleness, "nobody knew yet"
    assert {age for step in ages[12:] for age in step} == {1}
    load, kept = 24 * 0.25, 0.1
    assert seconds == pytest.approx(3 + 24 * 9 + load + kept), "only the first step waited"


def test_a_batch_more_begins_early_once_a_step_had_to_wait_and_fewer_only_after_a_longer_row():
    ahead = Lookahead()
    assert ahead.answers(8, 32) == 32
    for spare in (24, 20, 30, 28):
        ahead.step(8, 32, spare, False)
    assert ahead.answers(8, 32) == 12, "what each of four steps had to spare"
    ahead.step(8, 32, -3, True)
    assert ahead.answers(8, 32) == 20
    for _ in range(7):
        ahead.step(8, 32, 16, False)
    assert ahead.answers(8, 32) == 20
    ahead.step(8, 32, 16, False)
    assert ahead.answers(8, 32) == 8, "a batch at least"
    assert ahead.answers(8, 4) == 4, "rollout.extra allows fewer"


def test_without_staleness_nothing_begins_before_its_step():
    seconds = {}
    for staleness in (0, 1):
        run = Run(Rules(staleness, 2), 4, 4, 1, 8, [3], [5.0])
        _, seconds[staleness] = in_virtual_time(run.go_on)
    load, kept = 4 * 0.25, 0.1
    assert seconds[0] == pytest.approx(4 * (3 + 5) + load + kept)
    assert seconds[1] == pytest.approx(3 + 4 * 5 + load + kept)


def test_groups_of_equal_rewards_are_replaced_and_counted():
    async def main():
        run = Run(Rules(1, 2, sampling=DynamicSampling(4)), 3, 3, 2, 8, [3], [5.0])
        rollout = Rollout(run.lengths, 2, 8, 0)

        async def answers(prompts):
            async for one in rollout.answers(prompts):
                yield one if one.prompt.id % 3 else even(one)

        in_flight = InFlight(run.rules, draw=run.draw, ledger=run.books, end=3)
        learned = []
        for index in range(3):
            batch = in_flight.next_batch(Step(index, (), 2, in_flight=in_flight), answers, rollout)
            learned += [one.prompt.id for one in await batch.groups.collect()]
            await in_flight.publish(rollout, index + 1)
        await in_flight.close()
        return learned, run.books, batch.metrics

    (learned, books, metrics), _ = in_virtual_time(main)
    assert learned == [1, 2, 4, 5, 7, 8]
    assert [(number, reason) for number, reason, _ in sorted(books.dropped_samples)] == [
        (0, "equal rewards"), (3, "equal rewards"), (6, "equal rewards"),
    ]  # fmt: skip
    assert metrics["sampling/kept"] == 2


def even(one):
    return Group(one.prompt, tuple(replace(sample, reward=1.0) for sample in one.samples))


def test_a_failure_reaches_the_step_that_lacks_something_and_the_next_batch_begins_anew():
    async def main():
        rollout, fails = Rollout([3], 1, 8, 0), [2]

        async def answers(prompts):
            async for one in rollout.answers(prompts):
                if one.prompt.id in fails:
                    fails.clear()
                    raise RuntimeError(f"no reward for {one.prompt.id}")
                yield one

        run = Run(Rules(1, 2), 4, 4, 1, 8, [3], [5.0])
        in_flight = InFlight(run.rules, draw=run.draw, keeper=None, end=4)

        async def learned(index):
            batch = in_flight.next_batch(Step(index, (), 1, in_flight=in_flight), answers, rollout)
            found = [one.prompt.id for one in await batch.groups.collect()]
            await asyncio.sleep(5.0)
            await in_flight.publish(rollout, index + 1)
            return found

        first = await learned(0)
        with pytest.raises(RuntimeError, match=r"reward.*2"):
            await learned(1)
        rest = await learned(1)
        await in_flight.close()
        return first, rest, [task for task in asyncio.all_tasks() if task.get_name() == "answers in flight"]

    (first, rest, left), _ = in_virtual_time(main)
    assert (first, sorted(rest), left) == ([0, 1], [2, 3], [])


def test_what_comes_to_nothing_is_dropped_with_its_reason_and_another_takes_its_place():
    async def main():
        run = Run(Rules(0, 2), 1, 1, 1, 8, [3], [5.0])

        async def answers(prompts):
            async for one in prompts:
                made = (
                    Completed(one.id, (), "every episode failed")
                    if one.id == 0
                    else Completed(one.id, (group(one, [[0]]),))
                )
                yield made

        in_flight = InFlight(run.rules, draw=run.draw, ledger=run.books, end=1)
        batch = in_flight.next_batch(Step(0, (), 1, in_flight=in_flight), answers, None)
        learned = [one.prompt.id for one in await batch.groups.collect()]
        await in_flight.close()
        return learned, run.books.dropped_samples

    (learned, dropped), _ = in_virtual_time(main)
    assert (learned, dropped) == ([1, 2], [(0, "every episode failed", None)])


def test_a_step_that_brings_its_prompts_needs_nobody_who_draws():
    async def main():
        rollout = Rollout([3], 1, 8, 0)
        in_flight, found = InFlight(), []
        for index in range(2):
            step = Step(index, [prompt(2 * index), prompt(2 * index + 1)], 1, in_flight=in_flight)
            batch = in_flight.next_batch(step, rollout.answers, rollout)
            found.append([one.prompt.id async for one in batch.groups])
            await in_flight.publish(rollout, index + 1)
        await in_flight.close()
        return found

    assert in_virtual_time(main)[0] == [[0, 1], [2, 3]]


def test_work_that_is_suspended_goes_on_from_where_it_was():
    async def main():
        run = Run(Rules(1, 2), 4, 4, 1, 8, [10], [1.0])
        rollouts = [Rollout([10], 1, 8, 0), Rollout([10], 1, 8, 1)]
        now = rollouts[0]

        class Moved:
            def __getattr__(self, name):
                async def asked(*args):
                    return now.version if name == "version" else await getattr(now, name)(*args)

                return asked

        in_flight = InFlight(run.rules, draw=run.draw, keeper=Moved(), end=4)
        for index in range(2):
            batch = in_flight.next_batch(Step(index, (), 1, in_flight=in_flight), now.answers, now)
            assert len(await batch.groups.collect()) == 2
            await in_flight.publish(now, index + 1)
            if index == 0:
                await asyncio.sleep(4.0)
                await in_flight.suspend()
                now = rollouts[1]
        await in_flight.close()
        return rollouts[0].made, rollouts[1].made

    (before, after), _ = in_virtual_time(main)
    assert before > 20
    assert before + after >= 40
    assert after < 20, "answers were made anew"
