"""A wire with a length: copies every frame between two interfaces, some time later.

`wire.py SECONDS ONE OTHER`; before that `wire.py INTERFACE` on the machines at its ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import socket
import struct
import sys

SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
EVERY_PROTOCOL = 3
OUTGOING = 4
"""What a frame is marked with that this process itself, or another here, has sent."""


async def main(delay: float, one: str, other: str) -> None:
    loop = asyncio.get_running_loop()
    ends = []
    for interface in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
        end.bind((interface, 0))
        end.setblocking(False)
        ends.append(end)

    def carry(come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                frame, (_, _, kind, *_) = come.recvfrom(1 << 16)
                if kind != OUTGOING:
                    loop.call_later(delay, send, go, frame)

    def send(go: socket.socket, frame: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # a full interface loses frames, as in life
            go.send(frame)

    loop.add_reader(ends[0], carry, *ends)
    loop.add_reader(ends[1], carry, *reversed(ends))
    print("ready", flush=True)
    await asyncio.Event().wait()


def complete_frames(interface: str) -> None:
    """Have the kernel itself compute checksums and cut packets to size, which it leaves to a network card otherwise."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), ctypes.addressof(value)))


if len(sys.argv) == 2:
    complete_frames(sys.argv[1])
else:
    asyncio.run(main(float(sys.argv[1]), *sys.argv[2:]))
