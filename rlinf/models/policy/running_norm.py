"""Running scale of observations: states in, states of mean 0 and variance 1 out, with what was seen so far.

The statistics are buffers, so they are saved and published with the weights. They change in `update` alone, never by
being used: within an update of the weights they stand still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.advantages import Reduce
from rlinf.models.policy.layers import Exact

_LEAST_VARIANCE = 1e-8  # a number that never varies is centred, and divided by 1e-4 at the most


class RunningNorm(Exact):
    """(x - mean) / sqrt(max(variance, 1e-8)), cut off at +-limit. Before the first update: x, cut off.

    Args:
        size: numbers in a row.
        limit: what the result is cut off at; a constant that jumps for the first time would else be enormous.
    """

    count: Tensor
    """Rows seen, float64 []."""
    mean: Tensor
    """Of each number, float64 [size]."""
    squares: Tensor
    """Sum of squared distances from the mean, float64 [size]."""

    def __init__(self, size: int, limit: float = 10.0):
        super().__init__()
        self.limit = limit
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows, float32 [N, size]."""
        variance = torch.where(self.count > 0, self.squares / self.count.clamp(min=1.0), 1.0)
        scale = variance.clamp(min=_LEAST_VARIANCE).rsqrt()
        return ((x - self.mean.to(x.dtype)) * scale.to(x.dtype)).clamp(-self.limit, self.limit)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take more rows in (Chan, Golub and LeVeque, 1979: sums about the old mean, moved to the new one).

        Args:
            x: [N, size].
            mask: which rows count, bool [N]; None for all.
            reduce: adds a float64 tensor of sums up over ranks; None if this is all. Ranks that hold the same
                statistics before hold the same ones after.
        """
        rows = (x if mask is None else x[mask.bool()]).double() - self.mean
        sums = torch.cat([rows.new_tensor([len(rows)]), rows.sum(0), rows.square().sum(0)])
        sums = sums if reduce is None else reduce(sums)
        count, total, squares = sums[0], *sums[1:].chunk(2)
        if count == 0:
            return
        # Old rows have sum 0 about the old mean; so do all together about the new one, `shift` further on.
        everything = self.count + count
        shift = total / everything
        self.squares += squares - everything * shift.square()
        self.squares.clamp_(min=0.0)  # rounding
        self.mean += shift
        self.count.copy_(everything)
