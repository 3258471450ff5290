"""What an endpoint refuses, in the form of the API that was spoken; what it tells of itself; who it ends with."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import string
import threading
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf.agents.endpoint.endpoint import Endpoint, Served
from rlinf.config.text import EndpointConfig
from rlinf.runtime.base.errors import ActorDied, UserError
from tests.agents.endpoint.serving import stand

aiohttp = pytest.importorskip("aiohttp")

HI = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
SCORED = {"model": "policy", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/chat/completions", "/messages", "/responses", "/completions"


def saying(content):
    return {**HI, "messages": [{"role": "user", "content": content}]}


async def post(here, path, body=HI, url=None, **headers):
    """(status, body, headers)"""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as client,
        client.post((url or here.url) + path, data=raw, headers={"Content-Type": "application/json", **headers}) as got,
    ):
        return got.status, await got.json(), got.headers


async def get(here, path):
    async with aiohttp.ClientSession() as client, client.get(here.url.split("/s/")[0] + path) as got:
        return got.status, await got.text()


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        (CHAT, b"{", 400, "invalid_json", "valid JSON"),
        (CHAT, b"[1]", 400, "invalid_json", "not a JSON object"),
        (CHAT, b"[" * 100_000, 400, "invalid_json", "valid JSON"),
        (CHAT, b'{"a": NaN}', 400, "invalid_json", "NaN"),
        (CHAT, b'{"model": "\\ud800"}', 400, "invalid_json", "surrogates not allowed"),
        (CHAT, {**HI, "model": None}, 400, "missing_required_parameter", "model is missing"),
        (CHAT, {**HI, "model": "gpt-4o"}, 404, "model_not_found", "take policy"),
        (CHAT, {**HI, "messages": []}, 400, "invalid_value", "messages"),
        (CHAT, {**HI, "messages": [{"role": "boss", "content": ""}]}, 400, "invalid_value", r"messages[0].role"),
        (CHAT, {**HI, "messages": "Hi"}, 400, "invalid_value", "messages"),
        (CHAT, {**HI, "temperature": "hot"}, 400, "invalid_value", "temperature"),
        (CHAT, json.dumps(HI).encode()[:-1] + b', "temperature": 1e999}', 400, "invalid_value", "temperature"),
        (CHAT, {**HI, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        (CHAT, {**HI, "max_tokens": 10**30}, 400, "invalid_value", "max_tokens"),
        (CHAT, {**HI, "top_p": 0}, 400, "invalid_value", "top_p=0"),
        (CHAT, {**HI, "stop": [""]}, 400, "invalid_value", "stop must be"),
        (CHAT, {**HI, "logit_bias": {"5": 100}}, 400, "unsupported_parameter", "logit_bias"),
        (CHAT, {**HI, "presence_penalty": 0.5}, 400, "unsupported_parameter", "presence_penalty"),
        (CHAT, {**HI, "tool_choice": {"type": "function"}}, 400, "invalid_value", "tool_choice"),
        (CHAT, {**HI, "tool_choice": 5}, 400, "invalid_value", "tool_choice must be"),
        (CHAT, {**HI, "parallel_tool_calls": "no"}, 400, "invalid_value", "parallel_tool_calls"),
        (CHAT, {**HI, "guided_json": "{"}, 400, "invalid_value", "guided_json"),
        (CHAT, {**HI, "chat_template_kwargs": "no"}, 400, "invalid_value", "chat_template_kwargs"),
        (CHAT, {**HI, "logprobs": True, "top_logprobs": 5}, 400, "unsupported_parameter", "take 1"),
        (CHAT, {**HI, "response_format": {"type": "xml"}}, 400, "invalid_value", "json_schema"),
        (CHAT, saying([{"type": "image_url"}]), 400, "invalid_value", "image"),
        (CHAT, saying("x" * 600), 400, "context_length_exceeded", "takes 500"),
        (COMPLETIONS, {"model": "policy", "prompt": []}, 400, "invalid_value", "prompt must be"),
        (COMPLETIONS, {"model": "policy", "prompt": [10**6]}, 400, "invalid_value", "1000000"),
        (COMPLETIONS, {"model": "policy", "prompt": "", "max_tokens": 5}, 400, "invalid_value", "no token"),
        (COMPLETIONS, {**SCORED, "stream": True}, 400, "unsupported_parameter", "stream"),
        (COMPLETIONS, {**SCORED, "prompt_logprobs": 129}, 400, "invalid_value", "prompt_logprobs"),
        (COMPLETIONS, {**SCORED, "echo": False}, 400, "invalid_value", "max_tokens"),
        (COMPLETIONS, {**SCORED, "prompt": [10**6]}, 400, "invalid_value", "1000000"),
        (COMPLETIONS, {**SCORED, "prompt": "x" * 600}, 400, "context_length_exceeded", "takes 500"),
        (RESPONSES, {"model": "policy", "input": 5}, 400, "invalid_value", "input must be"),
        (RESPONSES, {"model": "policy", "input": "a", "background": True}, 400, "unsupported_parameter", "background"),
        (
            RESPONSES, {"model": "policy", "input": "a", "previous_response_id": "x"},
            404, "previous_response_not_found", "'x'",
        ),
        ("/nonsense", HI, 404, "unknown_url", "POST"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_said_in_the_api_s_own_form_and_touches_nothing(path, body, status, code, said):
    async with stand(longest=500) as here:
        got, told, _ = await post(here, path, body)
        assert (got, told["error"]["code"]) == (status, code)
        assert said in told["error"]["message"]
        assert here.model.calls == []
        assert here.llm.counts().calls == 0


@pytest.mark.parametrize(
    ("before", "after"), [(None, "127.0.0.1,localhost"), ("a.b", "a.b,127.0.0.1,localhost"), ("*", "*")]
)
async def test_a_proxy_is_for_all_but_the_endpoint(monkeypatch, before, after):
    for name in ("http_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever the endpoint does
        monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv("no_proxy", before)
        monkeypatch.setenv("NO_PROXY", before)
    async with stand():
        assert os.environ.get("no_proxy") == before
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with stand("ab") as here:
        assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (after, after)
        openai = pytest.importorskip("openai")
        async with openai.AsyncOpenAI(base_url=here.url, api_key=here.key, max_retries=0) as client:
            said = await client.chat.completions.create(model="policy", messages=HI["messages"])
        assert said.choices[0].message.content == "ab"


async def test_what_a_url_needs_is_imported_beside_the_event_loop_and_once(monkeypatch):
    threads = []

    def imported(name):
        threads.append(threading.current_thread())
        return importlib.import_module(name)

    monkeypatch.setattr("rlinf.agents.endpoint.endpoint.import_module", imported)
    endpoint = Endpoint()
    await asyncio.gather(*(endpoint.prepare() for _ in range(3)))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    threads.clear()
    async with Served(EndpointConfig(), lambda: None):  # listens, with what is there by then
        assert [thread is threading.current_thread() for thread in threads] == [False, True]


async def test_the_endpoint_is_opened_and_asked_from_any_thread():
    def ask(llm):
        body = json.dumps(HI).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
        with urllib.request.urlopen(urllib.request.Request(llm.base_url + CHAT, body, headers)) as got:
            return json.loads(got.read())["choices"][0]["message"]["content"]

    async with stand("ab") as here:
        llm = here.make()
        assert await asyncio.to_thread(ask, llm) == "ab"
        assert await asyncio.to_thread(lambda: llm.chat(HI["messages"]).result(20).text) == "ab"
        assert await asyncio.to_thread(lambda: asyncio.run(_asking_twice(llm))) == ["ab", "ab"]
        assert llm.counts().calls == 4
        with pytest.raises(UserError, match=r"`await llm\.chat"):
            llm.chat(HI["messages"]).result()
        with pytest.raises(UserError, match=r"result\(\)`.*function"):
            await asyncio.to_thread(_not_asked, llm.chat(HI["messages"]))


def _not_asked(call):
    try:
        return call.text
    finally:
        call.close()


async def _asking_twice(llm):
    """On an event loop of another thread, as one call and as tasks."""
    answers = [await llm.chat(HI["messages"]), *await asyncio.gather(llm.chat(HI["messages"]))]
    return [answer.text for answer in answers]


async def test_a_base_url_without_its_end_is_told_of():
    async with stand() as here:
        for url in (here.url.removesuffix("/v1"), here.url.split("/s/")[0]):
            status, told, _ = await post(here, CHAT, HI, url=url)
            assert status == 404
            assert told["error"]["message"].endswith(" /v1")


async def test_anthropic_s_errors_have_its_own_form():
    async with stand(longest=200) as here:
        for body, status, kind in [
            (b"{", 400, "invalid_request_error"),
            ({**HI, "model": "claude"}, 404, "not_found_error"),
            ({**HI, "max_tokens": None}, 400, "invalid_request_error"),
            (saying("x" * 300), 400, "invalid_request_error"),
        ]:
            got, told, _ = await post(here, MESSAGES, body)
            assert (got, told["type"], told["error"]["type"]) == (status, "error", kind)
        got, told, _ = await post(here, MESSAGES, url=here.url.split("/s/")[0] + "/v1")
        assert (got, told["error"]["type"]) == (401, "authentication_error")


async def test_only_keys_of_agents_that_still_work_are_answered():
    async with stand() as here:
        root = here.url.split("/s/")[0] + "/v1"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, {"X-Api-Key": "é"}):
            status, told, _ = await post(here, CHAT, url=root, **headers)
            assert (status, told["error"]["type"]) == (401, "authentication_error")
        assert (await post(here, CHAT, url=root, Authorization=f"Bearer {here.key}"))[0] == 200
        assert (await post(here, CHAT))[0] == 200
        here.llm.end()
        status, told, _ = await post(here, CHAT)
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert here.endpoint.sessions == {}
        assert here.llm.counts().calls == 2


async def test_a_credential_that_is_no_text_is_refused_like_any_other(caplog):
    model = Endpoint(EndpointConfig(token="secret"), opens=lambda: None)
    try:
        for key in (b"\xff\xfe", b"secret\xff", "sécret".encode()):
            raw = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n"
            assert b" 401 " in await said_to(model, raw + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert b" 400 " in await said_to(
            model, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        )  # fmt: skip
    finally:
        await model.close()
    assert caplog.text == ""


async def test_what_is_no_http_is_one_line_of_the_log_and_a_count(caplog):
    async with stand() as here:
        for raw in (b"\x16\x03\x01\x02\x00\x01\n\n", b"GET / HTTP/9\r\n\r\n", b"nonsense\r\n\r\n"):
            assert b" 400 " in await said_to(here.endpoint, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + raw)
            assert b" 400 " in await said_to(here.endpoint, raw)
        malformed = {key: n for key, n in here.endpoint.metrics.requests.items() if key[0] == "malformed"}
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text
    assert sum(malformed.values()) > 1


async def said_to(endpoint, raw):
    """What comes back for bytes."""
    endpoint.listen()
    reader, writer = await asyncio.open_connection(*endpoint.address)
    writer.write(raw)
    async with asyncio.timeout(20):
        told = await reader.read()
    writer.close()
    return told


async def test_what_is_asked_when_the_episode_ends_is_given_up():
    async with stand(gate=asyncio.Event()) as here:
        asking = asyncio.create_task(post(here, CHAT))
        while not here.model.calls:
            await asyncio.sleep(0)
        here.llm.end()
        status, told, _ = await asking
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert here.model.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_answer(stream):
    async with stand(gate=asyncio.Event()) as here:
        asking = asyncio.create_task(post(here, CHAT, {**HI, "stream": stream, "n": 2}))
        while len(here.model.calls) < 2:
            await asyncio.sleep(0)
        asking.cancel()
        while here.model.cancelled < 2 or here.endpoint.metrics.in_flight:
            await asyncio.sleep(0)
        assert here.llm.counts().calls == 0
        assert here.endpoint.metrics.requests["/v1/chat/completions", 499] == 1


async def test_a_failure_of_the_model_is_told_without_its_insides(caplog):
    async with stand(error=ActorDied("rollout[0] on host 3 at 10.0.0.7 died")) as here:
        for path in (CHAT, MESSAGES):
            status, told, _ = await post(here, path)
            assert status == 500
            assert "10.0.0.7" not in json.dumps(told)
        assert "10.0.0.7" in caplog.text


async def test_too_much_at_once_is_to_come_again():
    gate = asyncio.Event()
    async with stand(gate=gate, limits={"max_concurrent": 1, "requests_per_minute": 2}) as here:
        first = asyncio.create_task(post(here, CHAT))
        while not here.model.calls:
            await asyncio.sleep(0)
        status, told, headers = await post(here, CHAT)
        assert (status, told["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "2")
        gate.set()
        assert (await first)[0] == 200
        assert [(await post(here, CHAT))[0] for _ in range(2)] == [200, 429]  # for half a minute
        status, told, headers = await post(here, CHAT)
        assert "requests_per_minute" in told["error"]["message"]
        assert 1 <= int(headers["Retry-After"]) <= 31
        _, url, _ = here.more()
        assert (await post(here, CHAT, url=url))[0] == 200  # another key


async def test_a_body_that_is_too_long_is_refused():
    async with stand(limits={"max_body_mb": 0.01}) as here:
        status, told, _ = await post(here, CHAT, {**HI, "user": "x" * 20_000})
        assert (status, told["error"]["code"]) == (413, "request_too_large")
        assert "agent.endpoint.max_body_mb" in told["error"]["message"]


async def test_health_and_metrics():
    async with stand() as here:
        await post(here, CHAT)
        await post(here, CHAT, b"{")
        await post(here, CHAT, saying("Ho"))
        assert await get(here, "/health") == (200, '{"status": "ok"}')
        _, text = await get(here, "/metrics")
        told = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        route = 'route="/v1/chat/completions"'
        assert told[f'rlinf_endpoint_requests_total{{{route},code="200"}}'] == "2"
        assert told[f'rlinf_endpoint_requests_total{{{route},code="400"}}'] == "1"
        assert told[f"rlinf_endpoint_request_seconds_count{{{route}}}"] == "3"
        assert told["rlinf_endpoint_requests_in_flight"] == "0"
        assert told["rlinf_endpoint_sessions"] == "1"
        assert told["rlinf_endpoint_branches_total"] == "1"
        said = sum(len(said) for _, said, *_ in here.model.calls)
        assert told['rlinf_endpoint_tokens_total{kind="generated"}'] == str(said)


async def test_an_address_that_cannot_be_had_is_said_and_closing_frees_it():
    async with stand() as here:
        taken = here.endpoint.address[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{taken} "):
            async with stand(limits={"port": taken}):
                pass
    async with stand(limits={"port": taken}) as again:
        assert again.endpoint.address == ("127.0.0.1", taken)


NAMES = st.sampled_from(
    ["model", "messages", "input", "prompt", "tools", "tool_choice", "stop", "n", "role", "content", "type", "text",
     "max_tokens", "temperature", "stream", "response_format", "tool_calls", "function", "name", "arguments", "system",
     "stream_options", "logprobs", "top_k", "seed", "instructions", "json_schema", "schema", "parameters", "store",
     "chat_template_kwargs", "guided_json", "parallel_tool_calls", "thinking", "custom", "include", "reasoning_content",
     "encrypted_content", "summary", "namespace", "call_id"]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(string.printable, max_size=8),
    st.sampled_from(
        ["policy", "user", "assistant", "tool", "system", "text", "function", "auto", "json_schema", "required",
         "custom", "namespace", "additional_tools", "reasoning", "custom_tool_call", "web_search", "thinking"]
    ),
)  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.just("a") | JSON},
    optional={"tool_calls": JSON, "name": JSON, "tool_call_id": JSON},
)
BODIES = st.one_of(
    JSON,
    st.dictionaries(NAMES, JSON, max_size=6),
    st.builds(
        lambda base, more: {**base, **more},
        st.fixed_dictionaries(
            {"model": st.just("policy")},
            optional={
                "messages": st.lists(MESSAGE, max_size=3),
                "input": JSON,
                "prompt": JSON,
                "max_tokens": st.just(9),
            },
        ),
        st.dictionaries(NAMES.filter(lambda name: name != "model"), JSON, max_size=2),
    ),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(BODIES, min_size=10, max_size=20))
async def test_no_body_breaks_it(bodies):
    paths = (CHAT, MESSAGES, RESPONSES, COMPLETIONS, "/messages/count_tokens")
    async with stand(longest=300) as here, aiohttp.ClientSession() as client:
        for body in bodies:
            for path in paths:
                async with asyncio.timeout(20), client.post(here.url + path, json=body) as got:
                    text = await got.text()
                    assert got.status < 500, (path, body, text)
                    assert "model failed" not in text, (path, body, text)
                    if got.status >= 400:
                        assert json.loads(text)["error"]["message"]
