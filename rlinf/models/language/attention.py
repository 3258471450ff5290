"""Causal attention over packed sequences: layouts, context parallelism, and blocks checkpointed and compiled.

Sequences lie one behind another; no token sees another sequence, and no padding is computed. A layout is made from the
lengths once per micro-batch, on the host, and sent once, so that no layer waits for a device; everything else in a
model works token by token and needs no layout. Of a prefix tree every sequence asks for its own tokens alone, which
come last in it, and they see all of it. On CUDA a variable-length kernel computes attention in half precision
(`kernels.py`). Elsewhere there is none, and a mask over [tokens, tokens] costs ten times what it saves: sequences of
about equal length are gathered into a few rectangles.

The mask within a sequence is a `Rule`: the function of two positions by which transformers would make the model's mask
tensor. So windows and chunks count positions of their own sequence.

With context parallelism a rank has the queries of its share of the tokens, and gathers keys and values of all shares
whole: with grouped heads they are a small part of a layer's activations, and one collective for all of them hides
nothing less than a ring of many would (Llama 3, arXiv:2407.21783, section 3.3.2).

A model's blocks can be checkpointed and compiled, each by itself, for sequences of any lengths: `forward` then keeps
its input alone, and is compiled once for all blocks of a kind. Checkpointing stands around what is compiled, and the
hooks by which FSDP2 gathers weights around both, so that a rank which could not compile would still take part in every
collective. It is not the checkpointing of transformers, which stands within `forward` in some releases and around the
hooks in others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from rlinf.algos.loss_sum import wide
from rlinf.data.packing import sent
from rlinf.data.prefix_tree import begins_of
from rlinf.models.language.kernels import HALF, Kernel, cause_of, device_at_fault, first_line, kernel_of
from rlinf.models.language.tensor_parallel import Pieces, gathered


def all_keys(key: Tensor, value: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Keys and values of all shares one behind another, [all tokens, key heads, size] each; a collective."""
    if pieces.group is None:
        return key, value
    if key.shape == value.shape:
        both = gathered(torch.stack([key, value], dim=1), pieces.group)
        return both[:, 0], both[:, 1]
    return gathered(key, pieces.group), gathered(value, pieces.group)


def of_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scores: Scores, rule: Rule) -> Tensor:
    """Attention of every piece, one after the other, [tokens of the share, heads, value size].

    Of long pieces it keeps what all have of keys and values, and nothing else: a mask of a piece has more numbers than
    a layer has of its tokens, and so have keys that are repeated for every head.

    Args:
        query: of the share, [tokens, heads, size].
        key, value: of all shares, see `all_keys`.
        pieces: who sees whom.
        scores, rule: as for all attention.
    """
    sizes, ends = [size for size, _ in pieces.lengths], [end for _, end in pieces.lengths]
    long = [size * end >= _LONG for size, end in pieces.lengths]
    key_rows = pieces.keys.split(ends)
    short = [rows for rows, apart in zip(key_rows, long, strict=True) if not apart]
    at_once = torch.cat(short) if any(long) and short else pieces.keys
    parts = [iter(each.index_select(0, at_once).split([len(rows) for rows in short])) for each in (key, value) if short]
    done = []
    queries = query.index_select(0, pieces.queries).split(sizes)
    for part, rows, apart in zip(queries, key_rows, long, strict=True):
        if not apart:
            done.append(_last(part, next(parts[0]), next(parts[1]), scores, rule))
            continue
        begin = len(rows) - len(part)
        for block in part.split(_BLOCK):
            begin += len(block)
            done.append(checkpoint(_block, block, key, value, rows[:begin], scores, rule, pieces, **_RECOMPUTED))
    return _restored(done, query, key, value, pieces)


_LONG = 1 << 20
"""Pairs of queries and keys from which on a piece is computed in blocks, and again for the gradient: its mask would
take 4 MiB in float32."""
_BLOCK = 256
"""Queries of a block: its mask for 16,384 keys takes 16 MiB in float32, and shorter ones gather keys more often."""
_RECOMPUTED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def _block(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores, rule: Rule, pieces: Pieces
) -> Tensor:
    """Attention of neighbours to what they see of a sequence, whose rows these are of keys and values."""
    window = rule.window(len(rows))
    if window is None:
        mask = rule.within(len(rows), query.device, len(rows) - len(query))
    else:
        if window >= len(rows):  # all that came before: one mask for blocks of any length
            window = max(end for _, end in pieces.lengths)
        rows = rows[max(0, len(rows) - len(query) - window + 1) :]
        dtype = torch.bool if not scores.plain else wide(query[:0]).dtype if query.device.type == "cpu" else query.dtype
        mask = _corner(pieces, window, len(query), len(rows), dtype, query.device)
    parts = [each.transpose(0, 1)[None] for each in (query, key.index_select(0, rows), value.index_select(0, rows))]
    return scores.attend(parts[0], parts[1], parts[2], mask)[0].transpose(0, 1)


