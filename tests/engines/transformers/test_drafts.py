"""Drafts from history change no token: a forward that reads its texts off the cache says so, and a real model."""

import asyncio
import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.engines.base import Sampling
from rlinf.engines.transformers import cache
from rlinf.engines.transformers import engine as transformers
from rlinf.engines.transformers.batch import Slots
from rlinf.engines.transformers.cache import Layers
from rlinf.engines.transformers.drafts import LARGE, SMALL, Answers, Continuations, Drafts, Prices
from rlinf.engines.transformers.engine import TransformersEngine
from tests.engines.scripted import VOCABULARY, Scripted, Weights, _NoModel, answer, answers, request, right
from tests.engines.transformers.test_engine import tiny

FREE = Prices(((1, 1000), (2, 1000)), 0)
"""Every draft pays that is not hopeless."""


class Verifying(Scripted):
    """A scripted forward that reads several tokens of a row, off keys and values alone."""

    verifies, weights = True, 1

    def read(self, *args):
        logits, layers = super().read(*args)
        return logits, Layers(layers.pairs)

    def step(self, ids, positions, bands):
        self.steps.append(ids.tolist())
        logits, start = [], 0
        for band in bands:
            some = slice(start, start + band.tokens)
            start = some.stop
            keys, values = band.write(0, ids[some, None, None].float(), positions[some, None, None].float())
            mask, (rows, columns) = band.mask(), (len(keys), keys.shape[2])
            seen = torch.ones(rows, 1, columns, dtype=torch.bool) if mask is None else mask[:, 0] == 0
            keys, values, seen = (
                each.expand(rows, seen.shape[1], columns)
                for each in (keys[:, 0, None, :, 0], values[:, 0, None, :, 0], seen)
            )
            texts = (each[:, 0] if band.alone else band.by_token(each) for each in (keys, values, seen))
            for tokens, places, shown in zip(*texts, strict=True):
                logits.append(self._logits(tokens, places, shown, sum(tokens[shown].long().tolist())))
        return torch.stack(logits)


def drafting(**settings):
    """An engine that reads drafts, around a scripted forward, and the forward."""
    forward = Verifying()
    with (
        mock.patch.object(transformers, "fastest", return_value=forward),
        mock.patch.object(transformers, "SMALL", FREE),
    ):
        return TransformersEngine(_NoModel(), drafts=True, **settings), forward


prompts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=4)
asked = st.tuples(st.integers(0, 3), st.integers(1, 30), st.lists(st.integers(0, VOCABULARY - 1), max_size=1))


@given(
    prompts,
    st.lists(st.lists(asked, min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 90)),
)
@settings(max_examples=60, deadline=None)
def test_whoever_joins_leaves_or_is_put_back_every_answer_is_that_of_its_text(texts, epochs, max_rows, max_tokens):
    with mock.patch.object(cache, "_AHEAD", 3):
        engine, _ = drafting(max_rows=max_rows, max_tokens=max_tokens)
        numbers = itertools.count()
        for epoch in epochs:
            requests = [
                replace(
                    request(next(numbers), texts[which % len(texts)], Sampling(room, stop_ids=tuple(stops))),
                    conversation=which if number == 0 else None,
                )
                for number, (which, room, stops) in enumerate(epoch)
            ]
            right(requests, asyncio.run(answers(engine, requests)))
        drafts = engine._batch._rows.drafts
        assert (drafts._rows, drafts._texts, engine._batch.tokens) == ({}, {}, 0)


async def test_an_answer_that_came_before_comes_again_in_few_passes():
    engine, forward = drafting(max_rows=4)
    for epoch in range(2):
        before = len(forward.steps)
        requests = [request(10 * epoch + i, [3, i, 5], Sampling(60)) for i in range(4)]
        right(requests, await answers(engine, requests))
    assert len(forward.steps) - before <= 6
    stats = engine.stats
    assert 0.9 * stats.draft_tokens <= stats.right_tokens <= stats.draft_tokens


async def test_new_weights_in_the_middle_have_drafts_of_the_old_ones_refused(monkeypatch):
    engine, _ = drafting(max_rows=2)
    asked = [request(i, [7, i], Sampling(40)) for i in range(2)]
    right(asked, await answers(engine, asked))
    await engine.load(Weights(version=1))
    right(asked, await answers(engine, asked), version=1)


