"""Copies of a model that learn at their own pace, in virtual time: whoever gets its device when, every sample is
learned from once, all meet at the optimizer step, and nobody waits for ever."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.changing_hands_modelled import ModelledTrainer
from rlinf import Actor, ActorSystem, Stream
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runs.text import PaceObserver
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import lease_here
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.streams.stream import each
from rlinf.training.pacing import Pacing

ROUNDING = 2.0**-24
"""Largest relative error of one addition in float32."""


def group(number, sizes):
    prompt = Prompt(number, np.array([number]))
    return Group(prompt, tuple(sample(prompt, index, size) for index, size in enumerate(sizes)))


def sample(prompt, index, size):
    ids = np.zeros(size, np.int64)
    return Sample(prompt, index, ids, np.zeros(size, np.float32), np.zeros(size, np.int32), "", False, reward=1.0)


class Answers(Actor):
    """Answers one prompt after the other, keeping its device all that time."""

    async def setup(self, seconds, groups):
        self.seconds, self.groups = seconds, groups

    @endpoint(device=True)
    async def generate(self, prompts):
        async for number in each(prompts):
            async with lease_here().computing():
                await asyncio.sleep(self.seconds[number])
            yield self.groups[number]


class Rival(Actor):
    """Wants devices now and then."""

    @endpoint(device=True)
    async def use(self, seconds):
        async with lease_here().computing():
            await asyncio.sleep(seconds)


def value(row):
    return np.random.default_rng([int(row.prompt_ids[0]), len(row.response_ids)]).normal(size=4).astype(np.float32)


async def trained(devices, copies, batches, seconds, rivals=(), rollouts=None, memory=None, meanwhile=None, **settings):
    """Optimizer steps, and when the last batch had been learned; answers come from rollouts on the same devices.

    Args:
        devices: one for each rank of the trainer.
        copies: the ranks of each copy.
        batches: for each call, its groups, with numbers that go on from call to call.
        seconds: to answer each prompt.
        rivals: (when, for how long, on which device or None for all of them).
        rollouts: devices that they have; all, if not given.
        memory: bytes of a device, where each role takes 60.
        meanwhile: called with the trainer, and a function that begins to train on the first batch.
    """
    taken, meetings = [], {}
    groups = {each.prompt.id: each for batch in batches for each in batch}
    limits = None if memory is None else dict.fromkeys(range(devices), memory)
    async with ActorSystem.local(hosts=devices, trace=False, device_memory=limits) as system:

        async def spawn(kind, name, on, **more):
            return await system.spawn(kind, name=name, hosts=on, devices=on, resident_bytes=60, **more)

        rollout = await spawn(Answers, "rollout", list(rollouts or range(devices)), seconds=seconds, groups=groups)
        trainer = await spawn(
            ModelledTrainer, "trainer", list(range(devices)), copies=copies, taken=taken, meetings=meetings,
            **{"value": value, "token": 0.01, "step": 0.5, "switch": 0.1, "budget": 60, **settings},
        )  # fmt: skip
        rival = await spawn(Rival, "rival", list(range(devices)))

        async def wants(when, length, device):
            await asyncio.sleep(when)
            await (rival if device is None else rival[device]).use(length)

        def begun(batch):
            return trainer.train(rollout.generate(Stream.of([one.prompt.id for one in batch])))

        if meanwhile is not None:
            return await meanwhile(trainer, begun, taken)
        wishes = [asyncio.ensure_future(wants(*one)) for one in rivals]
        for batch in batches:
            assert await begun(batch) == len(batch)
        ended = asyncio.get_running_loop().time()
        await asyncio.gather(*wishes)
    return taken, ended


def assert_learned_once(steps, groups):
    """Every row of these groups, in so many steps together; and sums are exact up to the rounding of any order."""
    rows = [(each.prompt.id, len(one.response_ids)) for each in groups for one in each.samples]
    found = [row for sums in steps for part in sums.values() for row in part.rows.elements()]
    assert sorted(found) == sorted(rows)
    numbers = np.array(
        [
            np.random.default_rng(list(row)).normal(size=4).astype(np.float32)
            for sums in steps
            for part in sums.values()
            for row in part.rows.elements()
        ],
        dtype=np.float64,
    )
    total = np.sum([part.total for sums in steps for part in sums.values()], axis=0, dtype=np.float64)
    bound = (len(numbers) + len(steps)) * ROUNDING * np.abs(numbers).sum(0)
    assert (np.abs(total - numbers.sum(0)) <= bound).all()


TIMES = st.sampled_from([0.0, 0.001, 0.02, 0.5, 3.0, 20.0])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_whoever_has_its_device_when_every_sample_is_learned_from_once_and_nobody_waits_for_ever(data):
    team = data.draw(st.sampled_from([1, 1, 2]), "ranks of a copy")
    count = data.draw(st.integers(2, 4 if team == 1 else 2), "copies")
    devices = team * count
    chance = random.Random(data.draw(st.integers(0, 10**6), "sizes"))
    epochs, minibatches = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    numbers, batches = iter(range(100)), []
    for _ in range(2):
        many = data.draw(st.integers(1, 8), "groups")
        batches.append([group(next(numbers), chance.sample(range(1, 50), 3)) for _ in range(many)])
    seconds = data.draw(st.lists(TIMES, min_size=16, max_size=16), "seconds")
    rivals = data.draw(st.lists(st.tuples(TIMES, TIMES, st.none() | st.integers(0, devices - 1)), max_size=4), "rivals")
    first = data.draw(st.integers(0, devices - 1), "first device of the rollout")
    (steps, _), _ = run_virtual(
        trained(
            devices, [range(team * copy, team * copy + team) for copy in range(count)], batches, seconds, rivals,
            rollouts=range(first, devices), memory=data.draw(st.sampled_from([None, 100]), "memory"), epochs=epochs,
            minibatches=minibatches, budget=data.draw(st.sampled_from([1, 60, 10**6]), "budget"),
        )
    )  # fmt: skip
    assert all(len(sums) == devices for sums in steps)
    for batch in batches:
        per_epoch = min(minibatches, len(batch))
        for _ in range(epochs):
            assert_learned_once(steps[:per_epoch], batch)
            del steps[:per_epoch]
    assert not steps


LONG_TAIL = ([[group(number, (40, 41)) for number in range(12)]], [1.0] * 11 + [30.0])


@pytest.mark.parametrize(("order", "latest"), [("free", 38.0), ("arrival", 48.0)])
def test_devices_whose_answers_are_done_train_while_others_still_generate(order, latest):
    """The longest answer ends after 35 s, and all groups take 20 s of training, on two devices 10: in step these begin
    then, and freely all but the last group's are over."""
    batches, seconds = LONG_TAIL
    (steps, ended), _ = run_virtual(trained(2, [[0], [1]], batches, seconds, token=0.02, order=order))
    assert_learned_once(steps, batches[0])
    assert latest - 3.0 < ended < latest


