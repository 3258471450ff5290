"""Carries connections to a port of its loopback on to a Unix socket. Runs as a program in a container, without ours.

In: the socket's path. Out: the port, printed once it listens; then it goes on in the background.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys


async def _copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while part := await source.read(1 << 16):
            target.write(part)
            await target.drain()
        target.write_eof()
    except OSError:
        target.transport.abort()


async def _serve(listening: socket.socket, path: str) -> None:
    async def connected(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        try:
            far, to_far = await asyncio.open_unix_connection(path)
        except OSError:
            to_near.transport.abort()
            return
        await asyncio.gather(_copied(near, to_far), _copied(far, to_near))
        to_near.close()
        to_far.close()

    server = await asyncio.start_server(connected, sock=listening)
    await server.serve_forever()


def main(path: str) -> None:
    """Listen, say where, and serve in the background."""
    listening = socket.create_server(("127.0.0.1", 0))
    os.write(1, b"%d" % listening.getsockname()[1])
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    asyncio.run(_serve(listening, path))


if __name__ == "__main__":
    main(sys.argv[1])
