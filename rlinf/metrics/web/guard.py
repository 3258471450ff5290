"""Who may see the page and do something by it.

In: requests. Out: those that may pass; for the others a word why not. Answers of a model are on the page, and its
buttons end a run, so three kinds of strangers are kept out: other users of the machine (by a token), pages of other
sites in the user's browser (by where a request comes from), and sites whose name leads to this machine (by the name in
the request).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

logger = logging.getLogger(__name__)

HEADER = "X-Rlinf"
"""What requests that do something carry: no form and no picture of another site can."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer, unless it has its own."""
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
        """Whether a request means this machine: by a name of it, or by an address, which no site can have as its
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
        return _said(request, (refusal.text or refusal.reason).strip(), refusal.status)
    except (OSError, ValueError) as error:  # files that are damaged, or that cannot be read for now
        logger.warning("%s: %s", request.path, error)
        return _said(request, str(error), web.HTTPInternalServerError.status_code)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer says that it is for this page alone, and is what its type says."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


def _said(request: web.Request, said: str, status: int) -> web.Response:
    if request.path.startswith("/api/"):
        return web.json_response({"said": said}, status=status)
    return web.Response(text=f"{said}\n", status=status)


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


def _forbidden(said: str) -> web.HTTPForbidden:
    return web.HTTPForbidden(text=said)
