"""A service in a thread of this process: a program of the official client's runs by itself, without a second process.

with local_service("serve/tiny"):
    service = tinker.ServiceClient()
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from rlinf.agents.endpoint.endpoint import past_proxies
from rlinf.config.importing import shipped
from rlinf.runs.rules import load_config
from rlinf.service.serve import serving


@contextmanager
def local_service(config: str = "serve/tiny", *overrides: str) -> Iterator[tuple[str, str]]:
    """A service of this process's own, until the block ends; clients find it by TINKER_BASE_URL and TINKER_API_KEY.

    Args:
        config: a file, or the name of one that is shipped.
        overrides: of its keys, such as "model.path=DIRECTORY"; it listens on any free port unless they say otherwise.

    Yields:
        Its URL and its key.

    Raises:
        InputError: it cannot be served.
    """
    address: Future[tuple[str, str]] = Future()
    end: Future[None] = Future()

    async def serve() -> None:
        async with serving(load_config(shipped(config), ["serve.port=0", *overrides], 1), lambda line: None) as where:
            address.set_result(where)
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
            url, key = address.result()
            past_proxies("127.0.0.1")
            os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key)
            yield url, key
        finally:
            end.set_result(None)
        running.result()
