"""One request as the protocols see it: it asks the model, and answers by an object or by a stream of events.

In: a body that was read, and whose it is. Out: what the model says, recorded as its session's. Who wakes whom: the
model's answers wake requests; a client that leaves cancels its request, and with it what it asked the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aiohttp import web

from rlinf.agents.endpoint.endpoint import Endpoint, EndpointSession
from rlinf.agents.endpoint.requests import (
    ApiError,
    ClientAnswer,
    Fields,
    ModelRequest,
    ask,
    enforced,
    invalid,
    refused,
    template_of,
)
from rlinf.agents.endpoint.streaming import Live, Piece
from rlinf.runtime.base.tasks import cancel_all, in_thread

logger = logging.getLogger(__name__)
_ALIVE = 10.0
"""Seconds after which a client that waits for a stream is told that it still comes."""
_SERVER_FAILED = "the model failed to answer; the log of the run says why"


class Events(Protocol):
    """Answers as the events of a protocol's stream; it remembers how far it is."""

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Tell further words of an answer: its reasoning first, and then its text."""

    def end(self, results: list[ClientAnswer]) -> Iterable[bytes]:
        """Tell what is left of whole answers, of which all words were told."""


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
    """Id of the response, without its prefix."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    streamed: bool = False
    """The answer is a stream of events."""
    live: Live | None = None
    """The answers while they come, of such a stream."""

    async def answers(
        self, request: ModelRequest, response: str, *, keep: list[dict[str, Any]] | None = None, first: int = 0
    ) -> list[ClientAnswer]:
        """Ask the model and return its answers.

        Args:
            request: to what.
            response: id of the response.
            keep: messages that a later request goes on from by that id; None: none may.
            first: number of the first of these answers among those of the response.

        Raises:
            ApiError, UserError, Exception: it cannot answer.
        """
        endpoint, session, form = self.endpoint, self.session, request.form
        if form is not None and (why := await form.impossible(endpoint.applying)) is not None:
            raise invalid(form.param, f"{form.param}: {why}")
        if session is None:
            any_session = next(iter(endpoint.sessions.values()), None)
            format = None if any_session is None else template_of(any_session.llm, request)
            session = self.session = endpoint.conversation(
                request.messages_with_instruction() if request.messages else [], format
            )
        request = await enforced(session.llm, request, self.body)
        endpoint.unheeded(session, self.body.unheeded)
        how: dict[str, Any] = {"thinks": endpoint.thinks(session.llm), "live": self.live}
        asking = [
            asyncio.ensure_future(ask(session.llm, one, endpoint.applying, number=number, **how))
            for number, one in enumerate(_each(request), first)
        ]
        session.asking.update(asking)
        try:
            results = [await one for one in asking]
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
        whole = [] if keep is None else [*keep, results[0].message]
        endpoint.noted(session, response, results, whole)
        metrics = endpoint.metrics
        metrics.prompt_tokens += results[0].prompt_tokens
        metrics.cached += results[0].cached
        metrics.generated += sum(len(each.reply.ids) for each in results)
        metrics.malformed += sum(each.refusal is not None for each in results)
        metrics.asked_again += sum(each.again for each in results)
        return results

    def model(self) -> str:
        """Return the name of the model that is asked for, and read whether the answer is to be a stream.

        Raises:
            ApiError: it is missing.
        """
        self.streamed = self.body.flag("stream")
        return str(self.body.wanted("model", self.body.text("model")))

    def accept(self, model: str) -> None:
        """See that there is the model; note the fields of the request that nobody has asked for.

        Raises:
            ApiError: 404.
        """
        self.body.done()
        self.endpoint.check_model(model)

    async def reply(
        self,
        answering: Callable[[], Awaitable[list[ClientAnswer]]],
        whole: Callable[[list[ClientAnswer]], Any],
        events: Events,
        ping: bytes = b": alive\n\n",
    ) -> web.StreamResponse:
        """A response of one object, or of a stream where the request wishes for one.

        Args:
            answering: asks the model.
            whole: makes the object of its answers.
            events: what becomes of them in a stream.
            ping: says in a stream that the answer still comes.
        """
        if self.streamed:
            return await self._stream(answering, events, ping)
        return self.json(whole(await answering()))

    def json(self, value: Any) -> web.Response:
        """A response of one object."""
        return web.Response(body=dumped(value), content_type="application/json")

    async def long_json(self, value: Callable[[], Any]) -> web.Response:
        """A response of one object, which is so large that it is made in a thread."""
        return web.Response(body=await in_thread(lambda: dumped(value())), content_type="application/json")

    async def _stream(
        self, answering: Callable[[], Awaitable[list[ClientAnswer]]], events: Events, ping: bytes
    ) -> web.StreamResponse:
        """A response of server-sent events. It begins with the first words, or after some seconds."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        live = self.live = Live(answering)
        try:
            while not live.task.done():
                parts = [b"".join(events.piece(piece)) for piece in live.take()] if await live.news(_ALIVE) else [ping]
                if live.task.done() and not response.prepared:
                    live.task.result()  # a mistake is still told by the status
                if parts:
                    await self._write(response, b"".join(parts))
            try:
                last = [b"".join(events.piece(piece)) for piece in live.rest()]
                last += events.end(live.task.result())
            except Exception as error:
                if not response.prepared:
                    raise
                failure = client_error(error, self.request.path).body(anthropic=self.anthropic)
                last = [event(failure, "error" if self.anthropic else None)]
            await self._write(response, b"".join(last))
            await response.write_eof()
        finally:
            await cancel_all([live.task])
            if live.waited is not None:
                self.endpoint.metrics.began(re.sub("^/s/[^/]+", "", self.request.path), live.waited)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if not response.prepared:
            await response.prepare(self.request)
        await response.write(data)


def _each(request: ModelRequest) -> list[ModelRequest]:
    """Repeat a request as often as it shall be answered; with a seed, each answer has one of its own."""
    seed = request.sampling.get("seed")
    if request.count == 1 or seed is None:
        return [request] * request.count
    return [replace(request, sampling={**request.sampling, "seed": seed + n}) for n in range(request.count)]


def client_error(error: Exception, path: str) -> ApiError:
    """Translate any exception to an error for the client."""
    if (failure := refused(error)) is not None:
        return failure
    logger.error("%s: the model failed", path, exc_info=error)
    return ApiError(500, _SERVER_FAILED, code="model_failed")


def dumped(value: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dumped(value) + b"\n\n"
