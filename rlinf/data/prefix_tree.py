"""Prefix trees: what token sequences share with each other at their beginnings, so that it is read once.

Answers to one prompt share it, turns of a conversation everything before the last turn, branches of a search all above
the branch. In the order of their bytes a sequence shares with its neighbour all that it shares with any before it, so
comparing neighbours finds the whole tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.data.sample import ImageRef


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Token sequences laid end to end, none empty."""

    ids: np.ndarray
    """Their tokens, int64 [sum of lengths]."""
    lengths: np.ndarray
    """Tokens of each, int64 [texts]."""
    prompts: np.ndarray
    """How many of them are its prompt, int64 [texts]."""
    images: Sequence[tuple[ImageRef, ...]]
    """Pictures of each, all in its prompt."""
    routes: np.ndarray | None = None
    """Experts to which the tokens went, [sum of lengths, layers, experts per token], see `Sample.routes`."""

    @property
    def starts(self) -> np.ndarray:
        """Where each begins, int64 [texts]."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Texts, and the tokens of the tree that they make."""

    places: np.ndarray
    """Which token of the tree stands at each place of the texts laid end to end, int64. Of every text the last tokens,
    those that no earlier one has, follow those of the text before it."""
    reads: np.ndarray
    """Where each token of the tree stands first, int64 [tokens of the tree], ascending."""
    images: tuple[ImageRef, ...]
    """Pictures that are read, in the order of their placeholders in the tree."""


def tree_order(texts: Texts) -> list[int]:
    """Numbers of texts in an order in which each shares most with the one before it; equal ones as they came."""
    data, ends = texts.ids.tobytes(), (np.cumsum(texts.lengths) * texts.ids.itemsize).tolist()
    # any order of bytes keeps together what begins alike
    keys: list[object] = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    if any(texts.images):
        digests = [[image.digest for image in images] for images in texts.images]
        keys = [(own[:1], key, own) for own, key in zip(digests, keys, strict=True)]
    return sorted(range(len(keys)), key=keys.__getitem__)  # type: ignore[arg-type]


def overlaps(texts: Texts, order: Sequence[int]) -> np.ndarray:
    """How many tokens each text can share with the one before it, int64 [texts]; 0 for the first.

    Placeholders of pictures are alike whatever the pictures, and nobody knows here where they stand: with pictures,
    what is shared holds a whole prompt, and the other text has that prompt's pictures first. An answer's tokens may
    have gone to other experts each time, and so may those of another prompt; those of one prompt go where its first
    reader's went.

    Args:
        texts: to be compared.
        order: their numbers, as they follow one another; the result is in this order.
    """
    starts, lengths = texts.starts[order], texts.lengths[order]
    common = np.minimum(lengths[:-1], lengths[1:])
    begins = np.cumsum(common) - common
    offsets = np.arange(common.sum())
    before, after = (offsets + np.repeat(part - begins, common) for part in (starts[:-1], starts[1:]))
    differ = np.flatnonzero(texts.ids[before] != texts.ids[after])
    first = np.append(differ, np.iinfo(np.int64).max)[np.searchsorted(differ, begins)]
    common_tokens = np.concatenate([[0], np.minimum(first - begins, common)])
    if texts.routes is not None or any(texts.images):
        for at in np.flatnonzero(common_tokens).tolist():
            common_tokens[at] = _alike(texts, (order[at - 1], order[at]), int(common_tokens[at]))
    return common_tokens


def _alike(texts: Texts, pair: tuple[int, int], count: int) -> int:
    """How many of so many equal tokens two texts can share, by their pictures and their routes."""
    short, other = sorted(pair, key=lambda number: int(texts.prompts[number]))
    prompt, images = int(texts.prompts[short]), texts.images[short]
    if texts.routes is not None:
        begin = prompt if prompt == texts.prompts[other] <= count else 0
        starts = texts.starts
        one, two = (texts.routes[starts[number] + begin : starts[number] + count] for number in pair)
        differ = np.flatnonzero((one != two).any(axis=(1, 2)))
        count = begin + int(differ[0]) if len(differ) else count
    if images or texts.images[other]:
        both = count >= texts.prompts[other]
        if count < prompt or texts.images[other][: None if both else len(images)] != images:
            return 0
    return count


def tree_of(texts: Texts) -> Tree:
    """The tree of texts."""
    order = tree_order(texts)
    counts = overlaps(texts, order).tolist()
    starts = texts.starts.tolist()
    every = np.arange(len(texts.ids))
    same = every.copy()  # a place that has the same token of the tree
    for before, number, count in zip([0, *order], order, counts, strict=False):
        if count:
            here, there = starts[number], starts[before]
            same[here : here + count] = same[there : there + count]
    first = np.empty_like(every)
    first[same[::-1]] = every[::-1]  # of several places the last that is written counts: the first of all
    first = first[same]
    fresh = first == every
    return Tree((np.cumsum(fresh) - 1)[first], np.flatnonzero(fresh), _pictures(texts, order, counts))


def _pictures(texts: Texts, order: Sequence[int], counts: Sequence[int]) -> tuple[ImageRef, ...]:
    """The pictures that are read: of every text those that no earlier one has shared with it."""
    if not any(texts.images):
        return ()
    owners: dict[int, list[tuple[int, int]]] = {}  # of each text the pictures, as text and number, that it has first
    for before, number, count in zip([0, *order], order, counts, strict=False):
        start = 0
        if count:
            start = len(texts.images[min(before, number, key=lambda one: int(texts.prompts[one]))])
        own = [(number, at) for at in range(start, len(texts.images[number]))]
        owners[number] = [*(owners[before][:start] if start else ()), *own]
    once = dict.fromkeys(one for number in sorted(owners) for one in owners[number])
    return tuple(texts.images[number][at] for number, at in once)


def begins_of(lengths: Sequence[int], places: np.ndarray) -> np.ndarray:
    """How many leading tokens each text shares with earlier ones, int64 [texts].

    Args:
        lengths: tokens of each text.
        places: see `Tree`.
    """
    most = np.maximum.accumulate(places)
    ends = np.cumsum(lengths)
    return np.asarray(lengths) - np.diff(most[ends - 1], prepend=-1)
