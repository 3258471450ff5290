"""Divergences between a teacher's distribution of the next token and the student's, token by token.

    forward     KL(T || S): the student must cover whatever the teacher finds likely
    reverse     KL(S || T): the student must not say what the teacher finds unlikely
    jsd         beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S, of GKD (arXiv:2306.13649, eq. 1)

Over the whole vocabulary, or over the teacher's k likeliest tokens: then with all others as one further token
(`bucket`), a lower bound of the whole divergence that meets it as k grows; or with both distributions made to add up to
1 over the k (`renormalize`).
"""

from __future__ import annotations

import math
from typing import Literal, Unpack

import torch
from torch import Tensor

from rlinf.algos.loss_sum import LossSum, one_of, within
from rlinf.algos.losses import Options, Tokens

DivergenceKind = Literal["reverse", "forward", "jsd"]
KINDS: tuple[DivergenceKind, ...] = ("reverse", "forward", "jsd")
Tail = Literal["bucket", "renormalize"]
TAILS: tuple[Tail, ...] = ("bucket", "renormalize")
_LEAST = -1e4
"""Log-prob in place of -inf: no float32 probability is left of it, and its products with 0 are 0."""


def check_divergence(where: str, kind: str, beta: float, top_k: int | None, tail: str) -> None:
    """Check the settings of a divergence.

    Raises:
        ValueError: one is out of range, or would not be used.
    """
    one_of(where, "kind", kind, KINDS)
    one_of(where, "tail", tail, TAILS)
    within(where, "beta", beta, 0.0, 1.0)
    if kind == "jsd" and beta in (0.0, 1.0):
        other = "forward" if beta == 0.0 else "reverse"
        raise ValueError(f"{where}: beta={beta:g} makes a jsd 0 everywhere; its limit there is kind: {other}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{where}: top_k={top_k} must be at least 1; null for the whole vocabulary")


def divergence(teacher: Tensor, student: Tensor, kind: DivergenceKind = "reverse", beta: float = 0.5) -> Tensor:
    """Divergence of two distributions over the last dimension.

    Args:
        teacher, student: log-probs that add up to 1, [..., tokens], of one shape.
        kind, beta: see above; beta is used by `jsd` alone.

    Returns:
        Nats, [...], differentiable by both.
    """
    teacher, student = teacher.clamp(min=_LEAST), student.clamp(min=_LEAST)
    if kind == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if kind == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1.0 - beta) * (student.exp() * (student - mixture)).sum(-1)


def over_top(
    ids: Tensor, teacher: Tensor, student: Tensor, kind: DivergenceKind, beta: float = 0.5, tail: Tail = "bucket"
) -> Tensor:
    """Divergence over a teacher's likeliest tokens.

    Args:
        ids: of those tokens, int64 [rows, k], each once.
        teacher: their log-probs, [rows, k].
        student: log-probs of the whole vocabulary, [rows, vocabulary].
        kind, beta: see `divergence`.
        tail: how all other tokens count.

    Returns:
        Nats, [rows], differentiable by `student`.
    """
    own = student.gather(1, ids)
    if tail == "renormalize":
        return divergence(teacher.log_softmax(-1), own.log_softmax(-1), kind, beta)
    if ids.shape[1] < student.shape[1]:
        # the student's own tail as a sum, since 1 less the others would have no digits left where it is small
        rest = student.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        others = (1.0 - teacher.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log()
        teacher, own = torch.cat([teacher, others], 1), torch.cat([own, rest], 1)
    return divergence(teacher, own, kind, beta)


def divergence_loss(values: Tensor, mask: Tensor, **options: Unpack[Options]) -> LossSum:
    """The loss of divergences: L_t = D_t, nats; the metric `divergence` is their mean.

    Args:
        values: of each token, [rows, tokens] or [tokens]; differentiable.
        mask: which tokens count, same shape, bool or 0/1.
        options: see `Options`.

    Raises:
        ValueError: shapes differ.
    """
    tokens = Tokens.of("divergence", values, mask, options)
    inside = tokens.read(values)
    return tokens.sum(inside, {"divergence": inside})
