"""KV cache and states of the rows of a batch, in memory that is allocated ahead and written in place.

A band holds rows of like length, aligned at their ends: all stand at the same column, so a step writes one column and
reads one window, and the columns to the left of a short row are masked. A row that leaves makes room for a newcomer
or is filled by the last row; nothing else moves. A batch has several bands when its rows differ much in length, so
that a short row is never read, and its memory never held, at the length of a long one.

Rows that read drafts get on by different numbers of tokens: then each has its own next column, until they meet again,
and what a step writes and sees is told by where each row stands. What was rejected lies behind a row's end, where
nobody looks before it is written over.

Layers that remember a text in a state of fixed size (Mamba, linear attention, short convolutions) keep one per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.base import Request

Place = tuple[int, str, int]
"""Where a state lies in a transformers cache: the layer, the attribute, and which of its states."""


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The memory that a model has of texts that it has read."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    """Keys and values per layer, each [rows, key-value heads, columns, head size]; of a layer without attention they
    have no heads."""
    states: Sequence[Tensor] = ()
    """States of fixed size, [rows, ...] each."""
    places: Sequence[Place] = ()
    """Where each state lies."""
    shifts: np.ndarray | None = None
    """How much further on than its number a token behind each text stands, int64 [rows]; None if nowhere. A picture
    takes up fewer positions than tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """Where the tokens of one pass lie, where rows read several or do not stand at the same column."""

    rows: Tensor
    """Row of each token, int64 [tokens]."""
    columns: Tensor
    """Its column, int64 [tokens]."""
    depths: Tensor
    """How many tokens of its row come before it in the pass, int64 [tokens]."""
    starts: Tensor
    """First column of each row, int64 [rows]."""
    looking: Tensor
    """Columns of each row's tokens, its last one again behind them, int64 [rows, most tokens]."""
    lowest: int
    """Column of the token that stands furthest back."""
    end: int
    """Column behind the one that stands furthest on."""


_AHEAD = 256
"""Columns allocated ahead at first: the usual short answers never move, long ones are moved a few times."""
_GROWTH = 1.5
"""Columns and rows grow by this factor, so that what is copied stays below twice what is written."""
_ALIGNED = 8
"""Elements to multiples of which CUDA's memory-efficient attention wants a mask's strides; its address is a multiple
of 16 bytes, which are as many elements of two bytes."""