def test_a_copy_that_never_gets_its_device_adds_nothing_and_takes_the_step():
    batches, seconds = [[group(number, (40, 41)) for number in range(4)]], [0.1] * 4
    (steps, _), _ = run_virtual(
        trained(2, [[0], [1]], batches, seconds, rollouts=[0], rivals=[(0.0, 60.0, 1)], token=0.01)
    )
    (sums,) = steps
    assert not sums[1].rows
    assert not sums[1].total.any()
    assert_learned_once(steps, batches[0])


def test_a_copy_gives_up_its_place_in_line_when_others_took_the_work():
    """Otherwise the rollout would leave a device, and come back, for nothing."""
    batches, seconds = [[group(number, (40, 41)) for number in range(4)]], [0.1] * 3 + [40.0]

    async def main():
        return await trained(3, [[0], [1], [2]], batches, seconds, rollouts=[0, 1], memory=100, switch=1.0, token=0.001)

    (steps, ended), _ = run_virtual(main())
    assert_learned_once(steps, batches[0])
    assert 40.0 < ended < 44.0


@pytest.mark.parametrize("order", ["free", "arrival"])
def test_calls_take_turns_and_each_finds_what_the_one_before_it_left(order):
    batches = [[group(number, (40, 41)) for number in range(6)], [group(number, (7, 9)) for number in range(6, 12)]]

    async def meanwhile(trainer, begun, taken):
        first, second = (asyncio.ensure_future(begun(batch)) for batch in batches)
        await asyncio.sleep(1.5)  # the first one is under way
        versions = [await trainer.weights(), await trainer.weights()]
        await asyncio.gather(first, second)
        assert versions == [2, 2]
        return taken

    steps = run_virtual(trained(2, [[0], [1]], batches, [1.0] * 12, meanwhile=meanwhile, order=order))[0]
    assert_learned_once(steps[:1], batches[0])
    assert_learned_once(steps[1:], batches[1])


def test_a_cancelled_call_leaves_nothing_behind_wherever_it_was():
    batches, seconds = LONG_TAIL

    async def cancelled_after(moment):
        async def meanwhile(trainer, begun, taken):
            training = asyncio.ensure_future(begun(batches[0]))
            await asyncio.sleep(moment)
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            taken.clear()
            assert await begun(batches[0]) == 12
            return taken

        return await trained(2, [[0], [1]], batches, seconds, meanwhile=meanwhile, memory=100)

    for moment in (0.0, 0.001, 1.05, 1.7, 2.0, 5.3, 12.0, 30.2, 31.5, 32.1):
        assert_learned_once(run_virtual(cancelled_after(moment))[0], batches[0])


