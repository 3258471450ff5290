"""Answers taken out of one engine go on in another as if nothing had happened."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.engines.base import PartialAnswer, Request, Sampling
from rlinf.engines.transformers import batch
from tests.engines.scripted import VOCABULARY, Weights, answers, ragged, request, right, scripted, ticks
from tests.engines.transformers.test_calls import direct

work = st.lists(
    st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=25), st.integers(1, 30)),
    min_size=1,
    max_size=10,
)


@pytest.fixture
def stepwise(monkeypatch):
    """Every step is looked at."""
    monkeypatch.setattr(batch, "_LONGEST", 0.0)


async def moved(engine, other, requests, ids, wait):
    """Answers of both engines, when some are taken out of one after a while and given to the other."""
    call = asyncio.create_task(answers(engine, requests))
    await ticks(wait)
    out = await engine.take_out(ids)
    await ticks(wait)
    found, more = await asyncio.gather(call, answers(other, out))
    assert not found.keys() & more.keys()
    assert {asked.id for asked in out} == more.keys()
    return {**found, **more}, out


def test_wherever_an_answer_is_cut_it_goes_on_alike(stepwise):
    @given(work, st.sets(st.integers(0, 9)), st.integers(0, 120), st.integers(1, 6), st.integers(1, 6))
    @settings(max_examples=40)
    def check(asked, ids, wait, rows, others):
        requests = [request(i, prompt, Sampling(room, stop_ids=(3,))) for i, (prompt, room) in enumerate(asked)]
        engine, _ = scripted(max_rows=rows, compute=direct)
        other, _ = scripted(max_rows=others, compute=direct)
        found, _ = asyncio.run(moved(engine, other, requests, ids, wait))
        right(requests, found)
        for one in (engine, other):
            assert one._batch._rows.bands == []
            assert one._batch.tokens == one._batch.live == 0

    check()


async def test_what_was_made_elsewhere_keeps_its_version(stepwise):
    engine, _ = scripted(compute=direct)
    other, _ = scripted(compute=direct)
    await engine.load(Weights(version=3))
    await other.load(Weights(version=4))
    found, (out,) = await moved(engine, other, [request(0, [3], Sampling(40))], [0], 30)
    count = len(out.partial.versions)
    assert 0 < count < 40
    assert found[0].versions.tolist() == [3] * count + [4] * (40 - count)


async def test_a_request_that_waits_moves_as_it_came(stepwise):
    engine, _ = scripted(max_rows=6, max_tokens=60, compute=direct)
    requests = [request(i, [i], Sampling(50)) for i in range(6)]
    call = asyncio.create_task(answers(engine, requests))
    await ticks(10)
    out = await engine.take_out(range(6))
    assert [one.id for one in out if one.partial is None] == [1, 2, 3, 4, 5]
    assert await call == {}
    other, _ = scripted(compute=direct)
    right(requests, await answers(other, out))


async def test_asleep_an_engine_lets_go_of_what_it_has(stepwise):
    engine, _ = scripted(compute=direct)
    call = asyncio.create_task(answers(engine, [request(0, [3], Sampling(40))]))
    await ticks(30)
    await engine.sleep()
    (out,) = await engine.take_out([0, 7])
    assert await call == {}
    assert 0 < len(out.partial.response_ids) < 40
    other, _ = scripted(compute=direct)
    right([out], await answers(other, [out]))


async def test_aborted_before_it_goes_on_an_answer_keeps_what_it_had():
    begun = PartialAnswer(np.array([4, 5]), np.zeros(2, np.float32), np.zeros(2, np.int32))
    requests = [Request(i, np.array([1]), Sampling(300), partial=begun if i else None) for i in range(3)]
    engine, _ = scripted(max_rows=1, compute=direct)
    call = asyncio.create_task(answers(engine, requests))
    await ticks(3)
    await engine.abort()
    found = await call
    assert [found[i].response_ids.tolist()[:2] for i in (1, 2) if i in found] == [[4, 5]] * (len(found) - 1)
    assert all(completion.finish == "abort" for completion in found.values())


@pytest.mark.parametrize("sizes", [(0, 0, 0), (5, 5, 5), (2, 1, 2)])
async def test_beginnings_that_are_none_are_refused(sizes):
    tokens, logprobs, versions = sizes
    begun = PartialAnswer(np.zeros(tokens, np.int64), np.zeros(logprobs, np.float32), np.zeros(versions, np.int32))
    engine, _ = scripted()
    with pytest.raises(ValueError, match=f"request 7.*{tokens} tokens"):
        await answers(engine, [Request(7, np.array([1]), Sampling(5), partial=begun)])


async def test_the_pace_counts_steps_rows_and_tokens_read():
    engine, forward = scripted(max_rows=8)
    await answers(engine, ragged(8))
    count, rows, seconds, tokens, reading, *_ = engine.stats
    assert count == engine.stats.steps == len(forward.steps)
    assert rows == sum(map(len, forward.steps))
    assert tokens == sum(one * other for one, other in forward.reads)
    assert min(seconds, reading) > 0