class Band:
    """Rows that stand at the same column.

    Args:
        like: what a prefill gave, for sizes, type and device.
        room: columns that will be written after the prefill, if known: no more than these are allocated ahead.
    """

    def __init__(self, like: Layers, room: int):
        self.slots = np.empty(0, dtype=np.int64)
        """Which record each row belongs to, -1 for a row that has ended, int64 [rows]."""
        self.starts = np.empty(0, dtype=np.int64)
        """First column of each row, int64 [rows]."""
        self.filled = int(like.pairs[0][0].shape[2])
        """Columns written of the row that is furthest on."""
        self.behind = np.empty(0, dtype=np.int64)
        """How many fewer each row has, int64 [rows]."""
        self._low = 0
        self._uniform = True
        self._pass: _Pass | None = None
        self._align = _alignment(like.pairs[0][0].device)
        self._capacity = self._rounded(self.filled + min(room, _AHEAD))
        self._pairs = [tuple(_blank(part, 0, self._capacity) for part in pair) for pair in like.pairs]
        self._states = [state.new_zeros((0, *state.shape[1:])) for state in like.states]
        self._places = like.places
        self._bias = like.pairs[0][0].new_zeros((0, 1, 1, self._capacity))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def live(self) -> int:
        """Rows that have not ended."""
        return int((self.slots >= 0).sum())

    @property
    def width(self) -> int:
        """Columns of its longest row."""
        return self.filled - self._low

    def place(
        self,
        slots: np.ndarray,
        lengths: np.ndarray,
        layers: Layers,
        source: Tensor,
        behind: np.ndarray | int = 0,
    ) -> None:
        """Take in rows that were read.

        Args:
            slots: their records, int64 [newcomers].
            lengths: columns of each, int64 [newcomers].
            layers: their keys and values, aligned at their ends.
            source: which row of `layers` each newcomer is, int64 [newcomers].
            behind: how many of its last columns were not written, int64 [newcomers].
        """
        columns = layers.pairs[0][0].shape[2]
        if columns > self.filled:
            shift = self._rounded(columns - self.filled)
            self._relay(len(self._bias), self._capacity + shift, shift)
        holes = np.flatnonzero(self.slots < 0)[: len(slots)]
        old = len(self)
        rows = np.concatenate([holes, np.arange(old, old + len(slots) - len(holes))])
        size = old + len(slots) - len(holes)
        if size > len(self._bias):
            self._relay(max(size, min(int(_GROWTH * len(self._bias)), 2 * size)), self._capacity, 0)
        self.slots = _longer(self.slots, size)
        self.starts, self.behind = _longer(self.starts, size), _longer(self.behind, size)
        self.slots[rows], self.starts[rows], self.behind[rows] = slots, self.filled - lengths, behind
        where = torch.from_numpy(rows).to(source.device)
        span = slice(self.filled - columns, self.filled)
        for own, new in zip(self._pairs, layers.pairs, strict=True):
            for target, fresh in zip(own, new, strict=True):
                target[:, :, span].index_copy_(0, where, fresh.index_select(0, source))
        for target, fresh in zip(self._states, layers.states, strict=True):
            target.index_copy_(0, where, fresh.index_select(0, source))
        self._bias.index_copy_(0, where, self._biases(self.starts[rows]))
        self._measure()

    def row(self, number: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of one row's first tokens, each [key-value heads, tokens, head size]."""
        span = slice(int(self.starts[number]), int(self.starts[number]) + tokens)
        return [(keys[number, :, span].clone(), values[number, :, span].clone()) for keys, values in self._pairs]

    def end(self, rows: np.ndarray) -> None:
        """These rows have ended, int64 [ended]; they go on as ballast until `compact` or a newcomer."""
        self.slots[rows] = -1
        self._measure()

    def compact(self) -> None:
        """Fill the places of rows that have ended with the last ones."""
        live = self.live
        holes = np.flatnonzero(self.slots[:live] < 0)
        last = live + np.flatnonzero(self.slots[live:] >= 0)
        if len(holes):
            device = self._bias.device
            to, source = torch.from_numpy(holes).to(device), torch.from_numpy(last).to(device)
            span = slice(self._low, self.filled)
            for pair in self._pairs:
                for tensor in pair:
                    tensor[:, :, span].index_copy_(0, to, tensor[:, :, span].index_select(0, source))
            for state in self._states:
                state.index_copy_(0, to, state.index_select(0, source))
            self._bias.index_copy_(0, to, self._bias.index_select(0, source))
            for numbers in (self.slots, self.starts, self.behind):
                numbers[holes] = numbers[last]
        self.slots, self.starts, self.behind = self.slots[:live], self.starts[:live], self.behind[:live]
        self._measure()

    def absorb(self, other: Band) -> None:
        """Take in the live rows of a band that is no wider."""
        other.compact()
        span = slice(other._low, other.filled)
        pairs = [(keys[:, :, span], values[:, :, span]) for keys, values in other._pairs]
        source = torch.arange(len(other), device=self._bias.device)
        lengths, layers = other.filled - other.starts, Layers(pairs, other._states, self._places)
        self.place(other.slots, lengths, layers, source, other.behind)

    def reserve(self, counts: np.ndarray | None = None) -> None:
        """Have room for the next tokens of every row.

        Args:
            counts: how many each row reads, at least one, int64 [rows]; None for one each.
        """
        columns = 1 if counts is None else int((counts - self.behind).max())
        if self.filled + columns > self._capacity:
            # Most rows that reached so far back are gone: move up.
            wasted = 3 * self._low > self._capacity and self._low >= columns
            capacity = self._capacity if wasted else self._rounded(int(_GROWTH * self._capacity) + columns)
            self._relay(len(self._bias), capacity, -self._low)
        even = counts is None and not self.behind.any()
        self._pass = None if even else self._laid(np.ones(len(self), np.int64) if counts is None else counts)

    def _laid(self, counts: np.ndarray) -> _Pass:
        ends, device = self.filled - self.behind, self._bias.device
        rows = np.repeat(np.arange(len(counts)), counts)
        depths = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        looking = ends[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)

        def on_device(numbers: np.ndarray) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        return _Pass(
            rows=on_device(rows),
            columns=on_device(ends[rows] + depths),
            depths=on_device(depths),
            starts=on_device(self.starts),
            looking=on_device(looking),
            lowest=int(ends.min()),
            end=int((ends + counts).max()),
        )

    @property
    def tokens(self) -> int:
        """Tokens of the pass for which room was reserved."""
        return len(self) if self._pass is None else len(self._pass.rows)

    @property
    def alone(self) -> bool:
        """Each row reads one token in it, at the same column."""
        return self._pass is None

    @property
    def reach(self) -> int:
        """More than the position of any token in it."""
        return self._window(None).stop

    def by_row(self, each: Tensor) -> Tensor:
        """Lay out what each token of a pass has, [tokens, ...], as [rows, most tokens, ...]; behind a row's last one
        comes something."""
        assert self._pass is not None
        rows, most = self._pass.looking.shape
        if len(each) == rows * most:
            return each.unflatten(0, (rows, most))
        wide = each.new_zeros((rows, most, *each.shape[1:]))
        wide[self._pass.rows, self._pass.depths] = each
        return wide

    def by_token(self, wide: Tensor) -> Tensor:
        """Undo `by_row`."""
        assert self._pass is not None
        if len(self._pass.rows) == wide.shape[0] * wide.shape[1]:
            return wide.flatten(0, 1)
        return wide[self._pass.rows, self._pass.depths]

    def write(self, layer: int, keys: Tensor, values: Tensor, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Write one layer's next columns.

        Args:
            layer: which.
            keys, values: [tokens, key-value heads, head size].
            last: columns that the layer sees at most, this one included; None for all.

        Returns:
            Keys and values of what it sees, these columns included, [rows, key-value heads, window, head size].
        """
        window = self._window(last)
        own_keys, own_values = self._pairs[layer]
        rows = len(self)
        if self._pass is None:
            own_keys[:rows, :, self.filled] = keys
            own_values[:rows, :, self.filled] = values
        else:
            own_keys[self._pass.rows, :, self._pass.columns] = keys
            own_values[self._pass.rows, :, self._pass.columns] = values
        return own_keys[:rows, :, window], own_values[:rows, :, window]

    def mask(self, last: int | None = None) -> Tensor | None:
        """Additive mask for the scores of the window with the columns about to be written, [rows, 1, most tokens,
        window].

        None if every row sees all of it. `last` is that of `write`. It lies as attention wants it; see `_ALIGNED`.
        """
        window = self._window(last)
        if self._pass is not None:
            columns = torch.arange(window.start, window.stop, device=self._bias.device)
            looking = self._pass.looking[..., None]
            hidden = (columns > looking) | (columns < self._pass.starts[:, None, None])
            if last is not None:
                hidden |= columns <= looking - last
            return self._bias.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
        if self._uniform:
            return None
        mask = self._bias[: len(self), :, :, window]
        if window.start % self._align == 0:
            return mask
        columns = window.stop - window.start
        return self._bias.new_empty((len(self), 1, 1, self._rounded(columns)))[..., :columns].copy_(mask)

    def real(self) -> Tensor | None:
        """Which columns of the window are a row's own, the one about to be written included, int64 [rows, window].

        None if all are.
        """
        mask = self.mask()
        return None if mask is None else (mask[:, 0, 0] == 0).long()

    def states(self) -> list[tuple[Place, Tensor]]:
        """States of fixed size, [rows, ...] each, to be overwritten by a step, and where they lie."""
        return [(place, state[: len(self)]) for place, state in zip(self._places, self._states, strict=True)]

    def _window(self, last: int | None) -> slice:
        first, end = (self.filled, self.filled + 1) if self._pass is None else (self._pass.lowest, self._pass.end)
        return slice(self._low if last is None else max(self._low, first + 1 - last), end)

    def advance(self, counts: np.ndarray | None = None) -> None:
        """The columns are written in all layers.

        Args:
            counts: how many of them each row keeps, int64 [rows]; None for all of one each.
        """
        if counts is None:
            self.filled += 1
        else:
            self.behind -= counts
            self._even_out()

    def _even_out(self) -> None:
        """Have the row that is furthest on stand at `filled`, and rows that have ended, too."""
        lead = self.behind[self.slots >= 0].min(initial=self.behind.max(initial=0))
        self.filled -= int(lead)
        self.behind -= lead
        ended = self.slots < 0
        self.behind[ended] = 0
        if (self.starts[ended] > self.filled).any():  # they see themselves
            self.starts[ended] = np.minimum(self.starts[ended], self.filled)
            self._bias[: len(self)] = self._biases(self.starts)

    def _measure(self) -> None:
        starts = self.starts[self.slots >= 0]
        if self.behind.any():
            self._even_out()
        if len(starts):
            self._low = int(starts.min())
            self._uniform = bool((starts == self._low).all())
            if not self._uniform:  # there is a mask, and it hides the columns in between
                self._low -= self._low % self._align

    def _rounded(self, columns: int) -> int:
        return -(-columns // self._align) * self._align

    def _biases(self, starts: np.ndarray) -> Tensor:
        columns = torch.arange(self._capacity, device=self._bias.device)
        hidden = columns < torch.from_numpy(starts).to(columns.device)[:, None]
        return self._bias.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def _relay(self, rows: int, capacity: int, shift: int) -> None:
        """Move to memory of other sizes, all columns `shift` to the right; one tensor at a time."""
        old, new = slice(self._low, self.filled), slice(self._low + shift, self.filled + shift)
        count = len(self)
        for layer, (keys, values) in enumerate(self._pairs):
            moved = []
            for tensor in (keys, values):
                fresh = _blank(tensor, rows, capacity)
                fresh[:count, :, new] = tensor[:count, :, old]
                moved.append(fresh)
            self._pairs[layer] = (moved[0], moved[1])
        for number, state in enumerate(self._states):
            if rows != len(state):
                self._states[number] = state.new_zeros((rows, *state.shape[1:]))
                self._states[number][:count] = state[:count]
        self.starts = np.maximum(self.starts + shift, 0)
        self.filled += shift
        self._low += shift
        self._capacity = capacity
        self._bias = self._bias.new_zeros((rows, 1, 1, capacity))
        self._bias[:count] = self._biases(self.starts)


def _alignment(device: torch.device) -> int:
    """To multiples of how many columns masks begin and rows end; on CPUs it would only change how sums round."""
    return _ALIGNED if device.type == "cuda" else 1


def _blank(like: Tensor, rows: int, columns: int) -> Tensor:
    # Zeros: what is masked gets weight 0, and 0 x NaN would spread.
    return like.new_zeros((rows, like.shape[1], columns, like.shape[3]))


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([array, np.full(size - len(array), -1, dtype=array.dtype)])


@dataclass(frozen=True, slots=True, eq=False)
class CachedText:
    """The tokens of one conversation that have been read, with their keys and values."""

    ids: np.ndarray
    """The tokens, int64 [tokens]."""
    pairs: Sequence[tuple[Tensor, Tensor]]
    """Their keys and values per layer, each [key-value heads, tokens, head size]."""

    def shared(self, text: np.ndarray) -> int:
        """With how many of these tokens a text begins; its last token always has to be read, for what follows it."""
        most = min(len(self.ids), len(text) - 1)
        equal = self.ids[:most] == text[:most]
        return most if equal.all() else int(equal.argmin())


class Conversations:
    """The kept caches, the one used longest ago first."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all texts in it."""
        self._kept: dict[int, CachedText] = {}

    def keep(self, conversation: int, cached: CachedText) -> None:
        """Keep this from now on, in place of what was kept of the conversation."""
        self.take(conversation)
        self._kept[conversation] = cached
        self.tokens += len(cached.ids)

    def take(self, conversation: int) -> CachedText | None:
        """Give out what there is of a conversation, and keep it no more."""
        cached = self._kept.pop(conversation, None)
        if cached is not None:
            self.tokens -= len(cached.ids)
        return cached

    def taken(self, request: Request) -> CachedText | None:
        """Give out what there is of a request's conversation, if it has one, and keep it no more."""
        if request.conversation is None or request.images or request.adapter:
            return None
        return self.take(request.conversation)

    def shrink(self, most: int) -> None:
        """Drop what was used longest ago, until no more than so many tokens are kept."""
        while self._kept and self.tokens > most:
            self.take(next(iter(self._kept)))

    def forget(self, conversations: Iterable[int] | None) -> None:
        """Drop these, or all."""
        for conversation in list(self._kept) if conversations is None else conversations:
            self.take(conversation)
