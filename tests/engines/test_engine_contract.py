"""What every engine must do, whatever is behind it. An engine of one's own is added to `ENGINES` and passes."""

import asyncio
import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf.data.rng import uniforms
from rlinf.data.sample import ImageRef
from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, PartialAnswer, Request, RequestRefused, Sampling, make, unable
from rlinf.models.offload import bytes_of
from tests.engines.transformers.test_engine import VOCABULARY, answers, packed, ragged, request, teacher_forced, tiny

ENGINES = {
    "transformers": "transformers",
    "graphed": "tests.engines.transformers.rehearsed.build",
    "process": "tests.engines.scripted_process.build",
}
ALPHABET = "abcdefghijklmnopqrstuvw"
TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(ALPHABET[token] for token in tokens))


@pytest.fixture(params=ENGINES)
def kind(request):
    return request.param


@pytest.fixture
async def started():
    """Makes engines as a rollout does, of one model unless a seed is given; all are closed."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(kind, seed=0, args=None, **settings):
            build = contextlib.nullcontext
            setup = EngineSetup(f"engine-{kind}", {}, lambda: build(tiny(seed=seed)), **settings)
            engine = await make(ENGINES.get(kind, kind), setup, args)
            stack.push_async_callback(engine.close)
            return engine

        yield start


@functools.cache
def reference(seed):
    """The model of a seed, to be read only."""
    return tiny(seed=seed)


def expected(asked, model=0):
    """The answer to a request by reading the whole text again for every token: tokens, log-probs and why it ended.

    It is asked of a model, or of that of a seed.
    """
    tokens, logprobs, finish = _read_again(tuple(asked.prompt_ids.tolist()), asked.seed, asked.sampling, model)
    return [*tokens], [*logprobs], finish


@functools.cache
@torch.no_grad()
def _read_again(prompt, seed, sampling, model):
    model, tokens, logprobs = reference(model) if isinstance(model, int) else model, [], []
    while True:
        text = torch.tensor([[*prompt, *tokens]])
        logits = model(text).logits[0, -1].double() / (sampling.temperature or 1.0)
        cumulative = logits.softmax(-1).cumsum(-1)
        uniform = float(uniforms(torch.tensor(seed), torch.tensor(len(tokens))))
        token = int((cumulative > uniform * cumulative[-1]).nonzero()[0]) if sampling.temperature else logits.argmax()
        tokens.append(int(token))
        logprobs.append(float(logits.log_softmax(-1)[token]))
        if int(token) in sampling.stop_ids and len(tokens) >= sampling.min_new_tokens:
            return tokens, logprobs, "stop"
        if len(tokens) == sampling.max_new_tokens:
            return tokens, logprobs, "length"


def right(requests, found, model=0):
    """Every request got its answer by the model, or by that of a seed, to the token, with its log-probs."""
    assert sorted(found) == sorted(asked.id for asked in requests)
    for asked in requests:
        tokens, logprobs, finish = expected(asked, model)
        completion = found[asked.id]
        assert (completion.response_ids.tolist(), completion.finish) == (tokens, finish)
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)
        assert len(completion.versions) == len(tokens)


async def rest(running):
    return {completion.id: completion async for completion in running}


async def begun(engine, *long):
    """A call that has yielded one short answer, so that the long ones have tokens too; nobody reads it now."""
    running = engine.generate([request(99, [1, 2], Sampling(3)), *long])
    assert (await anext(running)).id == 99
    for member in getattr(engine, "members", ()):  # which began when the own engine did, or a little later
        while any(one.partial is None for one in await member.partial(member.ids)):
            pass
    return running


async def ticks():
    for _ in range(60):
        await asyncio.sleep(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_answers_and_logprobs_are_those_of_the_model_reading_the_whole_text(kind, temperature, started):
    requests = ragged(12, Sampling(9, temperature, stop_ids=(0, 1)))
    found = await answers(await started(kind), requests)
    right(requests, found)
    assert {completion.finish for completion in found.values()} == {"stop", "length"}


@pytest.mark.parametrize("settings", [{"max_rows": 1}, {"max_rows": 3}, {"max_tokens": 25}])
async def test_a_seed_gives_the_same_answer_in_any_company(kind, settings, started):
    requests = ragged(9, Sampling(6, stop_ids=(0,)))
    right(requests, await answers(await started(kind, **settings), requests[::-1]))


async def test_requests_may_still_be_coming_and_calls_may_overlap(kind, started):
    async def coming(requests):
        for asked in requests:
            await asyncio.sleep(0)
            yield asked

    engine = await started(kind, max_rows=4)
    one, two = (ragged(6, Sampling(5), seed=seed) for seed in (1, 2))
    two = [replace(asked, id=asked.id + 100) for asked in two]
    found = await asyncio.gather(answers(engine, coming(one)), answers(engine, two))
    right(one, found[0])
    right(two, found[1])
    assert await answers(engine, []) == {}


async def test_an_answer_ends_by_its_own_rules(kind, started):
    free = request(0, [4, 5], Sampling(30))
    whole, _, _ = expected(free)
    stop, text = whole[4], "".join(ALPHABET[token] for token in whole[5:7])
    requests = [
        free,
        request(1, [4, 5], Sampling(30, stop_ids=(stop,)), seed=0),
        request(2, [4, 5], Sampling(30, stop_ids=(stop,), min_new_tokens=12), seed=0),
        request(3, [4, 5], Sampling(30, stop_texts=(text, "zz")), seed=0),
        request(4, [4, 5], Sampling(1), seed=0),
    ]
    found = await answers(await started(kind, tokenizer=TOKENIZER), requests)
    right([asked for asked in requests if asked.id != 3], {i: one for i, one in found.items() if i != 3})
    assert found[3].finish == "text"
    assert TOKENIZER.decode(found[3].response_ids).endswith(text)
    assert found[3].response_ids.tolist() == whole[: len(found[3].response_ids)]


REFUSED = {
    "empty prompt": request(3, [], Sampling(5)),
    "stop texts .* no tokenizer": request(3, [1], Sampling(5, stop_texts=("x",))),
    "begun with 5 tokens": replace(
        request(3, [1], Sampling(5)), partial=PartialAnswer(np.zeros(5, int), np.zeros(5), np.zeros(5, int))
    ),
}


@pytest.mark.parametrize("text", REFUSED)
async def test_what_cannot_be_answered_is_refused_by_its_number(kind, text, started):
    engine = await started(kind)
    with pytest.raises(ValueError, match=rf"request 3 has .*{text}|request 3 has {text}"):
        await answers(engine, [REFUSED[text]])
    right([request(0, [1], Sampling(3))], await answers(engine, [request(0, [1], Sampling(3))]))


async def test_longer_texts_than_an_engine_takes_are_refused(started):
    engine = await started("process", args={"max_length": 10})
    right([request(1, [1] * 5, Sampling(5))], await answers(engine, [request(1, [1] * 5, Sampling(5))]))
    with pytest.raises(ValueError, match=r"request 2.*11 tokens.*ScriptedProcess takes 10"):
        await answers(engine, [request(2, [1] * 5, Sampling(6))])


@pytest.mark.parametrize("ids", [[1, -1], [1, 10**6]])
async def test_ids_that_the_model_has_not_are_refused(started, ids):
    engine = await started("transformers")
    with pytest.raises(ValueError, match=f"request 3.*token.*{ids[1]}"):
        await engine.answer(request(3, ids, Sampling(3)))
    right([request(0, [1], Sampling(3))], await answers(engine, [request(0, [1], Sampling(3))]))


async def test_what_is_refused_for_its_length_is_told_what_to_change(started):
    engine = await started("transformers", max_length=10)
    assert engine.max_length == 10
    with pytest.raises(
        ValueError,
        match=r"11 tokens.*prompt.*5.*6.*10:",
    ):
        await engine.answer(request(2, [1] * 5, Sampling(6)))


async def test_aborted_answers_keep_their_tokens(kind, started):
    engine = await started(kind, max_rows=3)
    long = [request(i, [i], Sampling(400)) for i in range(2)]
    running = await begun(engine, *long, request(2, [2], Sampling(40)))
    await engine.abort([0, 77])
    found = await anext(running)
    assert (found.id, found.finish) == (0, "abort")
    count = len(found.response_ids)
    assert 0 < count == len(found.logprobs) == len(found.versions) < 400
    tokens, logprobs, _ = expected(replace(long[0], sampling=Sampling(count)))
    assert found.response_ids.tolist() == tokens
    np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-5)
    assert (await anext(running)).id == 2
    await engine.abort()
    (last,) = (await rest(running)).values()
    assert (last.id, last.finish) == (1, "abort")


async def test_aborting_everything_reads_no_further_requests(kind, started):
    engine = await started(kind, max_rows=4)
    taken = []

    async def endless():
        for number in range(10**9):
            taken.append(number)
            yield request(number, [number % VOCABULARY], Sampling(2 if number == 0 else 500))

    running = engine.generate(endless())
    first = await anext(running)
    await engine.abort()
    found = await rest(running)
    assert sorted([first.id, *found]) == taken
    assert {completion.finish for completion in found.values()} == {"abort"}
    assert len(taken) <= 6


async def test_paused_nothing_moves_and_nothing_is_lost(kind, started):
    engine = await started(kind)
    long = request(0, [3], Sampling(60))
    running = await begun(engine, long)
    call = asyncio.create_task(rest(running))
    await ticks()
    await engine.pause()
    (before,) = await engine.partial([0])
    await ticks()
    (after,) = await engine.partial([0])
    assert before.partial.response_ids.tolist() == after.partial.response_ids.tolist()
    assert not call.done()
    await engine.resume()
    right([long], await call)


async def test_new_weights_are_used_by_all_that_comes_after(kind, started):
    engine = await started(kind)
    long = request(0, [3], Sampling(60))
    running = await begun(engine, long)
    await engine.load(packed(tiny(seed=1), 4))
    assert engine.version == 4
    found = (await rest(running))[0]
    switched = found.versions.tolist().index(4)
    assert found.versions.tolist() == [0] * switched + [4] * (60 - switched)
    old = teacher_forced(tiny(), [3], found.response_ids[:switched].tolist())
    np.testing.assert_allclose(found.logprobs[:switched], old, atol=2e-5)
    requests = ragged(5, Sampling(8))
    after = await answers(engine, requests)
    right(requests, after, 1)
    assert {version for one in after.values() for version in one.versions.tolist()} == {4}


async def switched_twice(engine):
    """Answers under way through two changes of weights, and the models by version."""
    models = {version: tiny(seed=version) for version in (0, 3, 5)}
    long = [request(i, [3 + i] * (i + 1), Sampling(70 + i, temperature=1.3)) for i in range(4)]
    running = await begun(engine, *long)
    before = {one.id: one.partial for one in await engine.partial(range(4))}
    for version in (3, 5):
        await engine.load(packed(models[version], version))
        await answers(engine, [request(50 + version, [1], Sampling(10))])  # some tokens by these
    found = await rest(running)
    for one in found.values():
        assert sorted(set(one.versions.tolist())) == [0, 3, 5]
        assert one.versions.tolist() == sorted(one.versions.tolist())
        begin = before[one.id]
        assert one.response_ids[: len(begin.response_ids)].tolist() == begin.response_ids.tolist()
        assert one.logprobs[: len(begin.logprobs)].tolist() == begin.logprobs.tolist()  # what was told stays as it was
    return long, found, models


def furthest(asked, one, models):
    """How far log-probs are from those of the weights that their versions name, reading the whole text before them:
    of the tokens of the first weights, and of the others."""
    by = {version: teacher_forced(model, asked.prompt_ids, one.response_ids, 1.3) for version, model in models.items()}
    expected = np.array([by[version][place] for place, version in enumerate(one.versions.tolist())])
    far = np.abs(one.logprobs - expected)
    return far[one.versions == 0].max(), far[one.versions != 0].max()


async def test_reread_every_token_is_of_the_weights_that_its_version_names_alone(kind, started):
    engine = await started(kind, kv="reread")
    long, found, models = await switched_twice(engine)
    for asked in long:
        assert max(furthest(asked, found[asked.id], models)) < 2e-5


def test_what_a_server_cannot_keep_is_known_before_it_is_started():
    assert unable("sglang", "keep") == unable("vllm", "keep").replace("vllm", "sglang")
    assert "reread" in unable("sglang", "keep")
    assert [unable(name, kv) for name, kv in (("vllm", "reread"), ("transformers", "keep"), ("sglang", None))] == [
        None
    ] * 3


async def test_kept_keys_and_values_are_those_of_the_weights_before(kind, started):
    if kind == "process":  # which keeps none
        with pytest.raises(ValueError, match=r"staleness\.kv=keep: tests\.eng"):
            await started(kind, kv="keep")
        return
    long, found, models = await switched_twice(await started(kind, kv="keep"))
    for asked in long:
        first, later = furthest(asked, found[asked.id], models)
        assert first < 2e-5
        assert later > 1e-3  # they were made from a past that those weights would have seen otherwise


async def test_weights_that_do_not_fit_change_nothing(kind, started):
    engine = await started(kind)
    named = dict(tiny(seed=1).named_parameters())
    name = "model.norm.weight"
    wrong = {
        f"missing {name}": {key: tensor for key, tensor in named.items() if key != name},
        "unknown extra": {**named, "extra": torch.zeros(1)},
        rf"{name} is \[5\] where the model has \[32\]": {**named, name: torch.zeros(5)},
    }
    for text, tensors in wrong.items():
        weights = Weights.pack(tensors.items(), 9)
        for refuse in (engine.check, engine.load):
            with pytest.raises(ValueError, match=text):
                await refuse(weights)
    assert engine.version == 0
    requests = ragged(3, Sampling(5))
    right(requests, await answers(engine, requests))


async def held(kind, engine):
    """Bytes of weights where the engine computes."""
    if kind == "process":
        return await engine.worker.call("held")
    return bytes_of(getattr(engine, "own", engine)._forward._held())


@pytest.mark.parametrize("load", [False, True])
async def test_asleep_it_holds_nothing_and_goes_on_when_it_wakes(kind, load, started):
    engine = await started(kind)
    long = request(0, [3], Sampling(60))
    running = await begun(engine, long)
    before = await held(kind, engine)
    await engine.sleep()
    assert await held(kind, engine) == 0 < before
    call = asyncio.create_task(rest(running))
    if load:
        await engine.load(packed(tiny(seed=1), 2))
    await ticks()
    assert not call.done()
    await engine.wake()
    found = await call
    if load:
        assert set(found[0].versions.tolist()) == {0, 2}
        requests = ragged(3, Sampling(5))
        right(requests, await answers(engine, requests), 1)
    else:
        right([long], found)
    assert await held(kind, engine) >= before


async def test_who_leaves_takes_its_requests_along(kind, started):
    engine = await started(kind, max_rows=3)
    running = await begun(engine, *(request(i, [i], Sampling(5000)) for i in range(2)))
    staying = [request(i, [4, i], Sampling(30)) for i in range(10, 13)]
    other = asyncio.create_task(answers(engine, staying))
    doomed = asyncio.create_task(answers(engine, [request(20, [5], Sampling(5000))]))
    await ticks()
    await running.aclose()
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    assert doomed.cancelled()
    right(staying, await other)
    assert await engine.partial([0, 1, 20]) == []


async def test_what_fails_names_its_requests_and_the_engine_goes_on(kind, started):
    engine = await started(kind)
    engine.vocabulary = None  # so that it fails while it computes, and not when it is asked
    with pytest.raises(IndexError) as caught:
        await answers(engine, [request(5, [VOCABULARY + 9], Sampling(4)), request(6, [1], Sampling(4))])
    assert any("requests 5, 6" in note for note in caught.value.__notes__)

    async def broken():
        yield request(0, [1], Sampling(5))
        raise OSError("the file is gone")

    requests = ragged(4, Sampling(6))
    outcomes = await asyncio.gather(answers(engine, broken()), answers(engine, requests), return_exceptions=True)
    assert isinstance(outcomes[0], OSError)
    right(requests, outcomes[1])


@pytest.mark.parametrize("other", ENGINES)
async def test_another_engine_continues_what_was_taken_out(kind, other, started):
    engine, target = await started(kind, max_rows=3), await started(other)
    long = [request(i, [3, i], Sampling(25, temperature=1.3)) for i in range(3)]
    running = await begun(engine, *long)
    kept = await engine.partial(range(4))
    out = await engine.take_out([0, 1, 50])
    left, taken = await asyncio.gather(rest(running), answers(target, out))
    assert sorted(left) == [2]
    right(long, {**left, **taken})
    assert any(one.partial is not None for one in out)
    texts = {one.id: one.partial and one.partial.response_ids.tolist() for one in kept}
    assert {one.id: one.partial and one.partial.response_ids.tolist() for one in out} == {
        number: text for number, text in texts.items() if number != 2
    }


async def test_pictures_are_read_or_refused_and_tell_equal_prompts_apart(kind, started):
    engine = await started(kind)
    one, two = (ImageRef(digest, f"{digest}.png") for digest in ("cat", "dog"))
    shown = [(one,), (one,), (two,), ()]
    requests = [Request(i, np.array([7, 8]), Sampling(1), i, images=images) for i, images in enumerate(shown)]
    if not engine.reads_images:
        with pytest.raises(ValueError, match=r"request 0.*1 images"):
            await answers(engine, requests)
        return
    found = await answers(engine, requests)
    assert engine.passes == 3  # the two that look at one picture are read once
    logprobs = {i: (found[i].response_ids.tolist(), found[i].logprobs.tolist()) for i in found}
    again = await answers(engine, [replace(requests[2], seed=0), replace(requests[3], seed=0)])
    assert again[2].logprobs[0] != again[3].logprobs[0] != logprobs[0][1][0] != again[2].logprobs[0]


def asked_one_by_one(engine, requests):
    return [asyncio.create_task(engine.answer(asked)) for asked in requests]


async def test_single_answers_are_those_of_a_batch_and_share_it(kind, started):
    engine = await started(kind, max_rows=4)
    single, batch = ragged(9, Sampling(7, stop_ids=(0,))), ragged(5, Sampling(6), seed=1)
    batch = [replace(asked, id=asked.id + 100) for asked in batch]
    ones = asked_one_by_one(engine, single)
    right(batch, await answers(engine, batch))
    right(single, {one.id: one for one in await asyncio.gather(*ones)})
    right(batch[:1], {100: await engine.answer(batch[0])})


async def test_a_caller_who_leaves_gives_its_row_back_and_the_others_get_their_answers(kind, started):
    engine = await started(kind, max_rows=2)
    long = [request(i, [i + 1], Sampling(5000)) for i in range(3)]
    leaving = asked_one_by_one(engine, long)
    await ticks()
    staying = asked_one_by_one(engine, requests := [replace(one, id=one.id + 10) for one in ragged(4, Sampling(6))])
    await ticks()
    for task in leaving:  # the first of them drives the engine, the last waits for a row
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert all(task.cancelled() for task in leaving)
    right(requests, {one.id: one for one in await asyncio.gather(*staying)})
    assert await engine.partial(range(3)) == []


async def test_single_answers_are_aborted_with_their_tokens_and_paused_without_loss(kind, started):
    engine = await started(kind, max_rows=2)
    long = [request(i, [i + 1], Sampling(5000)) for i in range(3)]
    tasks = asked_one_by_one(engine, long)
    await ticks()
    await engine.pause()
    await ticks()
    before = await engine.partial([0, 1])
    await ticks()
    assert [one.answered for one in await engine.partial([0, 1])] == [one.answered for one in before]
    await engine.resume()
    await ticks()
    await engine.abort()
    found = await asyncio.gather(*tasks)
    assert [one.finish for one in found] == ["abort"] * 3
    for asked, one in zip(long, found, strict=True):
        if count := len(one.response_ids):
            assert one.response_ids.tolist() == expected(replace(asked, sampling=Sampling(count)))[0]
    right([again := replace(long[0], sampling=Sampling(4))], {0: await engine.answer(again)})


async def test_what_fails_is_told_to_all_who_wait_for_it_and_the_engine_goes_on(kind, started):
    engine = await started(kind)
    engine.vocabulary = None  # as above
    with pytest.raises(ValueError, match=r"request 3.*prompt"):
        await engine.answer(REFUSED["empty prompt"])
    lost = asked_one_by_one(engine, [request(5, [VOCABULARY + 9], Sampling(4)), request(6, [1], Sampling(4))])
    outcomes = await asyncio.gather(*lost, return_exceptions=True)
    assert isinstance(outcomes[0], IndexError)
    assert any("request" in note and "5" in note for note in outcomes[0].__notes__)
    requests = ragged(4, Sampling(6))
    right(requests, {one.id: one for one in await asyncio.gather(*asked_one_by_one(engine, requests))})


async def test_single_answers_wait_while_the_engine_sleeps_and_go_on_when_it_wakes(kind, started):
    engine = await started(kind)
    requests = [request(i, [i + 1], Sampling(40)) for i in range(3)]
    tasks = asked_one_by_one(engine, requests)
    await ticks()
    await engine.sleep()
    await ticks()
    assert not any(task.done() for task in tasks)
    await engine.wake()
    right(requests, {one.id: one for one in await asyncio.gather(*tasks)})


async def turns(engine, talks, count, sampling, between=None, model=0):
    """Conversations in step, each with a tool's reply of its own length after every turn; all answers are right."""
    texts = {number: list(prompt) for number, prompt in talks.items()}
    for turn in range(count):
        asked = [
            Request(number, np.array(text), sampling, seed=100 * turn + number, conversation=number)
            for number, text in texts.items()
        ]
        found = dict(zip(texts, await asyncio.gather(*(engine.answer(one) for one in asked)), strict=True))
        right(asked, found, model)
        for number, one in found.items():
            texts[number] += [*one.response_ids.tolist(), *((number + i) % VOCABULARY for i in range(1 + number % 4))]
        if between is not None:
            await between(turn)


