"""A forward pass over judged groups, on all ranks together: values, or log-probs under other weights.

In: groups as they come. Out: rounds of `Forward` commands, and groups that carry the columns. Who wakes whom: rank 0,
having computed a round with all others, tells what came out (`Forward.tell`), which puts the groups that are complete
into `finished`, for whoever waits there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.data.packing import Row
from rlinf.data.sample import Group
from rlinf.training.text.commands import Command, Forward
from rlinf.training.text.micro_batches import InOrder, Round, Rounds, lots

Groups = Iterable[Group] | AsyncIterable[Group]
_FAILED = ("timeout", "error")


class LogprobPass:
    """One pass over groups. What nobody learns from gets NaN: tokens outside the loss mask, and samples whose judging
    failed.

    Args:
        shares: among how many the work is dealt out: ranks, or copies of a model.
        budget: tokens (prompts included) that a share computes at once.
        columns: names in `Sample.per_token` of what is computed.
        copies: see `Rounds`.
    """

    def __init__(self, shares: int, budget: int, columns: tuple[str, ...], copies: int = 1):
        self.finished: asyncio.Queue[Group] = asyncio.Queue()
        """Groups that carry the columns, in the order in which they came."""
        self._columns, self._budget = columns, budget
        self._cutter = Rounds(shares, budget, copies=copies)
        self.came = 0
        """Groups that were pushed."""
        self._waiting: deque[tuple[Group, list[Row | None]]] = deque()  # the groups and their rows, oldest first
        self._found: dict[Row, np.ndarray] = {}

    async def commands(self, groups: Groups, in_order: InOrder | None) -> AsyncGenerator[tuple[Command, ...], None]:
        """Read groups and give the commands.

        Args:
            groups: to be passed over.
            in_order: see `lots`.
        """
        async for lot in lots(groups, in_order, self._budget):
            for command in self.push(lot):
                yield command
        for command in self.close():
            yield command

    def push(self, groups: Sequence[Group]) -> Iterator[tuple[Forward, ...]]:
        """More groups; the rounds that are full."""
        self.came += len(groups)
        rows: list[Row] = []
        for group in groups:
            mine = [None if sample.outcome in _FAILED else Row.of(sample, 0.0) for sample in group.samples]
            rows += [row for row in mine if row is not None]
            self._waiting.append((group, mine))
        yield from map(self._forward, self._cutter.push(rows))
        self._release()

    def close(self) -> Iterator[tuple[Forward, ...]]:
        """No more groups come; the last rounds."""
        yield from map(self._forward, self._cutter.close())

    def _forward(self, dealt: Round) -> tuple[Forward, ...]:
        tokens = tuple(sum(row.learned for row in rows) for rows in dealt)

        def told(found: Sequence[np.ndarray]) -> None:
            for rows, numbers in zip(dealt, found, strict=True):
                ends = np.cumsum([row.learned for row in rows])[:-1]
                self._found.update(zip(rows, np.split(numbers, ends, axis=1), strict=True) if rows else ())
            self._release()

        return tuple(Forward(rows, self._columns, tokens, None if rank else told) for rank, rows in enumerate(dealt))

    def _release(self) -> None:
        """Let the oldest groups go on of which all rows are computed."""
        while self._waiting and all(row is None or row in self._found for row in self._waiting[0][1]):
            group, rows = self._waiting.popleft()
            found = [
                np.full((len(self._columns), sample.learned_tokens), np.nan, np.float32)
                if row is None
                else self._found.pop(row)
                for sample, row in zip(group.samples, rows, strict=True)
            ]
            for number, name in enumerate(self._columns):
                group = group.told(name, [numbers[number] for numbers in found])
            self.finished.put_nowait(group)


def gathered(mine: Tensor, tokens: Sequence[int], mesh: DeviceMesh | None, shares: Sequence[int]) -> list[np.ndarray]:
    """What was computed in a round: a collective.

    Args:
        mine: of this rank, float32 [columns, learned tokens].
        tokens: learned tokens of each share of the round.
        mesh: the ranks; None for one.
        shares: of each rank, which share it computed; those of equal shares found the same.

    Returns:
        Of each share, float32 [columns, its learned tokens].
    """
    if mesh is None or mesh.size() == 1:
        return [mine.float().cpu().numpy()]
    padded = torch.zeros(len(mine), max(1, *tokens), dtype=torch.float32, device=mine.device)
    padded[:, : mine.shape[1]] = mine
    parts = [torch.empty_like(padded) for _ in shares]
    dist.all_gather(parts, padded, group=mesh.get_group())
    firsts = [parts[shares.index(share)] for share in range(len(tokens))]
    return [part[:, :count].cpu().numpy() for part, count in zip(firsts, tokens, strict=True)]
