"""Learning from given texts: objectives, the metrics of their batches, and samples for people.

A trainer takes an `Objective`: it tells which numbers of a model it needs, makes the rows of groups, and is the loss of
a packed micro-batch of them. One of your own is a class like those here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.algos import losses
from rlinf.algos.loss_sum import LossSum, Mean, within
from rlinf.algos.preference import PairLoss, bradley_terry, check_dpo, dpo
from rlinf.data.datasets.rendering import MARGIN, REF, WEIGHT
from rlinf.data.packing import Packed, Row, pack
from rlinf.data.sample import Group, Sample
from rlinf.training.batch_metrics import read_spans, token_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlinf.training.backend import Outputs


class Objective(Protocol):
    """Something to learn from given texts."""

    head: ClassVar[Literal["logprobs", "scores"]]
    """The head of the model, see `ModelSpec`."""
    together: ClassVar[int]
    """Rows that are computed together: 2 for pairs."""

    @property
    def needs_reference(self) -> bool:
        """A reference policy's log-probs of every learned token are part of the loss."""

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """The rows of a batch.

        Raises:
            ValueError: a group lacks something.
        """

    def loss(self, batch: Packed, outputs: Outputs, cached_columns: Mapping[str, Tensor]) -> LossSum:
        """The un-normalised loss of a micro-batch.

        Args:
            batch: rows of this objective.
            outputs: of the model, for its learned tokens.
            cached_columns: columns beside those of the batch, [learned] each.
        """


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Supervised training: the mean negative log-likelihood of the learned tokens of the whole batch."""

    head: ClassVar[Literal["logprobs", "scores"]] = "logprobs"
    together: ClassVar[int] = 1
    needs_reference: ClassVar[bool] = False  # type: ignore[misc]  # a property to the protocol

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        samples = [sample for group in groups for sample in group.samples]
        uneven = any(WEIGHT in sample.per_token for sample in samples)
        return [_row(sample, {WEIGHT: _weights(sample)} if uneven else {}) for sample in samples]

    def loss(self, batch: Packed, outputs: Outputs, cached_columns: Mapping[str, Tensor]) -> LossSum:
        logprobs, entropy = outputs[:2]
        total = losses.supervised(logprobs, batch.columns.get(WEIGHT, batch.mask))
        count = torch.tensor(float(len(logprobs)), dtype=torch.float64)
        return total.watching({"entropy": Mean(entropy.detach().sum(dtype=torch.float64), count)})


@dataclass(frozen=True, slots=True)
class Preference:
    """Direct preference optimisation on pairs, see `algos.preference.dpo`."""

    loss_kind: PairLoss = "sigmoid"
    """Which loss."""
    beta: float = 0.1
    """How dear it is to leave the reference."""
    label_smoothing: float = 0.0
    """Share of labels that are taken to be wrong."""

    head: ClassVar[Literal["logprobs", "scores"]] = "logprobs"
    together: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_dpo(self.loss_kind, self.beta, self.label_smoothing)

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        _check_pairs(groups)
        has_reference = all(REF in sample.per_token for group in groups for sample in group.samples)
        return [
            _row(sample, {REF: sample.column(REF)} if has_reference else {})
            for group in groups
            for sample in group.samples
        ]

    def loss(self, batch: Packed, outputs: Outputs, cached_columns: Mapping[str, Tensor]) -> LossSum:
        logprobs = outputs[0]
        columns = {**batch.columns, **cached_columns}
        if REF not in columns and len(logprobs):
            raise ValueError(
                "dpo: nobody said the reference's log-probs: put reference.logprobs before trainer.train, give the "
                "trainer reference='adapters_off', or take data with ref_chosen_logps and ref_rejected_logps"
            )
        chosen, rejected = _per_pair(logprobs, batch)
        ref_chosen, ref_rejected = _per_pair(columns.get(REF, logprobs.detach()), batch)
        return dpo(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            loss=self.loss_kind,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            lengths=_per_pair(torch.ones_like(logprobs.detach()), batch),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """A reward model, learned from pairs: see `algos.preference.bradley_terry`."""

    center: float = 0.0
    """Weight of what keeps the scores around 0."""

    head: ClassVar[Literal["logprobs", "scores"]] = "scores"
    together: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        within("reward_model", "center", self.center, 0.0)

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        _check_pairs(groups)
        margins = any(MARGIN in group.prompt.row for group in groups)
        return [
            _row(sample, {MARGIN: np.array([group.prompt.row.get(MARGIN, 0.0)], np.float32)} if margins else {})
            for group in groups
            for sample in group.samples
        ]

    def loss(self, batch: Packed, outputs: Outputs, cached_columns: Mapping[str, Tensor]) -> LossSum:
        chosen, rejected = _per_pair(outputs[0], batch)
        margins = _per_pair(batch.columns[MARGIN], batch)[0] if MARGIN in batch.columns else None
        return bradley_terry(chosen, rejected, margins, center=self.center)


def _row(sample: Sample, columns: Mapping[str, np.ndarray]) -> Row:
    """The row of a sample that nobody drew: all that it has but log-probs."""
    return replace(Row.of(sample, columns=columns), old_logprobs=None)


def _weights(sample: Sample) -> np.ndarray:
    """Weight of each learned token, float32 [learned]."""
    return sample.column(WEIGHT) if WEIGHT in sample.per_token else np.ones(sample.learned_tokens, np.float32)


def _check_pairs(groups: Sequence[Group]) -> None:
    for group in groups:
        if len(group.samples) != 2:
            raise ValueError(
                f"group {group.id} has {len(group.samples)} samples: a pair has the chosen one and the rejected one"
            )


def _per_pair(values: Tensor, batch: Packed) -> tuple[Tensor, Tensor]:
    """Sums over the learned tokens of the chosen and of the rejected rows, [pairs] each; rows of pairs alternate."""
    pairs = len(batch.lengths) // 2  # a rank without work has one row, and no pair
    # float64, since a sum of thousands one after the other would lose digits
    sums = values.new_zeros(2 * pairs, dtype=torch.float64).index_add(0, batch.sequences, values.double())
    sums = sums.to(values.dtype)
    return sums[::2], sums[1::2]


OUTPUT = "output"
"""Key of `Sample.per_token`: what the model said of each learned token, its log-prob or the score."""
_AT_ONCE = 256
"""Groups whose loss is computed together: of numbers alone, so little memory."""


def described(groups: Sequence[Group]) -> dict[str, float]:
    """Counts of a batch: `samples`, `tokens` (read, prompts included), `response_tokens` (learned)."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "samples": float(len(samples)),
        "tokens": float(sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples)),
        "response_tokens": float(sum(sample.learned_tokens for sample in samples)),
    }


