"""What goes wrong around a server, with an imitation of one: answers are whole all the same, or one clear error."""

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, PartialAnswer, RequestRefused, Sampling, make
from rlinf.engines.served import server as http
from rlinf.engines.served.engine import Row
from rlinf.engines.served.server import Chunk, Experts, environment_of
from rlinf.runtime.processes.supervisor import ChildDied
from tests.engines.scripted import answers, request
from tests.engines.served.imitation import EXPERTS, Imitation, answer, imitated, routes, scored, some_tokens

pytest.importorskip("aiohttp")
SHAPES = {"weight": (3,)}


@pytest.fixture
async def started():
    async with contextlib.AsyncExitStack() as stack:

        async def start(version="0.5.20", settings=None, experts=None, adapter_rank=0, shapes=SHAPES, **setup):
            server = Imitation(version, experts, adapter_rank)
            made = EngineSetup("rollout[0]", {}, contextlib.nullcontext, max_length=5000, **setup)
            engine = await imitated(made, server, shapes, **(settings or {}))
            stack.push_async_callback(engine.close)
            stack.push_async_callback(lambda: server.runner.cleanup())
            return engine, server

        yield start


def weights(version):
    return Weights.pack({"weight": torch.full((3,), float(version))}.items(), version)


def right(found, requests, version=0):
    assert sorted(found) == sorted(asked.id for asked in requests)
    for asked in requests:
        whole = answer(asked.prompt_ids.tolist(), asked.sampling.max_new_tokens, version)
        assert found[asked.id].response_ids.tolist() == whole
        assert len(found[asked.id].logprobs) == len(found[asked.id].versions) == len(whole)


@pytest.mark.parametrize("wrong", [[500], [503, 500], ["half"], ["half", "nothing", 500]])
async def test_what_fails_on_the_way_is_asked_for_again_from_its_tokens(started, wrong):
    engine, server = await started()
    server.wrong = list(wrong)
    requests = [request(i, [i, 2], Sampling(12)) for i in range(3)]
    right(await answers(engine, requests), requests)
    assert not server.wrong
    assert engine.child.child.restarts == 0


@pytest.mark.parametrize("wrong", [[], [503, "half"]])
async def test_a_listener_hears_each_token_once_whatever_interrupts_the_answer(started, wrong):
    engine, server = await started()
    server.wrong, told = list(wrong), []
    done = await engine.answer(asked := request(0, [3, 2], Sampling(12)), told.append)
    right({0: done}, [asked])
    assert len(told) > 1
    assert [token for tokens in told for token in tokens] == done.response_ids.tolist()[:-1]


async def test_experts_are_told_of_every_token_whatever_interrupts_the_answer(started):
    engine, server = await started(experts=EXPERTS)
    assert engine.routes
    server.wrong = [503, "half"]
    requests = [request(i, [i, 2, 3], Sampling(12, stop_ids=(5,) if i else ())) for i in range(3)]
    found = await answers(engine, requests)
    assert not server.wrong
    for asked in requests:
        done = found[asked.id]
        text = [*asked.prompt_ids.tolist(), *done.response_ids.tolist()]
        assert done.routes.dtype == np.uint8
        np.testing.assert_array_equal(done.routes, routes(text))
    begun = replace(requests[0], id=9, partial=PartialAnswer(*_beginning(found[0], 4), found[0].routes[:6] + 100))
    done = await engine.answer(begun)
    np.testing.assert_array_equal(done.routes[:6], found[0].routes[:6] + 100)  # as the log-probs that it came with
    np.testing.assert_array_equal(done.routes[6:], found[0].routes[6:])
    silent, _ = await started()
    assert (silent.routes, (await silent.answer(requests[0])).routes) == (False, None)


def _beginning(done, count):
    return done.response_ids[:count], done.logprobs[:count], done.versions[:count]


@pytest.mark.parametrize("other", [Experts(3, 2, 8), Experts(5, 3, 16)])
async def test_experts_of_another_model_are_refused(started, other):
    engine, _ = await started(experts=other)
    with pytest.raises(ValueError, match=r"request 0: SGLang.*experts"):
        await engine.answer(request(0, [1, 2, 3], Sampling(12)))


