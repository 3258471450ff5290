"""A trainer or a critic that shows what it learned, for programs that look into real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from rlinf import endpoint
from rlinf.actors.base.text_trainer import Place, TextTrainer
from rlinf.models.language.fsdp import local
from rlinf.models.language.load import ONE_AT_A_TIME
from rlinf.models.language.lora import merged_named_parameters
from rlinf.models.language.policy_model import PolicyModel

PRECISELY = 1e-9
"""How far two ways of learning in float64 may be apart, relative to what was learned. Sums are rounded at 1e-16; Adam's
step changes by lr / eps = 0.01 / 1e-8 times that at most, where the gradient is 0. Found are 1e-13; in float32 1e-4."""


def whole(tensor: Any) -> torch.Tensor:
    """A tensor from all its slices."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Watched(TextTrainer):
    """Keeps the gradients of every optimizer step, as the optimizer saw them.

    Args:
        precise: learn in float64. Adam divides a gradient by its own size, so where that is near 0, float32's rounding
            moves a weight by up to the learning rate, and no tolerance tells it from a mistake.
    """

    async def setup(self, precise: bool = False, **settings: Any) -> None:  # type: ignore[override]
        self._precise = precise
        await super().setup(**settings)
        self.seen: list[dict[str, torch.Tensor]] = []
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def look(optimizer: Any, *_: Any) -> None:
            parameters = optimizer.param_groups[0]["params"]
            self.seen.append({named[id(p)]: whole(p.grad) for p in parameters if p.grad is not None})

        self.optimizer.register_step_pre_hook(look)

    async def _make(self, build: Callable[[Place], nn.Module], **settings: Any) -> None:  # type: ignore[override]
        def precisely(place: Place) -> nn.Module:
            with ONE_AT_A_TIME, mock.patch.object(PolicyModel, "settle"):  # which runs it, when FSDP fixes its dtype
                module = build(place).double()
            for norm in module.modules():
                if hasattr(norm, "variance_epsilon"):  # of Llama and Qwen, whose own forward goes through float32
                    norm.forward = partial(_norm, norm)  # type: ignore[method-assign]
            cast(PolicyModel, module).settle()
            return module

        await super()._make(precisely if self._precise else build, **settings)

    @endpoint(device=True, joint=True)
    async def inspect(self) -> dict[str, Any]:
        async def look(_: None) -> dict[str, Any]:
            return await self.compute(self._inspect)

        return await self.jointly(look)

    def _inspect(self) -> dict[str, Any]:
        named = {name: whole(tensor) for name, tensor in merged_named_parameters(self.model)}
        mine = sum(local(parameter).numel() for parameter in self.model.parameters())
        return {"gradients": self.seen, "weights": named, "slice": mine}
