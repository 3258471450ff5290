"""A teacher behind an address: scripted servers in each dialect say what a local teacher of the same weights says."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools

import numpy as np
import pytest
import torch
from aiohttp import web

from rlinf import ActorSystem
from rlinf.actors.reference import Blend, Reference
from rlinf.actors.remote_teacher import RemoteTeacher
from rlinf.actors.rollout import Rollout
from rlinf.agents.agent import AgentLLM, Attempt
from rlinf.agents.chat import ChatFormat
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.llm import RolloutModel, Setting
from rlinf.agents.tools.formats import call_format
from rlinf.config.learning import ReferenceSettings, TeacherServerConfig
from rlinf.config.load import InputError
from rlinf.config.text import EndpointConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.served.server import Lost
from rlinf.models.distillation import TOP
from rlinf.models.language.build import build_model
from rlinf.runs.start import runtime_errors_explained
from tests.actors import toys

GROUPS = toys.groups(5, longest=9, temperature=1.0)
NET = build_model(toys.configuration(), load_tokenizer(toys.ALPHABET), seed=0).eval()
COLUMN = "teacher_logprobs"


def rows_of(ids):
    with torch.no_grad():
        return NET(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]


def vllm(body):
    """As vLLM replies: of each token's place the token itself and the likeliest, by ids."""
    ids, count = body["prompt"], body["prompt_logprobs"]
    places = [None]
    for token, row in zip(ids[1:], rows_of(ids), strict=True):
        order = row.argsort(descending=True).tolist()
        ranks = {each: order.index(each) + 1 for each in {*order[:count], token}}
        places.append({str(each): {"logprob": float(row[each]), "rank": rank} for each, rank in ranks.items()})
    return {"choices": [{"text": "", "logprobs": None, "prompt_logprobs": places}]}


def sglang(body):
    """As SGLang replies to /generate: [log-prob, id, text]."""
    ids, count = body["input_ids"], body["top_logprobs_num"]
    own, top = [[None, ids[0], None]], [None]
    for token, row in zip(ids[1:], rows_of(ids), strict=True):
        own.append([float(row[token]), token, None])
        values, order = row.topk(count)
        top.append([[value, each, None] for value, each in zip(values.tolist(), order.tolist(), strict=True)])
    return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}


def echo(body):
    """As OpenAI's completions did with echo; with one generated token behind, as some servers do."""
    ids = body["prompt"]
    said = [None, *(float(row[token]) for token, row in zip(ids[1:], rows_of(ids), strict=True)), -0.1]
    return {"choices": [{"text": "", "logprobs": {"token_logprobs": said, "tokens": ["?"] * len(said)}}]}


SAYS = {"vllm": vllm, "sglang": sglang, "echo": echo}


@contextlib.asynccontextmanager
async def server(reply):
    """A server that replies to any POST; the requests that came, as (path, body, headers)."""
    asked = []

    async def answer(request):
        asked.append((request.path, await request.json(), request.headers))
        result = reply(asked[-1][1])
        result = await result if inspect.isawaitable(result) else result
        return result if isinstance(result, web.Response) else web.json_response(result)

    app = web.Application()
    app.router.add_post("/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", asked
    finally:
        await runner.cleanup()


async def told(url, dialect="vllm", groups=GROUPS, blend=None, **settings):
    """Groups as the teacher gives them back."""
    where = TeacherServerConfig(
        url=url, dialect=dialect, attempts=settings.pop("attempts", 1), **settings.pop("at", {})
    )
    how = ReferenceSettings(column=settings.pop("column", COLUMN), **settings)
    async with ActorSystem.local() as system:
        teacher = await system.spawn(
            RemoteTeacher, server=where, settings=how, tokenizer=toys.ALPHABET, blend=blend, name="teacher"
        )
        return sorted(await teacher.logprobs(groups).collect(), key=lambda group: group.prompt.id)


@contextlib.asynccontextmanager
async def our_own():
    """Our endpoint, over a rollout of the teacher's weights; instead of the requests, the names of sessions left."""
    async with ActorSystem.local() as system:
        more = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "max_new_tokens": 4}
        rollout = await system.spawn(Rollout, name="rollout", **more)
        tokenizer, numbers = load_tokenizer(toys.ALPHABET), itertools.count()
        setting = Setting(RolloutModel(lambda: rollout), 1.0, 4, None, len(tokenizer))

        def opened():
            attempt = Attempt(setting, call_format("hermes", tokenizer), lambda: next(numbers))
            return AgentLLM(attempt, ChatFormat(tokenizer), (1,))

        endpoint = Endpoint(EndpointConfig(), opened)
        try:
            yield f"{endpoint.listen()}/v1", endpoint.sessions
        finally:
            await endpoint.close()