def scored_right(texts, scores, version=0, top=2):
    for ids, score in zip(texts, scores, strict=True):
        places = [scored(ids[:place].tolist(), version) for place in range(1, len(ids))]
        own = [place[token] for place, token in zip(places, ids[1:], strict=True)]
        assert score.logprobs.tolist() == own
        ranked = [sorted(range(len(place)), key=lambda token, place=place: -place[token]) for place in places]
        assert score.likeliest.tolist() == [tokens[:top] for tokens in ranked]
        ranks = [tokens.index(token) + 1 for tokens, token in zip(ranked, ids[1:], strict=True)]
        assert score.ranks.tolist() == [rank if rank <= top else 0 for rank in ranks]
        assert score.likeliest_logprobs.shape == (len(ids) - 1, top)


TEXTS = [np.array(ids) for ids in ([3, 1, 4, 1], [5], [9, 2, 6, 5, 3, 5], [8, 9])]


@pytest.mark.parametrize("wrong", [[], [500, 503]])
async def test_texts_are_scored_beside_answers_and_again_where_that_fails(started, wrong):
    engine, server = await started()
    server.free, asked = 2, request(0, [4, 2], Sampling(9))
    server.hold.clear()
    call = asyncio.create_task(engine.answer(asked))
    await some_tokens(engine, 0)
    server.wrong = list(wrong)
    scoring = asyncio.create_task(engine.score(TEXTS, 2))
    await server.reading.wait()
    server.hold.set()
    scored_right(TEXTS, await scoring)
    right({0: await call}, [asked])
    assert (server.wrong, [len(one.logprobs) for one in await engine.score([TEXTS[1]])]) == ([], [0])
    server.wrong = [400]
    with pytest.raises(RequestRefused, match=r"scored.*so it goes"):
        await engine.score(TEXTS)
    for text, words in ((np.array([1, 11]), "11"), (np.ones(5000, int), "4999")):
        with pytest.raises(RequestRefused, match=words):
            await engine.score([text])


async def test_texts_are_scored_by_one_version_of_the_weights_and_not_in_a_pause(started):
    engine, server = await started()
    server.hold.clear()
    before = asyncio.create_task(engine.score(TEXTS, 2))
    await server.reading.wait()
    loading = asyncio.create_task(engine.load(weights(4)))
    pausing = asyncio.create_task(engine.pause())
    for _ in range(20):
        await asyncio.sleep(0)
    assert (loading.done(), pausing.done()) == (False, False)  # they wait for what is being read
    after = asyncio.create_task(engine.score(TEXTS, 2))
    server.hold.set()
    scored_right(TEXTS, await before)
    await loading
    await pausing
    reads = server.calls.count("/generate")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (after.done(), server.calls.count("/generate")) == (False, reads)
    await engine.resume()
    scored_right(TEXTS, await after, 4)


async def test_a_server_that_never_says_anything_is_one_clear_error(started):
    engine, server = await started()
    server.wrong = ["nothing"] * 6
    with pytest.raises(RuntimeError, match=r"SGLang.*answer 6.*without") as caught:
        await engine.answer(request(5, [1], Sampling(4)))
    assert "request 5" in caught.value.__notes__[0]
    right({6: await engine.answer(asked := request(6, [1], Sampling(4)))}, [asked])


async def test_a_hanging_stream_is_left_after_its_silence(started):
    engine, server = await started(settings={"silence": 0.3})
    server.wrong = ["hang"]
    right({0: await engine.answer(asked := request(0, [1], Sampling(4)))}, [asked])


async def test_a_refused_request_is_one_error_and_the_others_go_on(started):
    engine, server = await started()
    server.hold.clear()
    others = asyncio.create_task(answers(engine, requests := [request(i, [i], Sampling(9)) for i in range(3)]))
    while len(server.running) < 3:
        await asyncio.sleep(0.01)
    server.wrong = [400]
    with pytest.raises(ValueError, match=r"request 7: SGLang /generate says 400:"):
        await engine.answer(request(7, [1], Sampling(4)))
    server.hold.set()
    right(await others, requests)


async def test_a_server_killed_in_mid_answer_goes_on_with_the_weights_and_tokens_that_there_were(started):
    engine, server = await started()
    await engine.load(weights(4))
    requests = [request(i, [i, 1], Sampling(700)) for i in range(5)]
    calls = asyncio.create_task(answers(engine, requests))
    begun = await some_tokens(engine, *range(5))
    os.kill(engine.child.child.pid, 9)
    await server.runner.cleanup()
    found = await calls
    right(found, requests, 4)
    assert all(found[i].response_ids.tolist()[: len(ids)] == ids for i, ids in begun.items())
    assert engine.child.child.restarts == 1
    assert {version for one in found.values() for version in one.versions.tolist()} == {4}


