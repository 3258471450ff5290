"""What every engine must do, over a real vLLM server on this machine's CPU: one server per family of models."""

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Request, RequestRefused, Sampling, make
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.runtime.processes.supervisor import ChildDied
from tests.engines.test_engine_contract import ALPHABET, TOKENIZER, begun, expected, rest, right, scored_right
from tests.engines.transformers.test_adapters import adapters
from tests.engines.transformers.test_engine import VOCABULARY, answers, packed, ragged, request, teacher_forced

PROJECT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("RLINF_VLLM_PYTHON") or PROJECT / ".venv-vllm/bin/python")
pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: `make vllm` creates it"),
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTH = 512
ONE = [f"model.layers.0.self_attn.q_proj.lora_{matrix}.weight" for matrix in "AB"]


def tiny(kind, seed=0, heads=2, **config):
    """A model with opinions, whose heads have a size that vLLM has a kernel for on CPUs (32)."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=1, intermediate_size=64, max_position_embeddings=LENGTH,
        **{"tie_word_embeddings": kind == "qwen2", **config},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def setup_of(model, **settings):
    return EngineSetup("it", {}, lambda: contextlib.nullcontext(model), **{"max_length": LENGTH, **settings})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2", "llama"])
async def server(request):
    """A family and its engine, of which Llama's may have adapters; closed, it leaves no process and no file."""
    args = {"python": str(PYTHON), "adapter_rank": 3 if request.param == "llama" else 0}
    engine = await make("vllm", setup_of(tiny(request.param), tokenizer=TOKENIZER), args)
    directory, pid = engine._files.directory, engine.child.child.pid
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert directory.exists()
    yield request.param, engine
    await engine.close()
    assert not directory.exists()
    assert engine.child.child.pid is None
    assert psutil.wait_procs(family, timeout=5)[1] == []


@pytest_asyncio.fixture(loop_scope="module")
async def served(server):
    """The engine as it started, and a way to make its model."""
    kind, engine = server
    await engine.load(packed(tiny(kind), 0))
    return engine, lambda seed=0: tiny(kind, seed)


async def seconds(count=0.3):
    await asyncio.sleep(count)  # a real server's time is real


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_answers_and_logprobs_are_those_of_the_model_reading_the_whole_text(served, temperature):
    engine, model = served
    requests = ragged(12, Sampling(9, temperature, stop_ids=(0, 1)))
    found = await answers(engine, requests)
    right(requests, found, model())
    assert {completion.finish for completion in found.values()} == {"stop", "length"}


async def test_greedy_is_what_generate_gives(served):
    engine, model = served
    requests = ragged(8, Sampling(10, temperature=0.0))
    done, model = await answers(engine, requests), model()
    for asked in requests:
        ids = torch.tensor(asked.prompt_ids[None])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert done[asked.id].response_ids.tolist() == whole[0, len(asked.prompt_ids) :].tolist()


async def test_a_seed_gives_the_answer_of_our_own_engine_in_any_company(served):
    engine, model = served
    rules = [Sampling(20, 1.3), Sampling(20, top_k=3), Sampling(20, top_p=0.7), Sampling(20, 0.8, min_p=0.2)]
    requests = [request(i, [i % 20, 3], rules[i % 4], seed=(1 << 62) + i) for i in range(24)]
    ours = await answers(TransformersEngine(model()), requests)
    together = await answers(engine, requests[::-1])
    alone = [await engine.answer(asked) for asked in requests[:4]]
    for number, one in [*together.items(), *enumerate(alone)]:
        assert one.response_ids.tolist() == ours[number].response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, ours[number].logprobs, atol=1e-4)


async def test_an_answer_ends_by_its_own_rules(served):
    engine, model = served
    free = request(0, [4, 5], Sampling(30))
    whole, _, _ = expected(free, model())
    stop, text = whole[4], "".join(ALPHABET[token] for token in whole[5:7])
    requests = [
        free,
        request(1, [4, 5], Sampling(30, stop_ids=(stop,)), seed=0),
        request(2, [4, 5], Sampling(30, stop_ids=(stop,), min_new_tokens=12), seed=0),
        request(4, [4, 5], Sampling(1), seed=0),
    ]
    found = await answers(engine, [*requests, request(3, [4, 5], Sampling(30, stop_texts=(text, "zz")), seed=0)])
    by_text = found.pop(3)
    right(requests, found, model())
    assert found[0].truncated
    assert by_text.finish == "text"
    assert TOKENIZER.decode(by_text.response_ids).endswith(text)
    assert by_text.response_ids.tolist() == whole[: len(by_text.response_ids)]


