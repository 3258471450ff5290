"""Whole distributions of a teacher, on their way to the student's loss, without [tokens, vocabulary] of either.

A teacher says of every learned token either its k likeliest tokens with their log-probs, or, for the whole vocabulary,
the hidden state that it predicts from: the student's process has the teacher's output embedding and makes logits of it.
Both distributions exist for one chunk of tokens at a time, and once more for that chunk's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlinf.algos.algorithms import Divergence
from rlinf.algos.divergences import divergence, over_top
from rlinf.algos.loss_sum import wide

TOP = "teacher_top"
"""Column of a teacher's likeliest tokens, float32 [tokens, 2, k]: their ids, and their log-probs."""
HIDDEN = "teacher_hidden"
"""Column of a teacher's hidden states, float32 [tokens, 1 + width]: which of several teachers it is, from 0, first."""

Logits = Callable[[slice], Tensor]
"""Logits of some of the tokens over their temperature, [some, vocabulary], at least float32."""
Head = tuple[Tensor, Tensor | None]
"""An output embedding: weight [vocabulary, width], and bias [vocabulary]."""


def logits_of(
    hidden: Tensor, head: Head, temperature: Tensor | None, add: Callable[[Tensor, int], None] | None = None
) -> Logits:
    """Logits that are made of hidden states, [tokens, width], when they are asked for; with what `add` adds to those
    that begin at a token."""
    weight, bias = head

    def logits(part: slice) -> Tensor:
        raw = F.linear(hidden[part].to(weight.dtype), weight, bias)
        if add is not None:
            add(raw, part.start or 0)
        raw = wide(raw)
        return raw if temperature is None else raw / temperature[part, None]

    return logits


def likeliest(logits: Logits, count: int, chunk: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens at each of so many places, the likeliest first, int64 [count, top_k], and their log-probs; a
    chunk of places has logits at a time."""
    parts = [slice(start, start + chunk) for start in range(0, max(1, count), chunk)]
    best = [torch.log_softmax(logits(part), dim=-1).topk(top_k) for part in parts]
    return torch.cat([ids for _, ids in best]), torch.cat([logprobs for logprobs, _ in best])


class TeacherHead:
    """The student's side: divergences from what a teacher said.

    Args:
        part: which divergence.
        chunk: tokens whose distributions exist at a time.
        heads: the output embedding of each teacher; none with `part.top_k`.
    """

    def __init__(self, part: Divergence, chunk: int, heads: Sequence[Head] = ()):
        self._part, self._chunk, self._heads = part, chunk, heads

    @property
    def column(self) -> str:
        """The column that it reads."""
        return TOP if self._part.top_k is not None else HIDDEN

    def divergences(self, student: Logits, column: Tensor, temperature: Tensor | None) -> Tensor:
        """The divergence of each token, nats, [tokens], differentiable by what the student's logits are made of.

        Args:
            student: its logits.
            column: what the teacher said.
            temperature: of each token, [tokens]; None for 1.
        """
        compute = self._of_top if self._part.top_k is not None else self._of_all
        parts = [slice(start, start + self._chunk) for start in range(0, len(column), self._chunk)]
        values: list[Tensor] = [
            checkpoint(compute, student, column, temperature, part, use_reentrant=False) for part in parts
        ]
        return torch.cat(values) if values else column.new_empty(0)

    def _of_top(self, student: Logits, column: Tensor, temperature: Tensor | None, part: slice) -> Tensor:
        how, (ids, top) = self._part, column[part].unbind(1)
        return over_top(ids.long(), top, student(part).log_softmax(-1), how.kind, how.beta, how.tail)

    def _of_all(self, student: Logits, column: Tensor, temperature: Tensor | None, part: slice) -> Tensor:
        logits, number, heat = student(part), column[part, 0], None if temperature is None else temperature[part]
        total = torch.zeros_like(logits[:, 0])
        for index, head in enumerate(self._heads):
            rows = (number == index).nonzero().squeeze(1)
            width = 1 + head[0].shape[1]  # of several teachers the widest says how wide the column is
            hidden = column[part, 1:width].index_select(0, rows)
            teacher = logits_of(hidden, head, None if heat is None else heat.index_select(0, rows))(slice(None))
            common = min(teacher.shape[1], logits.shape[1])  # what is more in one of them is padding
            own = logits.index_select(0, rows)[:, :common].log_softmax(-1)
            of_rows = divergence(teacher[:, :common].log_softmax(-1), own, self._part.kind, self._part.beta)
            total = total.index_add(0, rows, of_rows)
        return total
