"""Packing: many token sequences as the few flat tensors that a model reads, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeIs

from rlinf.data.prefix_tree import Texts, overlaps, tree_of
from rlinf.data.routes import side_by_side
from rlinf.data.sample import Away, Datum, Group, ImageRef, Lead, Sample, SampleFace, join_columns, split, split_columns
from rlinf.runtime.base.tasks import together

T = TypeVar("T")

_ALIGNED = 16
"""Bytes that tensors of one copy begin at a multiple of: what kernels read at once."""
_WORTH_SHARING = 0.1
"""Share of tokens to be spared from which on beginnings are read once: gathering them costs attention some per cent."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence to learn from: a sample with its advantage, or a worked example."""

    prompt_ids: np.ndarray
    """Ids before the response, int64 [prompt], at least one."""
    response_ids: np.ndarray
    """Ids that follow the prompt, int64 [response]; the learned tokens are those of `loss_mask`."""
    old_logprobs: np.ndarray | None = None
    """Log-probs of the policy that sampled, nats, float32 [learned]; None for an example."""
    advantage: float | np.ndarray = 0.0
    """Advantage of the whole sequence, or of each learned token, float32 [learned]."""
    temperature: float = 1.0
    """At which its log-probs are meant."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further values of each learned token, by name, [learned] each; rows of a micro-batch have the same names."""
    images: tuple[ImageRef, ...] = ()
    """Pictures of the prompt, in the order of their placeholders in `prompt_ids`."""
    loss_mask: np.ndarray | None = None
    """Which response tokens are learned, bool [response]; None for all. The others are read and otherwise count for
    nothing: of them there is no log-prob, no advantage and no column."""
    weight: float = 1.0
    """How many rows it counts as."""
    routes: np.ndarray | None = None
    """Experts to which its tokens went, see `Sample.routes`."""
    targets: np.ndarray | None = None
    """The tokens that are learned where they are not the response's own, int64 [learned]."""
    agent: str = ""
    """Name of the agent that said them, see `Sample.agent`."""

    @staticmethod
    def of(sample: Sample, advantage: float | np.ndarray = 0.0, columns: Mapping[str, np.ndarray] | None = None) -> Row:
        """The row of a sample.

        Args:
            sample: a greedy one counts as drawn at temperature 1, which is what its log-probs say.
            advantage: of the sample, or of each learned token, [learned].
            columns: of each learned token, [learned] each.
        """
        prompt = sample.prompt
        if isinstance(sample, SampleFace):
            return AwayRow.of_face(sample, advantage, columns or {})
        return Row(
            prompt.token_ids,
            sample.response_ids,
            sample.column("logprobs"),
            advantage,
            sample.temperature or 1.0,
            columns or {},
            prompt.images,
            sample.loss_mask,
            sample.weight,
            sample.routes,
            agent=sample.agent,
        )

    @staticmethod
    def of_datum(datum: Datum, names: Sequence[str] = ()) -> Row:
        """The row of tokens with numbers beside them, all of which are learned.

        Args:
            datum: checked.
            names: of its inputs that become columns.
        """
        response = np.concatenate([datum.tokens[1:], datum.targets[-1:]])
        columns = {name: datum.inputs[name] for name in names}
        return Row(datum.tokens[:1], response, columns=columns, targets=datum.targets)

    @staticmethod
    def made_up(prompt: int, response: int, number: int = 0) -> Row:
        """A sequence of so many tokens each, for trials; those of other numbers have other answers."""
        ids = np.arange(prompt + response, dtype=np.int64) * 7919 + prompt
        return Row(ids[:prompt], ids[prompt:] + 31 * number)

    @property
    def size(self) -> int:
        """Tokens, prompt included."""
        return len(self.prompt_ids) + len(self.response_ids)

    def places(self) -> np.ndarray:
        """Where in the response the learned tokens stand, int64 [learned]."""
        return np.arange(len(self.response_ids)) if self.loss_mask is None else np.flatnonzero(self.loss_mask)

    @property
    def learned_routes(self) -> np.ndarray | None:
        """Experts of the tokens that predict the learned ones, [learned, layers, experts per token]."""
        return None if self.routes is None else self.routes[len(self.prompt_ids) - 1 + self.places()]

    @property
    def learned(self) -> int:
        """How many tokens are learned."""
        return len(self.response_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, eq=False)
