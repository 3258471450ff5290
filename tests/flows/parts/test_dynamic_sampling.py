"""Dynamic sampling: what a batch is filled with depends on the answers alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import ActorSystem, Stream
from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.step import Step
from rlinf.flows.text import filled
from rlinf.runtime.base.clock import run_virtual
from tests.flows.scripted import Scripted, prompt
from tests.runtime.worlds import left_on

EVEN, UNEVEN = [1.0, 1.0], [0.0, 1.0]


def play(scene, seconds, good, *, hosts=1, **more):
    """Run a scene with a scripted rollout in virtual time; returns what it returns, and the seconds. Nothing may be
    left over."""

    async def main():
        async with ActorSystem.local(hosts, serialize=hosts > 1) as system:
            rewards = [UNEVEN if yes else EVEN for yes in good]
            group = await system.spawn(Scripted, hosts=[hosts - 1], seconds=seconds, rewards=rewards, **more)
            result = await scene(group[0])
            if "fails" in more:
                gc.collect()  # the frames of an error hold what they had in hand
            await asyncio.sleep(1.0)  # word of what was dropped is on its way
            left = left_on(system._host)
            assert not left.keys() - {"cells", "arena"}, left
            return result

    return run_virtual(main())


def step_of(wanted, max_rounds, *, supply=1000, streamed=False):
    """A step with its first prompts, which can draw the rest of so many."""
    numbers = iter(range(supply))

    async def draw(count):
        await asyncio.sleep(0.0)
        return [prompt(number) for number in itertools.islice(numbers, count)]

    first = [prompt(number) for number in itertools.islice(numbers, wanted)]
    prompts = Stream.of(first) if streamed else first
    return Step(0, prompts, 2, prompts_per_step=wanted, sampling=DynamicSampling(max_rounds), draw=draw)


def one_by_one(good, wanted, max_rounds):
    """What DAPO keeps where prompts are answered one after the other: ids, rounds, prompts drawn, groups looked at."""
    kept, seen, drawn, rounds = [], 0, 0, 0
    while len(kept) < wanted and rounds < max_rounds:
        missing = wanted - len(kept)
        count = min(wanted, math.ceil(missing * seen / len(kept))) if kept else wanted
        rounds += 1
        for number in range(drawn, drawn + count):
            if len(kept) < wanted:
                seen += 1
                kept += [number] if good[number] else []
        drawn += count
    return kept, rounds, drawn, seen


@st.composite
def scripts(draw):
    """Groups of a batch, rounds, which prompts have groups worth learning, and two ways in which answers come."""
    wanted, max_rounds = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    count = wanted * max_rounds
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    good = [draw(st.floats(0, 1, exclude_max=True)) < share for _ in range(count)]
    times = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count)
    return wanted, max_rounds, good, [draw(times), draw(times)]


@given(script=scripts(), streamed=st.booleans())
@settings(max_examples=60)
def test_what_is_kept_is_what_answering_one_by_one_keeps_whenever_answers_come(script, streamed):
    wanted, max_rounds, good, ways = script
    kept, rounds, drawn, seen = one_by_one(good, wanted, max_rounds)
    assert len(kept) == wanted or rounds == max_rounds

    async def scene(rollout):
        batch = filled(step_of(wanted, max_rounds, streamed=streamed), rollout.generate)
        return [group.prompt.id async for group in batch.groups], batch.metrics

    for seconds in ways:
        (found, metrics), _ = play(scene, seconds, good)
        assert found == (kept or list(range(wanted)))  # without any to learn from, the step tells of the first round's
        assert metrics.pop("sampling/reward/mean") == pytest.approx(1 - len(kept) / 2 / seen)
        assert metrics == {
            "sampling/rounds": rounds,
            "sampling/drawn": drawn,
            "sampling/dropped": seen - len(kept),
            "sampling/kept": len(kept),
        }


def test_a_group_goes_on_as_soon_as_those_drawn_before_it_have_come():
    async def scene(rollout):
        loop = asyncio.get_running_loop()
        batch = filled(step_of(4, 3), rollout.generate)
        return [(group.prompt.id, loop.time()) async for group in batch.groups]

    found, _ = play(scene, [2.0, 1.0, 5.0, 4.0, 1.0, 9.0], [True, True, False, True, True, True])
    assert found == [(0, 2.0), (1, 2.0), (3, 5.0), (4, 6.0)]


def test_when_the_batch_is_full_answers_under_way_are_stopped():
    async def scene(rollout):
        batch = filled(step_of(2, 3), rollout.generate)
        kept = [group.prompt.id async for group in batch.groups]
        await asyncio.sleep(0.0)
        return kept, asyncio.get_running_loop().time(), await rollout.told()

    (kept, seconds, log), _ = play(scene, [1.0, 1.0, 2.0, 999.0], [True, False, True, True])
    assert kept == [0, 2]
    assert seconds == 3.0
    assert log == ["began", "ended", "began", "stopped"]


@pytest.mark.parametrize("hosts", [1, 2])
def test_without_dynamic_sampling_the_prompts_of_the_step_are_answered_as_they_are(hosts):
    async def scene(rollout):
        batch = filled(Step(0, [prompt(n) for n in range(3)], 2), rollout.generate)
        return [group.prompt.id async for group in batch.groups], batch.metrics

    (found, metrics), seconds = play(scene, [3.0, 1.0, 2.0], [False, False, True], hosts=hosts)
    assert found == [1, 2, 0]
    assert metrics == {}
    assert seconds == 4.0


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("fails", [1, 5])
def test_a_failure_of_generation_reaches_who_learns_and_leaves_nothing(hosts, fails):
    async def scene(rollout):
        batch = filled(step_of(4, 3), rollout.generate)
        found = []

        async def learn():
            async for group in batch.groups:
                found.append(group.prompt.id)

        with pytest.raises(RuntimeError, match=f"answer.*{fails}"):
            await learn()
        return found, await rollout.told()

    (found, log), _ = play(scene, [1.0] * 12, [number % 3 == 0 for number in range(12)], hosts=hosts, fails=fails)
    assert found == ([0] if fails == 1 else [0, 3])
    assert log[-1] == "stopped"


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("after", [0.5, 1.5, 2.5])
def test_a_step_that_is_cancelled_stops_generation_and_leaves_nothing(hosts, after):
    async def scene(rollout):
        async def learn():
            batch = filled(step_of(4, 3), rollout.generate)
            return [group async for group in batch.groups]

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after):
                await learn()
        await asyncio.sleep(0.1)
        return await rollout.told()

    log, _ = play(scene, [1.0] * 12, [False] * 12, hosts=hosts)
    assert log == ["began", "ended"] * int(after) + ["began", "stopped"]


def test_prompts_that_are_never_answered_hold_up_no_others():
    async def scene(rollout):
        batch = filled(step_of(4, 2), rollout.generate)
        return [group.prompt.id async for group in batch.groups], batch.metrics["sampling/drawn"]

    (found, drawn), _ = play(scene, [3.0, 2.0, 1.0, 1.0, 1.0, 1.0], [True] * 6, lost=(1, 2))
    assert found == [0, 3, 4, 5]
    assert drawn == 6


def test_data_that_come_to_their_end_leave_the_batch_as_it_is():
    async def scene(rollout):
        batch = filled(step_of(4, 9, supply=6), rollout.generate)
        return [group.prompt.id async for group in batch.groups], batch.metrics["sampling/drawn"]

    assert play(scene, [1.0] * 6, [True, False] * 3)[0] == ([0, 2, 4], 6)


async def test_a_step_that_does_not_say_how_large_a_batch_is_is_refused():
    with pytest.raises(ValueError, match=r"step 3.*sampling.*prompts_per_step=0"):
        filled(Step(3, [], 2, sampling=DynamicSampling()), lambda prompts: prompts)
