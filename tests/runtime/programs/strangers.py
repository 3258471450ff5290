"""What strangers do to an open port: `strangers.py ADDRESS:PORT ...`, or `bother(address, port)`."""

import socket
import struct
import sys
import time

WAYS = {
    "garbage": b"GET / HTTP/1.0\r\n\r\n" * 20,
    "half a frame": struct.pack("<Q", 16) + b"abc",
    "an enormous frame": struct.pack("<Q", 1 << 60),
    "zeros": bytes(64),
    "nothing, and closes": b"",
    "nothing, and stays": None,
}


def bother(address: str, port: int, patience: float = 0.2) -> list[socket.socket]:
    """Connect in every way, as far as one is let in; returns the connections that stay."""
    staying = []
    for says in WAYS.values():
        stranger = socket.socket()
        stranger.settimeout(patience)
        try:
            stranger.connect((address, port))
            if says is None:
                staying.append(stranger)
                continue
            stranger.sendall(says)
        except OSError:
            pass
        stranger.close()
    return staying


if __name__ == "__main__":
    kept = [bother(address, int(port)) for address, _, port in (place.partition(":") for place in sys.argv[1:])]
    print("bothered", sum(map(len, kept)), flush=True)
    time.sleep(1.0)
