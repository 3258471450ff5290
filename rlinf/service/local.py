"""A service in a thread of this process: a program of the official client's runs by itself, without a second process.

with local_service("serve/tiny"):
    service = tinker.ServiceClient()                     # of `tinker`, or of `rlinf.service.client`
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from rlinf.agents.endpoint.endpoint import past_proxies
from rlinf.config.importing import shipped
from rlinf.runs.rules import load_config
from rlinf.runtime.base.errors import UserError
from rlinf.service.app import App
from rlinf.service.serve import serving

T = TypeVar("T")
_VARIABLES = ("TINKER_BASE_URL", "TINKER_API_KEY", "no_proxy", "NO_PROXY")
"""Variables by which clients find a service."""


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A service of this process."""

    app: App
    loop: asyncio.AbstractEventLoop
    """That it runs on, in a thread of its own."""
    every: ClassVar[list[Local]] = []
    """Those that are open, in the order of their beginning."""

    @staticmethod
    def newest() -> Local:
        """The one that was opened last.

        Raises:
            UserError: there is none.
        """
        if not Local.every:
            raise UserError("there is no service in this process: write `with local_service(…):` around the program")
        return Local.every[-1]

    def begun(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin with a call on its loop, behind those before.

        Raises:
            UserError: it has ended.
        """
        if self not in Local.every:
            call.close()
            raise UserError("the service of this process has ended, with the block of its local_service")
        return asyncio.run_coroutine_threadsafe(call, self.loop)


@contextmanager
def local_service(config: str = "serve/tiny", *overrides: str) -> Iterator[tuple[str, str]]:
    """A service of this process's own, until the block ends; clients find it by TINKER_BASE_URL and TINKER_API_KEY,
    which are set as long, and `rlinf.service.client` by itself.

    Args:
        config: a file, or the name of one that is shipped.
        overrides: of its keys, such as "model.path=DIRECTORY"; it listens on any free port unless they say otherwise.

    Yields:
        Its URL and its key.

    Raises:
        InputError: it cannot be served.
    """
    address: Future[tuple[str, str, Local]] = Future()
    end: Future[None] = Future()

    async def serve() -> None:
        settings = load_config(shipped(config), ["serve.port=0", *overrides], 1)
        async with serving(settings, lambda line: None) as (url, key, app):
            address.set_result((url, key, Local(app, asyncio.get_running_loop())))
            await asyncio.wrap_future(end)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if address.done():
                raise
            address.set_exception(error)  # raised by who waits for it

    with ThreadPoolExecutor(1, "service") as pool:
        running = pool.submit(run)
        try:
            url, key, local = address.result()
            with _variables():
                past_proxies("127.0.0.1")
                os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key)
                Local.every.append(local)
                try:
                    yield url, key
                finally:
                    Local.every.remove(local)
        finally:
            end.set_result(None)
        running.result()


@contextmanager
def _variables() -> Iterator[None]:
    """Have variables of this process afterwards as they were before."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
