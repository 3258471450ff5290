"""The smallest back end: a whole model in each process, which computes every micro-batch of the batch by itself.

Shows what a back end must do, and stands for those whose ranks are parts of one model: all of its ranks have the same
share of the data. Nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed
from rlinf.models.language.build import ModelSpec, build_module, place
from rlinf.models.language.lora import POLICY, merged_named_parameters, using
from rlinf.models.language.policy_model import HEAD
from rlinf.training.backend import HostCopy, Loss, Outputs, Ranks
from rlinf.training.checkpoint import STATE, Restored, Source, StateCopy, copy_state, held, load_state
from rlinf.training.export import MODEL, copy_model


class PlainOptimization:
    """AdamW at a constant learning rate."""

    def __init__(self, module: Any, settings: LearningSettings):
        self._module, self._clip, self._lr = module, settings.grad_clip, settings.lr
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trained, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self._sum: LossSum | None = None

    def begin(self) -> None:
        self.optimizer.zero_grad()
        self._sum = None

    def accumulate(self, batches: Sequence[Packed], loss: Loss, *, entropy_slope: bool = False) -> None:
        kept = []
        for batch in batches:  # all forward passes before the first backward pass, as a pipeline might
            asked = {"entropy_slope": True} if entropy_slope else {}
            kept.append(loss(batch, self._module(batch, **asked)))
        for found in reversed(kept):
            found.total.backward()
            self._sum = found.detach() if self._sum is None else self._sum + found.detach()

    def step(self) -> tuple[LossSum, dict[str, float]]:
        found = self._sum
        if found is None or not float(found.weight):
            self.begin()
            raise ValueError("there is nothing to learn from")
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        for gradient in gradients:
            gradient /= float(found.weight)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        if not math.isfinite(norm) or not math.isfinite(float(found.mean())):
            self.begin()
            raise FloatingPointError(f"loss {float(found.mean())} and gradient norm {norm} are not both finite")
        torch.nn.utils.clip_grad_norm_(self._trained, self._clip)
        self.optimizer.step()
        self.begin()
        return found, {"loss": float(found.mean()), "grad_norm": norm, "lr": self._lr}

    def pass_over(self, count: int) -> None:
        """Nothing: the learning rate is constant."""


class PlainBackEnd:
    """See `BackEnd`."""

    def __init__(self, module: Any, ranks: Ranks):
        self.module = module
        self.data_ranks = [0] * ranks.world_size
        self.copies_of_ranks = [range(ranks.world_size)]
        self._rank, self._ranks = ranks.rank, ranks.world_size

    @classmethod
    async def make(cls, ranks: Ranks, spec: ModelSpec, tokenizer: Any) -> Self:
        return cls(cls.build(spec, tokenizer, ranks.device), ranks)

    @classmethod
    def build(cls, *given: Any) -> Any:
        return build_module(*given)

    def optimization(self, settings: LearningSettings) -> PlainOptimization:
        return PlainOptimization(self.module, settings)

    @torch.no_grad()
    def outputs(self, batch: Packed, *, adapter: str | None = POLICY) -> Outputs:
        with using(self.module, adapter):
            return self.module(batch)

    @torch.no_grad()
    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in merged_named_parameters(self.module.model):
            yield name, tensor.detach() if dtype is None else tensor.detach().to(dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._layers()}

    def take(self, named: Mapping[str, Tensor]) -> None:
        for name, parameter in self._layers():
            place(parameter, named[name])

    def _layers(self) -> Iterator[tuple[str, Any]]:
        return ((name, each) for name, each in self.module.model.named_parameters() if not name.startswith(HEAD))

    def copies(self, optimization: Any, version: int, extra: Any, tokenizer: Any) -> Mapping[str, HostCopy]:
        state = self.state(optimization, version, extra)
        whole = copy_model(self.module.model, tokenizer, lead=True) if self._rank == 0 else None
        return {STATE: state} if whole is None else {STATE: state, MODEL: whole}

    def state(self, optimization: Any, version: int, extra: Any) -> StateCopy:
        return copy_state(
            self.module.model, optimization.optimizer, None, version,
            rank=self._rank, ranks=self._ranks, extra=extra, first_copy=self._rank == 0,
        )  # fmt: skip

    def restore(self, optimization: Any, source: Path | Source) -> Restored:
        return load_state(self.module.model, optimization.optimizer, None, source, rank=self._rank)

    def held(self, *optimizations: Any) -> Iterator[Tensor]:
        return held(self.module, *(each.optimizer for each in optimizations))
