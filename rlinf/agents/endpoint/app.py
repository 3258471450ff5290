"""The way of a request: whose it is, its limits, its body, its route, and what becomes of it.

In: HTTP requests. Out: responses, errors in the API's own form. Who wakes whom: the model's answers wake requests; a
client that leaves cancels its request, and with it what it asked the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from rlinf.agents.endpoint import anthropic as messages
from rlinf.agents.endpoint import openai
from rlinf.agents.endpoint.endpoint import Endpoint, EndpointSession
from rlinf.agents.endpoint.requests import (
    ApiError,
    Asked,
    Fields,
    Said,
    ask,
    invalid,
    message_of,
    parsed,
    refused,
    template_of,
)
from rlinf.runtime.base.tasks import cancel_all

logger = logging.getLogger(__name__)
_ALIVE = 10.0
"""Seconds after which a client that waits for a stream is told that it still comes."""
_SERVER_FAILED = "the model failed to answer; the log of the run says why"


@dataclass(slots=True)
class Call:
    """One request, as the protocols see it."""

    request: web.Request
    endpoint: Endpoint
    session: EndpointSession | None
    """Whose it is; None: what is said will tell."""
    body: Fields
    anthropic: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Of the response, without its prefix."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    async def answers(self, asked: Asked, response: str, *, keep: list[dict[str, Any]] | None = None) -> list[Said]:
        """What the model says.

        Args:
            asked: to what.
            response: id of the response.
            keep: messages that a later request goes on from by that id; None: none may.

        Raises:
            ApiError, UserError, Exception: it cannot answer.
        """
        endpoint, session, form = self.endpoint, self.session, asked.form
        if form is not None and (why := await form.impossible(endpoint.applying)) is not None:
            raise invalid(form.param, f"{form.param}: {why}")
        if session is None:
            known = next(iter(endpoint.sessions.values()), None)
            format = None if known is None else template_of(known.llm, asked)
            session = self.session = endpoint.conversation(asked.told() if asked.messages else [], format)
        endpoint.unheeded(session, self.body.unheeded)
        thinks = endpoint.thinks(session.llm)
        asking = [
            asyncio.ensure_future(ask(session.llm, one, endpoint.applying, thinks=thinks)) for one in _each(asked)
        ]
        session.asking.update(asking)
        try:
            said = [await one for one in asking]
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not session.over or (current is not None and current.cancelling()):
                raise
            raise ApiError(401, "the episode of this key is over", code="invalid_api_key") from None
        finally:
            await cancel_all(asking)
            session.asking.difference_update(asking)
        if session.over:
            raise ApiError(401, "the episode of this key is over", code="invalid_api_key")
        whole = [] if keep is None else [*keep, message_of(said[0].text, said[0].calls)]
        endpoint.noted(session, response, said, whole)
        metrics = endpoint.metrics
        metrics.read += said[0].read
        metrics.cached += said[0].cached
        metrics.generated += sum(len(each.reply.ids) for each in said)
        metrics.malformed += sum(each.refusal is not None for each in said)
        metrics.asked_again += sum(each.again for each in said)
        return said

    def json(self, value: Any) -> web.Response:
        """A response of one object."""
        return web.Response(body=dumped(value), content_type="application/json")

    async def stream(
        self,
        answers: Awaitable[list[Said]],
        events: Callable[[list[Said]], Iterable[bytes]],
        ping: bytes = b": alive\n\n",
    ) -> web.StreamResponse:
        """A response of server-sent events. It begins once the model has answered, or after some seconds.

        Args:
            answers: of the model.
            events: what they become.
            ping: says that the answer still comes.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        answering = asyncio.ensure_future(answers)
        try:
            await asyncio.wait([answering], timeout=_ALIVE)
            if answering.done():
                answering.result()  # a mistake is still told by the status
            await response.prepare(self.request)
            while not answering.done():
                await response.write(ping)
                await asyncio.wait([answering], timeout=_ALIVE)
            try:
                await response.write(b"".join(events(answering.result())))
            except Exception as error:
                told = _told(error, self.request.path).body(anthropic=self.anthropic)
                await response.write(event(told, "error" if self.anthropic else None))
            await response.write_eof()
        finally:
            await cancel_all([answering])
        return response


