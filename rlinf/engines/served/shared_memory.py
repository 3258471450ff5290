"""Weights into a server on the same machine by shared memory: one copy here, the server's own copy there.

Flows in: the buckets of `Weights`. Flows out: manifests, each a few kilobytes that say where a bucket lies, for
`far_side/rlinf_weights.py`, and its word about it. Nobody waits here: the caller copies in a thread.

The memory is a memfd, which has no name, so nothing is left behind however a process ends, and which the far side opens
through our entry in /proc. There are two of them by turns, so that a bucket is copied while the server reads the one
before it; each is as large as the largest bucket so far.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.data.weights import Weights
from rlinf.engines.served.far_side.rlinf_weights import STATUS


@dataclass(slots=True, eq=False)
class _Segment:
    """One memfd, mapped whole."""

    descriptor: int
    """Its file descriptor in this process."""
    memory: mmap.mmap
    """Its bytes."""


class SharedMemory:
    """Two pieces of shared memory, for buckets by turns."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}

    def copy(self, weights: Weights, number: int) -> str:
        """Copy bucket `number` into shared memory; returns its manifest, as JSON. Blocking."""
        bucket = weights.buckets[number]
        memory = self._room(number % 2, STATUS + bucket.nbytes)
        memory[:STATUS] = bytes(STATUS)
        torch.frombuffer(memory, dtype=bucket.dtype, count=bucket.numel(), offset=STATUS).copy_(bucket)
        manifest: dict[str, Any] = {
            "path": f"/proc/{os.getpid()}/fd/{self._segments[number % 2].descriptor}",
            "dtype": str(bucket.dtype).removeprefix("torch."),
            "elements": bucket.numel(),
            "checksum": weights.checksums[number],
            "slots": [(slot.name, slot.shape, slot.offset) for slot in weights.layout if slot.bucket == number],
        }
        return json.dumps(manifest)

    def word(self, number: int) -> str:
        """The far side's word about bucket `number`: "ok", an error in words, or nothing yet."""
        return bytes(self._segments[number % 2].memory[:STATUS]).rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        """Give the memory back."""
        for turn in list(self._segments):
            self._drop(turn)

    def _room(self, turn: int, size: int) -> mmap.mmap:
        segment = self._segments.get(turn)
        if segment is None or len(segment.memory) < size:
            self._drop(turn)
            descriptor = os.memfd_create("rlinf-weights")
            os.ftruncate(descriptor, size)
            segment = self._segments[turn] = _Segment(descriptor, mmap.mmap(descriptor, size))
        return segment.memory

    def _drop(self, turn: int) -> None:
        if (segment := self._segments.pop(turn, None)) is not None:
            os.close(segment.descriptor)  # the mapping goes with the last view of it