async def test_whoever_listens_hears_every_token_but_the_last():
    engine, _ = drafting(max_rows=2)
    asked = request(0, [1, 2, 3], Sampling(30))
    await answers(engine, [asked])
    heard = []
    completion = await engine.answer(replace(asked, id=1), heard.extend)
    assert completion.response_ids.tolist() == answer([1, 2, 3], asked.sampling)
    assert heard == completion.response_ids.tolist()[: len(heard)]
    assert len(heard) == 29


async def test_a_conversation_goes_on_from_what_was_read_with_drafts():
    engine, forward = drafting(max_rows=2)
    first = [replace(request(i, [4, 1], Sampling(20)), conversation=9) for i in range(2)]
    for each in first:  # the second by drafts
        right([each], await answers(engine, [each]))
    turn = [4, 1, *answer([4, 1], Sampling(20)), 2, 2]
    second = replace(request(5, turn, Sampling(4)), conversation=9)
    right([second], await answers(engine, [second]))
    assert forward.reads[-1] == (1, 3)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "llama"])
@pytest.mark.parametrize("sampling", [Sampling(40), Sampling(40, temperature=0.0), Sampling(40, top_k=5, top_p=0.9)])
def test_a_model_gives_the_tokens_that_it_gives_without_drafts(kind, sampling, monkeypatch):
    monkeypatch.setattr(transformers, "SMALL", FREE)
    window = {"sliding_window": 9} if kind == "mistral" else {}
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 20, length) for length in (3, 9, 17)]
    found = []
    for drafts in (False, True):
        model = tiny(kind, **window)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(20)  # so that it is sure enough of its answers to repeat some
        engine = TransformersEngine(model, max_rows=5, drafts=drafts)
        epochs = []
        for epoch in range(2):
            requests = [request(i, texts[i % 3], sampling, seed=i + 50 * epoch) for i in range(9)]
            epochs.append(asyncio.run(answers(engine, requests)))
        found.append(epochs)
    assert engine.stats.right_tokens > 0
    for plain, drafted in zip(*found, strict=True):
        for number, each in plain.items():
            assert drafted[number].response_ids.tolist() == each.response_ids.tolist()
            np.testing.assert_allclose(drafted[number].logprobs, each.logprobs, atol=3e-5)


def records(*requests):
    slots = Slots(len(requests), None)
    return slots, slots.open(requests)


@pytest.mark.parametrize(("prices", "rows"), [(SMALL, 512), (LARGE, 1024)])
def test_a_crowd_is_not_even_looked_at(prices, rows):
    slots, opened = records(*(request(i, [1, 2, 3], Sampling(20)) for i in range(rows)))
    drafts = Drafts(prices)
    assert drafts.propose(slots, opened) is None
    assert drafts._rows == {}


def test_guesses_that_are_never_right_are_soon_not_read_and_few_are_looked_at():
    rng = np.random.default_rng(0)
    slots, opened = records(*(request(i, [1, 2, 3, 4], Sampling(400)) for i in range(8)))
    drafts, read = Drafts(LARGE), []
    for _ in range(300):
        proposal = drafts.propose(slots, opened)
        tokens = rng.integers(0, 4, 8)  # so few that three of them are soon there again
        if proposal is not None:
            drafts.took(proposal, np.ones(8, np.int64))
        read.append(drafts.reads)
        slots.lengths[opened] += 1
        slots._tokens[opened, slots.lengths[opened] - 1] = (
            1000 + rng.integers(0, 10**6, 8) if len(read) > 50 else tokens
        )
    assert read[100] == read[-1]


def test_what_came_most_often_is_guessed_and_a_longer_past_counts_first():
    texts = Continuations(np.array([1, 2, 3]), [np.array(each) for each in ([4, 5], [6, 5], [6, 7])])
    assert texts.guess([1, 2, 3])[0] == 6
    assert texts.guess([9, 9, 1, 2, 3])[0] == 6
    assert texts.guess([9, 9, 9]) is None


def test_answers_that_are_remembered_are_bounded_and_the_newest_stay():
    kept = Answers(most=100)
    for number in range(60):
        kept.add(number % 6, np.full(10, number))
        assert kept._tokens == sum(len(one) for some in kept._of.values() for one in some) <= 100
    assert [int(one[0]) for one in kept.of(59 % 6)][-1] == 59


@pytest.mark.parametrize(("kind", "what"), [("qwen2", "with drafts from history"), ("gpt2", "without drafts")])
def test_the_first_lines_say_if_drafts_are_read(kind, what):
    engine = TransformersEngine(tiny(kind), max_rows=2, drafts=True)
    assert what in engine.way.words
    assert (engine._batch._rows.drafts is not None) is what.startswith("with d")
