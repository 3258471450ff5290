"""HTTP server of the page of runs: access checks, routes, and listening until somebody has seen enough.

In: directories, where to listen. Out: a printed address with its token; the page, JSON, videos, and a stream of events.
Who wakes whom: a tick each second, while somebody looks, has files read; what they and feeds tell wakes the streams.
SIGINT and SIGTERM end the server; below a job, so does the job's end, some time later.

    GET  /                            the page
    GET  /api/runs                    the runs: id, name, directory, status, step, steps
    GET  /api/runs/ID/state           all that the page shows of a run
    GET  /api/runs/ID/lanes           what each actor did in an early, a middle and a late step
    GET  /api/runs/ID/answers?step=N  the answers of a step
    GET  /api/runs/ID/video/NAME      a video
    GET  /api/events?runs=ID,ID       what happens, as server-sent events
    POST /api/runs/ID/do              {"what": "checkpoint" | "evaluate" | "pause" | "go_on" | "stop"}

Answers of a model are on the page, and its buttons end a run, so three kinds of strangers are kept out, each with a
word why: other users of the machine (by a token), pages of other sites in the user's browser (by where a request comes
from), and sites whose name leads to this machine (by the name in the request).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlinf.config.reading import parse_json
from rlinf.dashboard import runs
from rlinf.dashboard.events import CONTROLS, ClientQueue, NoFeed, TooSlow, job_of, known_steps
from rlinf.dashboard.report import live_page
from rlinf.dashboard.runs import RunList, RunTail

logger = logging.getLogger(__name__)

HEADER = "X-Rlinf"
"""Header of requests that do something: no form and no picture of another site can carry it."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer, unless it has its own."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """Lets those in who have the token.

    Args:
        host: name or address under which this listens.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_urlsafe(24)
        """Whoever has it may see and do all."""
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    def check(self, request: web.Request) -> None:
        """Let a request pass.

        Raises:
            web.HTTPForbidden: it may not.
        """
        if not self._is_ours(request.host):
            raise _forbidden(f"this page does not go by the name {_name(request.host)!r}")
        if not self._knows(request.cookies.get(_cookie(request.host), "")):
            raise _forbidden(
                "open the address that `rlinf watch` has printed: it has the token without which this is closed"
            )
        if request.method not in ("GET", "HEAD") and not _from_here(request):
            raise _forbidden("this request does not come from the page")

    def enter(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to who comes with the token in the address: a cookie, and the way on to an address without it;
        None if there is none in it.

        Raises:
            web.HTTPForbidden: it is a wrong one.
        """
        if (token := request.query.get("token")) is None:
            return None
        if not self._is_ours(request.host) or not self._knows(token):
            raise _forbidden("this is not the token: open the newest address that `rlinf watch` has printed")
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # By a link of another page: browsers give a strict cookie to what comes from our own pages alone.
            on: web.StreamResponse = web.Response(
                text='<!doctype html><meta http-equiv="refresh" content="0;url=/"><a href="/">on</a>',
                content_type="text/html",
                headers={"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"},  # a sandbox stays
            )
        else:
            on = web.Response(status=303, headers={"Location": "/"})
        on.set_cookie(_cookie(request.host), self.token, httponly=True, samesite="Strict", path="/")
        return on

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(
            token.encode(errors="replace"), self.token.encode()
        )  # bytes of no UTF-8 come as surrogates

    def _is_ours(self, host: str) -> bool:
        """True if a request means this machine: by a name of it, or by an address, which no site can have as its
        name."""
        name = _name(host)
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


