"""The tokens of a micro-batch, split over the ranks that compute it together.

In: a `Packed` micro-batch that all of them have. Out: this rank's tokens as a `Packed` of their own, who of them sees
which tokens of the others (`Pieces`), and what was computed of learned tokens, from all ranks again.

Causal attention costs a token what came before it, so a rank that had the end of a long answer would work longest. All
tokens are cut into twice as many chunks as there are context ranks, and a rank has one from the front and one from the
back (zig-zag; Llama 3, arXiv:2407.21783, section 3.3.2). Tensor ranks cut such a share once more, in order: they have
it whole while they compute with split matrices, and a part of it everywhere else. So each rank has tokens of its own
wherever weights are whole, and the gradients of all ranks are summed, for every weight, with no exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.data.packing import Packed, sent
from rlinf.models.language.parallel.collectives import whole_again


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of neighbours in one sequence that a context rank computes, each with all that it may see."""

    group: dist.ProcessGroup | None
    """The context ranks, whose keys and values come one behind another; None for one."""
    lengths: tuple[tuple[int, int], ...]
    """Of each piece, its tokens, and its position behind the last."""
    queries: Tensor
    """Where the pieces' tokens stand in this rank's share, int64 [tokens of pieces]."""
    keys: Tensor
    """Where stands what each piece may see, in the shares of all ranks, int64 [tokens seen]."""
    restore: Tensor
    """Of each token of the share, its place among the pieces' laid end to end, int64; behind the last for padding."""
    query_bounds: Tensor
    """Where each piece begins in `queries`, and the end of the last, int32 [pieces + 1]."""
    key_bounds: Tensor
    """The same in `keys`."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank computes of a micro-batch."""

    batch: Packed
    """Its tokens, and the learned tokens that these predict."""
    positions: Tensor
    """Of the tokens that the tensor ranks have together, int64."""
    pieces: Pieces
    """Who sees whom."""
    tokens: Tensor
    """Which token of the whole micro-batch each of ours is, int64; the last one for padding."""
    kept: Tensor
    """Which learned tokens of the whole micro-batch ours are, int64."""
    places: Tensor
    """Where each learned token stands when all ranks' come one behind another, int64 [learned]."""
    most: int
    """Learned tokens of the rank that has the most, at least one."""
    group: dist.ProcessGroup
    """The ranks that have a part each."""

    def whole(self, mine: Tensor) -> Tensor:
        """What was computed of each learned token, on all ranks, [learned, ...], from what each has, [ours, ...]."""
        return whole_again(mine, self.kept, self.places, self.most, self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Ranks that compute a micro-batch together, seen from one of them."""

    together: DeviceMesh
    """All of them, tensor ranks next to each other."""
    context: DeviceMesh | None = None
    """Those that have other shares, in order; None for one share."""
    tensor: DeviceMesh | None = None
    """Those that have other parts of the same share, in order; None for one part."""

    @property
    def lead(self) -> bool:
        """What all of them find alike counts as found by this one."""
        return self.together.get_local_rank() == 0

    def share(self, batch: Packed) -> Share:
        """This rank's part of a micro-batch, which all of them have on the same device."""
        ranks, parts = self.together.size(), 1 if self.tensor is None else self.tensor.size()
        me = self.together.get_local_rank()
        tokens = len(batch.ids)
        order = zigzag(tokens, ranks // parts, parts)
        stood = np.empty(order.size, np.int64)  # of each token, its place in the shares laid end to end
        stood[order.reshape(-1)] = np.arange(order.size)
        share = order[me // parts]
        part = share.reshape(parts, -1)[me % parts]
        stands = batch.stands if batch.stands is not None else np.arange(sum(batch.lengths))
        predicting = stood[stands[batch.kept.cpu().numpy()]]
        kept, places, most = _spread(predicting // len(part), ranks, me)
        lengths, arrays = _pieces(batch.lengths, stands, share, stood, tokens)
        at_hand = [
            np.minimum(part, tokens - 1),
            np.minimum(share, tokens - 1),
            predicting[kept] - me * len(part),
            kept,
            places,
            *arrays,
        ]
        chosen, shared, local, mine, back, *rest = sent([torch.from_numpy(each) for each in at_hand], batch.ids.device)
        own = replace(
            batch,
            ids=batch.ids.index_select(0, chosen),
            positions=batch.positions.index_select(0, chosen),
            places=None,
            stands=None,
            routes=None if batch.routes is None else batch.routes.index_select(0, chosen),
            kept=local,
            targets=batch.targets.index_select(0, mine),
            temperature=None if batch.temperature is None else batch.temperature.index_select(0, mine),
        )
        pieces = Pieces(None if self.context is None else self.context.get_group(), lengths, *rest)
        positions = batch.positions.index_select(0, shared)
        return Share(own, positions, pieces, chosen, mine, back, most, self.together.get_group())


def zigzag(tokens: int, shares: int, parts: int) -> np.ndarray:
    """Which tokens each share has, int64 [shares, tokens of a share]; numbers from `tokens` on are padding.

    Args:
        tokens: of the micro-batch.
        shares: into which they are split.
        parts: into which every share can be split evenly.
    """
    chunk = -(-tokens // (2 * shares * parts)) * parts
    chunks = np.arange(2 * shares * chunk).reshape(2 * shares, chunk)
    return np.concatenate([chunks[:shares], chunks[: shares - 1 : -1]], axis=1)


def _spread(owner: np.ndarray, ranks: int, me: int) -> tuple[np.ndarray, np.ndarray, int]:
    """For `Share`: `kept`, `places` and `most` of learned tokens, given the rank that has each, int64 [learned]."""
    counts = np.bincount(owner, minlength=ranks)
    most = max(1, int(counts.max()))
    places = np.empty_like(owner)
    for rank in range(ranks):
        places[owner == rank] = rank * most + np.arange(counts[rank])
    return np.flatnonzero(owner == me), places, most


def _pieces(
    lengths: Sequence[int], stands: np.ndarray, share: np.ndarray, stood: np.ndarray, tokens: int
) -> tuple[tuple[tuple[int, int], ...], list[np.ndarray]]:
    """For `Pieces`: `lengths`, and the rest as arrays.

    A token that sequences share sees the same in each, and is computed where it stands first.

    Args:
        lengths: tokens of each sequence.
        stands: which token stands at each place of the sequences laid end to end.
        share: the tokens of this rank's share, int64; from `tokens` on padding.
        stood: of each token, its place in the shares laid end to end, int64.
        tokens: how many there are.
    """
    mine = np.full(tokens, -1)
    real = np.flatnonzero(share < tokens)
    mine[share[real]] = real
    queries: list[np.ndarray] = [np.zeros(0, np.int64)]
    keys = [*queries]
    found: list[tuple[int, int]] = []
    for sequence in np.split(stands, np.cumsum(lengths)[:-1]):
        here = np.flatnonzero(mine[sequence] >= 0)
        for run in np.split(here, np.flatnonzero(np.diff(here) > 1) + 1) if len(here) else ():
            queries.append(mine[sequence[run]])
            keys.append(stood[sequence[: run[-1] + 1]])
            found.append((len(run), int(run[-1]) + 1))
            mine[sequence[run]] = -1
    asked = np.concatenate(queries)
    restore = np.full(len(share), len(asked))
    restore[asked] = np.arange(len(asked))
    bounds = [np.cumsum([0, *sizes]).astype(np.int32) for sizes in ([n for n, _ in found], [n for _, n in found])]
    return tuple(found), [asked, np.concatenate(keys), restore, *bounds]