async def test_turns_of_a_conversation_are_answered_as_if_all_was_read_again(kind, started):
    talks = {number: ragged(9, Sampling(1))[number].prompt_ids for number in range(9)}
    for settings in ({}, {"max_rows": 3}, {"max_tokens": 60}):
        engine = await started(kind, **settings)
        await turns(engine, talks, 3, Sampling(6, stop_ids=(0,)))
        await engine.forget([0, 5, 77])
        await engine.forget()


async def test_a_conversation_never_mixes_old_weights_with_new_ones(kind, started):
    engine = await started(kind)
    talks = {number: [number + 1] * 6 for number in range(4)}
    await turns(engine, talks, 1, Sampling(6))
    running = asyncio.create_task(engine.answer(replace(request(7, [5] * 6, Sampling(80)), conversation=7)))
    await ticks()
    await engine.load(packed(tiny(seed=1), 3))
    half = await running  # begun by the old weights
    await turns(engine, {**talks, 7: [5] * 6 + half.response_ids.tolist()}, 2, Sampling(5), model=1)


async def test_a_conversation_goes_on_after_sleep_and_from_a_changed_past(kind, started):
    engine = await started(kind)
    long = list(range(3, 20))

    async def between(turn):
        await engine.sleep()
        await engine.wake()

    await turns(engine, {1: long}, 2, Sampling(4), between)
    await turns(engine, {1: [*long[:9], 2, *long[9:]]}, 1, Sampling(4))  # what was said is told otherwise
    same = [Request(i, np.array(long), Sampling(5), seed=i, conversation=1) for i in range(4)]
    right(same, {one.id: one for one in await asyncio.gather(*(engine.answer(asked) for asked in same))})


