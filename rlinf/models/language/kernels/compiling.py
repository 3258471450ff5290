"""Functions that `torch.compile` makes faster, and that go on uncompiled where it cannot.

In: a function, and how it is compiled. Out: one that gives the same, and says why it is not compiled if it is not.
Compiling begins with the first call, in the thread that calls, and counts as that call's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlinf.models.language.kernels.varlen import device_at_fault


class Compiled:
    """A function that is compiled when it is first called.

    Args:
        function: of tensors whose first dimension may have any length; it is compiled once for all of them.
        backend: of `torch.compile`.
        required: what keeps it from being compiled is an error, and no reason to go on without.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor", *, required: bool = False):
        self.refused: str | None = None
        """Why it is not compiled; None while nothing spoke against it."""
        self.function, self._required = function, required
        self._compiled = torch.compile(function, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        if self.refused is None:
            try:
                for each in arguments:
                    if isinstance(each, torch.Tensor) and each.dim():
                        torch._dynamo.maybe_mark_dynamic(each, 0)
                return self._compiled(*arguments)
            except Exception as error:
                if self._required or device_at_fault(cause_of(error)):
                    raise
                self.refused = first_line(error)
        return self.function(*arguments)


def cause_of(error: BaseException) -> BaseException:
    """What went wrong within the compiler, which raises errors about errors."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def first_line(error: BaseException) -> str:
    """What an error of the compiler says first of its cause."""
    cause = cause_of(error)
    text = next((line for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {text.strip()}"
