"""What rank 0 tells all ranks to do: one tuple per round, with an entry for each rank, for `Feed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from rlinf.data.packing import Packed, Row, pack


@dataclass(slots=True, eq=False)
class Learn:
    """Add these rows to the gradient."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its rows

    rows: tuple[Row, ...]
    """A micro-batch; empty if there is no work for this rank, which takes part all the same."""
    compare: bool = False
    """The weights are still those that sampled."""
    keep: bool = False
    """It comes once more, as `Again`."""
    kept: dict[str, Tensor] = field(default_factory=dict, init=False)
    """What was found out about its tokens when it came first, on the device, float32 [learned] each."""
    _packed: Packed | None = field(default=None, init=False)

    def packed(self) -> Packed:
        """The rows as tensors, made once."""
        if self._packed is None:
            self._packed = pack(self.rows)
        return self._packed

    def __reduce__(self) -> tuple[object, ...]:
        return Learn, (self.rows, self.compare, self.keep)


@dataclass(frozen=True, slots=True)
class Again:
    """Add the rows of an earlier order to the gradient, under other weights."""

    number: int
    """Which of this call's orders to be kept, from 0."""


@dataclass(slots=True, eq=False)
class Score:
    """Say something of every learned token of these rows."""

    __plain__: ClassVar[bool] = True

    rows: tuple[Row, ...]
    """A micro-batch; empty if there is no work for this rank, which takes part all the same."""
    columns: tuple[str, ...]
    """What to say: names in `Sample.per_token`."""
    tokens: tuple[int, ...]
    """Learned tokens of each rank in this round."""
    told: Callable[[Sequence[np.ndarray]], None] | None = None
    """On rank 0, takes what all ranks found, float32 [columns, its learned tokens] of each."""

    def packed(self) -> Packed:
        """The rows as tensors."""
        return pack(self.rows)

    def tell(self, found: Sequence[np.ndarray]) -> None:
        """All ranks are done."""
        if self.told is not None:
            self.told(found)

    def __reduce__(self) -> tuple[object, ...]:
        return Score, (self.rows, self.columns, self.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """Take an optimizer step with what has gathered."""


Order = Learn | Again | Score | Step
