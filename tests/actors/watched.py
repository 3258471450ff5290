"""A trainer or a critic that shows what it learned, for programs that look into real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F

from rlinf import endpoint
from rlinf.actors.text_trainer import TextTrainer
from rlinf.models.language.build import ONE_AT_A_TIME
from rlinf.models.language.lora import merged_named_parameters
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.offload import shard_of
from rlinf.training.fsdp import FsdpBackEnd

N = TypeVar("N", bound=torch.nn.Module)
PRECISELY = 1e-9
"""How far two ways of learning in float64 may be apart, relative to what was learned. Sums are rounded at 1e-16; Adam's
step changes by lr / eps = 0.01 / 1e-8 times that at most, where the gradient is 0. Found are 1e-13; in float32 1e-4."""


def whole(tensor: Any) -> torch.Tensor:
    """A tensor from all its slices."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def in_double(net: N) -> N:
    """The same in float64."""
    for module in net.modules():
        if hasattr(module, "num_experts") and hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # products of groups know no float64
    for norm in net.double().modules():
        if hasattr(norm, "variance_epsilon"):  # of Llama and Qwen, whose own forward goes through float32
            norm.forward = partial(_norm, norm)  # type: ignore[method-assign]
    return net


def precisely(build: Callable[[], PolicyModel]) -> PolicyModel:
    """What `build` makes, in float64."""
    with ONE_AT_A_TIME, mock.patch.object(PolicyModel, "settle"):  # which runs it, when FSDP fixes its dtype
        module = in_double(build())
    module.settle()
    return module


class Precise(FsdpBackEnd):
    """Computes in float64."""

    @classmethod
    def build(cls, *settings: Any) -> PolicyModel:
        return precisely(partial(super().build, *settings))


class Watched(TextTrainer):
    """Keeps the gradients of every optimizer step, as the optimizer saw them.

    Args:
        precise: learn in float64. Adam divides a gradient by its own size, so where that is near 0, float32's rounding
            moves a weight by up to the learning rate, and no tolerance tells it from a mistake.
    """

    async def setup(self, precise: bool = False, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings, **({"backend": "tests.actors.watched.Precise"} if precise else {}))
        back: Any = self._back
        learner: Any = self._learner
        self.model = back.model
        self.seen: list[dict[str, torch.Tensor]] = []
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def look(optimizer: Any, *_: Any) -> None:
            parameters = optimizer.param_groups[0]["params"]
            self.seen.append({named[id(p)]: whole(p.grad) for p in parameters if p.grad is not None})

        learner.optimizer.register_step_pre_hook(look)

    @endpoint(device=True, joint=True)
    async def inspect(self) -> dict[str, Any]:
        async def look(_: None) -> dict[str, Any]:
            return await self.compute(self._inspect)

        return await self.run_spmd(look)

    def _inspect(self) -> dict[str, Any]:
        named = {name: whole(tensor) for name, tensor in merged_named_parameters(self.model)}
        mine = sum(shard_of(parameter).numel() for parameter in self.model.parameters())
        return {"gradients": self.seen, "weights": named, "slice": mine}