async def test_new_weights_are_used_by_all_that_comes_after_and_every_token_says_whose_it_is(served):
    engine, model = served
    long = request(0, [3], Sampling(400))
    running = await begun(engine, long)
    await engine.load(packed(model(1), 4))
    assert engine.version == 4
    found = (await rest(running))[0]
    switched = found.versions.tolist().index(4)
    assert found.versions.tolist() == [0] * switched + [4] * (400 - switched)
    tokens = found.response_ids.tolist()
    old, new = teacher_forced(model(), [3], tokens), teacher_forced(model(1), [3], tokens)
    np.testing.assert_allclose(found.logprobs, [*old[:switched], *new[switched:]], atol=1e-4)
    requests = ragged(5, Sampling(8))
    right(requests, await answers(engine, requests), model(1))


async def test_weights_that_do_not_fit_or_arrive_damaged_change_nothing(served):
    engine, model = served
    named = dict(model(1).named_parameters())
    short = Weights.pack({**named, "model.norm.weight": torch.zeros(5)}.items(), 9)
    with pytest.raises(ValueError, match=r"model.norm.weight.*\[5\].*model.*\[64\]"):
        await engine.load(short)
    whole = packed(model(1), 9)
    with pytest.raises(ValueError, match=r"bucket 0.*1.*changed"):
        await engine.load(replace(whole, checksums=(whole.checksums[0] ^ 1,)))
    assert engine.version == 0
    requests = ragged(3, Sampling(5))
    right(requests, await answers(engine, requests), model())


async def test_aborted_answers_keep_their_tokens(served):
    engine, model = served
    long = [request(i, [i], Sampling(500)) for i in range(2)]
    running = await begun(engine, *long, request(2, [2], Sampling(40)))
    await seconds(0.1)
    await engine.abort([0, 77])
    left = {}
    async for one in running:
        left[one.id] = one
        if one.id == 2:
            await engine.abort()
    assert (left[0].finish, left[1].finish, left[2].finish) == ("abort", "abort", "length")
    for number in (0, 1):
        count = len(left[number].response_ids)
        assert 0 < count == len(left[number].versions) < 500
        tokens, logprobs, _ = expected(replace(long[number], sampling=Sampling(count)), model())
        assert left[number].response_ids.tolist() == tokens
        np.testing.assert_allclose(left[number].logprobs, logprobs, atol=1e-4)


async def test_texts_are_scored_as_the_model_finds_them_while_others_are_answered(served):
    engine, model = served
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCABULARY, length) for length in (9, 1, 14, 9, 2, 300, LENGTH - 1)]
    long = request(7, [1, 2, 3], Sampling(300))
    running = await begun(engine, long)
    scored_right(texts, await engine.score(texts, 3), model(), atol=1e-4)
    scored_right(texts[:3], await engine.score(texts[:3]), model(), 0, atol=1e-4)
    assert (await engine.score(texts[:1]))[0].ranks.min() >= 1  # all are known
    right([long], await rest(running), model())
    for text, words in ((np.array([1, VOCABULARY]), str(VOCABULARY)), (np.ones(LENGTH, int), str(LENGTH - 1))):
        with pytest.raises(RequestRefused, match=words):
            await engine.score([text])
    await engine.load(packed(model(1), 3))
    scored_right(texts, await engine.score(texts, 3), model(1), atol=1e-4)


async def test_paused_nothing_moves_and_nothing_is_lost(served):
    engine, model = served
    long = request(0, [3], Sampling(300))
    call = asyncio.create_task(rest(await begun(engine, long)))
    await engine.pause()
    (before,) = await engine.partial([0])
    await seconds()
    (after,) = await engine.partial([0])
    assert 0 < before.answered == after.answered < 300
    assert not call.done()
    await engine.resume()
    right([long], await call, model())


@pytest.mark.parametrize("load", [False, True])
async def test_asleep_nothing_is_answered_and_awake_it_goes_on(served, load):
    engine, model = served
    long = request(0, [3], Sampling(300))
    call = asyncio.create_task(rest(await begun(engine, long)))
    await engine.sleep()
    if load:
        await engine.load(packed(model(1), 2))
    await seconds()
    assert not call.done()
    await engine.wake()
    found = await call
    if load:
        assert set(found[0].versions.tolist()) == {0, 2}
        requests = ragged(3, Sampling(5))
        right(requests, await answers(engine, requests), model(1))
    else:
        right([long], found, model())


