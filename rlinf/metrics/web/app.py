"""The addresses of the page: itself, what it shows, what happens, and what it asks a job to do.

In: requests. Out: the page, JSON, videos, and a stream of events. Who wakes whom: a tick each second, while somebody
looks, has files read; what they and feeds tell wakes the streams.

    GET  /                            the page
    GET  /api/runs                    the runs: id, name, directory, status, step, steps
    GET  /api/runs/ID/state           all that the page shows of a run
    GET  /api/runs/ID/lanes           what each actor did in an early, a middle and a late step
    GET  /api/runs/ID/answers?step=N  the answers of a step
    GET  /api/runs/ID/video/NAME      a video
    GET  /api/events?runs=ID,ID       what happens, as server-sent events
    POST /api/runs/ID/do              {"what": "checkpoint" | "evaluate" | "pause" | "go_on" | "stop"}
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from rlinf.config.reading import parse_json
from rlinf.metrics.html.document import live_page
from rlinf.metrics.web.feed import CONTROLS, NoFeed
from rlinf.metrics.web.followed import Followed
from rlinf.metrics.web.guard import Guard, Handler, add_headers, in_words
from rlinf.metrics.web.outbox import Outbox, TooSlow, known_steps
from rlinf.metrics.web.shelf import Shelf

_ALIVE = 15.0
"""Seconds of silence after which a stream says that it is there, or finds out that the page is not."""
_MOST_BODY = 4096
"""Bytes of a request: none has more than a word in it."""
_PLAYED = {".mp4": "video/mp4", ".webm": "video/webm", ".webp": "image/webp", ".gif": "image/gif", ".png": "image/png"}
"""Files that are sent from a run's directory of videos, and as what."""


def application(shelf: Shelf, guard: Guard) -> web.Application:
    """The server.

    Args:
        shelf: the runs.
        guard: who may see them.
    """
    app = web.Application(middlewares=[in_words, _guarded(guard)], client_max_size=_MOST_BODY)
    app.on_response_prepare.append(add_headers)
    routes = _Routes(shelf)
    app.router.add_get("/", routes.page)
    app.router.add_get("/api/runs", routes.runs)
    app.router.add_get("/api/events", routes.events)
    for what in ("state", "answers", "lanes"):
        app.router.add_get(f"/api/runs/{{run}}/{what}", getattr(routes, what))
    app.router.add_get("/api/runs/{run}/video/{name:.+}", routes.video)
    app.router.add_post("/api/runs/{run}/do", routes.do)

    async def ticking(app: web.Application) -> AsyncIterator[None]:
        async with shelf.followed():
            yield

    app.cleanup_ctx.append(ticking)
    return app


class _Routes:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def page(self, request: web.Request) -> web.Response:
        html, policy = await asyncio.to_thread(live_page)
        return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def runs(self, request: web.Request) -> web.Response:
        return web.json_response(await self._shelf.listed())

    async def state(self, request: web.Request) -> web.Response:
        return await _unpacked(request, await self._run(request).state())

    async def answers(self, request: web.Request) -> web.Response:
        step = request.query.get("step", "")
        if not step.isascii() or not step.isdigit() or len(step) > 15:
            raise web.HTTPBadRequest(text="step: give the number of a step, ?step=12")
        return web.json_response(await self._run(request).answers(int(step)))

    async def lanes(self, request: web.Request) -> web.Response:
        return await _unpacked(request, await self._run(request).lanes())

    async def video(self, request: web.Request) -> web.StreamResponse:
        path = await asyncio.to_thread(self._run(request).video, request.match_info["name"])
        kind = None if path is None else _PLAYED.get(path.suffix.lower())
        if path is None or kind is None:
            raise web.HTTPNotFound(text="there is no such video")
        return web.FileResponse(path, headers={"Content-Type": kind})

    async def do(self, request: web.Request) -> web.Response:
        run = self._run(request)
        try:
            what = parse_json(await request.text())["what"]
        except (ValueError, LookupError, TypeError):
            what = None
        if not isinstance(what, str) or what not in CONTROLS:
            raise web.HTTPBadRequest(text=f"what: give one of {', '.join(CONTROLS)}")
        try:
            answer = await run.ask(what)
        except NoFeed as error:
            raise web.HTTPConflict(text=str(error)) from None
        return web.json_response({"said": answer.get("said"), "ok": answer.get("ok")})

    async def events(self, request: web.Request) -> web.StreamResponse:
        names = [each for each in request.query.get("runs", "").split(",") if each]
        shown = [self._known(name) for name in dict.fromkeys(names)]
        if (known := request.headers.get("Last-Event-ID")) is not None:
            since = known_steps(known)
        else:
            steps = request.query.get("since", "").split(",")
            since = known_steps(",".join(f"{name}:{step}" for name, step in zip(names, steps, strict=False)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        outbox = Outbox(since)
        async with self._shelf.shown(shown, outbox):
            with contextlib.suppress(TooSlow, ConnectionError):
                while True:
                    try:
                        async with asyncio.timeout(_ALIVE):
                            event = await outbox.next()
                    except TimeoutError:
                        event = ": here\n\n"
                    await response.write(event.encode())
        return response

    def _run(self, request: web.Request) -> Followed:
        return self._known(request.match_info["run"])

    def _known(self, name: str) -> Followed:
        if (run := self._shelf.runs.get(name)) is None:
            raise web.HTTPNotFound(text="there is no such run here")
        return run


def _guarded(guard: Guard) -> Callable[..., Any]:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/" and (entered := guard.enter(request)) is not None:
            return entered
        guard.check(request)
        return await handler(request)

    return guarded


async def _unpacked(request: web.Request, packed: bytes) -> web.Response:
    """An answer of JSON that is kept compressed, for a browser that takes it so or not."""
    headers = {"Content-Encoding": "gzip"}
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        packed, headers = await asyncio.to_thread(gzip.decompress, packed), {}
    return web.Response(body=packed, content_type="application/json", charset="utf-8", headers=headers)
