"""HTTP routes of an endpoint, and the way of a request through key, limits and body to its handler.

In: HTTP requests. Out: responses, errors in the API's own form.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from rlinf.agents.endpoint import anthropic, completions, openai
from rlinf.agents.endpoint.call import Call, client_error, dumped
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.endpoint.requests import ApiError, Fields, parsed

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


def application(endpoint: Endpoint, more: Mapping[str, Handler]) -> web.Application:
    """All routes of an endpoint.

    Args:
        endpoint: it.
        more: paths of further POST requests, and who answers them.
    """
    app = web.Application(client_max_size=int(endpoint.config.max_body_mb * 2**20))

    def route(method: str, path: str, handler: Handler, *, prefixed: bool = True) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await _answered(endpoint, path, handler, request)

        for prefix in ("", "/s/{session}") if prefixed else ("",):
            app.router.add_route(method, prefix + path, answer)

    posts: list[tuple[str, Handler]] = [
        ("/v1/chat/completions", openai.chat_reply),
        ("/v1/completions", completions.completion_reply),
        ("/v1/responses", openai.responses_reply),
        *more.items(),
    ]
    for prefix in ("/v1", "/v1/v1"):  # Anthropic's clients add /v1 to a URL that has it already
        posts += [
            (f"{prefix}/messages", anthropic.messages_reply),
            (f"{prefix}/messages/count_tokens", anthropic.count_reply),
        ]
    for path, handler in posts:
        route("POST", path, handler)
    route("GET", "/v1/models", _models)
    route("GET", "/v1/models/{model}", _model)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        text = endpoint.metrics.text(len(endpoint.sessions), endpoint.branches)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def nowhere(request: web.Request) -> web.Response:
        there = {resource.canonical for resource in app.router.resources()}
        hint = "; the base URL ends in /v1" if "/v1" + re.sub("^/s/[^/]+", "", request.path) in there else ""
        error = ApiError(404, f"there is no {request.method} {request.path}{hint}", code="unknown_url")
        endpoint.metrics.ended("unknown", 404, 0.0)
        return _failed(error, "/messages" in request.path)

    async def by_websocket(_: web.Request) -> web.Response:
        """Codex tries this first, and posts at once where it reads this status."""
        return _failed(ApiError(426, "responses do not come over WebSockets here; POST the request"), anthropic=False)

    for prefix in ("", "/s/{session}"):
        app.router.add_get(f"{prefix}/v1/responses", by_websocket)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{anywhere:.*}", nowhere)
    return app


async def _answered(endpoint: Endpoint, path: str, handler: Handler, request: web.Request) -> web.StreamResponse:
    """Take one request through."""
    start, metrics = asyncio.get_running_loop().time(), endpoint.metrics
    anthropic = "/messages" in path
    status, admitted = 499, False
    try:
        endpoint.check_origin(request.headers.get("Origin"))
        session = endpoint.admitted(
            _key(request), request.match_info.get("session") or request.headers.get("X-Session-Id")
        )
        metrics.in_flight += 1
        admitted = True
        body = parsed(await _body(request)) if request.method == "POST" else Fields({})
        response = await handler(Call(request, endpoint, session, body, anthropic))
        status = response.status
        return response
    except ConnectionResetError:  # the client left while it was written to
        raise
    except Exception as error:
        failure = client_error(error, path)
        status = failure.status
        return _failed(failure, anthropic)
    finally:
        metrics.in_flight -= admitted
        metrics.ended(path, status, asyncio.get_running_loop().time() - start)


def _failed(error: ApiError, anthropic: bool) -> web.Response:
    body = error.body(anthropic=anthropic)
    return web.Response(status=error.status, body=dumped(body), content_type="application/json", headers=error.headers)


def _key(request: web.Request) -> str | None:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("X-Api-Key")


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        most = request.app._client_max_size / 2**20
        message = f"the body is longer than {most:g} MiB (agent.endpoint.max_body_mb)"
        raise ApiError(413, message, code="request_too_large") from None
    except web.HTTPException as error:
        raise ApiError(400, f"the body cannot be read: {error.reason}", code="invalid_body") from None


def _described(call: Call, name: str) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": call.created, "owned_by": "rlinf"}
    return {**model, "type": "model", "display_name": name, "created_at": "2026-01-01T00:00:00Z"}


async def _models(call: Call) -> web.StreamResponse:
    listed = [_described(call, name) for name in call.endpoint.models()]
    return call.json({"object": "list", "data": listed, "has_more": False, "first_id": None, "last_id": None})


async def _model(call: Call) -> web.StreamResponse:
    name = call.request.match_info["model"]
    call.endpoint.check_model(name)
    return call.json(_described(call, name))
