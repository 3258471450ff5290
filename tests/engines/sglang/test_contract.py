"""What every engine must do, done by a real SGLang server on a CPU: one for the whole file, and one more for Llama.

Needs the environment that `make sglang` creates. What seeds decide here are SGLang's own random numbers, so answers are
compared with what the model says of them, and with themselves.
"""

import asyncio
import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio

from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Request, Sampling, lacking, make
from rlinf.engines.served.sglang import ROUTES
from tests.engines.served.imitation import some_tokens
from tests.engines.test_engine_contract import scored_right
from tests.engines.transformers.test_engine import VOCABULARY, answers, packed, ragged, request, teacher_forced, tiny

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(100),
    pytest.mark.skipif(lacking("sglang") is not None, reason=str(lacking("sglang"))),
]
CONTEXT = 512
ALPHABET = "abcdefghijklmnopqrstuvw"
TOKENIZER = SimpleNamespace(decode=lambda tokens: "".join(ALPHABET[token] for token in tokens))


def model(seed=0, kind="qwen2"):
    return tiny(kind, seed, max_position_embeddings=CONTEXT)


async def started(kind="qwen2", directory=None, **args):
    setup = EngineSetup(
        "rollout[0]",
        {},
        lambda: contextlib.nullcontext(model(kind=kind)),
        tokenizer=TOKENIZER,
        max_rows=64,
        max_length=CONTEXT,
        directory=directory,
    )
    return await make("sglang", setup, {"max_restarts": 9, **args})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = await started(directory=str(tmp_path_factory.mktemp("run")))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server):
    """The server with the weights that it began with, under the next version."""
    if server.version:
        await server.load(packed(model(), server.version + 1))
    return server


def right(asked, found, by=None, begun=0):
    """The log-probs are the model's own; greedy answers are its likeliest tokens."""
    by, sampling = by or model(), asked.sampling
    ids = found.response_ids.tolist()
    logprobs = teacher_forced(by, asked.prompt_ids.tolist(), ids, sampling.temperature or 1.0)
    np.testing.assert_allclose(found.logprobs[begun:], logprobs[begun:], atol=1e-4)
    assert len(found.versions) == len(ids) <= sampling.max_new_tokens
    assert (found.finish == "length") == (len(ids) == sampling.max_new_tokens and ids[-1] not in sampling.stop_ids)


def greedy(asked, by):
    import torch

    made = by.generate(
        torch.tensor(asked.prompt_ids[None]), attention_mask=torch.ones(1, len(asked.prompt_ids), dtype=torch.long),
        do_sample=False, max_new_tokens=asked.sampling.max_new_tokens, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return made[0, len(asked.prompt_ids) :].tolist()


def texts(found):
    return {number: one.response_ids.tolist() for number, one in found.items()}


def run(engine, *requests):
    return asyncio.create_task(answers(engine, requests))


def long(count=3, tokens=450):
    return [request(i, [i + 1, 5], Sampling(tokens)) for i in range(count)]


async def test_greedy_answers_are_those_of_transformers(engine):
    requests = ragged(10, Sampling(12, temperature=0.0))
    found = await answers(engine, requests)
    for asked in requests:
        assert found[asked.id].response_ids.tolist() == greedy(asked, model())
        right(asked, found[asked.id])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_model_reading_the_whole_text(engine, temperature):
    requests = ragged(20, Sampling(15, temperature, stop_ids=(0,)))
    found = await answers(engine, requests)
    for asked in requests:
        right(asked, found[asked.id])
    assert {one.finish for one in found.values()} == {"stop", "length"}


async def test_logprobs_are_of_the_whole_softmax_also_where_few_tokens_are_drawn_from(engine):
    asked = request(0, [3], Sampling(20, top_k=2, top_p=0.9))
    right(asked, await engine.answer(asked))
    with pytest.raises(ValueError, match=r"request 0 has min_p=0.1, .*rollout.min_p=0"):
        await engine.answer(replace(asked, sampling=Sampling(20, min_p=0.1)))


async def test_texts_are_scored_as_the_model_finds_them(engine):
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCABULARY, length) for length in (9, 1, 14, 9, 2, 300)]
    scored_right(texts, await engine.score(texts, 3), model(), atol=1e-4)
    scored_right(texts, await engine.score(texts), model(), 0, atol=1e-4)


async def test_a_seed_gives_the_same_answer_in_any_company(engine):
    assert engine.seeded
    requests = ragged(20, Sampling(12))
    together = texts(await answers(engine, requests))
    assert texts({asked.id: await engine.answer(asked) for asked in requests[:4]}) == {i: together[i] for i in range(4)}
    same = [replace(requests[0], id=i, seed=i) for i in range(10)]
    assert len({tuple(ids) for ids in texts(await answers(engine, same)).values()}) > 5