class AwayRow(Row):
    """A row of a sample that is elsewhere: it knows its lengths, and is made whole by whoever computes on it."""

    at: int = 0
    """The sample's place in its group."""
    learned_count: int = 0
    """How many tokens are learned."""
    lead: Lead = field(default_factory=Lead)
    """The way to the group; without what only planning needs where the row is computed on."""

    @staticmethod
    def of_face(sample: SampleFace, advantage: float | np.ndarray, columns: Mapping[str, np.ndarray]) -> AwayRow:
        """The row of a sample's face; see `Row.of`."""
        return AwayRow(
            sample.prompt.token_ids,
            sample.response_ids,
            advantage=advantage,
            columns=columns,
            weight=sample.weight,
            agent=sample.agent,
            at=sample.at,
            learned_count=sample.learned_tokens,
            lead=sample.lead,
        )

    @property
    def learned(self) -> int:
        return self.learned_count

    def places(self) -> np.ndarray:
        raise TypeError("a row that is elsewhere: make it whole first (rows_here)")

    def whole(self, group: Group) -> Row:
        """The row with its tokens, which the group has."""
        sample = group.samples[self.at]
        return Row.of(sample, self.advantage, {name: sample.column(name) for name in self.columns})

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels without what only planning needs."""
        lengths = len(self.prompt_ids), len(self.response_ids)
        return _away, (*lengths, self.advantage, (*self.columns,), self.at, self.learned_count, self.lead.handle)


def _away(
    prompt: int, response: int, advantage: Any, names: tuple[str, ...], at: int, learned: int, handle: Any
) -> AwayRow:
    prompt_ids: Any = Away(prompt)
    response_ids: Any = Away(response)
    columns: Any = dict.fromkeys(names)
    return AwayRow(
        prompt_ids,
        response_ids,
        advantage=advantage,
        columns=columns,
        at=at,
        learned_count=learned,
        lead=Lead(handle=handle),
    )


def is_away(row: Row) -> TypeIs[AwayRow]:
    """The row is of a sample that is elsewhere: it is planned with by its lengths alone."""
    return isinstance(row, AwayRow)


async def rows_here(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows with their tokens: those of samples that are elsewhere are fetched from there, each group once."""
    handles = {id(row.lead.handle): row.lead.handle for row in rows if is_away(row)}
    if not handles:
        return tuple(rows)
    groups = dict(zip(handles, await together([handle.value() for handle in handles.values()]), strict=True))
    return tuple(row.whole(groups[id(row.lead.handle)]) if is_away(row) else row for row in rows)


def shared(rows: Sequence[Row]) -> list[int]:
    """How many tokens each row shares with the one before it; 0 for the first. Of samples that are elsewhere those of
    one group are compared, and no others."""
    counts = [0] * len(rows)
    begin = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or is_away(rows[end]) != is_away(rows[begin]):
            some = rows[begin:end]
            if is_away(some[0]):
                for number, (before, row) in enumerate(pairwise(filter(is_away, some)), begin + 1):
                    if before.lead is row.lead:
                        counts[number] = row.lead.shared(before.at, row.at)
            else:
                counts[begin:end] = overlaps(whole_texts(some), range(len(some))).tolist()
            begin = end
    return counts


_NAMES = [each.name for each in fields(Row)]
_VALUES = attrgetter(*_NAMES)
_IDS, _ADVANTAGE, _COLUMNS = map(_NAMES.index, ("response_ids", "advantage", "columns"))


class Parcel:
    """Rows on their way to another process, where they arrive as a tuple: as a few long arrays, since many short ones
    cost ten times as much to pickle."""

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self._rows
        names = tuple(rows[0].columns) if rows else ()
        if not rows or any(row.old_logprobs is None or tuple(row.columns) != names for row in rows):
            return tuple, (list(rows),)
        values: list[Any] = [*zip(*map(_VALUES, rows), strict=True)]
        lengths, learned = [len(ids) for ids in values[_IDS]], [row.learned for row in rows]
        values[_IDS:_ADVANTAGE] = map(np.concatenate, values[_IDS:_ADVANTAGE])
        values[_COLUMNS] = join_columns(values[_COLUMNS])
        return _unpack, (lengths, learned, values)


