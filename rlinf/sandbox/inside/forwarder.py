"""Carries connections on to another address; in a container, those to a port of its loopback to a Unix socket.

In: an end of a connection and a way to the other one; as a program, the path of a socket. Out: the program prints its
port once it listens, and goes on in the background. No import of ours, and for older interpreters, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable
from typing import Tuple  # noqa: UP035 - see above

Ends = Tuple[asyncio.StreamReader, asyncio.StreamWriter]  # noqa: UP006


async def carry(near: Ends, connecting: Awaitable[Ends]) -> None:
    """Carry bytes both ways until both ends have said all, or one is gone, which the other then sees."""
    writers = [near[1]]
    try:
        far = await connecting
        writers.append(far[1])
        await asyncio.gather(_copied(near[0], far[1]), _copied(far[0], near[1]))
    except BaseException as error:
        for writer in writers:
            writer.transport.abort()
        if not isinstance(error, OSError):
            raise
    else:
        for writer in writers:
            writer.close()  # when what was written is sent


async def _copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while True:
        part = await source.read(1 << 16)
        if target.is_closing():
            return
        if not part:
            target.write_eof()
            return
        target.write(part)
        await target.drain()


def main(path: str) -> None:
    """Listen, say where, and carry on in the background."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    os.write(1, b"%d" % listening.getsockname()[1])
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)

    async def serve() -> None:
        async def connected(*near: object) -> None:
            await carry(near, asyncio.open_unix_connection(path))  # type: ignore[arg-type]

        server = await asyncio.start_server(connected, sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1])
