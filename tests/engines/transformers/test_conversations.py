"""KV caches kept between the turns of a conversation: what is read, and what is kept and dropped."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.families_shapes import tiny as family
from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.model import ModelForward, continues
from tests.engines.scripted import VOCABULARY, answer, scripted, ticks
from tests.engines.transformers.test_engine import SHAPES, teacher_forced, tiny


def turn(conversation, text, new=4, number=None, stop_ids=()):
    return Request(
        conversation if number is None else number,
        np.array(text, dtype=np.int64),
        Sampling(new, temperature=0.0, stop_ids=stop_ids),
        conversation=conversation,
    )


def kept(engine):
    return {number: one.ids.tolist() for number, one in engine._batch._conversations._kept.items()}


async def test_only_what_is_new_is_read():
    engine, forward = scripted()
    text = [1, 2, 3, 4, 5, 6]
    text += (await engine.answer(turn(1, text))).response_ids.tolist()
    assert kept(engine) == {1: text[:-1]}  # the last token was drawn and not yet read
    text += [7, 8]
    text += (await engine.answer(turn(1, text))).response_ids.tolist()
    assert forward.reads == [(1, 6), (1, 3)]
    assert text[-4:] == answer(text[:-4], Sampling(4))
    await engine.answer(turn(1, [1, 2, 3, 9, 9]))  # another past: from where it differs
    assert forward.reads[-1] == (1, 2)
    await engine.answer(turn(2, text))  # another conversation
    assert forward.reads[-1] == (1, len(text))


async def test_conversations_of_different_lengths_are_read_together():
    engine, forward = scripted()
    texts = {number: [number + 1] * (20 + 2 * number) for number in range(4)}
    for _ in range(2):
        found = await asyncio.gather(*(engine.answer(turn(number, text)) for number, text in texts.items()))
        for number, one in enumerate(found):
            assert one.response_ids.tolist() == answer(texts[number], Sampling(4))
            texts[number] += [*one.response_ids.tolist(), *[5] * (number + 1)]
    assert forward.reads[-1][1] == 5  # as many of each as the one with most that is new
    assert sum(rows for rows, width in forward.reads if width <= 5) == 4


async def test_running_answers_come_before_kept_ones_and_the_oldest_go_first():
    engine, _ = scripted(max_tokens=40)
    for number in range(4):
        await engine.answer(turn(number, [number + 1] * 8, new=3))  # keeps 10 tokens each
    assert list(kept(engine)) == [0, 1, 2, 3]
    running = engine.generate([Request(9, np.array([1] * 16), Sampling(7, temperature=0.0))])
    async for _ in running:
        assert list(kept(engine)) == [3]  # 22 tokens may be needed
    await engine.answer(turn(0, [1] * 39, new=2))  # and more than there is room for is not kept
    assert sum(map(len, kept(engine).values())) <= 40
    engine, _ = scripted(keep_tokens=25)
    for number in (0, 1, 0, 2):
        await engine.answer(turn(number, [number + 1] * 8, new=3))
    assert list(kept(engine)) == [0, 2]


async def test_nothing_is_kept_of_what_was_cancelled_forgotten_or_stands_alone():
    engine, _ = scripted()
    await engine.answer(Request(0, np.array([1, 2]), Sampling(3)))
    assert kept(engine) == {}
    await engine.answer(turn(1, [1, 2]))
    task = asyncio.create_task(engine.answer(turn(1, [1, 2, 3], new=10**5)))
    await ticks(9)
    await engine.partial([1])  # the step in progress is over
    assert kept(engine) == {}  # in use
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert kept(engine) == {}
    await engine.answer(turn(1, [1, 2]))
    await engine.answer(turn(2, [1, 2]))
    await engine.forget([1])
    assert list(kept(engine)) == [2]
    await engine.forget()
    assert engine._batch._conversations.tokens == 0


async def test_an_engine_may_be_told_to_keep_nothing():
    engine, forward = scripted(keep_tokens=0)
    assert not engine.keeps_conversations
    await engine.answer(turn(1, [1, 2, 3]))
    await engine.answer(turn(1, [1, 2, 3, 4]))
    assert (kept(engine), forward.reads) == ({}, [(1, 3), (1, 4)])
    with pytest.raises(ValueError, match="keep_tokens=-1"):
        scripted(keep_tokens=-1)


STEPS = st.one_of(
    st.tuples(
        st.just("ask"),
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=5),
    ),
    st.tuples(st.just("forget"), st.sets(st.integers(0, 4))),
    st.tuples(st.just("cut"), st.integers(0, 4)),
    st.sampled_from([("sleep", None), ("abort", None)]),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=12),
    limits=st.fixed_dictionaries(
        {"max_rows": st.integers(1, 4)},
        optional={"max_tokens": st.integers(1, 60), "keep_tokens": st.integers(0, 40)},
    ),
)
def test_whatever_happens_between_turns_answers_are_those_of_the_whole_text(steps, limits):
    async def program():
        engine, _ = scripted(**limits)
        texts = {number: [number + 1] for number in range(5)}
        for what, what_with in steps:
            if what == "ask":
                asked = {number: (more, new) for number, more, new in what_with}
                for number, (more, _) in asked.items():
                    texts[number] += [(number * 3 + i) % VOCABULARY for i in range(more)]
                calls = [engine.answer(turn(number, texts[number], new)) for number, (_, new) in asked.items()]
                for (number, (_, new)), one in zip(asked.items(), await asyncio.gather(*calls), strict=True):
                    assert one.response_ids.tolist() == answer(texts[number], Sampling(new))
                    texts[number] += one.response_ids.tolist()
            elif what == "forget":
                await engine.forget(what_with)
            elif what == "cut":
                texts[what_with] = texts[what_with][: max(1, len(texts[what_with]) // 2)]
            elif what == "sleep":
                await engine.sleep()
                assert kept(engine) == {}
                await engine.wake()
            else:
                await engine.abort()
            found = engine._batch._conversations
            assert found.tokens == sum(map(len, kept(engine).values()))
            assert found.tokens <= min(limits.get("max_tokens", 10**6), limits.get("keep_tokens", 10**6))
            assert engine._batch.tokens == engine._batch.live == 0

    asyncio.run(program())


ROUNDED = 1e-3
"""By how much log-probs may differ where a state was computed token by token and in chunks: weights three times as
large as usual make more of rounding, by the CPU up to 5e-5. Those of another text differ by more than 0.1."""


async def three_turns(model, within=1e-5):
    """Conversations of several lengths side by side, each turn held against the model reading the whole text; the
    engine, and how many tokens it would have read without keeping any."""
    engine = TransformersEngine(model)
    texts = {number: list(range(1, 4 + 3 * number)) for number in range(4)}
    asked = 0
    for number_of_turn in range(3):
        calls = [
            engine.answer(Request(number, np.array(text), Sampling(5), number_of_turn, conversation=number))
            for number, text in texts.items()
        ]
        asked += sum(map(len, texts.values()))
        for number, one in enumerate(await asyncio.gather(*calls)):
            np.testing.assert_allclose(
                one.logprobs, teacher_forced(model, texts[number], one.response_ids), atol=within
            )
            texts[number] += [*one.response_ids.tolist(), *range(1 + number)]
    return engine, asked


@pytest.mark.parametrize("kind", SHAPES)
async def test_logprobs_of_turns_are_those_of_the_model_reading_the_whole_text(kind):
    engine, asked = await three_turns(tiny(kind))
    assert engine.keeps_conversations
    assert engine.stats.read_tokens < 0.75 * asked


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
async def test_windows_do_not_change_what_is_kept(kind):
    """A window of 4 tokens, shorter than any turn: what is kept has all columns, and each sees its own window."""
    engine, asked = await three_turns(tiny(kind, sliding_window=4, head_dim=8))
    assert engine.keeps_conversations
    assert engine.stats.read_tokens < 0.75 * asked


@pytest.mark.parametrize("kind", ["mamba", "lfm2_moe", "falcon_h1"])
async def test_models_with_states_keep_nothing_and_read_every_turn_whole(kind):
    """A state of fixed size is that of the whole text: it cannot be cut to where the next turn begins to differ."""
    engine, asked = await three_turns(family(kind), ROUNDED)
    assert not engine.keeps_conversations
    assert kept(engine) == {}
    assert engine.stats.read_tokens == asked


@pytest.mark.parametrize("failing", [False, True])
def test_a_model_that_does_not_read_on_as_it_reads_whole_texts_keeps_nothing(failing):
    class Forgetful(ModelForward):
        def read(self, ids, real, images=(), past=None):
            if past is not None and failing:
                raise TypeError("no past")
            return super().read(ids, None if past is not None else real, images)

    right = ModelForward(tiny(), 0)
    assert not continues(Forgetful(tiny(), 0), right.truth())
    assert continues(right, right.truth())
