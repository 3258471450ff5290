"""The job's view of one process that joined: whether it lives, and whether its weights are the newest.

Flows in: weights for it; what it sends. Flows out: those weights, and questions whether it is still there. Who wakes
whom: a timer asks; silence ends the connection, which tells whoever reads from it.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from rlinf.data.weights import Weights
from rlinf.joining.connection import Connection

SILENCE = 60.0
"""Seconds without a word after which one that joined counts as lost, as a host does (`system.host_timeout`)."""


class Peer:
    """One process that joined.

    Args:
        connection: to it.
        name: as it calls itself.
        silence: seconds without a word, in which it was asked for one, after which it counts as lost.
    """

    def __init__(self, connection: Connection, name: str, silence: float = SILENCE) -> None:
        self.connection, self.name = connection, f"{name} ({connection.peer})"
        self.version: int | None = None
        """Version of its weights; None: those that the model came with."""
        self.numbers = itertools.count(1)
        """Numbers of what it is asked."""
        self._published = self._loaded = 0
        self._publishing: Weights | None = None
        self._has: tuple[int, tuple[int, ...]] | None = None  # key of its weights, while no others are on their way
        self._silence, self._heard = silence, True
        self._timer = asyncio.get_running_loop().call_later(silence / 2, self._beat)

    @property
    def current(self) -> bool:
        """It has the newest weights."""
        return self._loaded == self._published

    def outdate(self) -> None:
        """There are newer weights, which are yet to be published: those that it has are not the newest any more."""
        self._published = next(self.numbers)

    def publish(self, weights: Weights) -> None:
        """Have it use these weights once they have come, whole, or as they differ from those that it has."""
        self.outdate()
        sent = weights if weights.lineage is None else weights.lineage.since(weights, self._has)
        self._publishing, self._has = weights, None
        self.connection.send_weights(self._published, sent)

    def heard(self, kind: str, *rest: Any) -> None:
        """Take note of a message."""
        self._heard = True
        if kind == "loaded":
            self._loaded = rest[0]
            if self.current and self._publishing is not None:
                self.version, self._has = self._publishing.version, self._publishing.key
                self._publishing = None

    def _beat(self) -> None:
        if not self._heard:
            self.connection.abandon()
            return
        self._heard = False
        self.connection.send("ping", 0, ())
        self._timer = asyncio.get_running_loop().call_later(self._silence / 2, self._beat)

    def over(self) -> None:
        """Ask it no more: it is gone."""
        self._timer.cancel()
