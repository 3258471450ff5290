"""Calls of `generate` that overlap, stop, fail, or come from slow sources."""

import asyncio
from types import SimpleNamespace

import pytest

from rlinf.engines import base
from rlinf.engines.base import Sampling, StopTexts
from rlinf.engines.transformers import batch
from rlinf.runtime.base import clock
from tests.engines.scripted import Weights, answer, answers, ragged, request, right, scripted, ticks


async def direct(fn, *args):
    """Computing that gives others a turn before and after."""
    await asyncio.sleep(0)
    result = fn(*args)
    await asyncio.sleep(0)
    return result


@pytest.fixture
def stepwise(monkeypatch):
    """Every step is handed out by itself."""
    monkeypatch.setattr(batch, "_LONGEST", 0.0)


async def test_overlapping_calls_share_the_batch():
    engine, forward = scripted(max_rows=8, compute=direct)
    one, two = ([request(i, [first, i], Sampling(30)) for i in range(4)] for first in (1, 2))
    found = await asyncio.gather(answers(engine, one), answers(engine, two))
    right(one, found[0])
    right(two, found[1])
    assert max(len(step) for step in forward.steps) == 8


async def test_a_long_call_does_not_starve_a_short_one(stepwise):
    engine, _ = scripted(max_rows=4, compute=direct)
    ended = []

    async def run(name, requests):
        right(requests, await answers(engine, requests))
        ended.append(name)

    await asyncio.gather(
        run("long", [request(i, [1], Sampling(10)) for i in range(60)]), run("short", [request(0, [2], Sampling(5))])
    )
    assert ended == ["short", "long"]


async def test_first_come_is_first_served_also_when_it_is_large():
    order = []
    engine, _ = scripted(max_rows=8, max_tokens=40)
    requests = [request(0, [1] * 10, Sampling(15)), request(1, [1] * 30, Sampling(10)), request(2, [1], Sampling(2))]
    async for completion in engine.generate(requests):
        order.append(completion.id)
    assert order == [0, 1, 2]  # the last would have fitted beside the first, but not before the second


