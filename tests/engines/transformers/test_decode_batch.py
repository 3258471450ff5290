"""Rows joining and leaving: every answer is that of its own text, whoever shares the batch; and what it costs."""

import asyncio
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.sample import ImageRef
from rlinf.engines import usual_lengths
from rlinf.engines.base import Sampling
from rlinf.engines.transformers import batch, cache, model
from tests.engines.scripted import VOCABULARY, Scripted, answer, answers, ragged, request, right, scripted


@pytest.fixture
def tight(monkeypatch):
    """Constants so small that a few rows make bands differ, merge, grow and move up."""
    monkeypatch.setattr(batch, "_ALIKE", 4)
    monkeypatch.setattr(cache, "_AHEAD", 3)
    monkeypatch.setattr(model, "_PADDING", 3)
    monkeypatch.setattr(model, "_TOKENS", 40)


work = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=25),
        st.integers(1, 30),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("constants", ["tight", "usual"])
def test_every_answer_is_that_of_its_own_text(constants, request_constants):
    @given(work, st.integers(1, 8), st.one_of(st.none(), st.integers(1, 120)))
    @settings(max_examples=60)
    def check(asked, max_rows, max_tokens):
        requests = [
            request(number, prompt, Sampling(room, min_new_tokens=least, stop_ids=tuple(stops)))
            for number, (prompt, room, stops, least) in enumerate(asked)
        ]
        engine, forward = scripted(max_rows=max_rows, max_tokens=max_tokens)
        found = asyncio.run(answers(engine, requests))
        right(requests, found)
        assert all(len(step) <= max_rows for step in forward.steps)
        assert engine._batch._rows.bands == []  # nothing is held when nothing is asked
        assert engine._batch.tokens == 0

    check()


@pytest.fixture
def request_constants(request, constants):
    if constants == "tight":
        request.getfixturevalue("tight")


async def test_bands_keep_short_rows_from_the_width_of_long_ones(tight):
    requests = [request(0, [1] * 200, Sampling(30)), *(request(i, [i], Sampling(30)) for i in range(1, 9))]
    engine, forward = scripted(max_rows=16)
    right(requests, await answers(engine, requests))
    assert all(len(widths) == 2 for widths in forward.widths)
    assert max(widths[1] for widths in forward.widths) <= 30


async def test_bands_that_have_become_alike_are_one(tight):
    waves = [request(i, [i % 7] * (40 if i == 0 else 3), Sampling(120 if i < 2 else 20)) for i in range(12)]
    engine, forward = scripted(max_rows=4)
    right(waves, await answers(engine, waves))
    assert len(forward.widths[0]) == 2
    assert max(len(widths) for widths in forward.widths) <= 4
    assert len(forward.widths[-1]) == 1


async def test_a_steady_stream_does_not_widen_the_window():
    requests = [request(i, [i % 11, 3], Sampling(5 + i % 3)) for i in range(200)]
    engine, forward = scripted(max_rows=8)
    right(requests, await answers(engine, requests))
    assert max(max(widths) for widths in forward.widths) <= 2 + 7


