"""The thin end of generation moves to fewer ranks: the same samples, and devices that are free earlier."""

import asyncio
import contextlib
import logging

import numpy as np
import pytest

from rlinf import Actor, ActorSystem, Stream
from rlinf.actors import tail_migration
from rlinf.actors.rollout import Rollout
from rlinf.placement.rescale import DecodeCost
from rlinf.runtime.actor.actor import endpoint
from tests.actors.test_rollout import SHARED, asked, collected, weights

LONG = {**SHARED, "max_new_tokens": 120, "temperature": 4.0, "max_rows": 8}
LONGER = {"max_new_tokens": 300, "max_rows": 4}
"""With 8 answers of 60 tokens and more, both of two ranks have some that move."""


class Moving(Rollout):
    """Remembers what it took from others; and does what a test wants before and after it takes."""

    async def setup(self, **settings):
        self.taken = []
        self.told = []
        await super().setup(**settings)

    async def before(self):
        """Called with groups in hand, before they are taken."""

    @endpoint
    async def rescale_take(self, key, groups, version):
        await self.before()
        report = await super().rescale_take(key, groups, version)
        self.taken += groups if report is not None else []
        return report

    @endpoint
    async def history(self):
        return [(len(group.done), len(group.left)) for group in self.taken]

    @endpoint
    async def idle(self):
        engine = self._engine
        return not (self._in_flight.calls or self._tables or engine._batch.live or engine._admission.calls)


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    """Timings of so small a model on shared cores say nothing."""
    monkeypatch.setattr(tail_migration, "fit", lambda sums: DecodeCost(1.0, 1e-6))


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


def samples(groups):
    found = {(sample.group, sample.index): sample for group in groups for sample in group.samples}
    assert len(found) == sum(len(group.samples) for group in groups)
    return found


def alike(groups, others):
    """The same samples: the same tokens; log-probs but for rounding, as the rows that share a step are others."""
    one, other = samples(groups), samples(others)
    assert one.keys() == other.keys()
    for key, sample in one.items():
        assert sample.response_ids.tolist() == other[key].response_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, other[key].logprobs, atol=1e-5)
        assert sample.versions.tolist() == other[key].versions.tolist()
        assert (sample.text, sample.truncated, sample.temperature) == (
            other[key].text,
            other[key].truncated,
            other[key].temperature,
        )


async def alone(system, count=9, n=3, **more):
    """What one rank by itself answers."""
    rollout = await system.spawn(Rollout, name="alone", **{**LONG, **more})
    return await collected(rollout.generate(Stream.of(asked(count)), n=n))


async def spawned(system, ranks, cls=Moving, **more):
    return await system.spawn(cls, hosts=[0] * ranks, name="rollout", **{**LONG, "rescale": True, **more})


@pytest.mark.parametrize("ranks", [2, 3])
async def test_samples_are_those_of_one_rank_wherever_they_were_begun(system, ranks):
    expected = await alone(system)
    rollout = await spawned(system, ranks)
    groups = await collected(rollout.generate(Stream.of(asked(9)), n=3))
    alike(groups, expected)
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2]
        assert len({id(sample.prompt) for sample in group.samples}) == 1
    moved = [each for history in await rollout.history() for each in history]
    assert len(moved) >= ranks - 1
    assert any(done and left for done, left in moved)  # groups travel half finished too
    assert all(await rollout.idle())
    again = await collected(rollout.generate(Stream.of(asked(9)), n=3))
    alike(again, expected)


async def test_it_is_off_unless_asked_for(system):
    rollout = await spawned(system, 3, rescale=False)
    alike(await collected(rollout.generate(Stream.of(asked(9)), n=3)), await alone(system))
    assert await rollout.history() == [[], [], []]


async def test_calls_that_share_prompts_but_no_answers_keep_their_own(system):
    rollout = await spawned(system, 2)
    prompts = Stream.of(asked(9))
    both = await asyncio.gather(*(collected(rank.generate(prompts, n=3)) for rank in rollout))
    assert await rollout.history() == [[], []]
    alike([group for groups in both for group in groups], await alone(system))
    lists = await collected(rollout.generate(asked(4), n=2))  # each rank answers all of a list
    assert sorted(group.prompt.id for group in lists) == [0, 0, 1, 1, 2, 2, 3, 3]


class Neighbour(Actor):
    """Wants a device."""

    @endpoint(device=True)
    async def work(self):
        return "done"