def _last(query: Tensor, key: Tensor, value: Tensor, scores: Scores, rule: Rule) -> Tensor:
    """Attention of the last tokens of a sequence to all of it."""
    mask = rule.within(len(key), query.device, len(key) - len(query))
    parts = [each.transpose(0, 1)[None] for each in (query, key, value)]
    return scores.attend(parts[0], parts[1], parts[2], mask)[0].transpose(0, 1)


def _corner(pieces: Pieces, window: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask of so many last queries and keys of a sequence, each of which sees so many keys.

    Whom they see depends on how far both are from its end. So each mask is a corner of the largest, which is made once:
    bool, or to be added to scores, which spares plain attention to make it so every time.
    """
    longest = max(end for _, end in pieces.lengths)
    kind = min(window, longest), dtype
    if kind not in pieces.masks:
        most = min(longest, _BLOCK + kind[0])
        mask = _band(most, kind[0], device, max(0, most - _BLOCK))
        if dtype != torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
        pieces.masks[kind] = mask
    return pieces.masks[kind][-queries:, -keys:]


def by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, lookback: int
) -> Tensor:
    """Attention of a rank's pieces by a kernel, which lets the last token of a piece see the last of its keys;
    arguments as for `of_pieces`."""
    if not pieces.lengths:
        return _restored([], query, key, value, pieces)
    attended = kernel.attend(
        query.index_select(0, pieces.queries),
        key.index_select(0, pieces.keys),
        value.index_select(0, pieces.keys),
        (pieces.query_bounds, pieces.key_bounds),
        (max(size for size, _ in pieces.lengths), max(end for _, end in pieces.lengths)),
        scale,
        lookback,
    )
    return _restored([attended], query, key, value, pieces)


def _restored(done: list[Tensor], query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
    """In the order of the share; padding gets 0. Of a share of padding alone, what it depends on still gets a gradient,
    for which other ranks wait."""
    nothing = query.new_zeros(1, query.shape[1], value.shape[2])
    if not done:
        nothing = nothing + 0.0 * (query[:1].sum() + key[:1].sum() + value[:1].sum())
    return torch.cat([*done, nothing]).index_select(0, pieces.restore)


NAME = "rlinf_packed"
"""Under which transformers knows it: `model.set_attn_implementation(NAME)`."""
ARGUMENT = "packed_layout"
"""The keyword by which a `Layout` travels through a model's `forward` to its attention."""

_GROWTH, _SLACK = 1.1, 8
"""A rectangle holds lengths up to 1.1 x its shortest + 8 tokens. One more call of attention, forward and backward,
costs about what 8 columns more cost for short rows; long ones pay for padding with the square."""


_OPAQUE: dict[str, Callable[..., Tensor]] = {}
"""Operators that compiled code calls without looking into them; filled by `opaque`, since that imports the compiler."""
_ODD = ("position_bias", "head_mask")
"""Arguments that change what attention gives, and that this one does not take."""


class Rule:
    """The mask within a sequence as a function of two positions, which a model has in place of a mask tensor.

    Args:
        sees: of batch, head, and the positions of query and key, whether this query sees this key; see
            `transformers.masking_utils`.
    """

    def __init__(self, sees: Callable[..., Any]):
        self._sees = sees
        self._windows: dict[int, int | None] = {}
        self._fixed: tuple[int | None] | None = None

    def fix(self, longest: int) -> None:
        """Find out `left` for sequences of a layout, since compiled code can look it up and not find it out."""
        if self._fixed is None:
            self._fixed = (self.left(longest),)

    def left(self, longest: int) -> int | None:
        """How many tokens before itself each sees at most in sequences of up to that length, -1 for all; None if this
        is not how they see."""
        if self._fixed is not None:
            return self._fixed[0]
        window = self.window(longest)
        return None if window is None else -1 if window >= longest else window - 1

    def within(self, length: int, device: torch.device, begin: int = 0) -> Tensor | None:
        """Mask of a sequence, bool [length - begin, length], true where a query (row) sees a key; None if there are
        queries for all keys, and every query sees all keys up to itself.

        Args:
            length: tokens of the sequence.
            device: on which the mask is.
            begin: position of the first query.
        """
        window = self.window(length)
        if window is not None:
            return None if window >= length and not begin else _band(length, window, device, begin)
        every = torch.arange(length, device=device)
        return self._asked(every[begin:, None], every[None, :]).expand(length - begin, length)

    def window(self, length: int) -> int | None:
        """How many tokens each sees at most, itself included; None if this is not how sequences of that length see."""
        if self._sees is causal_mask_function:
            return length
        if length not in self._windows:
            every = torch.arange(length)
            window = int(self._asked(every[-1:], every).sum())
            first = (every - window + 1).clamp(min=0)
            inside = self._asked(every, every) & self._asked(every, first)
            outside = ((every >= window) & self._asked(every, (every - window).clamp(min=0))) | (
                (every + 1 < length) & self._asked(every, (every + 1).clamp(max=length - 1))
            )
            self._windows[length] = window if bool(inside.all()) and not bool(outside.any()) else None
        return self._windows[length]

    def _asked(self, query: Tensor, key: Tensor) -> Tensor:
        none = torch.zeros((), dtype=torch.int64, device=query.device)
        return torch.as_tensor(self._sees(none, none, query, key), device=query.device)


def rule_of(*, mask_function: Callable[..., Any], **more: Any) -> Rule:
    """Return the `Rule` of a mask function: the mask builder of models whose attention is `packed_attention`."""
    return Rule(mask_function)


_CAUSAL = Rule(causal_mask_function)


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Sequences of about equal length as rows."""

    rows: int
    """How many."""
    length: int
    """Tokens of the longest sequence."""
    begin: int
    """Position of the first query of each: those before it are asked for elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Rectangles:
    """All sequences of a micro-batch in rectangles, one behind another: they are gathered at once, since each gather's
    gradient is a sum over all tokens."""

    boxes: tuple[Rectangle, ...]
    """The rectangles."""
    keys: Tensor | None = None
    """Which token stands at each place, int64 [sum of rows x length]; None if it is all tokens in order."""
    queries: Tensor | None = None
    """Which token asks at each place, int64 [sum of rows x (length - begin)]; None for `keys`."""
    restore: Tensor | None = None
    """The place of each token among those that ask, int64 [tokens]; None for the same place."""
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """Masks of rows: all layers that see alike take the same ones."""

    def mask(self, box: Rectangle, scores: Scores, rule: Rule, like: Tensor) -> Tensor | None:
        """The mask of each row of a rectangle, see `Rule.within`: bool, or to be added to scores on a CPU, where plain
        attention would make it so in every layer."""
        window = rule.window(box.length)
        adds = scores.plain and like.device.type == "cpu"
        kind = (box.length, box.begin, rule if window is None else min(window, box.length), adds)
        if kind not in self.masks:
            mask = rule.within(box.length, like.device, box.begin)
            if mask is None:
                return None
            if adds:
                nothing = torch.zeros(mask.shape, dtype=wide(like[:0]).dtype, device=like.device)
                mask = nothing.masked_fill_(~mask, -torch.inf)
            self.masks[kind] = mask
        return self.masks[kind]


REFUSALS = (AttributeError, ImportError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions by which a model, or a kernel, shows that it cannot be run in an unusual way."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of a packed micro-batch: where its sequences lie."""

    longest: tuple[int, int]
    """Most tokens of its own that a sequence has, and tokens of the longest."""
    bounds: tuple[Tensor, Tensor]
    """Where each sequence's own tokens begin, and the end of the last, int32 [sequences + 1]; and likewise of all its
    tokens, laid end to end. The same if they share none."""
    kernel: Kernel | None
    """The kernel that computes attention; None for rectangles."""
    places: Tensor | None
    """Which token stands at each place of the sequences laid end to end, int64; None for the same one."""
    starts: np.ndarray
    """The second of `bounds` on the host, int64."""
    stands: np.ndarray | None
    """`places` on the host."""
    begins: np.ndarray | None
    """How many leading tokens each sequence shares with earlier ones, int64 [sequences]; None if they share none."""
    pieces: Pieces | None = None
    """This rank's share, where other ranks compute the rest; `places` does not matter then."""
    refusals: list[str] | None = None
    """Where attention that cannot be computed leaves the reason, and gives zeros, so that ranks that try together all
    come to the end; None: it raises."""
    parts: tuple[int, ...] = ()
    """Sequences of each batch whose rectangles are those that it has alone, see `Packed.parts`."""
    _rectangles: list[Rectangles] = field(default_factory=list)
    """The rectangles, once they were asked for."""

    def rectangles(self) -> Rectangles:
        """All sequences as rectangles, for layers that no kernel serves. Made once."""
        if not self._rectangles:
            self._rectangles.append(_rectangles(self))
        return self._rectangles[0]

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        places: Tensor | None = None,
        *,
        stands: np.ndarray | None = None,
        kernel: Kernel | Literal[False] | None = None,
        pieces: Pieces | None = None,
        refusals: list[str] | None = None,
    ) -> Layout:
        """The layout of sequences.

        Args:
            lengths: tokens of each, at least one sequence and none empty.
            device, dtype: on which and in which attention is computed.
            places: which token stands at each place of the sequences laid end to end; None if they share none.
            stands: the same on the host, int64; None reads `places`, for which a device must be waited.
            kernel: what computes attention where it can; False for rectangles; None takes torch's own kernel off the
                CPU in half precision, and rectangles elsewhere.
            pieces, refusals: see there.
        """
        sizes, begins = np.asarray(lengths), None
        if stands is None and places is not None:
            stands = places.cpu().numpy()
        if stands is not None:
            begins = begins_of(lengths, stands)
            asks = begins < sizes
            if not asks.all():  # a sequence that is the beginning of another asks for nothing
                places, stands = None, stands[np.repeat(asks, sizes)]
                sizes, begins = sizes[asks], begins[asks]
        if kernel is None and device.type != "cpu" and dtype in HALF:
            kernel = kernel_of("varlen", device)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        own = sizes if begins is None else sizes - begins
        on_host = [
            torch.from_numpy(starts.astype(np.int32)),
            None if begins is None else torch.from_numpy(np.concatenate([[0], np.cumsum(own)]).astype(np.int32)),
            torch.from_numpy(stands) if stands is not None and places is None else None,
        ]
        bounds, queries, again = sent(on_host, device)
        return Layout(
            (int(own.max()), int(sizes.max())),
            (bounds if queries is None else queries, bounds),
            kernel or None,
            places if again is None else again,
            starts,
            stands,
            begins,
            pieces,
            refusals,
        )


def _rectangles(layout: Layout) -> Rectangles:
    bounds, places, device = layout.starts, layout.stands, layout.bounds[1].device
    lengths = np.diff(bounds)
    if places is None and (lengths == lengths[0]).all():
        return Rectangles((Rectangle(len(lengths), int(lengths[0]), 0),))
    begins = np.zeros_like(lengths) if layout.begins is None else layout.begins
    restore = np.empty((lengths - begins).sum(), dtype=np.int64)
    boxes: list[Rectangle] = []
    keys: list[np.ndarray] = []
    asking: list[np.ndarray] = []
    used = 0
    for members, begin in _alike_in_parts(lengths, begins, layout.parts):
        longest = int(lengths[members].max())
        columns = np.arange(longest)
        # behind its end a row repeats its last token, which nobody looks at
        index = bounds[members, None] + np.minimum(columns, lengths[members, None] - 1)
        tokens = index if places is None else places[index]
        own = ((columns >= begins[members, None]) & (columns < lengths[members, None]))[:, begin:]
        queries = tokens[:, begin:]
        restore[queries[own]] = (used + np.arange(own.size)).reshape(own.shape)[own]
        boxes.append(Rectangle(len(members), longest, begin))
        keys.append(tokens.reshape(-1))
        asking.append(queries.reshape(-1))
        used += own.size
    fewer = np.concatenate(asking) if any(box.begin for box in boxes) else None
    on_host = [None if each is None else torch.from_numpy(each) for each in (np.concatenate(keys), fewer, restore)]
    return Rectangles(tuple(boxes), *sent(on_host, device))


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Positions of sequences, in sets of about equal length."""
    order = np.argsort(lengths, kind="stable")
    sets, start = [], 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] > lengths[order[start]] * _GROWTH + _SLACK:
            sets.append(order[start:end])
            start = end
    return sets


def _alike_in_parts(lengths: np.ndarray, begins: np.ndarray, parts: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Sequences of about equal length within each part, and the first query of theirs; sets of several parts whose
    longest are equal are one.

    Where the tokens that a sequence shares are less than half, computing them again costs no more: a mask that is
    causal from the first key on leaves out half of the products, and one that begins later leaves out none.
    """
    by_longest: dict[int, list[np.ndarray]] = {}
    first = 0
    for count in parts or [len(lengths)]:
        for members in _alike(lengths[first : first + count]):
            by_longest.setdefault(int(lengths[first + members].max()), []).append(first + members)
        first += count
    skips = np.where(2 * begins > lengths, begins, 0)
    for sets in by_longest.values():
        every = np.concatenate(sets)
        for members in _alike(skips[every]) if skips.any() else [np.arange(len(every))]:
            yield every[members], int(skips[every[members]].min())


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rule | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, in the shape that transformers asks of its attention functions.

    Args:
        module: the layer that asks.
        query: [1, heads, tokens, head_dim]
        key, value: [1, key heads, tokens, head_dim], [1, key heads, tokens, value_dim]
        attention_mask: who sees whom; None for all that came before, as far as the window reaches.
        scaling: of the scores; None for 1 / sqrt(head_dim).
        sliding_window: how many tokens, itself included, a token sees at most; None for all. Of a model that has made a
            rule the rule counts.
        more: holds the `Layout` under `ARGUMENT`; perhaps `softcap`: scores s become softcap x tanh(s / softcap)
            (Gemma 2, arXiv:2408.00118, eq. 1), and `s_aux`: a score per head that takes part in the softmax and has no
            value, [heads] (gpt-oss). What else changes the result, dropout too, is refused.

    Returns:
        [1, tokens, heads, value_dim], and no attention weights.

    Raises:
        ValueError: no layout came, or the layer wants what this cannot do.
    """
    layout: Layout | None = more.get(ARGUMENT)
    if layout is None:
        raise ValueError(f"{type(module).__name__} does not hand {ARGUMENT} on to its attention")
    odd = [name for name in _ODD if more.get(name) is not None]
    if odd or more.get("dropout") or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} wants {odd or 'dropout or no causality'} of its attention")
    rule = attention_mask
    if rule is None:
        rule = _CAUSAL if sliding_window is None else Rule(sliding_window_causal_mask_function(sliding_window))
    # [tokens, heads, head_dim]; the gradient of an index would be written into zeros
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.pieces is not None:  # before anything may fail on one rank alone
        key, value = all_keys(key, value, layout.pieces)
    try:
        attended = _attended(query, key, value, layout, Scores(scale, more.get("softcap"), more.get("s_aux")), rule)
    except REFUSALS as error:
        if layout.refusals is None or device_at_fault(error):
            raise
        layout.refusals.append(f"{type(module).__name__}: {error}")
        attended = query.new_zeros(*query.shape[:2], value.shape[2])
    return attended[None], None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Softmax attention with what a model does to its scores: scale, softcap, sinks."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    """One logit for each head, [heads], which takes part in the softmax and has no value."""

    @property
    def plain(self) -> bool:
        """A kernel knows it."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of rows, [rows, heads, length, size] each, with fewer heads of keys and values or as many."""
        if self.plain:
            causal, grouped, parts = mask is None, query.shape[1] != key.shape[1], (query, key, value)
            if query.device.type == "cpu":  # whose kernel takes ten times as long in half precision, and rounds more
                parts = (wide(query), wide(key), wide(value))
            return F.scaled_dot_product_attention(
                *parts, mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            ).to(value.dtype)
        repeats, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = _band(length, length, query.device)
        scores = scores.float().masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype) @ value