async def test_what_the_server_dies_of_is_told_to_its_caller(started):
    engine, server = await started(settings={"max_restarts": 5})
    stream = server.stream

    async def deadly(asked, body):
        if body["input_ids"] == [9]:
            os.kill(engine.child.child.pid, 9)
            await asyncio.sleep(0.05)
            asked.transport.abort()
        return await stream(asked, body)

    server.stream = deadly
    with pytest.raises(RuntimeError, match="SGLang /generate"):
        await engine.answer(request(0, [9], Sampling(3)))
    assert engine.child.child.restarts == 2
    right({1: await engine.answer(asked := request(1, [1], Sampling(4)))}, [asked])


async def test_weights_change_between_tokens_and_no_token_has_the_wrong_version(started):
    engine, server = await started()
    calls = asyncio.create_task(answers(engine, [request(i, [i], Sampling(700)) for i in range(4)]))
    await some_tokens(engine, *range(4))
    await engine.load(weights(3))
    for number, one in (await calls).items():
        text, versions = [number], one.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 3}
        for token, version in zip(one.response_ids.tolist(), versions, strict=True):
            text += answer(text, 1, version)
            assert text[-1] == token
    assert server.calls.index("/flush_cache") < server.calls.index("/update_weights_from_tensor")


@pytest.mark.parametrize(("version", "sessions"), [("0.5.20", 0), ("0.5.21", 1), ("0.5.23.post1", 1), ("0.6.dev0", 1)])
async def test_versions_that_want_a_session_around_new_weights_get_one(started, version, sessions):
    engine, server = await started(version)
    await engine.load(weights(1))
    assert [server.calls.count(f"/{what}_weight_update") for what in ("begin", "end")] == [sessions] * 2


async def test_asleep_it_computes_nothing_and_weights_that_come_are_used_on_waking(started):
    engine, server = await started()
    long = asyncio.create_task(engine.answer(request(0, [1], Sampling(1500))))
    await some_tokens(engine, 0)
    await engine.sleep()
    await engine.load(weights(2))
    assert server.weights == 0
    assert not server.running
    await engine.wake()
    assert set((await long).versions.tolist()) == {0, 2}
    assert server.calls[-1] != "/release_memory_occupation"
    right({1: await engine.answer(asked := request(1, [5], Sampling(9)))}, [asked], 2)


async def test_who_is_cancelled_is_forgotten_by_the_server_too(started):
    engine, server = await started()
    call = asyncio.create_task(engine.answer(request(0, [1], Sampling(4000))))
    await some_tokens(engine, 0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert await engine.partial([0]) == []
    async with asyncio.timeout(60):
        while server.running:
            await asyncio.sleep(0.01)


async def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            self.close_connection = True  # though it did not say so

    monkeypatch.setattr(http, "_KEPT", 0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = http.Http(f"http://127.0.0.1:{server.server_port}", "SGLang")
    try:
        for _ in range(2):
            assert await client.post("/abort_request", {}) == {}
            time.sleep(0.5)  # the loop stands still, and does not see the connection's end
    finally:
        await client.close()
        server.shutdown()
        server.server_close()


async def test_a_server_that_cannot_start_says_so_with_its_last_words(tmp_path):
    server = Imitation()
    server.command = lambda *_: ["sh", "-c", "echo no such device; exit 3"]
    setup = EngineSetup("rollout[0]", {}, contextlib.nullcontext)
    with pytest.raises(ChildDied, match=r"status 3(.|\n)*no such device"):
        await imitated(setup, server, SHAPES, log=tmp_path / "server.log")


def test_a_missing_environment_is_told_with_what_makes_it(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"/nowhere/python:.*`make sglang`"):
        environment_of("SGLang", "/nowhere/python", "THERE", ".venv-none", "sglang")
    monkeypatch.setenv("THERE", str(tmp_path / "python"))
    (tmp_path / "python").symlink_to("/bin/true")
    assert environment_of("SGLang", None, "THERE", ".venv-none", "sglang") == str(tmp_path / "python")


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("sglang", {"args": ["--speculative-algorithm", "NGRAM"]}),
        ("vllm", {"args": {"speculative_config": {"method": "ngram"}}}),
    ],
)
async def test_drafts_of_a_server_that_would_not_keep_to_seeds_are_refused_before_it_starts(engine, args):
    setup = EngineSetup("rollout[0]", {}, contextlib.nullcontext)
    with pytest.raises(ValueError, match=r"rollout.engine_args.args: "):
        await make(engine, setup, args)
    with pytest.raises(ValueError, match=r"rollout.drafts=true: "):
        await make(engine, replace(setup, drafts=True))