def test_a_group_that_cannot_be_learned_from_is_the_calls_error():
    batches, seconds = LONG_TAIL

    async def meanwhile(trainer, begun, taken):
        async def broken():
            for one in batches[0][:5]:
                yield one
            await asyncio.sleep(3.0)
            raise KeyError("no sixth group")

        with pytest.raises(KeyError, match=r"sixth group"):
            await trainer.train(Stream.of(broken()))
        assert not taken
        assert await begun(batches[0]) == 12
        return taken

    assert_learned_once(run_virtual(trained(2, [[0], [1]], batches, seconds, meanwhile=meanwhile))[0], batches[0])


def test_a_copy_that_fails_ends_the_call_and_breaks_nothing():
    """It leaves nobody in a collective, so the next call goes on."""
    batches, seconds = LONG_TAIL
    fails = {"at": 5}

    def failing(row):
        if int(row.prompt_ids[0]) == fails["at"]:
            fails["at"] = None
            raise MemoryError("too long")
        return value(row)

    async def main():
        async def meanwhile(trainer, begun, taken):
            with pytest.raises(MemoryError, match="too long"):
                await begun(batches[0])
            taken.clear()
            assert await begun(batches[0]) == 12
            return taken

        return await trained(3, [[0], [1], [2]], batches, seconds, meanwhile=meanwhile, value=failing)

    assert_learned_once(run_virtual(main())[0], batches[0])


@given(st.floats(0.5, 1.5), st.integers(0, 2**32 - 1))
def test_a_run_that_finds_its_way_takes_hardly_longer_than_the_quicker_one(ratio, seed):
    pacing, noise = Pacing(), random.Random(seed)
    took = best = 0.0
    ways = []
    for _ in range(500):
        tokens = noise.uniform(900, 1100)
        seconds = tokens * (ratio if pacing.free else 1.0)
        ways.append(pacing.free)
        took += seconds
        best += tokens * min(ratio, 1.0)
        pacing.after(seconds, tokens)
    assert took < 1.03 * best
    assert sum(ways[100:]) > 300 or ratio > 0.98
    assert sum(ways[100:]) < 100 or ratio < 0.98


def test_a_run_goes_on_at_its_copies_own_pace_once_answers_grow_long():
    pacing = Pacing()
    said = [pacing.after(2.0 if pacing.free else 1.0, 1.0) for _ in range(60)]
    assert not pacing.free
    said += [pacing.after(1.0 if pacing.free else 2.0, 1.0) for _ in range(200)]
    assert pacing.free
    told = [text for text in said if text is not None]
    assert "in step" in told[0]
    assert "own pace: a token took 0.50 of the time" in told[-1]


class Shown:
    """A run with a trainer whose copies can part, and a report."""

    def __init__(self):
        self.roles, self.report, self.lines, self.told = {"trainer": self}, self, [], []

    def line(self, text):
        self.lines.append(text)

    async def let_copies_part(self, free):
        self.told.append(free)
        return [True]


def on(**devices):
    return SimpleNamespace(seats={role: SimpleNamespace(devices=numbers) for role, numbers in devices.items()})


async def test_a_run_looks_for_its_way_as_long_as_trainer_and_rollout_share_devices():
    run, placed = Shown(), [on(trainer=(0, 1), rollout=(1, 2))]
    observer = PaceObserver(run, lambda: placed[-1])
    steps = iter(range(1, 100))

    async def pass_steps(count):
        for _ in range(count):
            free = bool(run.told and run.told[-1])
            await observer.on_step(next(steps), {"timing/step": 1.0 if free else 2.0, "tokens": 10.0})

    await pass_steps(8)
    assert len(run.lines) == 1
    assert run.told[-1] is True
    placed.append(on(trainer=(0, 1), rollout=(2, 3)))
    before = len(run.told)
    await pass_steps(60)
    assert (run.told[before:], len(run.lines)) == ([False], 1)
    placed.append(on(trainer=(0, 1), rollout=(0, 1)))
    await pass_steps(8)
    assert run.told[-1] is True
    assert len(run.lines) == 2


def test_copies_part_and_go_in_step_again_between_calls():
    taken, meetings = [], {}
    batch = [group(number, [5, 9, 3]) for number in range(12)]

    async def main():
        async with ActorSystem.local(hosts=2, trace=False, device_memory={0: 100, 1: 100}) as system:
            trainer = await system.spawn(
                ModelledTrainer, hosts=[0, 1], devices=[0, 1], name="trainer", copies=[[0], [1]], taken=taken,
                meetings=meetings, order="arrival", token=0.1, step=1.0, budget=16,
            )  # fmt: skip
            for free in (False, True, False, True):
                assert await trainer.let_copies_part(free) == [True, True]
                assert await trainer.train(batch) == 12
        return [sum((part.rows for part in sums.values()), Counter()) for sums in taken]

    counts, _ = run_virtual(main())
    assert len(counts) == 4
    assert all(count == counts[0] and sum(count.values()) == 36 for count in counts)