def _attended(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scores: Scores, rule: Rule) -> Tensor:
    kernel = layout.kernel
    if kernel is not None and scores.plain and key.shape == value.shape:
        lookback = rule.left(layout.longest[1])
        if lookback is not None and layout.pieces is not None:
            return by_kernel(kernel, query, key, value, layout.pieces, scores.scale, lookback)
        if lookback is not None:
            return _by_kernel(kernel, query, key, value, layout, scores.scale, lookback)
    if layout.pieces is not None:
        return of_pieces(query, key, value, layout.pieces, scores, rule)
    by_rectangles = _OPAQUE.get("by_rectangles", _by_rectangles) if torch.compiler.is_compiling() else _by_rectangles
    return by_rectangles(query, key, value, layout, scores, rule)


def opaque() -> None:
    """Keep compilers out of rectangles, of which every layout has others: to be called before something is compiled."""
    _OPAQUE.setdefault("by_rectangles", torch.compiler.disable(_by_rectangles))


def _by_rectangles(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scores: Scores, rule: Rule) -> Tensor:
    done, every = [], layout.rectangles()
    asks = every.keys if every.queries is None else every.queries
    parts = []
    for part, index, begins in ((query, asks, True), (key, every.keys, False), (value, every.keys, False)):
        tokens = part if index is None else part.index_select(0, index)
        sizes = [box.rows * (box.length - box.begin * begins) for box in every.boxes]
        parts.append(tokens.split(sizes) if len(sizes) > 1 else (tokens,))
    for box, *of_box in zip(every.boxes, *parts, strict=True):
        rows = [tokens.unflatten(0, (box.rows, -1)).transpose(1, 2) for tokens in of_box]
        attended = scores.attend(rows[0], rows[1], rows[2], every.mask(box, scores, rule, query))
        done.append(attended.transpose(1, 2).flatten(0, 1))
    if every.restore is None:
        return done[0]
    return torch.cat(done).index_select(0, every.restore)