async def test_five_hundred_requests_at_once_are_all_answered_right(served):
    engine, model = served
    requests = [request(i, [i % 23, i % 19, i % 17], Sampling(8, stop_ids=(0,))) for i in range(500)]
    ones = await asyncio.gather(*(engine.answer(asked) for asked in requests))
    ours = await answers(TransformersEngine(model()), requests)
    assert [one.response_ids.tolist() for one in ones] == [ours[i].response_ids.tolist() for i in range(500)]


async def test_a_request_longer_than_the_context_is_one_error_and_the_others_go_on(served, monkeypatch):
    engine, model = served
    long, others = request(7, [1] * 500, Sampling(30)), ragged(4, Sampling(30))
    with pytest.raises(ValueError, match=r"request 7.*530 tokens.*takes 512"):
        await engine.answer(long)
    monkeypatch.setattr(engine, "max_length", None)  # so that the server has to refuse it
    outcomes = await asyncio.gather(engine.answer(long), answers(engine, others), return_exceptions=True)
    assert isinstance(outcomes[0], ValueError)
    assert re.search(r"request 7: vLLM /generate .*400.*500.*30", str(outcomes[0]))
    right(others, outcomes[1], model())


async def test_a_token_outside_the_vocabulary_is_refused_and_the_server_lives(served):
    engine, model = served
    with pytest.raises(ValueError, match=r"request 5.*token.*99.*0.*22"):
        await engine.answer(request(5, [99], Sampling(4)))
    right([one := request(6, [1], Sampling(4))], {6: await engine.answer(one)}, model())


async def test_our_own_engine_continues_what_was_taken_out(served):
    engine, model = served
    long = [request(i, [3, i], Sampling(200, temperature=1.3)) for i in range(3)]
    running = await begun(engine, *long)
    await seconds(0.05)
    out = await engine.take_out([0, 1, 50])
    left, taken = await asyncio.gather(rest(running), answers(TransformersEngine(model()), out))
    assert sorted(left) == [2]
    assert all(one.answered for one in out)
    right(long, {**left, **taken}, model())


async def test_turns_of_a_conversation_are_answered_as_if_all_was_read_again(served):
    engine, model = served
    text = [4, 5, 6]
    for turn in range(3):
        asked = Request(turn, np.array(text), Sampling(12), seed=turn, conversation=1)
        one = await engine.answer(asked)
        right([asked], {turn: one}, model())
        text += [*one.response_ids.tolist(), 7, 8]


@pytest.mark.parametrize("victim", ["server", "core"])
async def test_killed_in_mid_answer_no_sample_and_no_token_is_lost(served, victim):
    engine, model = served
    await engine.load(packed(model(1), 3))
    requests = [request(i, [i, 2], Sampling(400)) for i in range(20)]
    tasks = [asyncio.create_task(engine.answer(asked)) for asked in requests]
    while sum(one.answered > 0 for one in await engine.partial(range(20))) < 20:
        await seconds(0.02)
    before = {one.id: one.partial.response_ids.tolist() for one in await engine.partial(range(20))}
    restarts, pid = engine.child.child.restarts, engine.child.child.pid
    if victim == "core":  # its server sees that, ends, and says why
        (pid,) = (child.pid for child in psutil.Process(pid).children() if "EngineCore" in child.name())
    os.kill(pid, signal.SIGKILL)
    found = {one.id: one for one in await asyncio.gather(*tasks)}
    assert engine.child.child.restarts == restarts + 1
    assert len(before) == 20
    assert all(found[number].response_ids.tolist()[: len(kept)] == kept for number, kept in before.items())
    assert {version for one in found.values() for version in one.versions.tolist()} == {3}
    ours = await answers(TransformersEngine(model(1)), requests)
    for number, one in found.items():
        assert one.response_ids.tolist() == ours[number].response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, ours[number].logprobs, atol=1e-4)


async def right_by(engine, models, asked, begun=0):
    """Answers at once, each by the model with its adapters merged in."""
    for number, one in (await answers(engine, asked)).items():
        ids, logprobs = one.response_ids.tolist(), one.logprobs[begun:]
        exact = teacher_forced(models[asked[number].adapter], asked[number].prompt_ids, ids)
        np.testing.assert_allclose(logprobs, exact[begun:], atol=1e-4)
        assert set(one.versions.tolist()) == {(engine.adapters | {None: engine.version})[asked[number].adapter]}


