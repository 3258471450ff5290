"""What a policy remembers of an episode: a gated recurrent unit, and where episodes begin in what it is given.

Memories travel with observations: a policy says what it remembers behind a decision, the environments' actor shows it
again with the next observation, and forgets it where an episode ended. So nobody else has to know of it, checkpoints of
environments have it, and a trainer finds it with the rows that it learns from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

MEMORY = "memory"
"""Name in observations and stored rows, float32 [N, M + 1]: M numbers, and how many decisions of its episode they are
of. Nothing is remembered where that count is 0, as at the beginning, where it may be missing altogether."""


class Memory(nn.Module):
    """h_t = GRU(x_t, h_{t-1}) (Cho et al., arXiv:1406.1078), where h is 0 when an episode begins.

    Args:
        features: width of x.
        units: width of h, M.
    """

    def __init__(self, features: int, units: int):
        super().__init__()
        self.units = units
        self.cell = nn.GRUCell(features, units)
        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One decision.

        Args:
            x: float32 [N, features].
            before: what was remembered, [N, M + 1].

        Returns:
            h, [N, M]; what is remembered now, [N, M + 1].
        """
        count = before[:, -1:]
        h = self.cell(x, torch.where(count > 0, before[:, :-1], 0.0))
        return h, torch.cat([h, count + 1.0], 1)

    def along(self, x: Tensor, before: Tensor) -> Tensor:
        """Several decisions in a row, from what was remembered at the first: gradients go back that far.

        Args:
            x: float32 [B, L, features].
            before: what was remembered at each when it was decided, [B, L, M + 1]; of all but the first only the counts
                are looked at, to begin anew where an episode began.

        Returns:
            h after each, [B, L, M].
        """
        found = []
        remembered = before[:, 0]
        for time in range(x.shape[1]):
            remembered = torch.cat([remembered[:, :-1], before[:, time, -1:]], 1)
            h, remembered = self(x[:, time], remembered)
            found.append(h)
        return torch.stack(found, 1)

    def shown(self, observation: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The memory that comes with an observation of N rows, like `like`; nothing where there is none."""
        found = observation.get(MEMORY)
        return (
            like.new_zeros(len(like), self.units + 1, dtype=torch.float32) if found is None else found.to(like.device)
        )
