"""What rank 0 of a trainer tells all ranks to do, and the stream by which every rank gets its commands in one order.

In: on rank 0, an async generator of commands, one tuple per round with an entry for each rank. Out: one stream per
rank, of equal length, that ends on all of them after the same round, whether the input ended, failed, or was stopped.
Who wakes whom: a command wakes every rank; rank 0's `done` lets the next one be fetched.

The generator runs in a task of the host, not in the call: the call gives its devices away while it waits, and takes
them again together with all ranks, who wake only when there is work for them, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from rlinf.data.packing import Packed, Row, pack
from rlinf.runtime.streams.stream import Stream

_AHEAD = 2
"""Commands that may be out: one that is computed, and one that peers can open meanwhile. Those are carried out even
when the call is cancelled."""
_END: Any = object()


@dataclass(slots=True, eq=False)
class ForwardBackward:
    """Add the gradient of a micro-batch."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its rows

    rows: tuple[Row, ...]
    """The micro-batch; empty if there is no work for this rank, which takes part all the same."""
    supervised: bool = False
    """The rows are worked examples, to be learned by their likelihood."""
    compare: bool = False
    """No step was taken on the batch yet: measure how far our log-probs are from the engine's."""
    columns: frozenset[str] = frozenset()
    """Columns of the loss that are computed in this pass, unless `kept` has them from an earlier one."""
    keep: bool = False
    """It comes once more, as `Recompute`."""
    again: bool = False
    """It came before, to whoever computed it then, under earlier weights."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Columns that were computed when it came first, float32 [learned] each: tensors on the device, or arrays where
    they come from another rank."""
    load: np.ndarray | None = None
    """Share of the whole batch's choices that each expert has, float32 [layers, experts], where they are balanced."""
    _packed: Packed | None = field(default=None, init=False)

    def packed(self) -> Packed:
        """The rows as tensors, made once."""
        if self._packed is None:
            load = None if self.load is None else torch.from_numpy(self.load)
            self._packed = replace(pack(self.rows), expert_load=load)
        return self._packed

    def __reduce__(self) -> tuple[object, ...]:
        return ForwardBackward, (
            self.rows, self.supervised, self.compare, self.columns, self.keep, self.again, self.kept, self.load,
        )  # fmt: skip

    def once_more(self, kept: dict[str, np.ndarray]) -> ForwardBackward:
        """The same for a later epoch, with the columns that its first computation gave."""
        return replace(self, again=True, keep=False, kept=kept)

    def without_rows(self) -> ForwardBackward:
        """Its kind, without work."""
        return replace(self, rows=(), keep=False, kept={})


@dataclass(frozen=True, slots=True)
class Recompute:
    """Add the gradient of an earlier micro-batch once more, under the weights of now."""

    number: int
    """Which of this call's commands with `keep`, from 0."""


@dataclass(slots=True, eq=False)
class Forward:
    """Compute numbers of every learned token of a micro-batch, without gradient: log-probs, values."""

    __plain__: ClassVar[bool] = True

    rows: tuple[Row, ...]
    """The micro-batch; empty if there is no work for this rank, which takes part all the same."""
    columns: tuple[str, ...]
    """What to compute: names in `Sample.per_token`."""
    tokens: tuple[int, ...]
    """Learned tokens of each share of this round."""
    told: Callable[[Sequence[np.ndarray]], None] | None = None
    """On rank 0, takes what was found of all shares, float32 [columns, its learned tokens] of each."""

    def packed(self) -> Packed:
        """The rows as tensors."""
        return pack(self.rows)

    def tell(self, found: Sequence[np.ndarray]) -> None:
        """All ranks are done."""
        if self.told is not None:
            self.told(found)

    def __reduce__(self) -> tuple[object, ...]:
        return Forward, (self.rows, self.columns, self.tokens)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Take an optimizer step with the gradients that were added since the last."""

    new_version: bool = False
    """This step makes a version of the weights by itself; otherwise all steps of a call together make one."""
    left_out: int = 0
    """Optimizer steps that were planned behind this one and are not taken: the schedule of the learning rate passes
    over them."""
    empty: bool = False
    """There is nothing to learn from: no step is taken, and the version that is made has the same weights."""


Command = ForwardBackward | Recompute | Forward | OptimizerStep


class CommandStream:
    """The commands of one call.

    Args:
        commands: for every round, what the ranks of each share shall do; rank 0 has the first one's.
        shares: of each rank, which entry of a round is its own.
    """

    def __init__(self, commands: AsyncGenerator[tuple[Any, ...], None], shares: Sequence[int]):
        self.error: BaseException | None = None
        """Why the input ended, if it failed."""
        self._commands = commands
        self._room = asyncio.Semaphore(_AHEAD)
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told: list[tuple[int, asyncio.Queue[Any]]] = [(share, asyncio.Queue()) for share in shares[1:]]

    def streams(self) -> list[Stream[Any]]:
        """The commands of each rank; rank 0's is what reads the input."""
        peers = (Stream.of(_of(told), name="commands") for _, told in self._told)
        return [Stream.of(self._lead(), name="commands"), *peers]

    def done(self) -> None:
        """Rank 0 has carried out one command."""
        self._room.release()

    def stop(self) -> None:
        """Give no more commands than are out already."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def _lead(self) -> AsyncIterator[Any]:
        try:
            async with aclosing(self._commands) as commands:
                while (command := await self._next(commands)) is not _END:
                    for share, told in self._told:
                        told.put_nowait(command[share])
                    yield command[0]
        except Exception as error:  # told when all ranks have come to the end
            self.error = error
        finally:
            for _, told in self._told:
                told.put_nowait(_END)

    async def _next(self, commands: AsyncIterator[tuple[Any, ...]]) -> Any:
        async def fetch() -> Any:
            await self._room.acquire()
            return await anext(commands, _END)

        fetching = asyncio.ensure_future(fetch())
        try:
            await asyncio.wait({fetching, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() and not self._stopped.done() else _END
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait([fetching])
            elif not fetching.cancelled():
                fetching.exception()  # seen


async def _of(told: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (part := await told.get()) is not _END:
        yield part
