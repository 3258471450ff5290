"""An actor with a model on its device, which leaves the device while other roles have it.

In: work that reads or writes the model. Out: what the work returns; the model's bytes, to host memory and back. The
runtime calls `offload` and `onload` around device calls; nobody waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlinf.data.offload import Parking
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.gpu.own_device import own_device

R = TypeVar("R")


class ModelActor(Actor):
    """Base class of actors that have a model on the device of their process."""

    device: torch.device
    """Where the model is, unless it is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.device = own_device()
        self._parking = Parking(self._held)

    def _held(self) -> Iterable[Tensor]:
        """All tensors that `offload` moves, as they are now."""
        raise NotImplementedError(f"{type(self).__name__} does not say which tensors it has: define _held")

    async def on_model(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work that needs the model.

        Raises:
            RuntimeError: the model is parked.
        """
        return await self.compute(self._parking.needed(fn), *args, **kwargs)

    async def offload(self) -> None:
        """Keep the model, and all that belongs to it, in host memory until `onload`."""
        await self.compute(self._park)

    async def onload(self) -> None:
        """Bring back what `offload` moved."""
        await self.compute(self._parking.unpark)

    def _park(self) -> None:
        self._parking.park()