def _band(length: int, window: int, device: torch.device, begin: int = 0) -> Tensor:
    """Mask of a causal sliding window for the queries from `begin` on, bool [length - begin, length]."""
    causal = torch.ones(length - begin, length, dtype=torch.bool, device=device).tril(begin)
    return causal if window >= length else causal.triu(begin + 1 - window)


def _by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, lookback: int
) -> Tensor:
    if layout.places is not None:
        key, value = (part.index_select(0, layout.places) for part in (key, value))
    return kernel.attend(query, key, value, layout.bounds, layout.longest, scale, lookback)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, rule_of)


_FORMS = 64
"""Compiled forms that a block may have; torch's 8 are too few for with and without gradient, shared prompts, single
tokens, windows and adapters together, and beyond them it goes on uncompiled without a word."""


def checkpoint_blocks(blocks: Sequence[nn.Module]) -> None:
    """Have every block keep its input alone, and compute the rest again for the gradient.

    Nothing in a block may be random: it is computed again without the generators' states of the first time.
    """
    for block in blocks:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]


def _checkpointed(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*arguments, **keywords)
        # to stop early, the second time, an error is raised out of the block, which no compiled code can be left by
        return checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=False, **keywords
        )

    forward.uncheckpointed = inner  # type: ignore[attr-defined]  # for `truth.wide`, which has its own way
    return forward