async def test_requests_are_read_when_there_is_a_row_for_them(started):
    engine, server = await started(max_rows=3)
    server.hold.clear()
    taken = []

    async def coming():
        for number in range(8):
            taken.append(number)
            yield request(number, [number], Sampling(4))

    call = asyncio.create_task(answers(engine, coming()))
    while len(server.running) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert taken == [0, 1, 2]
    server.hold.set()
    right(await call, [request(number, [number], Sampling(4)) for number in range(8)])


def test_an_answer_is_cut_before_an_id_that_the_tokenizer_has_not():
    row = Row(request(3, [1], Sampling(9)), None, padding=frozenset({7, 8}))
    assert row.take(Chunk([1, 2], [-0.5, -0.5]), version=4) == 2
    assert row.take(Chunk([3, 8, 1], [-0.5, -9.0, -0.5]), version=4) == 1
    assert (row.finish, row.completion.response_ids.tolist()) == ("length", [1, 2, 3])
    with pytest.raises(FloatingPointError, match=r"request 3: .*token.*7"):
        Row(request(3, [1], Sampling(9)), None, padding=frozenset({7, 8})).take(Chunk([7], [-9.0]), version=4)


LAYERS = {f"model.layers.0.self_attn.{name}_proj.weight": (4, 4) for name in "qkvo"}


def adapters(name, version, effect, rank=1, layers="qkvo", width=4):
    """Adapters that add `effect` to the version that a text of the imitation follows from."""
    tensors = {}
    for number, layer in enumerate(layers):
        path = f"model.layers.0.self_attn.{layer}_proj.lora_"
        tensors[path + "A.weight"] = torch.eye(rank, width)
        tensors[path + "B.weight"] = torch.zeros(4, rank)
        tensors[path + "B.weight"][0, 0] = effect if number == 0 else 0
    return replace(Weights.pack(tensors.items(), version), adapter=name)


def by(asked, name):
    return replace(asked, adapter=name)


async def test_answers_by_several_adapters_are_made_at_once_each_with_the_version_of_its_own(started):
    engine, server = await started(adapter_rank=2, shapes=LAYERS)
    assert (engine.adapters, engine.unembeds) == ({}, False)
    await engine.load(adapters("a", 5, 3))
    await engine.load(adapters("b", 8, 6, rank=2))
    assert engine.adapters == {"a": 5, "b": 8}
    of = {0: (None, 0, 0), 1: ("a", 5, 3), 2: ("b", 8, 6), 3: ("a", 5, 3)}
    server.free, requests = 1, [by(request(i, [1, 2], Sampling(9)), of[i][0]) for i in of]
    server.hold.clear()
    calls = asyncio.create_task(answers(engine, requests))
    await some_tokens(engine, *of)  # all of them are open
    server.hold.set()
    found = await calls
    for i, (_, version, effect) in of.items():
        right({i: found[i]}, [requests[i]], effect)
        assert set(found[i].versions.tolist()) == {version}
    with pytest.raises(ValueError, match=r"request 9 .*'c'"):
        await engine.answer(by(request(9, [1], Sampling(2)), "c"))