async def test_the_device_that_becomes_free_goes_to_who_waits_for_it():
    tail = {**LONG, **LONGER}
    async with ActorSystem.local() as system:
        rollout = await system.spawn(
            Moving, hosts=[0, 0], devices=[{0}, {1}], name="rollout", rescale=True, **tail
        )  # fmt: skip
        neighbours = [await system.spawn(Neighbour, hosts=[0], devices=[{d}], name=f"n{d}") for d in (0, 1)]
        groups = []

        async def generate():
            async for group in rollout.generate(Stream.of(asked(4)), n=2, min_new_tokens=60):
                groups.append(group)

        generating = asyncio.create_task(generate())
        await started(rollout)
        waiting = [asyncio.ensure_future(neighbour[0].work()) for neighbour in neighbours]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(groups) < 4
        await generating
        assert [await each for each in waiting] == ["done", "done"]
        assert len(groups) == 4
        assert sum(map(len, await rollout.history())) >= 1


async def started(rollout):
    """Until every rank generates."""
    while any(await rollout.idle()):
        await asyncio.sleep(0.001)


async def test_versions_never_fall_when_weights_change_around_a_hand_over(system):
    rollout = await spawned(system, 3, max_new_tokens=400, temperature=20.0)
    answers = aiter(rollout.generate(Stream.of(asked(9)), n=3))
    groups = [await anext(answers)]
    for version in range(1, 4):
        await rollout.load(weights(version, seed=version))
        with contextlib.suppress(StopAsyncIteration):
            groups.append(await anext(answers))
    groups += await collected(answers)
    assert sorted(samples(groups)) == [(prompt, index) for prompt in range(9) for index in range(3)]
    for sample in samples(groups).values():
        assert len(sample.response_ids) == len(sample.logprobs) == len(sample.versions)
        assert sample.versions.tolist() == sorted(sample.versions.tolist())
    assert sum(map(len, await rollout.history())) >= 1


async def test_a_rank_with_older_weights_is_given_nothing(system):
    class Behind(Moving):
        async def before(self):
            self._engine._forward.version -= 1

    rollout = await spawned(system, 2, Behind)
    alike_but_for_versions = samples(await collected(rollout.generate(Stream.of(asked(9)), n=3)))
    expected = samples(await alone(system))
    assert {k: s.response_ids.tolist() for k, s in alike_but_for_versions.items()} == {
        k: s.response_ids.tolist() for k, s in expected.items()
    }
    assert await rollout.history() == [[], []]


async def test_what_was_aborted_on_its_way_ends_where_it_stands(system):
    travelling = []

    class Aborted(Moving):
        @endpoint
        async def rescale_take(self, key, groups, version):
            travelling.extend((group.prompt.id, index) for group in groups for index in group.left)
            await self.group.abort()
            return await super().rescale_take(key, groups, version)

    rollout = await spawned(system, 2, Aborted, **LONGER)
    for _ in range(20):  # on busy cores one rank may be done before the other has read its prompts: nothing moves then
        found = samples(await collected(rollout.generate(Stream.of(asked(4)), n=2, min_new_tokens=60)))
        if travelling:
            break
    assert travelling
    assert sorted(found) == [(prompt, index) for prompt in range(4) for index in range(2)]
    for sample in found.values():
        assert len(sample.response_ids) == len(sample.logprobs) == len(sample.versions) > 0
    for place in travelling:
        assert found[place].truncated
        assert len(found[place].response_ids) < 300
    assert all(await rollout.idle())


async def test_who_leaves_during_a_hand_over_leaves_nothing_behind(system):
    reached, never = asyncio.Event(), asyncio.Event()

    class Stuck(Moving):
        async def before(self):
            reached.set()
            await never.wait()

    rollout = await spawned(system, 2, Stuck, **LONGER)
    stream = rollout.generate(Stream.of(asked(4)), n=2, min_new_tokens=60)
    reading = asyncio.create_task(collected(stream))
    await reached.wait()
    await stream.close()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    never.set()
    while not all(await rollout.idle()):
        await asyncio.sleep(0.001)
    assert len(await collected(rollout.generate(Stream.of(asked(2)), n=2, max_new_tokens=3))) == 2


async def test_what_is_not_taken_is_answered_where_it_was_and_the_reason_told(system, caplog):
    class Broken(Moving):
        async def before(self):
            raise OSError("no room")

    rollout = await spawned(system, 3, Broken)
    with caplog.at_level(logging.WARNING):
        groups = await collected(rollout.generate(Stream.of(asked(9)), n=3))
    alike(groups, await alone(system))
    assert any("did not take them: OSError: no room" in record.getMessage() for record in caplog.records)
    assert all(await rollout.idle())


async def test_an_engine_that_fails_after_a_hand_over_ends_the_call(system):
    class Failing(Moving):
        @endpoint
        async def rescale_take(self, key, groups, version):
            report = await super().rescale_take(key, groups, version)

            def broken(*_):
                raise RuntimeError("the device is on fire")

            self._engine._forward.step = broken
            return report

    rollout = await spawned(system, 2, Failing, **LONGER)
    with pytest.raises(RuntimeError, match="on fire"):
        await collected(rollout.generate(Stream.of(asked(4)), n=2, min_new_tokens=60))
