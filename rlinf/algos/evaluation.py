"""Accuracy over several answers to a problem: at least one right (pass@k), and the most frequent one right (maj@k); and
how sure a rate of success is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb, sqrt

import numpy as np

_SUBSETS = 256
"""Subsets of k answers that a majority is taken over: the estimate's own spread is then below 1/32 of a problem."""


def wilson_interval(successes: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Between which shares a rate of success lies, by `count` independent attempts of which so many succeeded.

        (p + z^2 / 2n  ∓  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)        with p = successes / n

    Wilson (JASA 22, 1927): unlike p ∓ z sqrt(p (1 - p) / n) it stays within 0 and 1, and is no point at p = 0 and 1.

    Args:
        successes: how many attempts succeeded, from 0 to `count`.
        count: attempts, n.
        z: quantile of the normal distribution; the default makes intervals that hold in 95 % of cases.

    Raises:
        ValueError: there was no attempt, or the number of successes is impossible.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"wilson_interval: {successes} of {count} attempts cannot have succeeded")
    share, spread = successes / count, z * z / count
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / count + spread / (4 * count))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (0.0 if successes == 0 else low), (1.0 if successes == count else high)


def pass_at_k(right: Sequence[bool], k: int) -> float:
    """Probability that of `k` answers drawn without replacement at least one is right.

        1 - C(n - c, k) / C(n, k)        n answers, c of them right

    Codex (arXiv:2107.03374, eq. 1): unbiased for any n >= k.

    Args:
        right: of each answer, [n].
        k: how many are drawn.

    Raises:
        ValueError: k is not between 1 and n.
    """
    count = _checked("pass_at_k", len(right), k)
    return 1.0 - comb(count - sum(map(bool, right)), k) / comb(count, k)


def majority_at_k(answers: Sequence[Hashable], right: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """Probability that the most frequent of `k` answers drawn without replacement is right.

    Self-consistency (arXiv:2203.11171, section 2). Answers that are equally frequent share the vote, as if one of them
    were drawn: so two answers are worth what one is. All draws are taken if they are at most 256 or of one answer each,
    else 256 of them. With k = 1 it is `pass_at_k`.

    Args:
        answers: what each answer comes to, such as the number in it, [n]; equal ones vote together.
        right: of each answer, [n].
        k: how many vote.
        seed: of the draws.

    Raises:
        ValueError: k is not between 1 and n, or lengths differ.
    """
    count = _checked("majority_at_k", len(answers), k)
    if len(right) != count:
        raise ValueError(f"majority_at_k: {count} answers, {len(right)} of them told right or wrong")
    draws: Sequence[Sequence[int]]
    if comb(count, k) <= _SUBSETS or k == 1:
        draws = list(combinations(range(count), k))
    else:
        generator = np.random.default_rng(seed)
        draws = [sorted(generator.choice(count, k, replace=False).tolist()) for _ in range(_SUBSETS)]
    total = 0.0
    for draw in draws:
        votes = Counter(answers[i] for i in draw)
        most = max(votes.values())
        winners = {answers[i]: bool(right[i]) for i in reversed(draw) if votes[answers[i]] == most}
        total += sum(winners.values()) / len(winners)
    return total / len(draws)


def standard_errors(right: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """How far a mean over problems of means over answers may be off: by drawing answers, and by choosing problems.

        sqrt(sum_i s_i^2 / n_i) / N             the same N problems, answered again: of n_i answers with variance s_i^2
        sqrt(sum_i (m_i - m)^2 / (N (N - 1)))   other problems of the same kind: of means m_i with mean m

    "Adding Error Bars to Evals" (arXiv:2411.00640). The first belongs to a comparison of two models on one
    benchmark, the second to a claim about more than it.

    Args:
        right: of each problem, of each answer, from 0 to 1.

    Returns:
        Both; None where a problem has one answer alone, or there is one problem alone.
    """
    means = [sum(each) / len(each) for each in right]
    count, total = len(right), sum(means) / len(right)
    drawing = choosing = None
    if all(len(each) > 1 for each in right):
        spread = (
            sum((one - mean) ** 2 for one in each) / (len(each) - 1) / len(each)
            for each, mean in zip(right, means, strict=True)
        )
        drawing = sqrt(sum(spread)) / count
    if count > 1:
        choosing = sqrt(sum((mean - total) ** 2 for mean in means) / (count * (count - 1)))
    return drawing, choosing


def _checked(name: str, count: int, k: int) -> int:
    if not 1 <= k <= count:
        raise ValueError(f"{name}: k={k} must be between 1 and the number of answers, {count}")
    return count
