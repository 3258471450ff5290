"""Inputs of a vision-language model besides token ids, for packed sequences whose prompts have pictures.

From a `Packed` micro-batch with references come pixels, and positions, which have three dimensions in
models that tell rows from columns by them. Pixels follow the order of placeholders: in another order a model raises no
error, and reads one picture in place of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlinf.data.images import GRID, Pictures
from rlinf.data.packing import Packed, sent
from rlinf.models.language.moe import nowhere


@dataclass(frozen=True, slots=True, eq=False)
class PictureInputs:
    """The pictures of a micro-batch, as the model takes them."""

    tensors: Mapping[str, Tensor]
    """Pixels and what belongs to them, on the device of the tokens; empty without pictures."""
    positions: Tensor
    """Position of each token, int64 [tokens]; or its text position, time, row and column, int64 [4, tokens]."""


def never(pictures: Pictures, like: Tensor) -> Tensor:
    """Return a mask that is added to logits, -inf at placeholders and 0 elsewhere, [vocabulary].

    Engines do not draw placeholders, so they are no part of what a policy chooses from.

    Args:
        pictures: the model's.
        like: has a number for each token of the vocabulary in its last dimension, and the dtype and device wanted.
    """
    banned = like.new_zeros(like.shape[-1])
    banned[list(pictures.banned)] = -torch.inf
    return banned


def without(pictures: Pictures | None, batch: Packed, vocabulary: int) -> None:
    """Put other tokens in place of the placeholders of a made-up text, which has no pictures."""
    banned = set() if pictures is None else set(pictures.banned)
    other = next(token for token in range(vocabulary) if token not in banned)
    for token in banned:
        for part in (batch.ids, batch.targets):
            part[part == token] = other


def with_blank(batch: Packed, pictures: Pictures) -> Packed:
    """The batch with one more sequence behind the others, of the smallest picture alone, of which nothing is learned.

    A rank without pictures must run the tower that reads them: where others do, its weights are gathered, and its
    gradients summed, by all ranks together.
    """
    _, count = pictures.blank()
    device, tokens = batch.ids.device, len(batch.ids)
    ids = torch.full((count,), pictures.placeholder, device=device)
    more = torch.arange(count, device=device)
    shared = batch.places is not None and batch.stands is not None
    return replace(
        batch,
        ids=torch.cat([batch.ids, ids]),
        positions=torch.cat([batch.positions, more]),
        lengths=(*batch.lengths, count),
        places=torch.cat([batch.places, tokens + more]) if shared and batch.places is not None else None,
        stands=np.concatenate([batch.stands, tokens + np.arange(count)]) if batch.stands is not None else None,
        routes=None if batch.routes is None else torch.cat([batch.routes, nowhere(batch.routes, count)]),
    )


def picture_inputs(batch: Packed, pictures: Pictures, *, blank: bool = False) -> PictureInputs:
    """The pictures of a batch.

    Args:
        batch: its images are in the order of their placeholders in `ids`.
        pictures: reads them.
        blank: it is one `with_blank`.

    Raises:
        ValueError: placeholders and pictures do not match.
    """
    device = batch.ids.device
    if blank:
        tensors, count = pictures.blank()
        counts = [count]
    else:
        tensors = pictures.inputs(batch.images)
        counts = pictures.counts(tensors, batch.images)
    ids = batch.ids.cpu().numpy()
    holds = np.flatnonzero(ids == pictures.placeholder)
    if len(holds) != sum(counts):
        raise ValueError(
            f"{len(batch.images)} pictures need {sum(counts)} placeholders (token {pictures.placeholder}), and the "
            f"sequences have {len(holds)}: an answer must have none, and a prompt as many as its pictures need"
        )
    if not counts:
        return PictureInputs({}, batch.positions)
    names = list(tensors)
    positions = batch.positions
    if GRID in tensors:
        owner = np.full(len(ids), -1)
        owner[holds] = np.repeat(np.arange(len(counts)), counts)
        host = _three_dimensions(batch, ids, owner, pictures, tensors[GRID])
        positions = sent([torch.from_numpy(host)], device)[0]
    return PictureInputs(dict(zip(names, sent([tensors[name] for name in names], device), strict=True)), positions)


def _three_dimensions(
    batch: Packed, ids: np.ndarray, owner: np.ndarray, pictures: Pictures, grids: Tensor
) -> np.ndarray:
    """Positions of all tokens, int64 [4, tokens]; `owner` is the picture that each stands for, or -1."""
    positions = np.tile(batch.positions.cpu().numpy(), (4, 1))
    starts = np.cumsum([0, *batch.lengths])
    for start, end in pairwise(starts.tolist()):
        here = np.arange(start, end) if batch.stands is None else batch.stands[start:end]
        own = np.unique(owner[here])
        own = own[own >= 0]
        if len(own):
            positions[1:, here] = pictures.positions(ids[here], grids[own])
    return positions


def in_rows(batch: Packed, pictures: Pictures, places: Tensor, longest: int, *, blank: bool = False) -> PictureInputs:
    """Return pixels and positions as `seen` does, for sequences padded on the right to a rectangle.

    Args:
        batch: the sequences.
        pictures: reads them.
        places: where each place of the sequences laid end to end is in the rectangle, flattened, int64.
        longest: columns of the rectangle.
        blank: as for `seen`.

    Returns:
        Pixels by rows, and positions, int64 [rows, longest] or [3, rows, longest].
    """
    once = picture_inputs(batch, pictures, blank=blank)
    stands = torch.arange(len(batch.ids), device=batch.ids.device) if batch.places is None else batch.places
    rows = len(batch.lengths)
    flat = once.positions.reshape(-1, len(batch.ids))[-3:, stands]
    wide = flat.new_zeros(len(flat), rows * longest)
    wide[:, places] = flat
    positions = wide.view(len(flat), rows, longest)
    positions = positions if len(flat) == 3 else positions[0]
    if blank or not once.tensors:
        return PictureInputs(once.tensors, positions)
    counts = pictures.counts(pictures.inputs(batch.images), batch.images)
    owner = torch.full_like(batch.ids, -1)
    owner[batch.ids == pictures.placeholder] = torch.repeat_interleave(
        torch.arange(len(counts), device=owner.device), torch.tensor(counts, device=owner.device)
    )
    again = [
        batch.images[number]
        for part in owner[stands].split(list(batch.lengths))
        for number in torch.unique(part[part >= 0]).tolist()
    ]
    tensors = pictures.inputs(again)
    moved = sent(list(tensors.values()), batch.ids.device)
    return PictureInputs(dict(zip(tensors, moved, strict=True)), positions)