def _unpack(lengths: Sequence[int], learned: Sequence[int], values: list[Any]) -> tuple[Row, ...]:
    """The rows of a `Parcel`."""
    values[_IDS:_ADVANTAGE] = split(values[_IDS], lengths), split(values[_IDS + 1], learned)
    values[_COLUMNS] = split_columns(values[_COLUMNS], learned)
    return tuple(map(Row, *values))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences one behind another, without padding. What several have in common at their beginnings, such as a prompt
    with several answers or the turns before a turn, is there once: the tokens are those of a prefix tree. The last
    learned token of a response, and all behind it, predict none and are not there at all."""

    ids: Tensor
    """Tokens to be read, int64 [tokens]."""
    positions: Tensor
    """Position of each token in its own sequence, from 0, int64 [tokens]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, those that it shares included."""
    places: Tensor | None
    """Which of `ids` stands at each place of the sequences laid end to end, int64 [sum of lengths]; None if they share
    none, so that each stands at its own. See `prefix_tree.Tree`."""
    predictors: Tensor
    """Places of the sequences laid end to end where learned tokens are predicted, one before where they stand, int64
    [learned]."""
    targets: Tensor
    """The learned tokens, int64 [learned]."""
    old_logprobs: Tensor
    """Log-probs of the policy that sampled, nats, float32 [learned]; 0 where there are none."""
    advantages: Tensor
    """float32 [learned]"""
    temperature: Tensor | None
    """float32 [learned]; None if all are 1."""
    sequences: Tensor
    """Which sequence each learned token belongs to, from 0, int64 [learned]."""
    columns: Mapping[str, Tensor]
    """Further values of the learned tokens, by name, [learned] each."""
    weights: Tensor | None = None
    """How many tokens each learned token counts as, float32 [learned]; None if all count as one."""
    distinct: Tensor | None = None
    """Learned tokens that stand for all: of those that one token predicts, that are one token and that have one
    temperature, the first, int64 [distinct]; None where that spares too little."""
    alike: Tensor | None = None
    """Which of `distinct` each learned token has the log-prob of, int64 [learned]; None with it."""
    images: tuple[ImageRef, ...] = ()
    """Pictures to be read, in the order of their placeholders in `ids`."""
    routes: Tensor | None = None
    """Experts to which `ids` went, [tokens, layers, experts per token], see `data.routes`; None: unknown."""
    expert_load: Tensor | None = None
    """Share of the whole batch's choices that each expert has, [layers, experts], where experts are balanced."""
    stands: np.ndarray | None = None
    """`places` on the host, wherever the rest is, so that nobody has to ask a device for them."""
    parts: tuple[int, ...] = ()
    """Sequences of each of the batches that were laid beside one another; none: it is one batch."""
    tenants: tuple[Any, ...] = ()
    """`Tenant`s: stretches that are computed with adapters of their own; none: all are with the policy's."""

    @property
    def mask(self) -> Tensor:
        """That all learned tokens count in a loss, bool [learned]; or how much, float32 [learned], see `weights`."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self.weights is None else self.weights

    def predicting(self) -> Tensor:
        """Which of `ids` predicts each learned token, int64 [learned]; a prompt's last token predicts the first of
        every answer to it."""
        return self.predictors if self.places is None else self.places.index_select(0, self.predictors)

    def routed(self, routes: Tensor | None) -> Packed:
        """Copy with other routes."""
        return replace(self, routes=routes)

    def to(self, device: torch.device) -> Packed:
        """Copy on a device; itself if it is there."""
        if self.ids.device == device:
            return self
        named = {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        moved = sent([*named.values(), *self.columns.values()], device)
        columns = dict(zip(self.columns, moved[len(named) :], strict=True))
        return replace(self, columns=columns, **dict(zip(named, moved, strict=False)))  # type: ignore[arg-type]


def sent(tensors: Sequence[Tensor | None], device: torch.device) -> list[Any]:
    """Tensors of the host on a device, in one copy that nobody waits for; what is None stays it.

    Args:
        tensors: small ones, of any dtypes; those that are on the device already stay as they are.
        device: to CUDA they go by way of pinned memory, without which a copy holds up the host.
    """
    away = [one for one in tensors if one is not None and one.device != device]
    if device.type == "cpu" or any(one.device.type != "cpu" for one in away):
        return [None if one is None else one.to(device) for one in tensors]
    ends = np.cumsum([-(-one.nbytes // _ALIGNED) * _ALIGNED for one in away], dtype=np.int64)
    pinned = device.type == "cuda" and torch.cuda.is_available()
    slab = torch.empty(int(ends[-1]) if len(away) else 0, dtype=torch.uint8, pin_memory=pinned)
    parts = [
        slab[end - -(-one.nbytes // _ALIGNED) * _ALIGNED :][: one.nbytes] for one, end in zip(away, ends, strict=True)
    ]
    for one, part in zip(away, parts, strict=True):
        part.view(one.dtype).view(one.shape).copy_(one)
    there = slab.to(device, non_blocking=True)
    places = [part.storage_offset() for part in parts]
    copies = {
        id(one): there[place : place + one.nbytes].view(one.dtype).view(one.shape)
        for one, place in zip(away, places, strict=True)
    }
    return [copies.get(id(one), one) for one in tensors]


def beside(batches: Sequence[Packed], multiple: int = 1) -> Packed:
    """Lay batches beside one another, each of which is computed as if it were alone.

    Args:
        batches: of texts that share no prompts; what they have beside tokens (columns, old log-probs) stays with them.
        multiple: made-up tokens follow that make the number of all one of this.
    """
    if filling := -sum(len(each.ids) for each in batches) % multiple:
        made_up = Row(np.zeros(1, dtype=np.int64), np.zeros(filling, dtype=np.int64))
        batches = [*batches, pack([made_up]).to(batches[0].ids.device)]
    starts = np.cumsum([0, *(len(each.ids) for each in batches)])
    first = np.cumsum([0, *(len(each.lengths) for each in batches)])
    return replace(
        batches[0],
        ids=torch.cat([each.ids for each in batches]),
        positions=torch.cat([each.positions for each in batches]),
        lengths=tuple(length for each in batches for length in each.lengths),
        predictors=torch.cat([each.predictors + int(start) for each, start in zip(batches, starts, strict=False)]),
        targets=torch.cat([each.targets for each in batches]),
        sequences=torch.cat([each.sequences + int(start) for each, start in zip(batches, first, strict=False)]),
        columns={},
        parts=tuple(len(each.lengths) for each in batches),
    )


def pack(rows: Sequence[Row], *, shares: bool = True) -> Packed:
    """Lay sequences one behind another.

    Without any, there is a single token and nothing to learn: a rank that has no work must take part in a computation.

    Args:
        rows: the sequences.
        shares: beginnings that several have in common are there once.

    Raises:
        ValueError: a prompt is empty, so there is nothing to predict the first token of its response from.
    """
    if not rows:
        rows = [Row(np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    prompts = np.array([len(row.prompt_ids) for row in rows])
    if not prompts.all():
        raise ValueError(f"row {int(prompts.argmin())} of a micro-batch has an empty prompt: it must have one token")
    learned = [row.places() for row in rows]
    counts = np.array([len(places) for places in learned])
    behind = np.array([places[-1] if len(places) else 0 for places in learned])  # all before the last learned one
    lengths = prompts + behind
    starts = np.cumsum(lengths) - lengths
    predicting = np.concatenate(learned) + np.repeat(starts + prompts - 1, counts)
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    responses = [row.response_ids[:more] for row, more in zip(rows, behind, strict=True)]
    parts = [part for row, response in zip(rows, responses, strict=True) for part in (row.prompt_ids, response)]
    ids = np.concatenate(parts).astype(np.int64)
    goals = [
        row.response_ids[places] if row.targets is None else row.targets
        for row, places in zip(rows, learned, strict=True)
    ]
    targets = np.concatenate(goals).astype(np.int64)
    temperature = _unless_one([row.temperature for row in rows], counts)
    routed = [row.routes for row in rows]
    routes = None if not any(part is not None for part in routed) else side_by_side(routed, lengths.tolist())
    pictures = [row.images for row in rows]
    tree = tree_of(Texts(ids, lengths, prompts, pictures, routes)) if shares and len(rows) > 1 else None
    if tree is not None and len(ids) - len(tree.reads) < _WORTH_SHARING * len(ids):
        tree = None
    reads, stands = (None, None) if tree is None else (tree.reads, tree.places)
    distinct, alike = (None, None) if stands is None else _distinct(stands[predicting], targets, temperature)
    old = [np.zeros(n) if row.old_logprobs is None else row.old_logprobs for n, row in zip(counts, rows, strict=True)]
    return Packed(
        ids=torch.from_numpy(ids if reads is None else ids[reads]),
        positions=torch.from_numpy(positions if reads is None else positions[reads]),
        lengths=tuple(lengths.tolist()),
        places=_tensor(stands),
        stands=stands,
        predictors=torch.from_numpy(predicting),
        targets=torch.from_numpy(targets),
        old_logprobs=torch.from_numpy(np.concatenate(old).astype(np.float32)),
        advantages=torch.from_numpy(_per_token([row.advantage for row in rows], counts)),
        temperature=_tensor(temperature),
        weights=_tensor(_unless_one([row.weight for row in rows], counts)),
        sequences=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        distinct=_tensor(distinct),
        alike=_tensor(alike),
        columns={
            name: torch.from_numpy(np.concatenate([row.columns[name] for row in rows])) for name in rows[0].columns
        },
        images=tuple(image for own in pictures for image in own) if tree is None else tree.images,
        routes=None if routes is None else torch.from_numpy(routes if reads is None else routes[reads]),
    )


def padded(batch: Packed) -> tuple[Tensor, Tensor]:
    """One rectangle, padded on the right: what is real never sees the padding behind it.

    Returns:
        Token ids [rows, longest], and where each place of the sequences laid end to end is in it, flattened, int64.
    """
    lengths = np.array(batch.lengths)
    longest = max(batch.lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    (places,) = sent([torch.from_numpy(rows * longest + np.arange(len(rows)) - starts[rows])], batch.ids.device)
    ids = batch.ids.new_zeros(len(lengths) * longest)
    ids[places] = batch.ids if batch.places is None else batch.ids[batch.places]
    return ids.view(len(lengths), longest), places


def _unless_one(values: Sequence[float], counts: np.ndarray) -> np.ndarray | None:
    """A number per sequence as one per token, float32; None if all are 1."""
    array = np.array(values, np.float32)
    return None if (array == 1.0).all() else np.repeat(array, counts)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _distinct(
    predicting: np.ndarray, targets: np.ndarray, temperature: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`Packed.distinct` and `Packed.alike`, of the tokens that predict the learned ones, of these and of their
    temperatures, [learned] each."""
    fewest = len(predicting) * (1 - _WORTH_SHARING)
    if np.count_nonzero(np.bincount(predicting)) > fewest:  # which most often tells without sorting
        return None, None
    keys = predicting * (int(targets.max()) + 1) + targets
    if temperature is not None:
        kinds, kind = np.unique(temperature, return_inverse=True)
        keys = keys * len(kinds) + kind
    _, first, alike = np.unique(keys, return_index=True, return_inverse=True)
    return (None, None) if len(first) > fewest else (first, alike)