@web.middleware
async def in_words(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal is a sentence; as JSON where programs ask."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        return _text(request, (refusal.text or refusal.reason).strip(), refusal.status)
    except (OSError, ValueError) as error:  # files that are damaged, or that cannot be read for now
        logger.warning("%s: %s", request.path, error)
        return _text(request, str(error), web.HTTPInternalServerError.status_code)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer says that it is for this page alone, and is what its type says."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _text(request: web.Request, text: str, status: int) -> web.Response:
    if request.path.startswith("/api/"):
        return web.json_response({"said": text}, status=status)
    return web.Response(text=f"{text}\n", status=status)


def _from_here(request: web.Request) -> bool:
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
    if HEADER not in request.headers or site not in (None, "same-origin"):
        return False
    return origin is None or urlsplit(origin).netloc.lower() == request.host.lower()


def _name(host: str) -> str:
    """A host without its port: `localhost:1`, `127.0.0.1`, `[::1]:1`."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _cookie(host: str) -> str:
    """The cookie's name, by the port at which the browser has the page: browsers keep cookies by host, whatever the
    port, and behind `ssh -L` two machines' pages may have one port there and another here."""
    try:
        return f"rlinf-watch-{urlsplit(f'//{host}').port or 80}"
    except ValueError:  # no port has such a number
        return "rlinf-watch"


def _forbidden(text: str) -> web.HTTPForbidden:
    return web.HTTPForbidden(text=text)


_ALIVE = 15.0
"""Seconds of silence after which a stream says that it is there, or finds out that the page is not."""
_MOST_BODY = 4096
"""Bytes of a request: none has more than a word in it."""
_PLAYED = {".mp4": "video/mp4", ".webm": "video/webm", ".webp": "image/webp", ".gif": "image/gif", ".png": "image/png"}
"""Files that are sent from a run's directory of videos, and as what."""


def application(run_list: RunList, guard: Guard) -> web.Application:
    """The server.

    Args:
        run_list: the runs.
        guard: who may see them.
    """
    app = web.Application(middlewares=[in_words, _guarded(guard)], client_max_size=_MOST_BODY)
    app.on_response_prepare.append(add_headers)
    routes = _Routes(run_list)
    app.router.add_get("/", routes.page)
    app.router.add_get("/api/runs", routes.runs)
    app.router.add_get("/api/events", routes.events)
    for what in ("state", "answers", "lanes"):
        app.router.add_get(f"/api/runs/{{run}}/{what}", getattr(routes, what))
    app.router.add_get("/api/runs/{run}/video/{name:.+}", routes.video)
    app.router.add_post("/api/runs/{run}/do", routes.do)

    async def ticking(app: web.Application) -> AsyncIterator[None]:
        async with run_list.followed():
            yield

    app.cleanup_ctx.append(ticking)
    return app


class _Routes:
    def __init__(self, run_list: RunList) -> None:
        self._run_list = run_list

    async def page(self, request: web.Request) -> web.Response:
        html, policy = await asyncio.to_thread(live_page)
        return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def runs(self, request: web.Request) -> web.Response:
        return web.json_response(await self._run_list.listed())

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
        runs = [self._tail(name) for name in dict.fromkeys(names)]
        if (last_id := request.headers.get("Last-Event-ID")) is not None:
            since = known_steps(last_id)
        else:
            steps = request.query.get("since", "").split(",")
            since = known_steps(",".join(f"{name}:{step}" for name, step in zip(names, steps, strict=False)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        client_queue = ClientQueue(since)
        async with self._run_list.showing(runs, client_queue):
            with contextlib.suppress(TooSlow, ConnectionError):
                while True:
                    try:
                        async with asyncio.timeout(_ALIVE):
                            event = await client_queue.next()
                    except TimeoutError:
                        event = ": here\n\n"
                    await response.write(event.encode())
        return response

    def _run(self, request: web.Request) -> RunTail:
        return self._tail(request.match_info["run"])

    def _tail(self, name: str) -> RunTail:
        if (run := self._run_list.runs.get(name)) is None:
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


PORT = 8265
"""Where it listens unless told otherwise, or another watcher does."""
LINGER = 600.0
"""Seconds for which the page of a job stays after the job's end: whoever was looking looks on."""
_GOODBYE = 1.0
"""Seconds for requests that are under way at the end."""


class CannotListen(Exception):
    """The address is not to be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Where:
    """How a page is offered."""

    host: str = "127.0.0.1"
    """Name or address to listen at."""
    port: int | None = None
    """0 for any that is free; None for `PORT`, or any if that is taken."""
    browser: bool = False
    """Open it in a browser here."""
    until_ended: bool = False
    """End `LINGER` after the first directory's job."""


async def serve(named: Sequence[Path], where: Where, say: Callable[[str], None]) -> None:
    """Show runs until SIGINT or SIGTERM.

    Args:
        named: their directories, or directories of them.
        where: to listen.
        say: told what to print, a line at a time.

    Raises:
        CannotListen: the address is not to be had.
    """
    where = replace(where, host=where.host.strip("[]"))  # IPv6, as URLs have it
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    listening = _listen(where)
    port = listening.getsockname()[1]
    guard = Guard(where.host)
    runner = runner_of(RunList(named), guard)
    try:
        await runner.setup()
        await web.SockSite(runner, listening).start()
        address = _address(where.host, port, guard.token)
        say(address)
        if not where.until_ended:
            for line in _advice(where.host, port):
                say(line)
        if where.browser and not await asyncio.to_thread(_open, address):
            say("no browser can be opened here: open the address above in one")
        await (_job_over(named[0], over) if where.until_ended else over.wait())
    finally:
        await runner.cleanup()
        listening.close()


def runner_of(run_list: RunList, guard: Guard) -> web.AppRunner:
    """The server of a page, before it listens."""
    return web.AppRunner(
        application(run_list, guard),
        access_log=None,
        logger=_own_logger(),
        handler_cancellation=True,
        shutdown_timeout=_GOODBYE,
    )


def _own_logger() -> logging.Logger:
    """aiohttp's lines, but for requests that are no HTTP: a port scan or TLS on the port is nothing to tell a reader,
    and each would be a traceback in the terminal."""
    own = logging.getLogger(__name__)
    own.addFilter(_is_no_stranger)  # adding it again changes nothing
    return own


def _is_no_stranger(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _listen(where: Where) -> socket.socket:
    wanted = [PORT, 0] if where.port is None else [where.port]
    for port in wanted:
        try:
            return socket.create_server((where.host, port), family=_family(where.host))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port != wanted[-1]:
                continue
            why = os.strerror(error.errno) if error.errno else str(error)
            raise CannotListen(f"--host {where.host} --port {port}: {why}") from None
    raise AssertionError("the last port is tried or refused")


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError):
        raise CannotListen(f"--host {host}: this is no name or address of a machine") from None


def _address(host: str, port: int, token: str) -> str:
    named = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{named}]' if ':' in named else named}:{port}/?token={token}"


def _advice(host: str, port: int) -> list[str]:
    if host not in ("127.0.0.1", "::1", "localhost"):
        return [f"--host {host}: whoever reads along on the network sees the token and all else; prefer ssh -L"]
    if "SSH_CONNECTION" in os.environ:
        return [
            f"from your own machine: ssh -L {port}:{host}:{port} {socket.gethostname()}, then open that address there"
        ]
    return []


def _open(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


async def _job_over(directory: Path, over: asyncio.Event) -> None:
    """Wait for the end of a run's job and as long as the page stays then; no longer than until told to end."""
    parent, began = os.getppid(), False
    while not over.is_set():
        job, lives = await asyncio.to_thread(_job, directory)
        began |= job
        if os.getppid() != parent or (began and not lives):
            break
        await _sleep(over, runs.TICK)
    await _sleep(over, LINGER)


def _job(directory: Path) -> tuple[bool, bool]:
    """Return two flags: a job says that it writes to a run directory; that job is alive."""
    job = job_of(directory)
    return job is not None, job is not None and job.lives


async def _sleep(over: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
