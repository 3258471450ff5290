"""A terminal for tests."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import struct
import termios
import threading
from fcntl import ioctl


class Terminal:
    """A terminal of the kernel's own, whose other end is read all the time."""

    def __init__(self, columns=80, rows=24):
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.out = os.fdopen(theirs, "w", encoding="utf-8")
        self._read = bytearray()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while piece := os.read(self._ours, 65536):
                self._read += piece

    def so_far(self) -> str:
        return self._read.decode(errors="ignore")

    def text(self) -> str:
        self.out.close()
        self._thread.join(60)
        os.close(self._ours)
        return self._read.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