def by_turns(names, count=20):
    return [replace(request(i, [3] * (i % 4 + 1), Sampling(9)), adapter=names[i % len(names)]) for i in range(count)]


async def test_answers_by_several_adapters_and_the_model_in_one_batch_are_those_of_merged_models(served):
    engine, model = served
    if engine.adapters is None:
        with pytest.raises(ValueError, match=r"adapters a: .*adapter_rank"):
            await engine.load(adapters(model(), "a", 1)[0])
        return
    models = {None: model()}
    for version, name in enumerate("abcd", 11):
        weights, models[name] = adapters(models[None], name, version)
        await engine.load(weights)
    assert (engine.adapters, engine.unembeds) == ({"a": 11, "b": 12, "c": 13, "d": 14}, True)
    texts = [np.arange(9), np.arange(20)]
    scores, _ = await asyncio.gather(engine.score(texts, 3), right_by(engine, models, by_turns([None, *"abcd"])))
    scored_right(texts, scores, models[None], atol=1e-4)
    running = await begun(
        engine, long := replace(request(0, [3], Sampling(300)), adapter="a"), request(1, [4], Sampling(300))
    )
    weights, merged = adapters(models[None], "a", 21, seed=1)
    await engine.load(weights)
    found = await rest(running)
    first = found[0].versions.tolist().count(11)
    ids = found[0].response_ids.tolist()
    assert found[0].versions.tolist() == [11] * first + [21] * (300 - first)
    assert 0 < first < 300
    exact = [*teacher_forced(models["a"], [3], ids)[:first], *teacher_forced(merged, [3], ids)[first:]]
    np.testing.assert_allclose(found[0].logprobs, exact, atol=1e-4)
    right([request(1, [4], Sampling(300))], {1: found[1]}, models[None])
    models["a"] = merged
    too_many = replace(
        Weights.pack({n: torch.zeros(4, 64) if "A" in n else torch.zeros(64, 4) for n in ONE}.items(), 1), adapter="a"
    )
    with pytest.raises(ValueError, match=r"adapters a: .*\[4\].*adapter_rank"):
        await engine.load(too_many)
    await engine.unload("b")
    with pytest.raises(ValueError, match=r"request 0 .*'b'"):
        await engine.answer(replace(long, adapter="b"))
    below = model(1)
    await engine.load(packed(below, 7))
    models = {None: below, "a": adapters(below, "a", 21, seed=1)[1], "d": adapters(below, "d", 14)[1]}
    await right_by(engine, models, by_turns([None, "a", "d"]))
    restarts = engine.child.child.restarts
    os.kill(engine.child.child.pid, signal.SIGKILL)
    await right_by(engine, models, by_turns([None, "a", "d"]))
    assert engine.child.child.restarts == restarts + 1
    for name in "acd":
        await engine.unload(name)


async def test_adapters_of_an_embedding_that_is_the_input_too_and_more_than_share_a_batch():
    model = tiny("llama", tie_word_embeddings=True)
    args = {"python": str(PYTHON), "adapter_rank": 9, "args": {"max_loras": 2, "max_cpu_loras": 3}}
    engine = await make("vllm", setup_of(model), args)
    try:
        models = {None: model}
        for version, name in enumerate("abcd", 11):
            weights, models[name] = adapters(model, name, version)
            await engine.load(weights)
        await right_by(engine, models, by_turns([None, "a", "b", "c", "d"]))
        below = tiny("llama", 1, tie_word_embeddings=True)
        await engine.load(packed(below, 20))
        await right_by(engine, {None: below, "d": adapters(below, "d", 14)[1]}, by_turns(["d", None]))
    finally:
        await engine.close()


async def test_what_cannot_be_served_says_why():
    with pytest.raises(ValueError, match=r"none.*/no/python:.*`make"):
        await make("vllm", setup_of(tiny("qwen2")), {"python": "/no/python"})
    with pytest.raises(ValueError, match=r"rollout.engine_args.args: dtype.*engine"):
        await make("vllm", setup_of(tiny("qwen2")), {"python": str(PYTHON), "args": {"dtype": "float32"}})
    with pytest.raises(ChildDied, match=r"heads.*32, 64.*those.*16"):
        await make("vllm", setup_of(tiny("qwen2", heads=4)), {"python": str(PYTHON)})
