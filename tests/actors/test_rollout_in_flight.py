"""What a rollout keeps of a `generate` that goes on: finished groups until they are settled, and what is dropped."""

import asyncio

import pytest

from rlinf import Actor, ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.runtime.actor.actor import endpoint
from tests.actors.test_rollout import SHARED, answered, asked, collected, weights
from tests.actors.test_rollout_engine import PROCESS

ENGINES = {"transformers": "transformers", "process": PROCESS, "plain": "tests.actors.test_rollout_engine.plain"}
LONG = {**SHARED, "max_new_tokens": 60, "temperature": 3.0, "max_rows": 6}


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


class Feed:
    """A stream of prompts that come when the test says so."""

    def __init__(self):
        self._queue = asyncio.Queue()
        self.stream = Stream.of(self._items())

    async def _items(self):
        while (prompt := await self._queue.get()) is not None:
            yield prompt

    def put(self, *prompts):
        for prompt in prompts:
            self._queue.put_nowait(prompt)

    def end(self):
        self.put(None)


def answers(rollout, prompts, n, **sampling):
    """One consumer of a call: what it took, nobody else waits for."""
    return aiter(rollout.generate(prompts, n=n, **sampling))


def listed(ranks):
    """Prompts of all ranks' groups, those under way and those that came out."""
    groups = [group for rank in ranks for group in rank]
    return (
        sorted(group.prompt.id for group in groups if group.left),
        sorted(group.prompt.id for group in groups if not group.left),
    )


async def test_what_came_out_is_kept_until_it_is_settled_or_the_call_ends(system, engine):
    rollout = await system.spawn(Rollout, name="rollout", engine=engine, **LONG)
    expected = {group.id: answered(group) for group in await collected(rollout.generate(asked(4), n=2))}
    feed = Feed()
    feed.put(*asked(4))
    stream = answers(rollout, feed.stream, n=2)
    found = [await anext(stream) for _ in range(4)]
    kept = await rollout.in_flight()
    assert listed(kept) == ([], [0, 1, 2, 3])
    await rollout.settled([0, 77])
    await rollout.settled({1: [0], 2: [0, 1], 3: None})  # one answer of 1 has not arrived
    assert listed(await rollout.in_flight()) == ([], [1])
    again = await system.spawn(Rollout, name="again", **LONG)
    found_again = await collected(again.generate(Stream.of(kept[0]), n=2))
    for groups in (found, found_again):
        assert {group.id: answered(group) for group in groups} == expected
    feed.end()
    assert await collected(stream) == []
    assert await rollout.in_flight() == [[]]


async def test_a_finished_group_comes_out_at_once_beside_those_that_go_on(system):
    rollout = await system.spawn(Rollout, name="rollout", **LONG)
    feed = Feed()
    first = answers(rollout, feed.stream, n=2)
    feed.put(*asked(1))
    await anext(first)
    ((kept,),) = await rollout.in_flight()
    feed.end()
    await collected(first)
    second = answers(rollout, Stream.of([*asked(3)[1:], kept]), n=1, min_new_tokens=10)
    assert [group.id async for group in second] == [0, 1, 2]  # the others had hardly begun


async def test_dropped_prompts_yield_nothing_and_their_tokens_are_told(system, engine):
    rollout = await system.spawn(Rollout, hosts=[0, 0], name="rollout", engine=engine, **LONG)
    feed = Feed()
    feed.put(*asked(6))
    stream = answers(rollout, feed.stream, n=2, min_new_tokens=30)
    first = await anext(stream)
    await rollout.pause()
    before = {group.prompt.id: group for rank in await rollout.in_flight() for group in rank}
    gone = [id for id, group in before.items() if group.left][:3]
    told = await rollout.drop([first.id, *gone, 77])
    tokens = {id: count for rank in told for id, count in rank.items()}
    assert sorted(tokens) == sorted(gone)  # what came out is none of its business
    for id in gone:
        there = [len(one.response_ids) for one in before[id].done.values()]
        there += [one.answered for one in before[id].left.values()]
        assert tokens[id] == sum(there)
    assert any(tokens.values())
    await rollout.resume()
    feed.end()
    rest = [group.id for group in await collected(stream)]
    assert sorted([first.id, *rest, *gone]) == list(range(6))
    if engine == "transformers":  # dropped, they can be asked for once more
        again = await collected(rollout.generate(Stream.of([one for one in asked(6) if one.id in gone]), n=2))
        assert sorted(group.id for group in again) == sorted(gone)


