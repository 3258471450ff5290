"""An engine of ours whose answers have given lengths, most of them short and a few very long."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf.engines.base import Completion, Engine, EngineSetup, Request
from rlinf.engines.transformers.engine import build
from rlinf.runtime.streams.stream import each


async def tailed(setup: EngineSetup, *, short: int, long: int, share: float, **args: Any) -> Engine:
    """The engine `transformers`, whose answers end after so many tokens and not before.

    Args:
        setup: see `engines.make`.
        short: tokens of most answers, give or take a half.
        long: of the others.
        share: of those, from 0 to 1.
        args: of the engine.
    """
    engine = build(setup, **args)
    found: Engine = engine if isinstance(engine, Engine) else await engine
    plain = found.batches

    def given(request: Request) -> Request:
        drawn = np.random.default_rng(request.seed & 0xFFFFFFFF)
        length = long if drawn.random() < share else int(drawn.integers(short // 2, short + short // 2 + 1))
        return replace(request, sampling=replace(request.sampling, min_new_tokens=length, max_new_tokens=length))

    async def lengthened(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Request, None]:
        async for request in each(requests):
            yield given(request)

    def batches(
        requests: Iterable[Request] | AsyncIterable[Request],
    ) -> AsyncGenerator[list[Completion], None]:
        return plain(lengthened(requests))

    found.batches = batches  # type: ignore[method-assign]  # of this engine alone
    return found