@pytest.mark.parametrize(
    ("dialect", "ours"), [("vllm", False), ("sglang", False), ("echo", False), ("vllm", True), ("echo", True)]
)
async def test_each_dialect_says_what_a_teacher_of_the_runs_own_says(dialect, ours):
    top = {} if dialect == "echo" else {"distribution": "top", "top_k": 3}
    async with our_own() if ours else server(SAYS[dialect]) as (url, asked):
        found = await told(url, dialect, at={"model": "policy"}, **top)
        assert not ours or dialect == "vllm" or not asked  # of what was only scored no session is left
    async with ActorSystem.local() as system:
        how = ReferenceSettings(column=COLUMN, **top)
        own = await system.spawn(
            Reference, model=toys.configuration(), tokenizer=toys.ALPHABET, settings=how, name="own"
        )
        own_groups = sorted(await own.logprobs(GROUPS).collect(), key=lambda group: group.prompt.id)
    for ours, theirs in zip(found, own_groups, strict=True):
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            np.testing.assert_allclose(a.per_token[COLUMN], b.per_token[COLUMN], atol=5e-6)
            if top:
                np.testing.assert_array_equal(a.per_token[TOP][:, 0], b.per_token[TOP][:, 0])
                np.testing.assert_allclose(a.per_token[TOP][:, 1], b.per_token[TOP][:, 1], atol=5e-6)
    if ours:
        return
    assert {path for path, *_ in asked} == {"/v1/generate" if dialect == "sglang" else "/v1/completions"}
    assert len(asked) == sum(len(group.samples) for group in GROUPS)


async def test_name_and_key_go_with_each_request(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    async with server(vllm) as (url, asked):
        await told(url, groups=GROUPS[:1], at={"model": "large", "key_env": "TEACHER_KEY"})
    assert all(body["model"] == "large" and headers["Authorization"] == "Bearer secret" for _, body, headers in asked)


async def test_a_server_that_fails_once_is_asked_again_and_one_that_fails_is_named(monkeypatch):
    monkeypatch.setattr("rlinf.actors.remote_teacher._PAUSE", 0.0)
    left = [1, 1]

    def failing(body):
        return web.Response(status=503, text="busy") if left and left.pop() else vllm(body)

    async with server(failing) as (url, asked):
        found = await told(url, groups=GROUPS[:1], attempts=3)
        assert len(asked) == 2 + len(found[0].samples)
        left.extend([1] * 50)
        with pytest.raises(Lost, match=f"{url}.*503"):
            await told(url, groups=GROUPS[:1], attempts=2)


@pytest.mark.parametrize(
    ("reply", "more", "words"),
    [
        (lambda body: {"choices": [{"text": "hello"}]}, {}, "prompt_logprobs"),
        (lambda body: {"choices": [{"prompt_logprobs": [None]}]}, {}, "there are 1 for"),
        (sglang, {}, "dialect=vllm"),
        (lambda body: web.Response(status=400, text="max_logprobs is 5"), {}, "400: max_logprobs is 5"),
        (lambda body: vllm({**body, "prompt_logprobs": 2}), {"distribution": "top", "top_k": 4}, "top_k=4"),
    ],
)  # fmt: skip
async def test_a_server_that_tells_something_else_is_an_error_with_its_address(reply, more, words):
    def answer(body):
        return reply({"input_ids": body["prompt"], "top_logprobs_num": 0} if reply is sglang else body)

    async with server(answer) as (url, _):
        with pytest.raises(ValueError, match=words) as caught:
            await told(url, groups=GROUPS[:1], **more)
    assert url in str(caught.value)


async def test_what_is_no_address_or_key_or_is_not_told_is_refused_before_anything_is_asked():
    for words, where, how in (
        ("server.url", {"url": "localhost:8000"}, {}),
        ("NO_SUCH_KEY", {"url": "http://localhost/v1", "key_env": "NO_SUCH_KEY"}, {}),
        ("top_k", {"url": "http://localhost/v1", "dialect": "echo"}, {"distribution": "top"}),
        ("top_k", {"url": "http://localhost/v1"}, {"distribution": "hidden"}),
    ):
        async with ActorSystem.local() as system:
            with pytest.raises(InputError, match=words) as caught, runtime_errors_explained():
                await system.spawn(
                    RemoteTeacher, server=TeacherServerConfig(**where), settings=ReferenceSettings(**how),
                    tokenizer=toys.ALPHABET,
                )  # fmt: skip
            assert isinstance(caught.value.__cause__, ValueError)  # as which programs catch it


async def test_another_temperature_is_refused():
    async with server(vllm) as (url, _):
        with pytest.raises(ValueError, match=r"rollout\.temperature"):
            await told(url, groups=toys.groups(1, temperature=0.7))


async def test_one_of_several_is_asked_for_its_own_prompts_alone():
    blend = Blend("math", ("math", "code"), 0.5, "subject")
    rows = [{"subject": "math"}, {"subject": "code"}]
    groups = []
    for group, row in zip(GROUPS, rows, strict=False):
        samples = [toys.replace(sample, prompt=toys.replace(group.prompt, row=row)) for sample in group.samples]
        groups.append(toys.Group(samples[0].prompt, tuple(samples)))
    async with server(vllm) as (url, asked):
        mine, other = await told(url, groups=groups, blend=blend, column=f"{COLUMN}/math")
    assert len(asked) == len(mine.samples)
    assert {COLUMN, f"{COLUMN}/math"} == {*mine.samples[0].per_token}
    assert not other.samples[0].per_token


async def test_no_more_requests_are_under_way_than_are_allowed():
    now, most = 0, 0

    async def slow(body):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return vllm(body)

    async with server(slow) as (url, _):
        assert len(await told(url, at={"at_once": 2})) == len(GROUPS)
    assert most <= 2
