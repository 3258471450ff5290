"""The engine of a job that has none of its own: what its pool asks of itself while others generate.

Flows in: weights, whose version it knows, and requests, which it checks. Flows out: nothing; it answers nobody, so a
request waits for an engine that joins. It holds no model and no device.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from typing import Any

from rlinf.data.weights import Weights
from rlinf.engines import ENGINES
from rlinf.engines.base import Completion, Engine, Request, RequestRefused

_OF_ITS_KIND = ("hands_over", "seeded")
"""Abilities of those who join, if their engine is one of `ENGINES`; of another nothing is known before it is there."""


class Absent(Engine):
    """No engine.

    Args:
        engine: that those who join make, as in `rollout.engine`.
        limits: attributes of `Engine` that bound what is asked.
    """

    through_host = True

    def __init__(self, engine: str, limits: Mapping[str, Any]) -> None:
        if engine in ENGINES:
            kind: type[Engine] = importlib.import_module(ENGINES[engine].rpartition(".")[0]).ENGINE
            for what in _OF_ITS_KIND:
                setattr(self, what, getattr(kind, what))
        for name, bound in limits.items():
            setattr(self, name, bound)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncGenerator[list[Completion], None]:
        """Answer nothing, and read nothing."""
        return
        yield []

    def check_request(self, request: Request) -> None:
        if request.images or request.adapter is not None:
            what = "shows pictures" if request.images else f"wants the adapters {request.adapter!r}"
            raise RequestRefused(
                f"request {request.id} {what}, which is for a job's own engine: set rollout.own_engine=true"
            )
        super().check_request(request)

    def form_problem(self, form: str) -> str | None:
        return "only a job's own engine keeps answers to a form, and it has none: set rollout.own_engine=true"

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        """Nothing is in flight here."""

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        return []

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        return []

    async def pause(self) -> None:
        """Nothing moves here."""

    async def resume(self) -> None:
        """Nothing moves here."""

    async def check(self, weights: Weights) -> None:
        """Take any; whether they fit, those know who use them."""

    async def load(self, weights: Weights) -> None:
        self._version = weights.version
