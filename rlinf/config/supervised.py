"""Keys of runs that learn from given texts: `algorithm: sft`, `dpo` or `reward_model`.

The text under a field is what `--help` and docs/config.md print. A key stands here only if something reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlinf.config.schema import number

SFT, DPO, REWARD_MODEL = "sft", "dpo", "reward_model"
SUPERVISED = (SFT, DPO, REWARD_MODEL)
"""Algorithms that learn from given texts: nothing is generated, and there is no reward."""


@dataclass
class DpoConfig:
    """The loss of `algorithm: dpo`; what it holds on to is `reference`."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """`sigmoid`: DPO (arXiv:2305.18290). `ipo` (arXiv:2310.12036), by log-probs per token. `hinge`: as in SLiC
    (arXiv:2305.10425)."""
    beta: float = number(0.1, above=0)
    """How dear it is to leave the reference; of ipo, its tau."""
    label_smoothing: float = number(0.0, low=0, high=0.5)
    """Share of pairs that are taken to be labelled the wrong way round; of sigmoid alone."""


@dataclass
class RewardModelConfig:
    """The loss of `algorithm: reward_model`."""

    center: float = number(0.0, low=0)
    """Weight of the square of the sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""


@dataclass
class SupervisedConfig:
    """Learning from given texts, with `algorithm: sft`, `dpo` or `reward_model`: each step is one optimizer step."""

    batch_size: int = number(32, low=1)
    """Conversations, or pairs, per step."""
    epochs: float | None = number(None, above=0)
    """Passes over the data, which then set the number of `steps`; null leaves it to that key."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of conversations are learned: the assistant's turns, its last turn, or everything, prompts
    included."""
    max_tokens: int | None = number(None, low=1)
    """Longest conversation, prompt included; null for as many as the model has positions for. What becomes of longer
    ones is `data.overlong`, which cuts them at their end."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