class CompiledBlocks:
    """The blocks of one model.

    Args:
        blocks: changed in place; off until `on` is set.
        backend: of `torch.compile`.
        checkpointed: `checkpoint_blocks` has been called on them.
    """

    def __init__(self, blocks: Sequence[nn.Module], backend: str = "inductor", *, checkpointed: bool = False):
        self.on = False
        """They are computed as compiled."""
        self.required = False
        """Raise where a block cannot be compiled; otherwise `refused` has the reason, and blocks go on uncompiled."""
        self.refused: str | None = None
        """Why they are not compiled."""
        self.graphs = 0
        """Graphs that were compiled so far."""
        self._blocks, self._backend, self._checkpointed = blocks, backend, checkpointed

    def prepare(self) -> None:
        """Give every block its compiled `forward`; what is compiled comes with the first calls."""
        inner = torch._dynamo.lookup_backend(self._backend)
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _FORMS)
        opaque()

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return inner(graph, inputs)

        for block in self._blocks:
            eager = getattr(block.forward, "__wrapped__", block.forward) if self._checkpointed else block.forward
            either = self._either(eager, torch.compile(eager, backend=counted, dynamic=True))
            block.forward = _checkpointed(either) if self._checkpointed else either  # type: ignore[method-assign]
        self.on = True

    def _either(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(eager)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            if not self.on:
                return eager(*arguments, **keywords)
            rule, layout = keywords.get("attention_mask"), keywords.get(ARGUMENT)
            if isinstance(rule, Rule) and layout is not None:
                rule.fix(layout.longest[1])
            try:
                return compiled(*arguments, **keywords)
            except Exception as error:
                if self.required or device_at_fault(cause_of(error)):
                    raise
                self.on, self.refused = False, first_line(error)
                return eager(*arguments, **keywords)

        return forward
