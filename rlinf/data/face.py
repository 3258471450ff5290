"""Faces of groups: all that is decided by of samples whose tokens, log-probs and texts stay where they were made.

A judge shows `face_of` its groups (`streams.handles`). It is a `Group` of samples whose arrays have a length and no
numbers: rewards, lengths and versions are as they are, so that flows choose by it and a trainer's rank 0 plans by it.
Whoever asks such an array for its numbers gets an error, never zeros.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from rlinf.data.prefix_tree import Texts, overlaps, tree_order
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runtime.base.tasks import together
from rlinf.runtime.streams.handles import Handle


class Away:
    """Stands for an array that is elsewhere.

    Args:
        length: of its only dimension.
    """

    __slots__ = ("shape",)

    def __init__(self, length: int):
        self.shape = (length,)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("these numbers stay where they were made: fetch the group that they belong to (Handle.value)")


@dataclass(slots=True, eq=False)
class Lead:
    """The way to a group that is elsewhere, and what its samples share."""

    order: tuple[int, ...] = ()
    """Places of its scored samples in an order in which each shares most with the one before it."""
    again: tuple[int, ...] = ()
    """How many tokens each of those shares with the one before it."""
    handle: Any = None
    """Gives the group itself."""

    def shared(self, one: int, other: int) -> int:
        """How many tokens two of its samples, by their places, share at their beginnings."""
        first, last = sorted((self.order.index(one), self.order.index(other)))
        return min(self.again[first + 1 : last + 1], default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SampleFace(Sample):
    """What is known of a sample that is elsewhere."""

    at: int = 0
    """Its place among the samples of its group."""
    learned_count: int = 0
    """How many of its tokens are learned."""
    by_version: Mapping[int, int] = field(default_factory=dict)
    """How many of those each version of the weights made."""
    lead: Lead = field(default_factory=Lead)
    """The group's."""

    @property
    def learned_tokens(self) -> int:
        return self.learned_count

    @property
    def learned_versions(self) -> np.ndarray:
        return np.repeat(np.array([*self.by_version], np.int64), [*self.by_version.values()])

    def column(self, name: str) -> np.ndarray:
        return Away(self.learned_count)  # type: ignore[return-value]

    def learned(self, array: np.ndarray) -> np.ndarray:
        return Away(self.learned_count)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, eq=False)
class GroupFace(Group):
    """What is known of a group that is elsewhere."""

    lead: Lead = field(default_factory=Lead)
    """The way to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as columns, since it goes wherever its group does not."""
        samples, prompt = self.samples, self.prompt
        columns = [
            _column([getattr(sample, name) for sample in samples], standard) for name, standard in _COLUMNS.items()
        ]
        lengths = [len(sample.response_ids) for sample in samples]
        return _arrived, (prompt.id, len(prompt.token_ids), lengths, columns, self.lead.order, self.lead.again)


_COLUMNS: dict[str, Any] = {
    "index": None,
    "truncated": False,
    "reward": None,
    "outcome": "ok",
    "scores": {},
    "remark": "",
    "weight": 1.0,
    "agent": "",
    "attempt": None,
    "too_old": 0,
    "at": None,
    "learned_count": None,
    "by_version": None,
}
"""What of each sample travels, and what most have."""


def _column(values: list[Any], standard: Any) -> Any:
    """One value for all where they are alike, otherwise a list."""
    alike = all(value == values[0] for value in values) if values else True
    return values if not alike else (values[0] if values else standard,)


def _arrived(
    prompt_id: int, prompt: int, lengths: list[int], columns: list[Any], order: tuple[int, ...], again: tuple[int, ...]
) -> GroupFace:
    rows = zip(*(repeat(column[0]) if type(column) is tuple else column for column in columns), strict=False)
    whole, lead = Prompt(prompt_id, Away(prompt)), Lead(order, again)  # type: ignore[arg-type]
    samples = tuple(
        _sample(whole, length, lead, dict(zip(_COLUMNS, row, strict=True)))
        for length, row in zip(lengths, rows, strict=False)
    )
    return GroupFace(whole, samples, lead)


def _sample(prompt: Prompt, length: int, lead: Lead, values: dict[str, Any]) -> SampleFace:
    away: Any = Away(length)
    index, truncated = values.pop("index"), values.pop("truncated")
    return SampleFace(prompt, index, away, away, away, "", truncated, lead=lead, **values)


def face_of(group: Group) -> GroupFace | None:
    """The face of a judged group; None if more than a face tells is decided by: columns of other roles, or no verdict
    yet."""
    samples = group.samples
    if not samples or any(sample.per_token or (sample.reward is None and sample.outcome is None) for sample in samples):
        return None
    scored = [at for at, sample in enumerate(samples) if sample.reward is not None]
    lead = Lead(*_tree(group, scored))
    prompt = Prompt(group.prompt.id, Away(len(group.prompt.token_ids)))  # type: ignore[arg-type]
    faces = []
    for at, sample in enumerate(samples):
        versions, counts = np.unique(sample.column("versions"), return_counts=True)
        values = {name: getattr(sample, name) for name in _COLUMNS if name not in ("at", "learned_count", "by_version")}
        values |= {"at": at, "learned_count": sample.learned_tokens}
        values |= {"by_version": dict(zip(versions.tolist(), counts.tolist(), strict=True))}
        faces.append(_sample(prompt, len(sample.response_ids), lead, values))
    return GroupFace(prompt, tuple(faces), lead)


def _tree(group: Group, scored: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`Lead.order` and `Lead.again`."""
    if not scored:
        return (), ()
    samples = [group.samples[at] for at in scored]
    parts = [part for sample in samples for part in (sample.prompt.token_ids, sample.response_ids)]
    prompts = np.array([len(sample.prompt.token_ids) for sample in samples])
    lengths = prompts + np.array([len(sample.response_ids) for sample in samples])
    texts = Texts(np.concatenate(parts).astype(np.int64), lengths, prompts, [one.prompt.images for one in samples])
    order = tree_order(texts)
    return tuple(scored[number] for number in order), tuple(overlaps(texts, order).tolist())


async def faces(held: AsyncIterable[Handle]) -> AsyncIterator[Group]:
    """Groups by their faces, as far as those tell all; the others whole."""
    async for handle in held:
        seen = handle.seen
        if isinstance(seen, Group) and not isinstance(seen, GroupFace):
            seen = face_of(seen)
        if seen is None:
            yield await handle.value()
        else:
            handle.keep()
            seen.lead.handle = handle
            yield seen


async def wholes(groups: Sequence[Group]) -> list[Group]:
    """Groups, fetched where there are only their faces."""
    lead = [group.lead.handle.value() if isinstance(group, GroupFace) else _itself(group) for group in groups]
    return await together(lead)


async def _itself(group: Group) -> Group:
    return group


async def shown_of(groups: Sequence[Group], count: int) -> list[Group]:
    """Groups of a batch for people: those with the first `count` samples by prompt are whole, and no other is kept from
    being forgotten where it was made.

    Args:
        groups: the batch.
        count: of samples.
    """
    first: list[int] = []
    for number in sorted(range(len(groups)), key=lambda number: groups[number].id):
        if sum(len(groups[one].samples) for one in first) < count:
            first.append(number)
    fetched = dict(zip(first, await wholes([groups[number] for number in first]), strict=True))
    for group in groups:
        if isinstance(group, GroupFace):
            group.lead.handle = None
    return [fetched.get(number, group) for number, group in enumerate(groups)]
