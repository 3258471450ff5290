"""Lines that a file has got since one looked last.

In: a file to which a run adds lines, which may be cut, replaced or removed. Out: blocks of whole lines, each once. Who
wakes whom: nobody; whoever watches the file calls `blocks` when it has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rlinf.config.reading import open_regular

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes read at once: far more than a line has, and little beside a run's memory."""
LONGEST = 1 << 26
"""Bytes of a line. A longer one is no row of a run, whose longest are conversations of some megabytes, and is left out:
a file without line ends must not fill memory."""
_MARK = 64
"""Bytes before the place reached that are compared, so that a file that was written anew is told from one that grew."""


class Appended:
    """A file that grows.

    Args:
        path: of it; it may come later.
        forget: called when the file no longer begins with what was read: it was cut, replaced or removed, as a run does
            that begins anew or goes on from a checkpoint. All of it is then read again.
    """

    def __init__(self, path: Path, forget: Callable[[], None] = lambda: None) -> None:
        self.path, self._forget = path, forget
        self._identity: tuple[int, int] | None = None
        self._offset, self._mark = 0, b""
        self._skipping = False  # in the midst of a line that is too long
        self.left_out = 0
        """Lines that were longer than `LONGEST`."""

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """What has been added since the last call: (offset in the file, whole lines).

        A last line without its end waits until that is written. Lines longer than `LONGEST` are left out.
        """
        try:
            file = open_regular(self.path, links=False)
        except OSError:
            self._anew()
            return
        with file:
            if not self._goes_on(file.fileno()):
                self._anew()
            longest = BLOCK
            while block := os.pread(file.fileno(), longest, self._offset):
                if self._skipping:
                    end = block.find(b"\n") + 1
                    self._skipping = not end
                    self._reached(block, end or len(block))
                    continue
                end = block.rfind(b"\n") + 1
                if end:
                    start, longest = self._offset, BLOCK
                    self._reached(block, end)
                    yield start, block[:end]
                elif len(block) >= LONGEST:
                    self._skip(block)
                    longest = BLOCK
                elif len(block) < longest:
                    return
                else:
                    longest = min(2 * longest, LONGEST)

    def _reached(self, block: bytes, end: int) -> None:
        """All before the place `end` of a block is done with."""
        self._offset += end
        self._mark = block[max(0, end - _MARK) : end]

    def _skip(self, block: bytes) -> None:
        """The line that begins with a block is too long."""
        self._skipping = True
        self.left_out += 1
        logger.warning("%s: a line of more than %d MB is left out: no run writes one", self.path, LONGEST >> 20)
        self._reached(block, len(block))

    def _goes_on(self, file: int) -> bool:
        """Whether an open file begins with what was read."""
        now = os.fstat(file)
        same, self._identity = self._identity in (None, (now.st_dev, now.st_ino)), (now.st_dev, now.st_ino)
        if not same or now.st_size < self._offset:
            return False
        return os.pread(file, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _anew(self) -> None:
        if self._offset:
            self._offset, self._mark = 0, b""
            self._skipping, self.left_out = False, 0
            self._forget()
