"""The experts of a mixture as numbers: how evenly tokens are spread over them, and whether engine and trainer agree.

In: counts and probabilities that routers gave. Out: metrics, as sums until the batch is whole, and shares of a batch
that an auxiliary loss balances against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.tensor.loss_sum import Metric, Several, mean_of
from rlinf.algos.validation import same_shape


def load(counts: Tensor, chances: Tensor) -> dict[str, Metric]:
    """How evenly tokens are spread over experts.

    Args:
        counts: choices that each expert got, [layers, experts].
        chances: sum over tokens of the gate's probability of each expert, same shape.

    Returns:
        Metrics, exact for the whole batch however it was cut: `moe/load_max`, the largest expert's share over the mean
        share, of the layer where that is largest; `moe/dead_experts`, how many experts of all layers got nothing;
        `moe/aux_loss`, the auxiliary loss before its coefficient, mean over layers of N sum_i f_i P_i (Fedus et al.,
        "Switch Transformers", arXiv:2101.03961, eq. 4 to 6), with f_i the share of choices and P_i the mean
        probability of expert i: 1 where all is even, N / experts per token where all tokens go to the same.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("load", "counts", counts, chances=chances)
    return {"moe": Several(torch.stack([counts.detach().double(), chances.detach().double()]), _of_load)}


def _of_load(sums: Tensor) -> dict[str, float]:
    shares, chances = sums / sums.sum(-1, keepdim=True).clamp(min=1e-300)
    experts = shares.shape[-1]
    return {
        "moe/load_max": float(shares.max() * experts),
        "moe/dead_experts": float((shares == 0).sum()),
        "moe/aux_loss": float((shares * chances).sum(-1).mean() * experts),
    }


def drift(apart: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How often the trainer's gates would have chosen other experts than the engine's did.

    Args:
        apart: whether the sets of experts differ, bool [layers, tokens].
        mask: which tokens count, bool [tokens].

    Returns:
        Metric `moe/route_drift`, the share of pairs of a token and a layer; nothing where no token counts.
    """
    found = mean_of(apart.double(), mask.expand_as(apart))
    return {"moe/route_drift": Several(torch.stack([found.total, found.weight]), _of_drift)}


def _of_drift(sums: Tensor) -> dict[str, float]:
    total, weight = sums.tolist()
    return {"moe/route_drift": total / weight} if weight else {}