def _per_token(values: Sequence[float | np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """Numbers of sequences, or of their tokens, as one per token, float32."""
    if any(isinstance(value, np.ndarray) for value in values):
        whole = [np.broadcast_to(np.float32(value), (n,)) for value, n in zip(values, lengths, strict=True)]
        return np.concatenate(whole)
    return np.repeat(np.array(values, np.float32), lengths)


def whole_texts(rows: Sequence[Row]) -> Texts:
    """Rows as texts, to their last tokens."""
    parts = [part for row in rows for part in (row.prompt_ids, row.response_ids)]
    lengths, images = np.array([row.size for row in rows]), [row.images for row in rows]
    return Texts(np.concatenate(parts).astype(np.int64), lengths, np.array([len(part) for part in parts[::2]]), images)


def cut_rows(rows: Sequence[Row], budget: int, *, trees: bool) -> Iterator[list[Row]]:
    """Cut rows, in order, into micro-batches of at most so many tokens; a longer row stands alone.

    Args:
        rows: what to cut.
        budget: of a micro-batch, in tokens.
        trees: what neighbours share at their beginnings is read once, and counts once.
    """
    again = overlaps(whole_texts(rows), range(len(rows))).tolist() if trees and rows else [0] * len(rows)
    return cut_tree(rows, [row.size for row in rows], again, budget)


_FULL = 0.8
"""Share of its budget that a piece has at least where it is cut earlier than it need be: a prefix that is read again
costs tokens, and so does one piece more."""


def cut_tree(items: Sequence[T], sizes: Sequence[int], again: Sequence[int], budget: int) -> Iterator[list[T]]:
    """`cut` where neighbours share a beginning, which counts once in each piece.

    Args:
        items: what to cut, in the order of a tree.
        sizes: size of each, in tokens.
        again: how many of those the one before it has too. Pieces end where that is least, as far as they are full.
        budget: of a piece, in tokens.
    """
    start = 0
    while start < len(items):
        total, end, ends = sizes[start], start + 1, list[tuple[int, int]]()
        while end < len(items) and total + sizes[end] - again[end] <= budget:
            if total >= _FULL * budget:
                ends.append((again[end], -end))
            total += sizes[end] - again[end]
            end += 1
        if end < len(items) and ends and min(ends)[0] < again[end]:
            end = -min(ends)[1]
        yield list(items[start:end])
        start = end


def cut(items: Sequence[T], sizes: Sequence[int], budget: int) -> Iterator[list[T]]:
    """Cut a sequence, in order, into pieces of at most `budget` in size; a larger item stands alone.

    Args:
        items: what to cut.
        sizes: size of each, in tokens.
        budget: of a piece, in tokens.
    """
    piece: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if piece and total + size > budget:
            yield piece
            piece, total = [], 0
        piece.append(item)
        total += size
    if piece:
        yield piece
