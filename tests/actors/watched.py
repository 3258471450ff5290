"""A trainer or a critic that shows what it learned, for programs that look into real ranks."""

from __future__ import annotations

from typing import Any

import torch

from rlinf import endpoint
from rlinf.actors.learning_actor import LearningActor
from rlinf.actors.lora import merged_named_parameters
from rlinf.actors.sharding import local


def whole(tensor: Any) -> torch.Tensor:
    """A tensor from all its slices."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Watched(LearningActor):
    """Keeps the gradients of every optimizer step, as the optimizer saw them."""

    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        self.seen: list[dict[str, torch.Tensor]] = []
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def look(optimizer: Any, *_: Any) -> None:
            parameters = optimizer.param_groups[0]["params"]
            self.seen.append({named[id(p)]: whole(p.grad) for p in parameters if p.grad is not None})

        self.optimizer.register_step_pre_hook(look)

    @endpoint(device=True, joint=True)
    async def inspect(self) -> dict[str, Any]:
        async def look(_: None) -> dict[str, Any]:
            return await self.compute(self._inspect)

        return await self.jointly(look)

    def _inspect(self) -> dict[str, Any]:
        named = {name: whole(tensor) for name, tensor in merged_named_parameters(self.model)}
        mine = sum(local(parameter).numel() for parameter in self.model.parameters())
        return {"gradients": self.seen, "weights": named, "slice": mine}
