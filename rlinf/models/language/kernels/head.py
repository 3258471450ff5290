"""What the output embedding's product is followed by, as two functions of elements that a compiler fuses.

In: logits of a chunk of tokens, as the product of matrices leaves them. Out: of each token the log-prob of its target,
the entropy and the logarithm of the sum; and on the way back the slope of the logits, in their own dtype. Inside all is
float32. Both read the logits once or twice and keep nothing of their size beside the slope itself; one after the other,
torch's own operations read and write them a dozen times. `logprob_head.py` has the same without a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.algos.tensor.masks import wide
from rlinf.models.language.kernels.compiling import Compiled


def scores(logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token, at least in float32: log-prob of its target, entropy, and log sum exp, [tokens] each.

    Args:
        logits: [tokens, vocabulary]
        targets: int64 [tokens]
        temperature: float32 [tokens]; None for 1.
    """
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    norms = torch.logsumexp(logits, dim=-1)
    logp = logits - norms[:, None]
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(dim=-1)
    return logits.gather(1, targets[:, None]).squeeze(1) - norms, entropy, norms


def slopes(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    norms: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """d loss / d logits, [tokens, vocabulary], at least float32; see `logprob_head._TokenLogprobs` for the formula.

    Args:
        logits, targets, temperature: as for `scores`.
        norms: what `scores` gave.
        grad: d loss / d log-prob of the target, [tokens].
        grad_entropy, entropy: d loss / d entropy, and the entropy, [tokens]; None if it is not differentiated.
    """
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    logp = logits - norms[:, None]
    asked = grad[:, None]
    if grad_entropy is not None and entropy is not None:
        finite = torch.where(logp == -torch.inf, 0.0, logp)
        asked = asked + grad_entropy[:, None] * (finite + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    slope = torch.where(is_target, grad[:, None], 0.0) - logp.exp() * asked
    return slope if temperature is None else slope / temperature[:, None]


def slopes_alone(logits: Tensor, *others: Tensor | None) -> Tensor:
    """`slopes` in the dtype of the logits."""
    return slopes(logits, *others).to(logits.dtype)  # type: ignore[arg-type]


def slopes_and_bias(logits: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    """`slopes` in the dtype of the logits; and, of the unrounded ones, the sum over tokens, [vocabulary]."""
    found = slopes(logits, *others)  # type: ignore[arg-type]
    return found.to(logits.dtype), found.sum(dim=0)


@dataclass(frozen=True, slots=True)
class FusedHead:
    """The compiled functions."""

    scores: Compiled
    slopes: Compiled
    slopes_and_bias: Compiled

    @staticmethod
    def make(backend: str = "inductor", *, required: bool = False) -> FusedHead:
        """Functions that compile at their first calls; see `Compiled`."""
        functions = (scores, slopes_alone, slopes_and_bias)
        return FusedHead(*(Compiled(function, backend, required=required) for function in functions))

    @property
    def refused(self) -> str | None:
        """Why it is not compiled."""
        return self.scores.refused or self.slopes.refused or self.slopes_and_bias.refused
