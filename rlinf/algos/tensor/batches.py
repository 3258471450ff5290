"""What advantages and losses are computed from: judged answers of whole groups, and tokens of a micro-batch.

Plain data; which tensors an algorithm needs is its own business, and `need` says which is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answers:
    """A batch of judged answers; what a spec does not need may be missing."""

    rewards: Tensor
    """Of each answer, [answers]; an advantage is shown them in float64, after shaping."""
    groups: Tensor
    """Which group each belongs to, whole numbers, [answers]."""
    mask: Tensor
    """Which tokens count, bool [answers, tokens]; an advantage is shown floats, how much each counts, if there are
    `weights`."""
    weights: Tensor | None = None
    """How many answers each counts as, more than 0, [answers]; None: as one."""
    truncated: Tensor | None = None
    """Whether the length limit cut it, bool [answers]."""
    logprobs: Tensor | None = None
    """Under the policy that sampled, nats, [answers, tokens]."""
    ref_logprobs: Tensor | None = None
    """Under the reference, nats, [answers, tokens]."""
    teacher_logprobs: Tensor | None = None
    """Under the teacher, nats, [answers, tokens]."""
    values: Tensor | None = None
    """The critic's prediction before each token, [answers, tokens]."""
    token_rewards: Tensor | None = None
    """The parts of `rewards` that fell at tokens, [answers, tokens]; what `rewards` is more falls at the last one."""

    lengths: Tensor | None = None
    """How many tokens were generated for each, [answers]; None: as many as count."""
    spent: Tensor | None = None
    """The parts of `rewards` that fell at generated tokens which do not count, [answers]; None: none did."""

    @property
    def unspent(self) -> Tensor:
        """What of `rewards` falls at tokens that count, [answers]."""
        return self.rewards if self.spent is None else self.rewards - self.spent

    def need(self, name: str) -> Tensor:
        """A tensor that this algorithm cannot do without.

        Raises:
            ValueError: it was not given.
        """
        return _given(self, name)


@dataclass(frozen=True, slots=True)
class Advantages:
    """What a batch of answers comes to."""

    values: Tensor
    """Advantage of each answer, [answers], or of each token, [answers, tokens]; float32, without gradient."""
    mask: Tensor
    """Which tokens count in the loss, bool [answers, tokens]."""
    rewards: Tensor
    """After shaping, float64 [answers]."""
    returns: Tensor | None = None
    """What the critic is to predict, [answers, tokens]."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens to learn from, [rows, tokens] or packed [tokens]; what a spec does not need may be missing."""

    logprobs: Tensor
    """Under the policy being trained, nats; differentiable."""
    mask: Tensor
    """Which tokens count, bool; or, in floats, how much each does."""
    old_logprobs: Tensor | None = None
    """Under the policy that the ratio starts from (with `loss.decoupled`: the one that drew the tokens)."""
    advantages: Tensor | None = None
    """Per token, or one per row or sequence."""
    sequences: Tensor | None = None
    """Sequence of each token, whole numbers from 0; None: each row is one."""
    entropy: Tensor | None = None
    """Of each token's distribution, nats; differentiable if the spec has a bonus for it."""
    ref_logprobs: Tensor | None = None
    """Under the reference."""
    behavior_logprobs: Tensor | None = None
    """The engine's, for `correction` and `rejection`."""
    proximal_logprobs: Tensor | None = None
    """Under the weights just before the update, for `loss.decoupled` and `rejection`."""
    versions: Tensor | None = None
    """Version of the weights that made each token."""
    version: int | None = None
    """Version of the weights being trained, before the update."""

    def need(self, name: str) -> Tensor:
        """A tensor that this algorithm cannot do without.

        Raises:
            ValueError: it was not given.
        """
        return _given(self, name)

    def next_version(self) -> int:
        """The version that this update makes.

        Raises:
            ValueError: `version` was not given.
        """
        if self.version is None:
            raise ValueError("MicroBatch.version is missing, which this algorithm needs")
        return self.version + 1


def _given(holder: Answers | MicroBatch, name: str) -> Tensor:
    value: Tensor | None = getattr(holder, name)
    if value is None:
        raise ValueError(f"{type(holder).__name__}.{name} is missing, which this algorithm needs")
    return value
