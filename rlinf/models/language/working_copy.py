"""Weights in half precision that a model computes with, beside the float32 ones that learn.

Where no other rank has a slice of a weight, nothing need be gathered: a copy of each stands in its place while the
model computes, and whatever reads or writes weights between passes finds float32 alone. Copies are cast all at once, by
the first pass after the weights have changed, and take half of the weights' bytes until they leave the device. Weights
that are in half precision themselves, since they learn nothing and were saved so, are computed with as they are. The
gradient that a micro-batch gives a copy is added to the weight's in float32 as soon as it is there, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class WorkingCopy:
    """Copies of a model's weights in the dtype that it computes in; none of those that are in it already.

    Args:
        places: gives modules and names of their parameters. A weight of several places has one copy.
        dtype: of the copies.
    """

    def __init__(self, places: Callable[[], Iterable[tuple[nn.Module, str]]], dtype: torch.dtype):
        self._named, self._dtype = places, dtype
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._made = self._fresh = False
        self._users = 0

    def invalidate(self) -> None:
        """Have the next pass cast the weights anew, since they change."""
        self._fresh = False

    def renew(self) -> None:
        """Have the next pass look for the weights anew, since some came or went."""
        self._made = self._fresh = False

    def free(self) -> None:
        """Give its memory back until the next pass."""
        self.invalidate()
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the copies: around a forward pass, and the backward pass where that computes parts
        again. Who asks for its parameters meanwhile is given copies."""
        if not self._fresh:
            self._cast()
        if not self._users:
            for parameters, name, _, copy in self._places:
                parameters[name] = copy
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                for parameters, name, weight, _ in self._places:
                    parameters[name] = weight

    @torch.no_grad()
    def _cast(self) -> None:
        if not self._made:
            self._make()
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.nbytes)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._copies))
        self._fresh = True

    def _make(self) -> None:
        """Once the model is where it computes: moving it may exchange its parameters."""
        before, self._copies, self._places = self._copies, {}, []
        for module, name in self._named():
            weight = module._parameters[name]
            if weight is None or weight.dtype == self._dtype or not weight.is_floating_point():
                continue
            if weight in before:
                self._copies.setdefault(weight, before[weight])
            elif weight not in self._copies:
                copy = nn.Parameter(torch.empty_like(weight, dtype=self._dtype), requires_grad=weight.requires_grad)
                if weight.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_add_to, weight))
                self._copies[weight] = copy
            self._places.append((module._parameters, name, weight, self._copies[weight]))
        self._made = True


@torch.no_grad()
def _add_to(weight: nn.Parameter, copy: Tensor) -> None:
    """Move a copy's gradient to the weight's."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)
