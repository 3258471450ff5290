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
from rlinf.engines.base import EngineSetup, PartialAnswer, Sampling
from rlinf.engines.served import server as http
from rlinf.engines.served.engine import Row
from rlinf.engines.served.server import Chunk, Experts, environment_of
from rlinf.runtime.processes.supervisor import ChildDied
from tests.engines.scripted import answers, request
from tests.engines.served.imitation import EXPERTS, Imitation, answer, imitated, routes, some_tokens

pytest.importorskip("aiohttp")
SHAPES = {"weight": (3,)}


@pytest.fixture
async def started():
    async with contextlib.AsyncExitStack() as stack:

        async def start(version="0.5.20", settings=None, experts=None, **setup):
            server = Imitation(version, experts=experts)
            made = EngineSetup("rollout[0]", {}, contextlib.nullcontext, max_length=5000, **setup)
            engine = await imitated(made, server, SHAPES, **(settings or {}))
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
    async with asyncio.timeout(10):
        while server.running:
            await asyncio.sleep(0.01)


async def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout = "HTTP/1.1", 0.2  # then it closes a connection without requests

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

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
