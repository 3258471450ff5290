"""Decoding by recorded steps gives what decoding step by step gives, whatever comes, goes and changes."""

import asyncio
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.engines.base import Sampling
from rlinf.engines.transformers import batch, paged_attention
from rlinf.engines.transformers import graphs as graphed_rows
from rlinf.engines.transformers import graphs as reading
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.graphs import row_sizes
from rlinf.models.offload import bytes_of
from tests.engines.transformers.rehearsed import REHEARSED
from tests.engines.transformers.test_engine import VOCABULARY, answers, packed, ragged, request, tiny


def both(model_seed=0, kind="qwen2", shape=None, **more):
    """The same engine twice: step by step, and by recorded steps."""
    shape = shape or {}
    return [TransformersEngine(tiny(kind, model_seed, **shape), graphs=graphs, **more) for graphs in ("off", REHEARSED)]


def equal(plain, graphed):
    """The same tokens for the same reasons, with the same log-probs up to rounding, by the same weights."""
    assert sorted(plain) == sorted(graphed)
    for number, one in plain.items():
        other = graphed[number]
        assert (one.response_ids.tolist(), one.finish) == (other.response_ids.tolist(), other.finish)
        assert one.versions.tolist() == other.versions.tolist()
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=3e-5)


samplings = st.builds(
    Sampling,
    st.integers(1, 40),
    temperature=st.sampled_from([1.0, 1.0, 0.7, 0.0]),
    top_k=st.sampled_from([0, 0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_new_tokens=st.integers(0, 3),
    stop_ids=st.sampled_from([(), (0,), (0, 1, 2)]),
)
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


AGAIN = pytest.mark.repeated


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=AGAIN), "qwen3", pytest.param("llama", marks=AGAIN)])
def test_answers_are_those_of_decoding_step_by_step(kind, monkeypatch):
    monkeypatch.setattr(reading, "_TOKENS", 60)
    monkeypatch.setattr(graphed_rows, "_AHEAD", 3)

    @given(st.lists(st.tuples(texts, samplings), min_size=1, max_size=14), st.integers(1, 12))
    @settings(max_examples=6)
    def check(asked, max_rows):
        requests = [request(number, *each) for number, each in enumerate(asked)]
        plain, graphed = both(kind=kind, max_rows=max_rows)
        equal(*(asyncio.run(answers(engine, requests)) for engine in (plain, graphed)))
        assert (graphed._batch.live, graphed._batch.tokens) == (0, 0)
        assert not graphed._batch._rows.cache.owned.any()

    check()


def test_windows_are_seen_as_the_model_says(monkeypatch):
    shape = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    plain, graphed = both(shape=shape, max_rows=6)
    assert {block.window for block in graphed._forward.blocks} == {None, 5}
    requests = [request(i, [i, 3] * (1 + 4 * i), Sampling(30)) for i in range(8)]
    equal(*(asyncio.run(answers(engine, requests)) for engine in (plain, graphed)))


asked_for = st.lists(
    st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), st.integers(2, 30)),
    min_size=2,
    max_size=8,
)
events = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["load", "park", "pause", "abort", "take_out", "partial", "cancel"])),
    max_size=4,
)