async def test_an_evaluation_beside_is_neither_listed_nor_dropped(system):
    rollout = await system.spawn(Rollout, name="rollout", **LONG)
    stream = answers(rollout, Stream.of(asked(4)), n=1, min_new_tokens=50, listed=False)
    first = await anext(stream)
    assert await rollout.in_flight() == [[]]
    assert await rollout.drop(range(4)) == [{}]
    assert sorted([first.id, *(group.id for group in await collected(stream))]) == list(range(4))


async def test_a_call_that_is_cancelled_does_not_hold_up_who_drops(system):
    rollout = await system.spawn(Rollout, name="rollout", **{**LONG, "max_new_tokens": 5000})
    feed = Feed()
    feed.put(*asked(6))
    stream = rollout.generate(feed.stream, n=1, min_new_tokens=4000)
    while listed(await rollout.in_flight())[0] != list(range(6)):
        await asyncio.sleep(0)
    dropping = asyncio.ensure_future(rollout.drop(range(6)))
    await stream.close()
    async with asyncio.timeout(30):
        await dropping
        while await rollout.in_flight() != [[]]:
            await asyncio.sleep(0)


class Neighbour(Actor):
    """A trainer on the same device: wants it, and tells how the rollout stands meanwhile."""

    async def setup(self, rollout):
        self._rollout = rollout

    @endpoint(device=True)
    async def train(self):
        return (await self._rollout.state())[0]


class Told(Rollout):
    """Tells how it stands."""

    @endpoint
    async def state(self):
        batch = self._engine._batch
        return {"asleep": batch.asleep, "bands": len(batch._rows.bands), "live": batch.live}


async def test_it_gives_its_device_to_a_trainer_with_half_finished_answers_and_goes_on_with_new_weights():
    async with ActorSystem.local(device_memory={0: 100}) as system:
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "parked_bytes": 10}
        rollout = await system.spawn(Told, name="rollout", lease_items=3, **on_one, **LONG)
        trainer = await system.spawn(Neighbour, name="trainer", rollout=rollout, **on_one)
        feed = Feed()
        feed.put(*asked(20))
        groups, turns, loading = [], [], None
        stream = answers(rollout, feed.stream, n=2, min_new_tokens=20)
        groups.append(await anext(stream))
        training = asyncio.ensure_future(trainer[0].train())
        async for group in stream:
            groups.append(group)
            if training.done():
                turns.append((len(groups), await training))
                await loading if loading is not None else None
                loading = asyncio.ensure_future(rollout.load(weights(len(turns))))
                training = asyncio.ensure_future(trainer[0].train())
            if len(groups) == 20:
                break
        feed.end()
        await asyncio.gather(training, loading)
        assert sorted(group.id for group in groups) == list(range(20))
        assert len(turns) >= 3
        for _, state in turns:
            assert state["asleep"]
            assert state["bands"] == 0
        assert sum(state["live"] > 0 for _, state in turns) >= 3  # it did not wait for its last answers
        assert len(turns) <= 1 + 20 / 3  # one after so many groups
        rows = [sample.versions.tolist() for group in groups for sample in group.samples]
        assert all(row == sorted(row) for row in rows)
        assert sum(row[0] < row[-1] for row in rows) >= 3  # answers of several versions


async def test_a_group_comes_in_two_parts_when_it_is_split(system, engine):
    settings = {**LONG, "engine": engine, "max_rows": 8}
    rollout = await system.spawn(Rollout, name="rollout", **settings)
    whole = {group.id: answered(group) for group in await collected(rollout.generate(asked(3), n=4))}
    stream = answers(rollout, Stream.of(asked(3)), n=4)
    found = []
    while not any(await rollout.split()):
        await asyncio.sleep(0)
        groups = [group for group in (await rollout.in_flight())[0] if not group.left]
        assert len(groups) < 3, "not one group was ever half finished"
    kept = await rollout.in_flight()
    found = await collected(stream)
    parts = {}
    for group in found:
        parts.setdefault(group.id, []).append(len(group.samples))
    assert [2, 2] in parts.values()
    assert all(sizes in ([2, 2], [4]) for sizes in parts.values())
    rows = {id: sorted(row for group in found if group.id == id for row in answered(group)) for id in whole}
    assert rows == whole  # no sample is another because of it
    if engine != ENGINES["plain"]:  # which does not go on with half answers
        again = await system.spawn(Rollout, name="again", **settings)
        unread = [prompt for prompt in asked(3) if prompt.id not in {group.prompt.id for group in kept[0]}]
        resumed = await collected(again.generate(Stream.of([*kept[0], *unread]), n=4))
        assert {id: sorted(row for one in resumed if one.id == id for row in answered(one)) for id in whole} == whole
    with pytest.raises(ValueError, match=r"least=1.*least 2"):
        await rollout.split(1)
