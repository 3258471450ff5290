"""What each number of an action is drawn from: a normal distribution, or a choice among a few.

In: what a network says of N chunks of actions. Out: draws from uniform numbers, their log-probs and entropies, all
[N, C, A], by the same operations for drawing and for scoring. "made" is an action in the policy's own terms, which
trainers store; `actions` turns it into numbers for the environment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf.models.policy.noise import normals

_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_IMPOSSIBLE = -1e9
"""Logit of a choice that a number does not have: its probability is exactly 0, and 0 times it is no NaN."""


class Distribution(ABC):
    """Independent distributions of all numbers in N chunks of actions."""

    @abstractmethod
    def likeliest(self) -> Tensor:
        """What `drawn` returns most often, [N, C, A]."""

    @abstractmethod
    def drawn(self, noise: Tensor) -> Tensor:
        """Draw from uniform numbers in [0, 1), float64 [N, C x A]; [N, C, A]."""

    @abstractmethod
    def actions(self, made: Tensor) -> Tensor:
        """What was drawn as numbers for the environment, in [-1, 1], float32 [N, C, A]."""

    @abstractmethod
    def logprobs(self, made: Tensor) -> Tensor:
        """Log-prob or log-density of each number that was drawn, nats, [N, C, A]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Of each number's distribution, nats, [N, C, A]."""


class Normal(Distribution):
    """Normal distributions. A draw is cut to [-1, 1] for the environment alone: its density is that of the uncut
    number, so the surrogate's gradient needs no correction for the cut.

    Args:
        mean: [N, C, A].
        log_std: logarithm of the standard deviations, [C, A].
    """

    def __init__(self, mean: Tensor, log_std: Tensor):
        self._mean, self._log_std = mean, log_std

    def likeliest(self) -> Tensor:
        return self._mean

    def drawn(self, noise: Tensor) -> Tensor:
        return self._mean + self._log_std.exp() * normals(noise).view_as(self._mean)

    def actions(self, made: Tensor) -> Tensor:
        return made.clamp(-1.0, 1.0)

    def logprobs(self, made: Tensor) -> Tensor:
        """log N(x; mean, sigma^2) = -((x - mean) / sigma)^2 / 2 - log sigma - log(2 pi) / 2"""
        away = (made - self._mean) * torch.exp(-self._log_std)
        return torch.addcmul(-_HALF_LOG_TAU - self._log_std, away, away, value=-0.5)  # the constants once, not by row

    def entropy(self) -> Tensor:
        """1/2 log(2 pi e sigma^2), whatever is seen."""
        return (self._log_std + (0.5 + _HALF_LOG_TAU)).expand_as(self._mean)


class Categorical(Distribution):
    """A choice for each number of an action: choice k of n is the number (2 k + 1) / n - 1, the middle of the k-th of n
    equal parts of [-1, 1].

    Args:
        logits: [N, C, A, K], K being the largest n; those of choices that a number does not have are not looked at.
        counts: n of each number, int64 [A].
    """

    def __init__(self, logits: Tensor, counts: Tensor):
        there = torch.arange(logits.shape[-1], device=logits.device) < counts[:, None]
        self._log = torch.where(there, logits, _IMPOSSIBLE).log_softmax(-1)
        self._counts = counts

    def likeliest(self) -> Tensor:
        return self._log.argmax(-1)

    def drawn(self, noise: Tensor) -> Tensor:
        """By the inverse of the distribution function: the choice below which the probabilities sum up to the noise."""
        sums = self._log.double().exp().cumsum(-1)
        below = (sums <= noise.view(sums.shape[:-1])[..., None]).sum(-1)
        return torch.minimum(below, self._counts - 1)  # where rounding leaves the whole sum below 1

    def actions(self, made: Tensor) -> Tensor:
        return (2 * made + 1) / self._counts - 1.0

    def logprobs(self, made: Tensor) -> Tensor:
        return self._log.gather(-1, made[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self._log.exp() * self._log).sum(-1)


def chosen(actions: Tensor, counts: Tensor) -> Tensor:
    """The choices that numbers stand for, the inverse of `Categorical.actions`, int64.

    Args:
        actions: in [-1, 1], [..., A].
        counts: choices of each number, int64 [A].
    """
    parts = torch.floor((actions.double() + 1.0) / 2.0 * counts).long()
    return torch.minimum(parts.clamp(min=0), counts - 1)


def check_choices(choices: Sequence[int], action_size: int) -> None:
    """Check the counts of choices.

    Raises:
        ValueError: there are not as many as numbers in an action, or one is less than 1.
    """
    if len(choices) != action_size or min(choices, default=1) < 1:
        raise ValueError(
            f"policy: choices={list(choices)} must say for each of the action_size={action_size} numbers of an action "
            f"how many choices it has, at least 1"
        )
