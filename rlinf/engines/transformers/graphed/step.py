"""A decode step as a recording sees it: everything that differs from one step to the next lies in tensors that stay.

Flows in: the rows, uploaded when they change. Flows out: a token and its log-prob per row, in `told`. Plain blocking
code that wakes nobody. The tokens of a step are read by the next one where they are; positions count themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.engines.transformers.graphed.attention import paged_attention, turn_and_keep
from rlinf.engines.transformers.graphed.paged_cache import PagedCache
from rlinf.engines.transformers.graphed.recording import upload
from rlinf.engines.transformers.llama_forward import Block, LeanForward
from rlinf.engines.transformers.sampling import Rules, choose


class Step:
    """The rows of a step on the device.

    Args:
        forward: the model.
        cache: of keys and values.
        rows: there may be.
    """

    def __init__(self, forward: LeanForward, cache: PagedCache, rows: int):
        self._forward, self._cache = forward, cache

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=forward.device)

        self.alive = numbers(rows)
        """1 for a row that counts, 0 for one that has ended or never was, int64 [rows]."""
        self.table = numbers(rows, cache.width, dtype=torch.int32)
        """Pages of each row, int32 [rows, width]."""
        self.told = numbers(2, rows, dtype=torch.int32)
        """What the step drew: tokens, and the bits of their log-probs in float32, int32 [2, rows]."""
        self._ids, self._positions, self._answered = numbers(rows), numbers(rows), numbers(rows)
        self._rules = Rules(
            seeds=numbers(rows),
            temperatures=numbers(rows, 1, dtype=torch.float32),
            greedy=numbers(rows, dtype=torch.bool),
            top_k=numbers(rows, 1),
            top_p=numbers(rows, 1, dtype=torch.float32),
            min_p=numbers(rows, 1, dtype=torch.float32),
        )

    def lay_out(
        self, ids: np.ndarray, positions: np.ndarray, answered: np.ndarray, alive: np.ndarray, draws: np.ndarray
    ) -> None:
        """Put rows here, from the first on, each [rows]: the token that each reads next, its position in its text,
        which token of its answer it draws next, whether it counts, and how it draws (`DRAWS`)."""
        count, rules = len(ids), self._rules
        for target, values in (
            (self._ids, ids),
            (self._positions, positions),
            (self._answered, answered),
            (self.alive, alive.astype(np.int64)),
            (rules.seeds, draws["seed"]),
            (rules.temperatures, np.where(draws["temperature"] == 0, np.float32(1), draws["temperature"])[:, None]),
            (rules.greedy, draws["temperature"] == 0),
            (rules.top_k, draws["top_k"][:, None]),
            (rules.top_p, draws["top_p"][:, None]),
            (rules.min_p, draws["min_p"][:, None]),
        ):
            assert target is not None
            upload(target[:count], values)

    def model(self, rows: int) -> Callable[[], Tensor]:
        """The model's part of a step of so many rows; gives logits, [rows, vocabulary]."""

        def work() -> Tensor:
            forward, cache = self._forward, self._cache
            alive, table = self.alive[:rows], self.table[:rows]
            positions = self._positions[:rows] * alive  # that of a row that has ended may have no page
            page = table.gather(1, (positions // cache.page)[:, None]).squeeze(1)
            place = (page * cache.page + positions % cache.page) * alive  # who has ended writes where nobody reads
            lengths = (positions + 1) * alive
            hidden = F.embedding(self._ids[:rows], forward.embedding)
            cos, sin = forward.angles(positions, 0)
            for number, block in enumerate(forward.blocks):
                hidden = self._layer(block, number, hidden, cos, sin, table, place, lengths)
            return forward.logits(hidden)

        return work

    def _layer(
        self,
        block: Block,
        number: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        table: Tensor,
        place: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        cache = self._cache
        pool = cache.keys[number], cache.values[number]
        query = turn_and_keep(*block.unturned(hidden), cos, sin, place, *pool, block.queries)
        attended = paged_attention(query, *pool, table, lengths, cache.page, block.window or 0, block.scale)
        return block.finish(hidden, attended.flatten(1))

    def draw(self, logits: Tensor, kind: Rules) -> Tensor:
        """Draw from logits, [rows, vocabulary], and count; returns `told`.

        Args:
            logits: of the first rows.
            kind: rules of which those that are None concern no row.
        """
        rows, own = len(logits), self._rules

        def some(part: Tensor | None, wanted: Tensor | None) -> Tensor | None:
            return None if wanted is None or part is None else part[:rows]

        rules = Rules(
            seeds=own.seeds[:rows],
            temperatures=some(own.temperatures, kind.temperatures),
            greedy=some(own.greedy, kind.greedy),
            top_k=some(own.top_k, kind.top_k),
            top_p=some(own.top_p, kind.top_p),
            min_p=some(own.min_p, kind.min_p),
        )
        padding = self._forward.padding
        tokens, logprobs = choose(logits, rules, self._answered[:rows], blocks=True, padding=padding)
        alive = self.alive[:rows]
        self._ids[:rows].copy_(tokens)
        self._positions[:rows].add_(alive)
        self._answered[:rows].add_(alive)
        self.told[0, :rows].copy_(tokens)
        self.told[1, :rows].copy_(logprobs.contiguous().view(torch.int32))
        return self.told


def from_told(told: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int64 [rows], and their log-probs, float32 [rows], of what a step told."""
    return told[0, :rows].astype(np.int64), told[1, :rows].copy().view(np.float32)