async def test_an_answer_ends_by_its_own_rules(engine):
    free = request(0, [4, 5], Sampling(40))
    whole = (await engine.answer(free)).response_ids.tolist()
    stop, text = whole[4], "".join(ALPHABET[token] for token in whole[9:11])
    first = whole.index(stop) + 1
    later = next(i + 1 for i, token in enumerate(whole) if token == stop and i + 1 >= 12)
    rules = [
        (Sampling(40, stop_ids=(stop,)), "stop", first),
        (Sampling(40, stop_ids=(stop,), min_new_tokens=12), "stop", later),
        (Sampling(40, stop_texts=("zz", text)), "text", None),
        (Sampling(1), "length", 1),
        (Sampling(7), "length", 7),
    ]
    asked = [request(i, [4, 5], sampling, seed=0) for i, (sampling, _, _) in enumerate(rules)]
    found = await answers(engine, asked)
    for number, (_, finish, length) in enumerate(rules):
        one = found[number]
        ids = one.response_ids.tolist()
        assert (one.finish, ids) == (finish, whole[: len(ids)])
        assert len(ids) == length if length else TOKENIZER.decode(ids).endswith(text)


async def test_an_end_token_of_the_models_files_is_no_end_unless_it_is_asked_for(engine):
    asked = request(0, [2], Sampling(40, stop_ids=(VOCABULARY - 1,)))
    right(asked, await engine.answer(asked))


async def test_a_request_longer_than_the_context_is_one_error_and_the_others_go_on(engine, monkeypatch):
    others = run(engine, *long())
    await some_tokens(engine, 0, 1, 2)
    with pytest.raises(ValueError, match=r"request 7.*520 tokens.*SGLangEngine takes 512.*max_new_tokens"):
        await engine.answer(request(7, [1] * 20, Sampling(500)))
    with pytest.raises(ValueError, match=r"request 8.*token.*99.*0.*22"):
        await engine.answer(request(8, [1, 99], Sampling(5)))
    monkeypatch.setattr(engine, "max_length", None)  # so that the server has to refuse it
    with pytest.raises(ValueError, match=r"request 9: SGLang /generate.*512"):
        await engine.answer(request(9, [1] * 600, Sampling(5)))
    found = await others
    for asked in long():
        right(asked, found[asked.id])


