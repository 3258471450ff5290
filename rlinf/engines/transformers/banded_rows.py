"""Rows that are decoded in bands, one call of the model after the other: on CPUs, and for every kind of model.

Flows in: texts to read, and which answers have ended. Flows out: logits after the texts, then a token per row and step.
Plain blocking code that wakes nobody, used by the decode batch in the compute thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.transformers.conversations import Reader, laid_out, side_by_side
from rlinf.engines.transformers.kv_cache import Band, Layers
from rlinf.engines.transformers.model_forward import ModelForward
from rlinf.engines.transformers.sampling import Rules, choose, to_host
from rlinf.engines.transformers.slots import Drawn, Slots

_BALLAST = 1 / 8
"""Ended rows are computed on until they are so large a share of their band: then moving others into their place is
cheaper. Newcomers take the places of those that are left."""
_ALIKE = 128
"""Rows no longer than this share a band whatever their lengths: attention over so few columns costs next to nothing."""


@dataclass(slots=True, eq=False)
class _View:
    """All rows of all bands side by side, made anew when rows join or move."""

    slots: np.ndarray
    """Slot of each row, -1 once it has ended, int64 [rows]."""
    ids: Tensor
    """The token that each reads next, int64 [rows]."""
    positions: Tensor
    """Of that token in its text, int64 [rows]."""
    answered: Tensor
    """Which token of its answer the row draws next, int64 [rows]."""
    rules: Rules
    """How it draws."""
    ended: list[int] = field(default_factory=list)
    """Rows that have ended since the last step."""


class BandedRows:
    """The rows of a decode batch, in bands of like length; see `decode_batch.Rows` for what the methods do.

    Args:
        forward: the model.
    """

    def __init__(self, forward: ModelForward):
        self.bands: list[Band] = []
        """Not empty, each."""
        self._forward = forward
        self._view: _View | None = None

    @property
    def width(self) -> int:
        return sum(len(band) for band in self.bands)

    def read(self, readers: Iterable[Reader], records: Slots) -> Iterator[tuple[np.ndarray, Tensor, int]]:
        self._tidy()
        self._view = None
        device = self._forward.device
        for rectangle in side_by_side(readers, pads=self._forward.pads):
            ids, real, past = laid_out(rectangle, device)
            images = [records.requests[reader.slots[0]].images for reader in rectangle]
            logits, read = self._forward.read(ids, real, images, past)
            if (routes := self._forward.routes()) is not None:
                of_texts = routes.reshape(*ids.shape, *routes.shape[1:])
                for reader, of_text in zip(rectangle, of_texts, strict=True):
                    records.routed(reader.slots, len(reader.text), of_text[-len(reader.text) :])
            which = np.array([slot for reader in rectangle for slot in reader.slots], dtype=np.int64)
            lengths = np.array([len(reader.text) for reader in rectangle for _ in reader.slots], dtype=np.int64)
            source = torch.tensor(
                [number for number, reader in enumerate(rectangle) for _ in reader.slots], device=device
            )
            records.shifts[which] = 0 if read.shifts is None else read.shifts[source.cpu().numpy()]
            self._band_for(int(lengths.max()), read, records.room(which)).place(which, lengths, read, source)
            yield which, logits.index_select(0, source), ids.numel()

    def joined(self) -> None:
        """Make one band of two that have become alike: rows grow by equal lengths, so in proportion they draw near."""
        merged: list[Band] = []
        for band in sorted((band for band in self.bands if band.live), key=lambda band: -band.width):
            if merged and _alike(merged[-1].width, band.width):
                merged[-1].absorb(band)
            else:
                merged.append(band)
        self.bands = merged

    def step(self, records: Slots) -> Drawn:
        self._tidy()
        view = self._view = self._view or self._look(records)
        if view.ended:  # ballast must not walk off the end of a table of positions
            view.positions[view.ended] = 0
            view.ended.clear()
        for band in self.bands:
            band.reserve()
        logits = self._forward.step(view.ids, view.positions, self.bands)
        if (routes := self._forward.routes()) is not None:
            records.routed_step(view.slots, routes)
        for band in self.bands:
            band.advance()
        tokens, logprobs = choose(
            self._forward.allowed(logits), view.rules, view.answered, padding=self._forward.padding
        )
        view.ids = tokens
        view.positions += 1
        view.answered += 1
        return Drawn(view.slots, *to_host(tokens, logprobs), self._forward.version)

    def settle(self) -> None:
        return None

    def end(self, slots: np.ndarray) -> None:
        for band in self.bands:
            if len(here := np.flatnonzero(np.isin(band.slots, slots))):
                band.end(here)
        if self._view is not None and len(rows := np.flatnonzero(np.isin(self._view.slots, slots))):
            self._view.slots[rows] = -1
            self._view.ended += rows.tolist()

    def kept(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        band, row = next((band, row) for band in self.bands for row in np.flatnonzero(band.slots == slot).tolist())
        return band.row(row, tokens)

    def forget(self) -> None:
        self.bands, self._view = [], None

    def park(self) -> None:
        self.forget()

    def _look(self, records: Slots) -> _View:
        device = self._forward.device
        slots = np.concatenate([band.slots for band in self.bands])
        answered = records.lengths[slots]
        positions = np.maximum(records.prompts[slots] + answered - 1 + records.shifts[slots], 0)
        return _View(
            slots,
            ids=torch.from_numpy(records.last[slots]).to(device),
            positions=torch.from_numpy(positions).to(device),
            answered=torch.from_numpy(answered).to(device),
            rules=Rules.of(records.draws[slots], device),
        )

    def _tidy(self) -> None:
        """Drop the rows that have ended where they have become too many."""
        for band in self.bands:
            ended = len(band) - band.live
            if ended and ended >= _BALLAST * len(band):
                band.compact()
                self._view = None
        if not all(len(band) for band in self.bands):
            self.bands = [band for band in self.bands if len(band)]
            self._view = None

    def _band_for(self, width: int, read: Layers, room: int) -> Band:
        """The band where rows of this width belong."""
        for band in self.bands:
            if _alike(band.width, width):
                return band
        self.bands.append(Band(read, room))
        return self.bands[-1]


def _alike(one: int, other: int) -> bool:
    longer = max(one, other)
    return longer <= _ALIKE or longer <= 2 * min(one, other)
