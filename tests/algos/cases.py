"""The losses that properties are tested on, each as a function of one batch, and the batches."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlinf.algos import losses
from rlinf.algos.losses import HOWS
from tests.algos import references

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@dataclass(frozen=True)
class Case:
    name: str
    loss: Callable
    """(batch of tensors, **aggregation) -> LossSum"""
    reference: Callable
    """(batch of arrays) -> losses of tokens"""
    stopped: bool = False
    """Part of the formula has its gradient stopped, so the slope is not the derivative of the value."""
    by_sequence: bool = False
    """A token's loss depends on the others of its sequence."""

    def __str__(self):
        return self.name


def three(b):
    return b["new"], b["old"], b["advantages"], b["mask"]


def correcting(b):
    return b["old"], b["behavior"], b["mask"]


CASES = [
    Case("policy", lambda b, **a: losses.policy(*three(b), **CLIP, **a), lambda b: references.policy(b, 0.2, 0.28)),
    Case(
        "policy with dual clip",
        lambda b, **a: losses.policy(*three(b), **CLIP, dual_clip=1.5, **a),
        lambda b: references.policy(b, 0.2, 0.28, 1.5),
    ),
    Case(
        "gspo",
        lambda b, **a: losses.policy(*three(b), clip_low=0.1, clip_high=0.15, ratio="sequence", **a),
        lambda b: references.gspo(b, 0.1, 0.15),
        by_sequence=True,
    ),
    Case(
        "policy with truncated importance sampling",
        lambda b, **a: losses.policy(
            *three(b), **CLIP, weights=losses.weights(b["old"], b["behavior"], b["mask"], cap=1.2)[0], **a
        ),
        lambda b: references.tis(b, 0.2, 0.28, 1.2),
    ),
    Case(
        "policy with weights of answers",
        lambda b, **a: losses.policy(
            *three(b),
            **CLIP,
            weights=losses.weights(*correcting(b), cap=1.2, floor=0.9, level="geometric", sequences=a.get("sequences"))[
                0
            ],
            **a,
        ),
        lambda b: references.weighed_by_answers(b, 0.2, 0.28, 0.9, 1.2),
        by_sequence=True,
    ),
    Case(
        "policy with rejected answers",
        lambda b, **a: losses.policy(
            *three(b),
            **CLIP,
            weights=losses.rejected(*correcting(b), floor=0.85, cap=1.2, least=0.5, sequences=a.get("sequences"))[0],
            **a,
        ),
        lambda b: references.rejected(b, 0.2, 0.28, 0.85, 1.2, 0.5),
        by_sequence=True,
    ),
    Case(
        "decoupled",
        lambda b, **a: losses.decoupled(
            b["new"], b["old"], b["behavior"], b["advantages"], b["mask"], **CLIP, cap=1.3, **a
        ),
        lambda b: references.decoupled(b, 0.2, 0.28, 1.3),
    ),
    Case(
        "cispo",
        lambda b, **a: losses.cispo(*three(b), clip_low=0.3, clip_high=0.4, **a),
        lambda b: references.cispo(b, 0.3, 0.4),
        stopped=True,
    ),
    Case(
        "aipo",
        lambda b, **a: losses.aipo(*three(b), cap=1.2, mask_low=0.1, mask_high=0.1, drift=0.05, **a),
        lambda b: references.aipo(b, 1.2, 0.1, 0.1, 0.05),
        stopped=True,
    ),
    Case("sapo", lambda b, **a: losses.sapo(*three(b), tau_neg=1.5, **a), lambda b: references.sapo(b, 1.0, 1.5)),
    *[
        Case(
            f"kl {kind}",
            lambda b, kind=kind, **a: losses.kl(b["new"], b["behavior"], b["mask"], kind=kind, **a),
            lambda b, kind=kind: references.kl(b, kind),
        )
        for kind in ("k1", "k2", "k3", "abs")
    ],
    Case(
        "kl corrected",
        lambda b, **a: losses.kl(b["new"], b["behavior"], b["mask"], kind="k3", old_logprobs=b["old"], **a),
        lambda b: references.kl(b, "k3", corrected=True),
    ),
    Case(
        "supervised",
        lambda b, **a: losses.supervised(b["new"], b["mask"], **a),
        lambda b: references.each(b, lambda r, t: -b["new"][r, t]),
    ),
    Case(
        "entropy bonus",
        lambda b, **a: losses.entropy_bonus(b["new"], b["mask"], **a),
        lambda b: references.each(b, lambda r, t: -b["new"][r, t]),
    ),
    *[
        Case(
            f"value {error}",
            lambda b, error=error, bound=bound, **a: losses.value(
                b["new"], b["old"], b["behavior"], b["mask"], clip=bound, error=error, delta=0.3, **a
            ),
            lambda b, error=error, bound=bound: references.value(b, bound, error, 0.3),
        )
        for error, bound in (("huber", 0.2), ("square", None))
    ],
]

AGGREGATIONS = [{"how": how, **({"norm_length": 7.0} if how.endswith("norm") else {})} for how in HOWS]


def batch(seed, rows=4, tokens=6, spread=0.4, filled=0.7):
    """Arrays of one batch, some rows possibly without a token."""
    rng = np.random.default_rng(seed)
    old = -rng.random((rows, tokens)) * 3
    return {
        "new": old + rng.normal(size=(rows, tokens)) * spread,
        "old": old,
        "behavior": old + rng.normal(size=(rows, tokens)) * spread,
        "teacher": -rng.random((rows, tokens)) * 3,
        "advantages": rng.normal(size=rows),
        "mask": rng.random((rows, tokens)) < filled,
    }


def tensors(arrays, dtype=torch.float64):
    """The same as tensors; `new` is a leaf."""
    found = {name: torch.tensor(x) if x.dtype == bool else torch.tensor(x, dtype=dtype) for name, x in arrays.items()}
    found["new"].requires_grad_()
    return found


def part(b, rows):
    """Some rows of a batch, in the order given."""
    return {name: x[list(rows)] for name, x in b.items()}


def packed(b, rows=None):
    """The tokens that count of some rows, one after the other, and which sequence each belongs to."""
    some = b if rows is None else part(b, rows)
    mask = some["mask"]
    found = {name: x[mask] for name, x in some.items() if name != "advantages"}
    found["advantages"] = some["advantages"]
    ids = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    return found, ids
