"""One batch of answers, decoded step by step.

Consumes requests, all known at the start. Produces completions, each in the step that ends it. Plain blocking code:
whoever owns the compute thread calls `advance` and hands out what it returns between calls.

Prompts of uneven length are padded on the left, so that all rows stand at the same column. Equal prompts are read once
and their keys and values copied. Rows that have ended go on as ballast until enough have gathered to be worth a copy of
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.base import Completion, Request
from rlinf.engines.cache import RowCache
from rlinf.engines.sampling import choose, uniforms

_KEEP = 0.75
"""The batch is copied to its live rows once they are fewer than this share: so a row's cache is copied a bounded number
of times (log of the batch to base 4/3) and at most a quarter of every step is wasted."""


class Forward(Protocol):
    """A model, as decoding sees it."""

    layers: int
    device: torch.device
    version: int

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RowCache) -> Tensor:
        """Read tokens and extend the cache.

        Args:
            ids: int64 [rows, tokens].
            positions: of each token in its own text, int64 [rows, tokens].
            mask: which columns each token sees, bool [rows, 1, tokens, columns]; None if all that came before.
            cache: what was read before.

        Returns:
            Logits after the last token, [rows, vocabulary].
        """
        ...


@dataclass(slots=True)
class _Rows:
    """What is kept per row of the batch."""

    request: Tensor
    """Which request the row answers, int64 [rows]."""
    tokens: Tensor
    """The answer so far, int64 [rows, room]."""
    logprobs: Tensor
    """Of those tokens, float32 [rows, room]."""
    position: Tensor
    """Of the next token to read in its own text, int64 [rows, 1]."""
    alive: Tensor
    """The answer has not ended, bool [rows]."""
    seed: Tensor
    """int64 [rows]"""
    temperature: Tensor
    """float32 [rows]"""
    limit: Tensor
    """Tokens the answer may have, int64 [rows]."""
    stops: Tensor
    """Tokens that end it, filled up with -1, int64 [rows, stops]."""
    visible: Tensor | None
    """Which columns it sees, bool [rows, 1, 1, columns]; None if all."""

    def keep(self, rows: Tensor) -> None:
        """Keep these rows alone, int64 [kept]."""
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value.index_select(0, rows))


class Decoding:
    """The state of one batch.

    Args:
        forward: the model; its `version` is read at every step, so weights may change between steps.
        requests: what to answer, at least one.
    """

    def __init__(self, forward: Forward, requests: Sequence[Request]):
        self._forward = forward
        self._requests = requests
        self._cache = RowCache(forward.layers)
        self._versions: list[int] = []  # of the weights that made column i of the answers, in all rows
        self._rows: _Rows | None = None  # None until the prompts have been read

    @property
    def done(self) -> bool:
        """Every request is answered."""
        return self._rows is not None and len(self._rows.alive) == 0

    @torch.inference_mode()
    def advance(self, steps: int) -> list[Completion]:
        """Decode up to `steps` tokens per row and return the answers that ended."""
        finished: list[Completion] = []
        for _ in range(steps):
            if self.done:
                break
            finished += self._step()
        return finished

    def _step(self) -> list[Completion]:
        column = len(self._versions)
        self._versions.append(self._forward.version)
        if self._rows is None:
            logits, rows = self._read_prompts()
            self._rows = rows
        else:
            rows = self._rows
            seen = self._cache.get_seq_length() + 1
            visible = None if rows.visible is None else rows.visible[..., :seen]
            logits = self._forward(rows.tokens[:, column - 1 : column], rows.position, visible, self._cache)
            rows.position = rows.position + 1
        tokens, logprobs = choose(logits, rows.temperature, uniforms(rows.seed, column))
        rows.tokens[:, column] = tokens
        rows.logprobs[:, column] = logprobs
        stopped = (tokens[:, None] == rows.stops).any(dim=1)
        ended = rows.alive & (stopped | (rows.limit <= column + 1))
        if not bool(ended.any()):
            return []
        rows.alive &= ~ended
        finished = self._completions(rows, ended.nonzero().squeeze(1), stopped)
        self._drop_ended(rows)
        return finished

    def _read_prompts(self) -> tuple[Tensor, _Rows]:
        """Read each different prompt once, then give every request its row."""
        device = self._forward.device
        requests = self._requests
        unique = {request.prompt_ids.tobytes(): request.prompt_ids for request in requests}
        order = {key: row for row, key in enumerate(unique)}
        row_of = torch.tensor([order[request.prompt_ids.tobytes()] for request in requests], device=device)
        ids, real = _pad_left(list(unique.values()), device)
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        padded = not bool(real.all())
        logits = self._forward(ids, positions, _prompt_mask(real) if padded else None, self._cache)

        samplings = [request.sampling for request in requests]
        room = max(sampling.max_new_tokens for sampling in samplings)
        stops = max(len(sampling.stop_ids) for sampling in samplings)
        # The last token of an answer is never read, so the cache needs one column less than text and answer have.
        self._cache.take(row_of, ids.shape[1] + room - 1)
        count = len(requests)
        visible = None
        if padded:
            answers = torch.ones((count, room), dtype=torch.bool, device=device)
            visible = torch.cat([real[row_of], answers], dim=1)[:, None, None, :]
        rows = _Rows(
            request=torch.arange(count, device=device),
            tokens=torch.zeros((count, room), dtype=torch.int64, device=device),
            logprobs=torch.zeros((count, room), device=device),
            position=positions[row_of, -1:] + 1,
            alive=torch.ones(count, dtype=torch.bool, device=device),
            seed=torch.tensor([request.seed for request in requests], device=device),
            temperature=torch.tensor([float(sampling.temperature) for sampling in samplings], device=device),
            limit=torch.tensor([sampling.max_new_tokens for sampling in samplings], device=device),
            stops=torch.tensor(
                [[*sampling.stop_ids, *[-1] * (stops - len(sampling.stop_ids))] for sampling in samplings],
                dtype=torch.int64,
                device=device,
            ),
            visible=visible,
        )
        return logits[row_of], rows

    def _completions(self, rows: _Rows, which: Tensor, stopped: Tensor) -> list[Completion]:
        length = len(self._versions)
        versions = np.asarray(self._versions, dtype=np.int32)
        tokens = rows.tokens[which, :length].cpu().numpy()
        logprobs = rows.logprobs[which, :length].cpu().numpy()
        requests = rows.request[which].tolist()
        cut = (~stopped[which]).tolist()
        return [
            Completion(self._requests[request].id, tokens[i], logprobs[i], versions, "length" if cut[i] else "stop")
            for i, request in enumerate(requests)
        ]

    def _drop_ended(self, rows: _Rows) -> None:
        """Shrink the batch to its live rows once enough others have gathered."""
        live = rows.alive.nonzero().squeeze(1)
        if len(live) <= _KEEP * len(rows.alive):
            rows.keep(live)
            if len(live):
                self._cache.take(live, self._cache.layers[0].get_max_length())


def _pad_left(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids, int64 [rows, longest], and which of them are real, bool of that shape."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    real = np.zeros((len(prompts), longest), dtype=bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        real[row, longest - len(prompt) :] = True
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)


def _prompt_mask(real: Tensor) -> Tensor:
    """Causal, without the padding, bool [rows, 1, columns, columns]."""
    columns = real.shape[1]
    causal = torch.ones((columns, columns), dtype=torch.bool, device=real.device).tril()
    # Padding sees itself: a row of attention that sees nothing is NaN, and 0 x NaN spreads from the cache.
    itself = torch.eye(columns, dtype=torch.bool, device=real.device)
    return ((real[:, None, :] & causal) | itself)[:, None]