async def test_new_adapters_of_a_name_interrupt_its_own_answers_alone(started):
    engine, server = await started(adapter_rank=2, shapes=LAYERS)
    await engine.load(adapters("a", 1, 3))
    await engine.load(adapters("b", 1, 6))
    server.free, requests = 3, [by(request(i, [4, 2], Sampling(12)), name) for i, name in enumerate("ab")]
    server.hold.clear()
    calls = asyncio.create_task(answers(engine, requests))
    await some_tokens(engine, 0, 1)
    await engine.load(adapters("a", 2, 7))
    server.hold.set()
    found = await calls
    first = found[0].versions.tolist().count(1)
    ids = found[0].response_ids.tolist()
    assert found[0].versions.tolist() == [1] * first + [2] * (12 - first)
    assert 0 < first < 12
    assert ids[:first] == answer([4, 2], first, 3)
    assert ids[first:] == answer([4, 2, *ids[:first]], 12 - first, 7)
    right({1: found[1]}, [requests[1]], 6)
    assert len([name for name in server.asked if name.startswith("b-")]) == 1
    assert sorted(name[0] for name in server.loras) == ["a", "b"]  # the older ones are gone


async def test_adapters_outlive_a_death_of_the_server(started):
    engine, server = await started(adapter_rank=1, shapes=LAYERS)
    await engine.load(adapters("a", 4, 3))
    await engine.load(adapters("a", 5, 8))
    server.free, asked = 3, by(request(0, [4, 2], Sampling(12)), "a")
    server.hold.clear()
    call = asyncio.create_task(engine.answer(asked))
    await some_tokens(engine, 0)
    os.kill(engine.child.child.pid, 9)
    await server.runner.cleanup()
    server.hold.set()
    right({0: (done := await call)}, [asked], 8)
    assert set(done.versions.tolist()) == {5}
    assert engine.child.child.restarts == 1


@pytest.mark.parametrize(
    ("rank", "shapes", "named", "words"),
    [
        (0, {}, {}, r"adapters a: rollout\[0\] .*adapter_rank"),
        (1, {}, {"rank": 2}, r"adapters a: .*adapter_rank"),
        (1, {}, {"layers": "q"}, r"adapters a: .*q_proj.*k_proj"),
        (1, {}, {"width": 5}, r"adapters a: .*q_proj.lora_A.*\[1, 5\]"),
        (1, {"model.layers.0.self_attn.o_proj.weight": None}, {}, r"adapters a: .*o_proj.lora_A.* no layer"),
    ],
)
async def test_adapters_that_a_server_cannot_hold_are_refused_before_it_hears_of_them(
    started, rank, shapes, named, words
):
    fit = {name: shape for name, shape in LAYERS.items() if shapes.get(name, shape)}
    engine, server = await started(adapter_rank=rank, shapes=fit)
    before = list(server.calls)
    with pytest.raises(ValueError, match=words):
        await engine.load(adapters("a", 1, 3, **named))
    assert (server.calls, engine.adapters) == (before, {} if rank else None)


@pytest.mark.parametrize(("wrong", "restarts"), [([400], 0), ([500], 1), ([500, None, 500], 2)])
async def test_after_adapters_that_fail_at_the_server_those_before_answer(started, wrong, restarts):
    engine, server = await started(adapter_rank=1, shapes=LAYERS, settings={"max_restarts": 5})
    await engine.load(adapters("a", 1, 3))
    server.wrong = list(wrong)
    if taken := wrong == [500]:  # the second time
        await engine.load(adapters("a", 2, 9))
    else:
        with pytest.raises((ValueError, RuntimeError), match="load_lora_adapter"):
            await engine.load(adapters("a", 2, 9))
    done = await engine.answer(asked := by(request(0, [4, 2], Sampling(6)), "a"))
    right({0: done}, [asked], 9 if taken else 3)
    assert set(done.versions.tolist()) == {2 if taken else 1}
    assert (server.wrong, engine.child.child.restarts) == ([], restarts)


async def test_adapters_are_unloaded_when_nobody_is_answered_by_them(started):
    engine, server = await started(adapter_rank=1, shapes=LAYERS)
    await engine.load(adapters("a", 1, 3))
    server.free, asked = 2, by(request(0, [4, 2], Sampling(6)), "a")
    server.hold.clear()
    call = asyncio.create_task(engine.answer(asked))
    await some_tokens(engine, 0)
    for name in "ab":
        with pytest.raises(ValueError, match=f"adapters {name} "):
            await engine.unload(name)
    server.hold.set()
    right({0: await call}, [asked], 3)
    await engine.unload("a")
    assert (engine.adapters, server.loras) == ({}, {})
    with pytest.raises(ValueError, match=r"request 1 .*'a'"):
        await engine.answer(by(request(1, [4], Sampling(6)), "a"))