def _each(asked: Asked) -> list[Asked]:
    """The same question as often as it shall be answered; with a seed, each answer has one of its own."""
    seed = asked.sampling.get("seed")
    if asked.count == 1 or seed is None:
        return [asked] * asked.count
    return [replace(asked, sampling={**asked.sampling, "seed": seed + n}) for n in range(asked.count)]


def dumped(value: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dumped(value) + b"\n\n"


# Routes ---------------------------------------------------------------------------------------------------------------

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


def application(endpoint: Endpoint, more: Mapping[str, Handler]) -> web.Application:
    """All routes of an endpoint.

    Args:
        endpoint: it.
        more: paths of further POST requests, and who answers them.
    """
    made = web.Application(client_max_size=int(endpoint.config.max_body_mb * 2**20))

    def route(method: str, path: str, handler: Handler, *, prefixed: bool = True) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await _answered(endpoint, path, handler, request)

        for prefix in ("", "/s/{session}") if prefixed else ("",):
            made.router.add_route(method, prefix + path, answer)

    posts: list[tuple[str, Handler]] = [
        ("/v1/chat/completions", openai.chat_reply),
        ("/v1/completions", openai.completion_reply),
        ("/v1/responses", openai.responses_reply),
        *more.items(),
    ]
    for prefix in ("/v1", "/v1/v1"):  # Anthropic's clients add /v1 to a URL that has it already
        posts += [(f"{prefix}/messages", messages.answered), (f"{prefix}/messages/count_tokens", messages.counted)]
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
        there = {resource.canonical for resource in made.router.resources()}
        hint = "; the base URL ends in /v1" if "/v1" + re.sub("^/s/[^/]+", "", request.path) in there else ""
        error = ApiError(404, f"there is no {request.method} {request.path}{hint}", code="unknown_url")
        endpoint.metrics.ended("unknown", 404, 0.0)
        return _failed(error, "/messages" in request.path)

    async def by_websocket(_: web.Request) -> web.Response:
        """Codex tries this first, and posts at once where it reads this status."""
        return _failed(ApiError(426, "responses do not come over WebSockets here; POST the request"), anthropic=False)

    for prefix in ("", "/s/{session}"):
        made.router.add_get(f"{prefix}/v1/responses", by_websocket)
    made.router.add_get("/health", health)
    made.router.add_get("/metrics", metrics)
    made.router.add_route("*", "/{anywhere:.*}", nowhere)
    return made


async def _answered(endpoint: Endpoint, path: str, handler: Handler, request: web.Request) -> web.StreamResponse:
    """Take one request through."""
    begun, metrics = asyncio.get_running_loop().time(), endpoint.metrics
    anthropic = "/messages" in path
    status, counted = 499, False
    try:
        endpoint.check_origin(request.headers.get("Origin"))
        session = endpoint.admitted(
            _key(request), request.match_info.get("session") or request.headers.get("X-Session-Id")
        )
        metrics.in_flight += 1
        counted = True
        body = parsed(await _body(request)) if request.method == "POST" else Fields({})
        response = await handler(Call(request, endpoint, session, body, anthropic))
        status = response.status
        return response
    except ConnectionResetError:  # the client left while it was written to
        raise
    except Exception as error:
        told = _told(error, path)
        status = told.status
        return _failed(told, anthropic)
    finally:
        metrics.in_flight -= counted
        metrics.ended(path, status, asyncio.get_running_loop().time() - begun)


def _told(error: Exception, path: str) -> ApiError:
    """What a client is told of an exception."""
    if (known := refused(error)) is not None:
        return known
    logger.error("%s: the model failed", path, exc_info=error)
    return ApiError(500, _SERVER_FAILED, code="model_failed")


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
    shown = {"id": name, "object": "model", "created": call.created, "owned_by": "rlinf"}
    return {**shown, "type": "model", "display_name": name, "created_at": "2026-01-01T00:00:00Z"}


async def _models(call: Call) -> web.StreamResponse:
    listed = [_described(call, name) for name in call.endpoint.models()]
    return call.json({"object": "list", "data": listed, "has_more": False, "first_id": None, "last_id": None})


async def _model(call: Call) -> web.StreamResponse:
    name = call.request.match_info["model"]
    call.endpoint.check_model(name)
    return call.json(_described(call, name))