async def test_a_process_that_dies_is_replaced_and_nobody_notices(started):
    engine = await started("process")
    await engine.load(packed(tiny(seed=1), 3))
    requests = [request(i, [i, 2], Sampling(40)) for i in range(4)]
    running = await begun(engine, *requests)
    engine.worker._life.kill()
    right(requests, await rest(running), 1)
    assert engine.worker.restarts == 1


async def test_closed_no_process_is_left(started):
    engine = await started("process")
    assert engine.worker.pid is not None
    await engine.close()
    assert engine.worker.pid is None


@pytest.mark.parametrize(
    ("engine", "args", "error", "text"),
    [
        ("transformers", {"speed": 9}, ValueError, r"rollout.engine_args: .*speed.*build\(setup, "),
        ("tests.engines.scripted_process.Call", {}, TypeError, r"gave Call.*rlinf.engines.base.Engine"),
    ],
)
async def test_engines_that_cannot_be_made_say_why(engine, args, error, text):
    with pytest.raises(error, match=text):
        await make(engine, EngineSetup("it", {}, contextlib.nullcontext), args)


async def streaming(started, kind, **settings):
    engine = await started(kind, **settings)
    if not engine.streams:
        pytest.skip("it does not tell tokens as they come")
    return engine


@pytest.mark.parametrize("apart", [0.0, 1e9])
async def test_tokens_are_told_as_they_come_and_the_answer_is_the_same(kind, apart, started, monkeypatch):
    for name in ("_APART", "_SILENCE"):
        monkeypatch.setattr(f"rlinf.engines.transformers.engine.{name}", apart)
    engine = await streaming(started, kind)
    requests = ragged(5, Sampling(30, stop_ids=(0,)))
    told = {asked.id: [] for asked in requests}
    ended = []

    async def heard(asked):
        completion = await engine.answer(asked, told[asked.id].append)
        ended.append(asked.id)
        return completion

    found = {one.id: one for one in await asyncio.gather(*map(heard, requests))}
    right(requests, found)
    for asked in requests:
        tokens = [token for tokens in told[asked.id] for token in tokens]
        assert tokens == found[asked.id].response_ids.tolist()[: len(tokens)]
        assert len(tokens) < len(found[asked.id].response_ids)  # the one that ended it is not told
        assert apart or len(tokens) >= len(found[asked.id].response_ids) - 2