async def test_five_hundred_requests_at_once(engine):
    requests = [request(i, [i % VOCABULARY, i // VOCABULARY], Sampling(12, stop_ids=(0,))) for i in range(500)]
    found = await asyncio.gather(*map(engine.answer, requests))
    assert [one.id for one in found] == list(range(500))
    for asked, one in list(zip(requests, found, strict=True))[::25]:
        right(asked, one)


async def test_aborted_answers_keep_their_tokens(engine):
    calls = run(engine, *long(3))
    whole = texts(await answers(engine, [replace(asked, id=asked.id + 10) for asked in long(3)]))
    assert {i + 10: text for i, text in texts(await calls).items()} == whole
    calls = run(engine, *long(3))
    await some_tokens(engine, 0, 1, 2)
    await engine.abort([0, 77])
    await some_tokens(engine, 1, 2)
    await engine.abort()
    for asked in long(3):
        one = (await calls)[asked.id]
        assert one.finish == "abort"
        assert 0 < len(one.response_ids) < 450
        assert one.response_ids.tolist() == whole[asked.id + 10][: len(one.response_ids)]
    assert await engine.partial(range(3)) == []


async def test_paused_nothing_moves_and_the_answers_are_what_they_would_have_been(engine):
    whole = texts(await run(engine, *long(3)))
    calls = run(engine, *long(3))
    await some_tokens(engine, 0, 1, 2)
    await engine.pause()
    before = [one.partial.response_ids.tolist() for one in await engine.partial(range(3))]
    await asyncio.sleep(0.1)  # of real time: what moves is in another process
    assert before == [one.partial.response_ids.tolist() for one in await engine.partial(range(3))]
    assert not calls.done()
    await engine.resume()
    assert texts(await calls) == whole


async def test_new_weights_are_used_by_all_that_comes_after(engine):
    old, new = engine.version, engine.version + 1
    calls = run(engine, *long(3))
    await some_tokens(engine, 0, 1, 2)
    await engine.load(packed(model(1), new))
    assert engine.version == new
    for number, one in (await calls).items():
        switched = one.versions.tolist().index(new)
        assert one.versions.tolist() == [old] * switched + [new] * (450 - switched)
        assert 0 < switched < 450
        asked = long(3)[number]
        right(replace(asked, sampling=Sampling(switched)), replace_ids(one, slice(0, switched)))
        right(asked, one, model(1), begun=switched)
    for asked in ragged(8, Sampling(8)):
        right(asked, one := await engine.answer(asked), model(1))
        assert set(one.versions.tolist()) == {new}


def replace_ids(one, part):
    return replace(one, response_ids=one.response_ids[part], logprobs=one.logprobs[part], versions=one.versions[part])


@pytest.mark.parametrize("route", ["shared_memory", "http", "disk"])
@pytest.mark.parametrize("bucket_bytes", [1 << 30, 20_000])
async def test_weights_get_in_by_every_route_in_buckets_of_any_size(engine, route, bucket_bytes, monkeypatch):
    with contextlib.closing(ROUTES[route]()) as way:
        monkeypatch.setattr(engine.child.server, "_route", way)
        weights = Weights.pack(model(2).named_parameters(), engine.version + 1, bucket_bytes=bucket_bytes)
        assert len(weights.buckets) == 1 if bucket_bytes > 20_000 else len(weights.buckets) > 3
        await engine.load(weights)
        for asked in ragged(5, Sampling(8)):
            right(asked, await engine.answer(asked), model(2))


async def test_weights_that_do_not_fit_change_nothing(engine):
    named = dict(model(1).named_parameters())
    name = "model.norm.weight"
    wrong = {
        f"missing {name}": {key: tensor for key, tensor in named.items() if key != name},
        rf"{name} is \[5\] where the model has \[32\]": {**named, name: named[name][:5]},
    }
    version = engine.version
    for text, tensors in wrong.items():
        with pytest.raises(ValueError, match=text):
            await engine.load(Weights.pack(tensors.items(), 99))
    assert engine.version == version
    right(asked := request(0, [3], Sampling(8)), await engine.answer(asked))


@pytest.mark.parametrize("load", [False, True])
async def test_asleep_nothing_moves_and_it_goes_on_when_it_wakes(engine, load):
    old, new = engine.version, engine.version + 1
    calls = run(engine, *long(2))
    await some_tokens(engine, 0, 1)
    await engine.sleep()
    before = [one.partial.response_ids.tolist() for one in await engine.partial(range(2))]
    if load:
        await engine.load(packed(model(1), new))
    single = asyncio.create_task(engine.answer(request(9, [1], Sampling(5))))
    await asyncio.sleep(0.1)
    assert before == [one.partial.response_ids.tolist() for one in await engine.partial(range(2))]
    assert not calls.done()
    assert not single.done()
    await engine.wake()
    for number, one in (await calls).items():
        assert set(one.versions.tolist()) == ({old, new} if load else {old})
        right(long(2)[number], one, model(1 if load else 0), begun=len(before[number]))
    right(request(9, [1], Sampling(5)), await single, model(1 if load else 0))


async def test_what_was_taken_out_is_continued_as_it_would_have_gone_on(engine):
    whole = texts(await run(engine, *long(3)))
    calls = run(engine, *long(3))
    begun = await some_tokens(engine, 0, 1, 2)
    out = await engine.take_out([0, 1, 50])
    assert sorted(one.id for one in out) == [0, 1]
    assert all(one.partial.response_ids.tolist()[: len(begun[one.id])] == begun[one.id] for one in out)
    assert texts(await calls) == {2: whole[2]}
    assert texts(await answers(engine, out)) == {i: whole[i] for i in (0, 1)}


async def test_who_leaves_takes_its_requests_along(engine):
    leaving = asyncio.create_task(engine.answer(long()[0])), run(engine, *long(3)[1:])
    staying = run(engine, *(request(i, [4, i], Sampling(30)) for i in range(10, 13)))
    await some_tokens(engine, 0, 1, 2)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    assert await engine.partial(range(3)) == []
    for number, one in (await staying).items():
        right(request(number, [4, number], Sampling(30)), one)

    async def broken():
        yield request(0, [1], Sampling(5))
        raise OSError("the file is gone")

    with pytest.raises(OSError, match=r"file.*gone"):
        await answers(engine, broken())


async def test_killed_in_mid_answer_nothing_is_lost_and_the_answers_go_on_from_their_tokens(engine):
    version = engine.version + 1
    await engine.load(packed(model(1), version))
    requests = [Request(i, np.array([i % VOCABULARY, i // VOCABULARY, 3]), Sampling(300), i) for i in range(40)]
    whole = texts(await run(engine, *requests))
    calls = run(engine, *requests)
    begun = await some_tokens(engine, *range(40))
    restarts = engine.child.child.restarts
    os.kill(engine.child.child.pid, 9)
    found = await calls
    assert engine.child.child.restarts == restarts + 1
    assert texts(found) == whole
    assert all(whole[i][: len(ids)] == ids for i, ids in begun.items())
    assert {each for one in found.values() for each in one.versions.tolist()} == {version}
    right(requests[3], found[3], model(1))


async def test_damaged_weights_are_refused_by_the_server_which_keeps_the_old_ones(engine):
    weights = packed(model(1), engine.version + 1)
    weights.buckets[0][7] += 1.0
    with pytest.raises(ValueError, match=r"0.*weights.*version.*ValueError:"):
        await engine.load(weights)
    right(asked := request(0, [3], Sampling(8)), await engine.answer(asked))


async def test_llama_is_answered_as_transformers_would(tmp_path):
    engine = await started("llama")
    try:
        by = model(kind="llama")
        for asked in ragged(6, Sampling(10, temperature=0.0)):
            one = await engine.answer(asked)
            assert one.response_ids.tolist() == greedy(asked, by)
            right(asked, one, by)
        await engine.load(packed(model(1, "llama"), 1))
        for asked in ragged(6, Sampling(10, 0.8)):
            right(asked, await engine.answer(asked), model(1, "llama"))
        pid = engine.child.child.pid
    finally:
        await engine.close()
    assert not os.path.exists(f"/proc/{pid}")
