"""The engine in this process: a Hugging Face causal language model and our own decode loop.

Consumes requests, gathered into batches. Produces completions as they end. The blocking steps run in whatever thread
`compute` offers, a few tokens at a time: between two chunks finished answers are handed out and new weights slip in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

from transformers import PreTrainedModel

from rlinf.data.iterate import each
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Request
from rlinf.engines.decoding import Decoding
from rlinf.engines.forward import ModelForward
from rlinf.engines.lean import fastest

Compute = Callable[..., Awaitable[Any]]
"""`await compute(fn, *args)` runs blocking work somewhere and gives its result."""

_CHUNK = 4
"""Tokens per row between two looks at the event loop. Handing over to the compute thread costs about 0.1 ms, a decode
step 1 ms or more; so the cost stays within a few per cent and a finished answer waits for three steps at most."""


class TransformersEngine:
    """An `Engine` around a model in this process.

    Args:
        model: the model, in place on its device; the engine owns its weights from now on.
        compute: where blocking work runs; an actor passes its own `compute`. Default: a thread of the event loop's.
        max_rows: answers decoded together.
        version: of the weights the model has now.

    Raises:
        ValueError: the model's attention is not of the plain kind that this engine decodes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute: Compute = asyncio.to_thread,
        max_rows: int = 128,
        version: int = 0,
    ):
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self._compute = compute
        self._forward: ModelForward = fastest(model.eval(), version)

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._forward.version

    async def generate(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Completion, None]:
        """Answer requests, `max_rows` at a time; yields each answer as soon as it is finished.

        A batch starts when `max_rows` requests have come or no more will.

        Raises:
            ValueError: a request has an empty prompt.
        """
        batch: list[Request] = []
        async for request in each(requests):
            if len(request.prompt_ids) == 0:
                raise ValueError(f"request {request.id} has an empty prompt: there is nothing to continue")
            batch.append(request)
            if len(batch) == self.max_rows:
                async for completion in self._decode(batch):
                    yield completion
                batch = []
        if batch:
            async for completion in self._decode(batch):
                yield completion

    async def _decode(self, requests: list[Request]) -> AsyncGenerator[Completion, None]:
        decoding = Decoding(self._forward, requests)
        while not decoding.done:
            for completion in await self._compute(decoding.advance, _CHUNK):
                yield completion

    async def load(self, weights: Weights) -> None:
        """Switch to other weights, between two chunks of whatever is being decoded.

        Raises:
            ValueError: names or shapes differ from the model's; then nothing has changed.
        """
        await self._compute(self._forward.load, weights)
