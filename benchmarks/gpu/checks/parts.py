"""Parts of checks: engines and trainers as a program of one's own makes them, prompts, and batches.

An engine comes from `rlinf.engines.base.make`, a trainer is the back end of `trainer.backend` with one rank, both of
random models of full shape. Everything here is deterministic.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu.checks.device import emptied
from benchmarks.gpu.scale import Scale
from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed, Row
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.base import Completion, Engine, EngineSetup, Request, Sampling, make
from rlinf.models.language.build import ModelSpec, build_model
from rlinf.runtime.base.tasks import InThreads
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.backend import BackEnd, back_end_of

TOKENIZER = {"characters": "0123456789>"}
"""Tokenizer of every model here: tokens beyond its 14 are read and written all the same, and have no text."""
ENGINES_DTYPE = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

# Engines -------------------------------------------------------------------------------------------------------------


class Made:
    """An engine, the model in it, and how long its thread computed for how many decode steps at a time."""

    engine: Engine
    model: Any

    def __init__(self) -> None:
        self.stretches: list[tuple[float, float]] = []
        """Decode steps and their seconds, for each time that the engine asked for its thread and took steps there."""
        self._threads = InThreads()

    async def compute(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run blocking work of the engine, and note the steps that it took."""
        before = self.engine.stats if hasattr(self, "engine") else None
        result = await self._threads(fn, *args)
        if before is not None and (steps := self.engine.stats.steps - before.steps) > 0:
            self.stretches.append((steps, self.engine.stats.seconds - before.seconds))
        return result

    async def answers(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        found = {one.id: one async for one in self.engine.generate(requests)}
        return [found[request.id] for request in requests]


@contextlib.asynccontextmanager
async def engine(
    scale: Scale,
    *,
    max_rows: int,
    dtype: torch.dtype | None = None,
    args: dict[str, Any] | None = None,
    source: str | None = None,
    padding: tuple[int, ...] = (),
) -> AsyncIterator[Made]:
    """The transformers engine around the 1.5B model, closed at the end."""
    source, dtype = source or str(scale.model_dir("1.5B")), dtype or scale.dtype
    tokenizer, made = load_tokenizer(TOKENIZER), Made()

    @contextmanager
    def build() -> Iterator[Any]:
        made.model = build_model(source, tokenizer, dtype=dtype).to(scale.device)
        yield made.model

    setup = EngineSetup(
        "engine", source, build, tokenizer, dtype=dtype, max_rows=max_rows, padding=padding, compute=made.compute
    )
    async with ActorSystem.local():  # which makes the device ready
        made.engine = await make("transformers", setup, args)
        try:
            yield made
        finally:
            await made.engine.close()


def prompts(scale: Scale, lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Random tokens, int64 [length] each."""
    rng, vocabulary = np.random.default_rng(seed), scale.config("1.5B").vocab_size
    return [rng.integers(3, vocabulary, length) for length in lengths]


def requests(asked: Sequence[np.ndarray], new: int | Sequence[int], *, temperature: float = 1.0) -> list[Request]:
    """One request for each prompt; answers have exactly `new` tokens, since nothing ends them."""
    each = [new] * len(asked) if isinstance(new, int) else new
    return [
        Request(number, prompt, Sampling(length, temperature), seed=number)
        for number, (prompt, length) in enumerate(zip(asked, each, strict=True))
    ]


# Trainers ------------------------------------------------------------------------------------------------------------


class OneRank:
    """The ranks of a trainer that has one; see `rlinf.training.backend.Ranks`."""

    mesh = None
    rank, world_size, machines = 0, 1, ("here",)

    def __init__(self, device: torch.device):
        self.device = device

    async def mesh_of(self, ranks: Sequence[int], purpose: str, rows: int | None = None) -> DeviceMesh:
        """A mesh of this rank alone."""
        if not dist.is_initialized():
            kind = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (1,))

    async def compute(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Run it here and now."""
        return fn(*args)


@contextmanager
def trainer(scale: Scale, **settings: Any) -> Iterator[Any]:
    """A back end that trains the 1.5B model on one rank; `settings` are any of `LearningSettings`."""
    compute = LearningSettings(**{"dtype": ENGINES_DTYPE[scale.dtype], **settings})
    spec, tokenizer = ModelSpec(str(scale.model_dir("1.5B")), compute=compute), load_tokenizer(TOKENIZER)
    kind: type[BackEnd] = back_end_of("fsdp")

    async def made() -> BackEnd:
        async with ActorSystem.local():  # which makes the device ready
            return await kind.make(OneRank(scale.device), spec, tokenizer)  # type: ignore[arg-type]

    try:
        yield asyncio.run(made())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        emptied(scale.device)


def uncompiled(scale: Scale) -> None:
    """Compile nothing in this process, as trainers do by themselves on a GPU: that takes longer than all the rest of a
    check that is about something else."""
    if scale.device.type == "cuda":
        import torch._dynamo

        torch._dynamo.config.disable = True


def rows(scale: Scale, lengths: Sequence[tuple[int, int]], seed: int = 1) -> list[Row]:
    """Sequences of so many prompt and answer tokens, with advantages of either sign."""
    asked = prompts(scale, [prompt for prompt, _ in lengths], seed)
    answered = prompts(scale, [answer for _, answer in lengths], seed + 1)
    return [
        Row(prompt, answer, advantage=1.0 if number % 2 else -0.5)
        for number, (prompt, answer) in enumerate(zip(asked, answered, strict=True))
    ]


def policy_gradient(batch: Packed, outputs: tuple[Tensor, Tensor]) -> LossSum:
    """-advantage x log-prob, summed over learned tokens."""
    logprobs, _ = outputs
    weight = torch.tensor(float(len(batch.targets)), dtype=torch.float64, device=logprobs.device)
    return LossSum(-(batch.advantages * logprobs).sum(), weight)