async def test_a_request_above_the_budget_is_answered_by_itself():
    engine, forward = scripted(max_rows=8, max_tokens=20)
    requests = [request(0, [1] * 30, Sampling(30)), *(request(i, [i], Sampling(8)) for i in range(1, 6))]
    right(requests, await answers(engine, requests))
    assert {len(step) for step in forward.steps[:29]} == {1}
    assert max(len(step) for step in forward.steps) == 2


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"max_tokens": 0}])
def test_no_room_at_all_is_a_mistake(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        scripted(**settings)


async def test_closing_a_call_frees_its_rows(stepwise):
    engine, forward = scripted(max_rows=4, compute=direct)
    leaving = engine.generate([request(0, [1], Sampling(2)), *(request(i, [i], Sampling(500)) for i in range(1, 4))])
    assert (await anext(leaving)).id == 0
    await leaving.aclose()
    assert engine._batch.live == 0
    steps = len(forward.steps)
    requests = ragged(10)
    right(requests, await answers(engine, requests))
    assert len(forward.steps) - steps < 100


async def test_cancelled_in_the_default_thread_the_engine_goes_on():
    engine, _ = scripted(max_rows=8)
    task = asyncio.create_task(answers(engine, [request(0, [1], Sampling(10**6))]))
    requests = [request(1, [2], Sampling(300))]
    other = asyncio.create_task(answers(engine, requests))
    await asyncio.sleep(0.02)
    task.cancel()
    right(requests, await other)
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_request_that_waits_for_room_is_aborted_without_tokens(stepwise):
    engine, _ = scripted(max_rows=4, max_tokens=60, compute=direct)
    call = asyncio.create_task(answers(engine, [request(0, [1], Sampling(50)), request(1, [1], Sampling(50))]))
    await ticks(30)
    await engine.abort([1])
    found = await call
    assert (found[1].finish, len(found[1].response_ids)) == ("abort", 0)
    assert len(found[0].response_ids) == 50


@pytest.mark.parametrize("paused", [False, True])
async def test_asleep_keys_and_values_are_gone_and_come_back(stepwise, paused):
    engine, forward = scripted(max_rows=4, compute=direct)
    requests = [request(i, [i] * (i + 1), Sampling(60 + i)) for i in range(6)]
    call = asyncio.create_task(answers(engine, requests))
    await ticks(50)
    if paused:
        await engine.pause()
    await engine.sleep()
    assert engine._batch._rows.bands == []
    steps, reads = len(forward.steps), len(forward.reads)
    await ticks(50)
    assert len(forward.steps) == steps
    await engine.sleep()  # as good as once
    await engine.wake()
    await engine.wake()
    await engine.resume()
    right(requests, await call)
    assert forward.reads[reads][0] == 4  # all that were in flight, before anything else
    assert forward.moves == ["off", "off", "on"]


@pytest.mark.parametrize("reread", [False, True])
async def test_weights_change_under_way(stepwise, reread):
    engine, forward = scripted(max_rows=4, compute=direct, reread=reread)
    call = asyncio.create_task(answers(engine, [request(0, [3], Sampling(80))]))
    await ticks(60)
    reads = len(forward.reads)
    await engine.load(Weights(version=5))
    assert engine.version == 5
    (found,) = (await call).values()
    changed = found.versions.tolist().index(5)
    assert found.versions.tolist() == [0] * changed + [5] * (80 - changed)
    assert 0 < changed < 80
    assert len(forward.reads) - reads == int(reread)
    old = answer([3], Sampling(changed))
    assert found.response_ids.tolist() == old + answer([3, *old], Sampling(80 - changed), version=5)


def slow_source(first, seconds, second):
    async def coming():
        for asked in first:
            yield asked
        await asyncio.sleep(seconds)
        for asked in second:
            yield asked

    return coming()


def test_a_prompt_source_is_waited_for_and_a_slow_one_is_not():
    async def widths(seconds):
        engine, forward = scripted(max_rows=8, compute=direct)
        first = [request(i, [i], Sampling(50)) for i in range(4)]
        second = [request(i, [i], Sampling(50)) for i in range(4, 8)]
        right(first + second, await answers(engine, slow_source(first, seconds, second)))
        return [len(step) for step in forward.steps]

    assert set(clock.run_virtual(widths(0.2))[0]) == {8}
    assert clock.run_virtual(widths(0.3))[0][0] == 4
    assert clock.run_virtual(widths(1000.0))[0][:49] == [4] * 49  # done before the others come


@pytest.mark.parametrize(("max_tokens", "most"), [(None, 4), (2 * 50_000, 2)])
async def test_a_slow_source_is_read_no_further_than_there_is_room(max_tokens, most, monkeypatch):
    monkeypatch.setattr(base, "PATIENCE", 0.0)
    engine, _ = scripted(max_rows=4, max_tokens=max_tokens)
    taken = found = 0
    ahead = []

    async def lots():
        nonlocal taken
        for lot in (1, 2, 12):
            await asyncio.sleep(0.01)
            for number in range(lot):
                taken += 1
                ahead.append(taken - found)
                yield request(taken, [number], Sampling(50_000))

    running = engine.generate(lots())
    call = asyncio.create_task(anext(running))
    while taken < most or engine._batch.live < most:
        await asyncio.sleep(0.01)
    while taken < 15:
        await engine.abort([found + 1])
        await call
        found += 1
        call = asyncio.create_task(anext(running))
        await asyncio.sleep(0.03)
    assert max(ahead) == most
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await running.aclose()


async def test_stop_texts_end_an_answer_and_stay_in_it():
    def decode(tokens):
        return "".join("abcdefghijk"[token] for token in tokens)

    whole = decode(answer([1, 2], Sampling(60)))
    stop = whole[20:22]
    first = whole.index(stop) + 2
    engine, _ = scripted(tokenizer=SimpleNamespace(decode=decode))
    asked = [
        request(0, [1, 2], Sampling(60, stop_texts=(stop, "zz"))),
        request(1, [1, 2], Sampling(60)),
        request(2, [1, 2], Sampling(60, stop_texts=(stop,), min_new_tokens=first + 1)),
        request(3, [1, 2], Sampling(first, stop_texts=(stop,))),
    ]
    found = await answers(engine, asked)
    assert decode(found[0].response_ids) == whole[:first]
    assert found[0].finish == found[3].finish == "text"
    assert (found[1].finish, len(found[1].response_ids)) == ("length", 60)
    again = whole.find(stop, first - 1)
    assert len(found[2].response_ids) == (again + 2 if again >= 0 else 60)


@pytest.mark.parametrize(
    ("stop", "ends"),
    [("a", "xa"), ("xa", "xa"), ("xb", "xPb"), ("P", None), ("<pad>", "xP"), ("<pad>b", "xPb"), ("<pad", None)],
)
def test_a_special_token_is_read_whole_or_not_at_all(stop, ends):
    texts = dict(enumerate(["x", "a", "b", "<pad>"]))
    reader = StopTexts.of(
        SimpleNamespace(
            decode=lambda tokens: "".join(texts[token] for token in tokens),
            all_special_ids=[3],
            convert_ids_to_tokens=texts.__getitem__,
        )
    )
    for written in ("x", "xa", "xP", "xPb"):
        tokens = ["xabP".index(letter) for letter in written]
        assert reader.complete(tokens, ("zz", stop)) == (written == ends), written