@pytest.mark.parametrize("reread", [False, pytest.param(True, marks=AGAIN)])
def test_whatever_happens_in_between_each_token_is_of_the_weights_that_it_names(reread, monkeypatch):
    """With answers interrupted at any step: their tokens are the beginnings of what a whole answer has."""
    monkeypatch.setattr(graphed_rows, "_AHEAD", 3)
    models = [tiny(seed=seed) for seed in range(3)]

    async def run(engine, asked, happening):
        steps, left, found = 0, list(happening), {}
        loop, stepped = asyncio.get_running_loop(), asyncio.Event()
        taken, seen = set(), {}
        requests = [request(number, prompt, Sampling(room)) for number, (prompt, room) in enumerate(asked)]
        running = asyncio.create_task(answers(engine, requests))
        single = asyncio.create_task(engine.answer(request(99, [1, 2, 3], Sampling(25))))
        version = 0
        advance = engine._batch._step

        def counted():
            nonlocal steps
            advance()
            steps += 1
            engine._batch.interrupted = True
            loop.call_soon_threadsafe(stepped.set)

        engine._batch._step = counted
        while not running.done():
            stepped.clear()
            waiting = asyncio.ensure_future(stepped.wait())
            await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not left or steps < left[0][0]:
                continue
            _, what = left.pop(0)
            left = [(steps + wait, event) for wait, event in left]
            some = {0, 2, 5}
            if what == "load" and version < 2:
                version += 1
                await engine.load(packed(models[version], version))
            elif what == "park":
                await engine.sleep()
                await engine.wake()
            elif what == "pause":
                await engine.pause()
                assert engine._batch._rows.settle() is None
                await engine.resume()
            elif what == "abort":
                await engine.abort(some)
            elif what == "take_out":
                taken |= {one.id for one in await engine.take_out(some)}
            elif what == "partial":
                seen.update({one.id: one.partial for one in await engine.partial(range(20))})
            elif what == "cancel":
                single.cancel()
        found = await running
        await asyncio.gather(single, return_exceptions=True)
        return requests, found, taken, seen

    @given(asked_for, events, st.integers(2, 8))
    @settings(max_examples=10)
    def check(asked, happening, max_rows):
        engine = TransformersEngine(tiny(), graphs=REHEARSED, reread=reread, max_rows=max_rows)
        requests, found, taken, seen = asyncio.run(run(engine, asked, happening))
        assert set(found) == {one.id for one in requests} - taken
        for number, one in found.items():
            assert (
                len(one.response_ids)
                == len(one.logprobs)
                == len(one.versions)
                <= requests[number].sampling.max_new_tokens
            )
            assert one.finish == "abort" or len(one.response_ids) == requests[number].sampling.max_new_tokens
            assert sorted(one.versions.tolist()) == one.versions.tolist()
            if (partial := seen.get(number)) is not None:
                assert one.response_ids[: len(partial.response_ids)].tolist() == partial.response_ids.tolist()
            if reread or len(set(one.versions.tolist())) < 2:
                told_by_their_models(models, requests[number], one)
        assert engine._batch.tokens == 0
        assert not engine._batch._rows.cache.owned.any()

    check()


def told_by_their_models(models, asked, found):
    """Log-probs are those of the weights that the versions name, over all tokens before."""

    ids = torch.tensor([[*asked.prompt_ids.tolist(), *found.response_ids.tolist()]])
    with torch.no_grad():
        tables = {version: models[version](ids).logits[0].log_softmax(-1) for version in set(found.versions.tolist())}
    begin = len(asked.prompt_ids) - 1
    expected = [
        float(tables[version][begin + number, token])
        for number, (token, version) in enumerate(
            zip(found.response_ids.tolist(), found.versions.tolist(), strict=True)
        )
    ]
    np.testing.assert_allclose(found.logprobs, expected, atol=3e-5)


@pytest.mark.parametrize("longest", [0.0, 10.0])
async def test_who_shares_a_step_depends_on_requests_and_not_on_timing(monkeypatch, longest):
    requests = ragged(40, Sampling(15, stop_ids=(0, 1)))
    steps = []
    for quick in (True, False):
        engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=9, max_tokens=150)
        rows, seen = engine._batch._rows, []
        step = rows.step

        def watched(records, step=step, seen=seen, rows=rows):
            drawn = step(records)
            seen.append((rows._rows.tolist(), [sampled.slots.tolist() for sampled in drawn]))
            return drawn

        rows.step = watched
        jitter = random.Random(int(longest))

        async def compute(fn, *args, jitter=jitter):
            await asyncio.sleep(jitter.choice([0, 0.001]))
            result = await asyncio.to_thread(fn, *args)
            time.sleep(jitter.choice([0, 0.0005]))
            return result

        if not quick:
            monkeypatch.setattr(batch, "_LONGEST", longest)
            monkeypatch.setattr(batch, "_QUIET", longest)
            engine._compute = compute
        await answers(engine, requests)
        steps.append(seen)
    assert steps[0] == steps[1]


async def test_nothing_is_recorded_again_for_other_weights_and_newcomers():
    engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=8)
    recorder = engine._batch._rows._recorder
    await answers(engine, ragged(20, Sampling(12)))
    known = len(recorder.recorded)
    await engine.load(packed(tiny(seed=1), 1))
    found = await answers(engine, ragged(20, Sampling(12), seed=3))
    assert len(recorder.recorded) == known
    other = TransformersEngine(tiny(seed=1), graphs="off", max_rows=8, version=1)
    equal(await answers(other, ragged(20, Sampling(12), seed=3)), found)


async def test_weights_that_lie_elsewhere_are_recorded_anew():
    engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=8)
    requests = ragged(6, Sampling(12))
    before = await answers(engine, requests)
    head = engine._forward._head.weight
    head.data = head.data.clone()
    equal(before, await answers(engine, requests))