def measured(objective: Objective, groups: Sequence[Group]) -> dict[str, float]:
    """The loss of groups by what a model said of them.

    Args:
        objective: says what the loss is.
        groups: with `OUTPUT`; at least one.

    Returns:
        `loss`, `perplexity` where it is one of likelihood, and what the objective watches but entropy, of which
        nothing was said.

    Raises:
        ValueError: there is no group, or one without `OUTPUT`.
    """
    if not groups or not all(OUTPUT in sample.per_token for group in groups for sample in group.samples):
        raise ValueError("loss: every group needs what the model says of it: let trainer.outputs(groups) tell it")
    sums = []
    for start in range(0, len(groups), _AT_ONCE):
        part = groups[start : start + _AT_ONCE]
        outputs = [sample.column(OUTPUT) for group in part for sample in group.samples]
        rows = [
            replace(row, columns={**row.columns, OUTPUT: column})
            for row, column in zip(objective.rows(part), outputs, strict=True)
        ]
        batch = pack(rows)
        outputs_of_rows = batch.columns[OUTPUT]
        sums.append(objective.loss(batch, (outputs_of_rows, torch.full_like(outputs_of_rows, torch.nan)), {}))
    total = sum(sums[1:], sums[0])
    watched = {name: value for name, value in total.values().items() if not math.isnan(value)}
    return {"loss": float(total.mean()), **watched}


def shown(
    groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, count: int, tokens: int = 0
) -> list[dict[str, Any]]:
    """The first samples of a batch, as plain values: what was read first, what followed, how much of it was learned;
    of the first `tokens` of them token by token, see `token_rows`; `read` is what is not learned, see `read_spans`."""
    samples = islice((sample for group in groups for sample in group.samples), count)
    return [
        {
            "prompt_id": sample.prompt.id,
            "index": sample.index,
            "prompt": tokenizer.decode(sample.prompt.token_ids),
            "response": (text := str(tokenizer.decode(sample.response_ids))),
            "length": sample.learned_tokens,
            **({"read": spans} if (spans := read_spans(sample, text, tokenizer)) else {}),
            **({"tokens": token_rows(sample, tokenizer)} if number < tokens else {}),
        }
        for number, sample in enumerate(samples)
    ]