async def test_an_answer_that_is_heard_and_given_up_frees_its_row(kind, started):
    engine = await streaming(started, kind, max_rows=1)
    begun = asyncio.Event()
    endless = asyncio.create_task(engine.answer(request(1, [1, 2], Sampling(5000)), lambda _: begun.set()))
    await begun.wait()
    endless.cancel()
    assert len((await engine.answer(request(2, [1, 2], Sampling(3)))).response_ids) == 3


def scored_right(texts, scores, model, top=3, atol=2e-5):
    """Scores are those of a model that reads the whole texts. Ranks may be unknown behind the likeliest."""
    for text, score in zip(texts, scores, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor(text[None])).logits[0, :-1].double().log_softmax(-1)
        values, likeliest = logprobs.sort(-1, descending=True)
        own = logprobs.gather(-1, torch.tensor(text[1:, None]))
        np.testing.assert_allclose(score.logprobs, own[:, 0], atol=atol)
        np.testing.assert_allclose(score.likeliest_logprobs, values[:, :top], atol=atol)
        assert score.likeliest.tolist() == likeliest[:, :top].tolist()
        ranks = ((logprobs > own).sum(-1) + 1).tolist()
        assert all(rank == exact or (rank == 0 and exact > top) for rank, exact in zip(score.ranks, ranks, strict=True))


@pytest.mark.parametrize("piece", [None, 3 * VOCABULARY])
async def test_texts_are_scored_as_the_model_finds_them_while_others_are_answered(kind, piece, started, monkeypatch):
    engine = await started(kind)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCABULARY, length) for length in (9, 1, 14, 9, 2)]
    if not engine.scores:
        with pytest.raises(NotImplementedError):
            await engine.score(texts)
        return
    if piece is not None:  # longer texts are read in pieces
        monkeypatch.setattr("rlinf.engines.transformers.model._SCORED", piece)
    running = await begun(engine, request(7, [1, 2, 3], Sampling(12)))
    scores = await engine.score(texts, 3)
    assert len((await rest(running))[7].response_ids) <= 12
    scored_right(texts, scores, reference(0))
    with pytest.raises(RequestRefused, match=str(VOCABULARY)):
        await engine.score([np.array([1, VOCABULARY])])