async def test_equal_prompts_are_read_once():
    requests = [request(i, [4, 5, i // 4], Sampling(3)) for i in range(12)]
    engine, forward = scripted(max_rows=16)
    await answers(engine, requests)
    assert forward.reads == [(3, 3)]


async def test_equal_prompts_with_different_pictures_are_read_apart(monkeypatch):
    monkeypatch.setattr(Scripted, "reads_images", True)
    shown = [(), (ImageRef("cat"),), (ImageRef("dog"),), (ImageRef("cat", "elsewhere.png"),), ()]
    requests = [replace(request(i, [4, 5], Sampling(3)), images=images) for i, images in enumerate(shown)]
    engine, forward = scripted(max_rows=16)
    right(requests, await answers(engine, requests))
    assert forward.reads == [(3, 2)]
    assert forward.images == [[(), shown[1], shown[2]]]


async def test_a_reading_serves_several_newcomers():
    requests = [request(i, [i % 11], Sampling(20 + i % 5)) for i in range(64)]
    engine, forward = scripted(max_rows=16)
    right(requests, await answers(engine, requests))
    assert len(forward.reads) < 64 / 3


def test_prompts_are_read_in_rectangles_with_little_padding():
    rng = np.random.default_rng(0)
    texts = [(np.zeros(length, dtype=np.int64), None) for length in sorted(rng.integers(1, 3000, 60), reverse=True)]
    runs = list(model.rectangles(texts))
    assert sum(map(len, runs)) == 60
    for run in runs:
        area = len(run) * len(run[0][0])
        assert area <= 8192 or len(run) == 1
        assert area - sum(len(text) for text, _ in run) <= max(256, area / 8)
    assert len(runs) < 40


@pytest.mark.parametrize("longest", [0.0, 10.0])
async def test_who_shares_a_step_depends_on_requests_and_not_on_timing(monkeypatch, longest):
    requests = ragged(60, stop_ids=(0,))
    plain, expected = scripted(max_rows=9, max_tokens=150)
    right(requests, await answers(plain, requests))
    monkeypatch.setattr(batch, "_LONGEST", longest)
    monkeypatch.setattr(batch, "_QUIET", longest)
    jitter = random.Random(int(longest))

    async def coming():
        for asked in requests:
            for _ in range(jitter.randrange(4)):
                await asyncio.sleep(0)
            yield asked

    async def compute(fn, *args):
        await asyncio.sleep(jitter.choice([0, 0.001]))
        await asyncio.to_thread(fn, *args)
        time.sleep(jitter.choice([0, 0.0005]))  # the loop is late

    for source in (requests, coming()):
        engine, forward = scripted(max_rows=9, max_tokens=150, compute=compute)
        right(requests, await answers(engine, source))
        assert forward.steps == expected.steps
        assert forward.reads == expected.reads


async def test_the_second_batch_finds_no_trace_of_the_first():
    requests = ragged(30)
    fresh, expected = scripted(max_rows=8)
    await answers(fresh, requests)
    used, forward = scripted(max_rows=8)
    await answers(used, ragged(17, seed=5))
    forward.steps.clear()
    await answers(used, requests)
    assert forward.steps == expected.steps


def long_tailed(count, limit=40, stops=(3,), prompt=4):
    """Requests whose answers are mostly short, and now and then as long as they may be."""
    return [
        request(number, [number % VOCABULARY] * (1 + number % prompt) + [number // 7 % VOCABULARY],
                Sampling(limit, stop_ids=stops))
        for number in range(count)
    ]  # fmt: skip


def watched(engine):
    """Texts in flight at each step of an engine, as (answers, tokens of cache that the step fills)."""
    batch, steps = engine._batch, []

    def step(records, step=batch._rows.step):
        slots = np.fromiter(records.requests, np.int64)
        steps.append((len(slots), int((records.prompts[slots] + records.lengths[slots]).sum())))
        return step(records)

    batch._rows.step = step
    return steps


@given(st.integers(40, 60), st.integers(20, 160), st.integers(1, 24), st.sampled_from([(3,), (3, 5), (1, 2, 4)]))
@settings(max_examples=12)
def test_answers_that_come_longer_than_usual_put_the_newest_back_and_all_are_as_if_alone(count, room, rows, stops):
    requests = long_tailed(count, stops=stops)
    engine, _ = scripted(max_rows=rows, max_tokens=room)
    steps = watched(engine)
    right(requests, asyncio.run(answers(engine, requests)))
    assert all(tokens <= room for answered, tokens in steps if answered > 1)
    assert (engine._batch.tokens, engine._batch._reserved.sum(), engine._batch._begun) == (0, 0, {})


def test_room_for_the_usual_answer_lets_in_more_than_room_for_the_longest(monkeypatch):
    requests = long_tailed(150)
    taken = []
    for enough in (usual_lengths._ENOUGH, 10**9):
        monkeypatch.setattr(usual_lengths, "_ENOUGH", enough)
        engine, _ = scripted(max_rows=64, max_tokens=300)
        steps = watched(engine)
        right(requests, asyncio.run(answers(engine, requests)))
        taken.append((len(steps), engine._batch.put_backs))
    (usual, put_backs), (longest, none) = taken
    assert usual < 0.85 * longest
    assert 0 < put_backs < 100
    assert none == 0


async def test_what_was_put_back_can_be_taken_out_aborted_and_told_with_its_tokens():
    requests = long_tailed(200)
    engine, _ = scripted(max_rows=64, max_tokens=300)
    batch, loop, stopped = engine._batch, asyncio.get_running_loop(), asyncio.Event()
    batch._usual.clear = lambda: None
    for one in requests[:40]:
        batch._usual.ended(one, 2)  # as if all answers were short

    def make_room(make_room=batch._make_room):
        make_room()
        if len(batch.put_back) >= 2 and not stopped.is_set():
            batch.paused = batch.interrupted = True
            loop.call_soon_threadsafe(stopped.set)

    batch._make_room = make_room
    work = asyncio.ensure_future(answers(engine, requests))
    await stopped.wait()
    first, second = list(batch.put_back)[:2]
    begun = {one.id: answer(one.prompt_ids.tolist(), one.sampling) for one in (first, second)}
    (told,) = await engine.partial([first.id])
    (taken,) = await engine.take_out([first.id])
    for one in (told, taken):
        tokens = one.partial.response_ids.tolist()
        assert 0 < len(tokens) < len(begun[first.id])
        assert tokens == begun[first.id][: len(tokens)]
    await engine.abort([second.id])
    await engine.resume()
    found = await work
    aborted = found.pop(second.id)
    assert aborted.finish == "abort"
    assert aborted.response_ids.tolist() == begun[second.id][: len(aborted.response_ids)] != []
    right([one for one in requests if one not in (first, second)], found)
