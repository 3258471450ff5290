"""Faces of groups: all that is decided by of samples whose tokens, log-probs and texts stay where they were made.

A judge shows `face_of` its groups (`streams.handles`). It is a `Group` of samples whose arrays have a length and no
numbers: rewards, lengths and versions are as they are, so that flows choose by it and a trainer's rank 0 plans by it.
Whoever asks such an array for its numbers gets an error, never zeros.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from rlinf.data.prefix_tree import Texts, overlaps, tree_order
from rlinf.data.sample import Away, Group, Lead, Prompt, SampleFace
from rlinf.runtime.base.tasks import together
from rlinf.runtime.streams.channel import Handle


@dataclass(frozen=True, slots=True, eq=False)
class GroupFace(Group):
    """Face of a group that is elsewhere: its samples are faces."""

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
"""Columns of each sample that travel, and what most have."""


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
        values = {name: getattr(sample, name) for name in _COLUMNS if name not in ("at", "learned_count", "by_version")}
        values |= {"at": at, "learned_count": sample.learned_tokens}
        values |= {"by_version": _counts(sample.column("versions"))}
        faces.append(_sample(prompt, len(sample.response_ids), lead, values))
    return GroupFace(prompt, tuple(faces), lead)


def _counts(versions: np.ndarray) -> dict[int, int]:
    """How many tokens each version made; without sorting them where one made all, as nearly always."""
    if len(versions) and versions.min() == versions.max():
        return {int(versions[0]): len(versions)}
    each, counts = np.unique(versions, return_counts=True)
    return dict(zip(each.tolist(), counts.tolist(), strict=True))


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


async def known(handle: Handle) -> Any:
    """An item as far as it is known here: a group by its face, which has the way to it, where that tells all; any other
    whole, and what is in this process: whoever wants its tokens gets them from here either way, and so without
    asking."""
    face = None if handle.here else handle.face
    if face is None:
        return await handle.value()
    if isinstance(face, GroupFace):  # otherwise its maker keeps none of it
        face.lead.handle = handle
    return face


def passed_on(group: Any) -> Any:
    """The entry of a stream that stands for a group: one that is elsewhere goes from there to its consumer."""
    return group.lead.handle if isinstance(group, GroupFace) else group


async def faces(holding: AsyncIterable[Handle]) -> AsyncIterator[Any]:
    """Items as they are `known` here."""
    async for handle in holding:
        yield await known(handle)


async def wholes(groups: Sequence[Any]) -> list[Group]:
    """Groups, fetched where there are only their faces."""
    away = [group.lead.handle.value() for group in groups if isinstance(group, GroupFace)]
    fetched = iter(await together(away))
    return [next(fetched) if isinstance(group, GroupFace) else group for group in groups]


async def shown_of(groups: Sequence[Any], count: int) -> list[Any]:
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