async def test_a_parked_engine_holds_nothing():
    engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=8)
    await answers(engine, ragged(6, Sampling(12)))
    rows = engine._batch._rows
    assert bytes_of(rows.cache.keys) > 0
    await engine.sleep()
    assert (rows.cache.keys, rows._recordings, rows._step) == ([], {}, None)


async def test_an_answer_has_no_token_past_its_end_and_none_is_counted():
    engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=8)
    found = await answers(engine, [request(i, [i], Sampling(5 + i)) for i in range(6)])
    assert [len(found[i].response_ids) for i in range(6)] == [5, 6, 7, 8, 9, 10]
    assert engine.stats.steps == 9  # of the longest, whose first token the prompt gave


async def test_logits_that_are_not_finite_are_an_error_and_the_engine_goes_on():
    engine = TransformersEngine(tiny(), graphs=REHEARSED, max_rows=8)
    broken = tiny(seed=1)
    broken.lm_head.weight.data[3] = float("nan")
    await engine.load(packed(broken, 1))
    with pytest.raises(FloatingPointError, match=r"weights.*version 1"):
        await answers(engine, ragged(6, Sampling(12)))
    await engine.load(packed(tiny(), 2))
    plain = TransformersEngine(tiny(), max_rows=8, version=2)
    equal(await answers(plain, ragged(6, Sampling(12))), await answers(engine, ragged(6, Sampling(12))))


def test_pages_are_nobody_elses():
    @given(
        st.lists(st.tuples(st.sampled_from(["extend", "release"]), st.integers(0, 5), st.integers(1, 90)), max_size=30)
    )
    @settings(max_examples=60)
    def check(changes):

        cache = paged_attention.PagedCache(2, 1, 4, 6, torch.float32, torch.device("cpu"), page=16)
        lengths = np.zeros(6, dtype=np.int64)
        for what, slot, tokens in changes:
            if what == "release":
                cache.release(np.array([slot]))
                lengths[slot] = 0
                continue
            tokens = max(tokens, int(lengths[slot]))
            fits = cache.fits(np.array([tokens]), np.array([slot]))
            moved = cache.extend(np.array([tokens]), np.array([slot]))
            assert moved is not fits
            fresh = torch.from_numpy(cache.places(slot, tokens)[lengths[slot] :])
            cache.keys[1][fresh] = 100.0 * slot + torch.arange(int(lengths[slot]), tokens)[:, None, None]
            lengths[slot] = tokens
            every = [place for other in range(6) for place in cache.places(other, int(lengths[other])).tolist()]
            assert len(set(every)) == len(every)
            assert min(every) >= 16  # the first page is nobody's
            for other in np.flatnonzero(lengths).tolist():
                keys = cache.copies(other, int(lengths[other]))[1][0][0, :, 0]
                assert keys.tolist() == (100.0 * other + np.arange(lengths[other])).tolist()

    check()


def test_the_pool_grows_ahead_up_to_its_bound_and_beyond_it_by_what_is_needed():
    found = {}
    for bound in (None, 640):
        cache = paged_attention.PagedCache(1, 1, 4, 2, torch.float32, torch.device("cpu"), 16, bound)
        found[bound] = []
        for tokens in (16, 20 * 16, 30 * 16, 42 * 16, 60 * 16):
            cache.extend(np.array([tokens]), np.array([0]))
            found[bound].append(len(cache.keys[0]) // 16)
    assert found == {None: [4, 21, 42, 84, 84], 640: [4, 21, 42, 44, 61]}  # nobody's page included


def test_sizes_of_steps():
    assert row_sizes(1) == [8]
    assert row_sizes(100) == [8, 16, 32, 48, 64, 96, 128]
    assert row_sizes(128)[-1] == 128


async def test_answers_that_were_put_back_for_want_of_room_have_the_same_tokens():
    requests = ragged(90, Sampling(40, stop_ids=(0, 1, 2)))
    whole, found = (
        TransformersEngine(tiny(), graphs=REHEARSED, max_rows=16, max_tokens=tokens) for tokens in (None, 130)
    )
    found._batch._usual.clear = lambda: None
    for one in requests[:40]:
        found._batch._usual.ended(one, 1)  # as if all answers were short
    alone = await answers(whole, requests)
    together = await answers(found, requests)
    assert found._batch.put_backs > 0
    for number, completion in alone.items():
        assert together[number].response_ids.tolist() == completion.response_ids.tolist()
        np.testing.assert_allclose(together[number].logprobs, completion.logprobs, atol=3e-5)
