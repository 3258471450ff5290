"""Which tokens are too old to be learned, and what becomes of the answers that have some."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlinf.data.sample import Group, Sample

Mode = Literal["drop", "mask", "resample"]
"""What becomes of an answer with tokens that are too old: it is not learned from; those tokens are read and not
learned; or its prompt is answered again."""


@dataclass(slots=True)
class Fresh:
    """What became of the tokens of a batch that were too old."""

    masked: int = 0
    """Tokens that are read, and not learned."""
    dropped: int = 0
    """Tokens of answers that are not learned from, young ones too."""
    resampled: int = 0
    """Tokens of answers whose prompts are answered again."""
    lost: list[tuple[int, int, int]] = field(default_factory=list)
    """Answers that are not learned from: prompt id, index, tokens."""

    def metrics(self) -> dict[str, float]:
        """Numbers of a step."""
        return {
            "staleness/masked": float(self.masked),
            "staleness/dropped": float(self.dropped),
            "staleness/resampled": float(self.resampled),
        }


def oldest(results: Sequence[Any]) -> tuple[int | None, int]:
    """The oldest version that made a learned token of groups, None if nobody knows; and how many those tokens are."""
    versions = [sample.learned(sample.versions) for one in results if isinstance(one, Group) for sample in one.samples]
    joined = np.concatenate([np.empty(0, np.int32), *versions])  # one minimum over all costs a tenth of one for each
    return (int(joined.min()) if len(joined) else None), len(joined)


def without_old(results: Sequence[Any], version: int, mode: Mode, found: Fresh) -> list[Any]:
    """Results without what was made by weights older than `version`, see `fresh`; those without versions stay."""
    kept = [fresh(one, version, mode, found) if isinstance(one, Group) else one for one in results]
    return [one for one in kept if one is not None]


def fresh(group: Group, version: int, mode: Mode, found: Fresh) -> Group | None:
    """A group without what was made by weights older than `version`; None if nothing is left of it.

    Args:
        group: of which nothing was learned yet.
        version: the oldest that may be learned.
        mode: `mask` keeps answers, and learns their other tokens; `drop` leaves out whole answers.
        found: counts what became of old tokens.
    """
    kept: list[Sample] = []
    for sample in group.samples:
        old = sample.versions < version
        if sample.loss_mask is not None:
            old &= sample.loss_mask
        if not (count := int(np.count_nonzero(old))):
            kept.append(sample)
        elif mode == "mask":
            learned = np.ones(len(old), bool) if sample.loss_mask is None else sample.loss_mask
            kept.append(replace(sample, loss_mask=learned & ~old, too_old=sample.too_old + count))
            found.masked += count
        else:
            found.dropped += sample.learned_tokens
            found.lost.append((group.prompt.id, sample.index, sample.learned_tokens))
    if len(kept) == len(group.samples) and all(map(operator.is_, kept, group.samples)):
        return group
    return Group(group.prompt, tuple(kept)) if kept else None
