"""Losses on preference pairs: DPO, IPO and SLiC's hinge on log-probs, Bradley-Terry on scores.

In: a number of each chosen and each rejected answer. Out: a `LossSum` whose weight is the number of pairs, with what to
watch under the names that TRL gives them. Everything is float32 (float64 stays).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.algos.loss_sum import LossSum, Mean, one_of, wide, within

PairLoss = Literal["sigmoid", "ipo", "hinge"]
"""How the margin between the implicit rewards of chosen and rejected becomes a loss."""


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    loss: PairLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> LossSum:
    """Direct preference optimisation, per pair, with h = log(pi/ref)(chosen) - log(pi/ref)(rejected):

    sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)  (DPO, arXiv:2305.18290, eq. 7; e, the label
    smoothing, is the share of labels that are taken to be wrong, as in the authors' cDPO);
    hinge: max(0, 1 - beta h)  (SLiC, arXiv:2305.10425);
    ipo: (h' - 1 / (2 beta))^2, where h' has log-ratios per token  (IPO, arXiv:2310.12036, eq. 17).

    Args:
        chosen, rejected: log-probs of the answers under the policy, nats, [pairs]; differentiable.
        ref_chosen, ref_rejected: the same under the reference.
        loss: which.
        beta: how dear it is to leave the reference.
        label_smoothing: share of wrong labels, 0 to 0.5; of sigmoid alone.
        lengths: tokens of the chosen and of the rejected answers, [pairs]; ipo needs them.

    Raises:
        ValueError: a setting out of range, or ipo without lengths.
    """
    check_dpo(loss, beta, label_smoothing)
    gains = wide(chosen) - wide(ref_chosen), wide(rejected) - wide(ref_rejected)
    margin = gains[0] - gains[1]
    if loss == "sigmoid":
        each = -(1 - label_smoothing) * F.logsigmoid(beta * margin)
        each = each - label_smoothing * F.logsigmoid(-beta * margin) if label_smoothing else each
    elif loss == "hinge":
        each = torch.relu(1 - beta * margin)
    else:
        if lengths is None:
            raise ValueError("dpo: ipo compares log-ratios per token: give the lengths")
        per_token = [gain / length.clamp(min=1).to(gain.dtype) for gain, length in zip(gains, lengths, strict=True)]
        each = (per_token[0] - per_token[1] - 1 / (2 * beta)) ** 2
    metrics = {
        "rewards/chosen": beta * gains[0],
        "rewards/rejected": beta * gains[1],
        "rewards/margins": beta * margin,
        "rewards/accuracies": (margin > 0).to(margin.dtype),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return _sum_pairs(each, metrics)


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, *, center: float = 0.0) -> LossSum:
    """How likely the right one wins, by scores: -log sigmoid(s_chosen - s_rejected - margin), and what keeps the scores
    around 0: center (s_chosen + s_rejected)^2.

    Bradley and Terry, Biometrika 39 (1952); margins as in Llama 2, arXiv:2307.09288, eq. 2; centring as in
    arXiv:2312.09244.

    Args:
        chosen, rejected: scores of the answers, [pairs]; differentiable.
        margins: by how much the chosen one must be better, [pairs]; None for 0.
        center: weight of the centring, from 0.

    Raises:
        ValueError: `center` is negative.
    """
    within("bradley_terry", "center", center, 0.0)
    chosen, rejected = wide(chosen), wide(rejected)
    margin = chosen - rejected
    each = -F.logsigmoid(margin if margins is None else margin - margins.to(margin.dtype))
    each = each + center * (chosen + rejected) ** 2 if center else each
    metrics = {
        "scores/chosen": chosen,
        "scores/rejected": rejected,
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).to(margin.dtype),
    }
    return _sum_pairs(each, metrics)


def check_dpo(loss: str, beta: float, label_smoothing: float) -> None:
    """Check the settings of `dpo`.

    Raises:
        ValueError: one is out of range.
    """
    one_of("dpo", "loss", loss, get_args(PairLoss))
    if not beta > 0:
        raise ValueError(f"dpo: beta={beta} must be more than 0")
    within("dpo", "label_smoothing", label_smoothing, 0.0, 0.5)
    if label_smoothing and loss != "sigmoid":
        raise ValueError(f"dpo: label_smoothing is of the sigmoid loss; {loss} has none")


def _sum_pairs(each: Tensor, metrics: dict[str, Tensor]) -> LossSum:
    pairs = torch.tensor(float(len(each)), dtype=torch.float64, device=each.device)
    means = {name: Mean(value.detach().sum(dtype=torch.float64), pairs) for name, value in metrics.items()}
    return LossSum(each.sum(), pairs, means)
