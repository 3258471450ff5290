"""A stage that computes in bfloat16 with weights, sums of gradients and an optimizer in float32.

In: the parameters of stages, float32. Out: while a stage computes, copies of them in the other dtype stand in their
places; the gradient that each micro-batch gives a copy is added to the float32 one of the parameter, and let go. So
whatever reads or writes weights, between passes, finds float32 alone. Copies are made for the first pass after the
weights have changed, and cost half of what the weights do until they change again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rlinf.training.megatron.layers.stage import Stage


class Precision:
    """What stages compute with.

    Args:
        stages: of one rank.
    """

    def __init__(self, stages: Sequence[Stage]):
        self._config = stages[0].config
        self._places = [place for stage in stages for place in stage.computed_with()]
        self._copies: list[nn.Parameter] = []

    def forget(self) -> None:
        """Let go of copies: the weights change, or leave the device."""
        self._copies = []

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Within, stages have parameters in the dtype that they compute in."""
        masters = [getattr(module, name) for module, name in self._places]
        if all(master.dtype == self._config.pipeline_dtype for master in masters):
            yield
            return
        copies = self._copies or [self._copy(master) for master in masters]
        self._copies = copies
        self._place(copies)
        try:
            yield
        finally:
            self._place(masters)

    def _place(self, parameters: Sequence[nn.Parameter]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            module._parameters[name] = parameter

    def _copy(self, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(master.detach().to(self._config.pipeline_dtype))
        copy.register_post_accumulate_grad_hook(partial(_add_to, master))
        return copy


@torch.no_grad()
def _add_to(master: nn.Parameter, copy: Tensor) -> None:
    """Move a copy's gradient to the parameter's, in float32."""
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad.add_(copy.grad)
    copy.grad = None
